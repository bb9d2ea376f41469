/* SPDX-License-Identifier: Apache-2.0 */
/* Which units take turns in which buffers. */
#include <stdlib.h>

#include "codelets/base/int64.h"
#include "codelets/base/take.h"
#include "runtime/plan/unit_sizes.h"

struct size {
    int64_t gathered, sent;
    int unit;
};

static int by_size(const void *a, const void *b)
{
    const struct size *x = a, *y = b;
    if (x->gathered != y->gathered)
        return x->gathered > y->gathered ? 1 : -1;
    if (x->sent != y->sent)
        return x->sent > y->sent ? 1 : -1;
    return (x->unit > y->unit) - (x->unit < y->unit);
}

/* The sizes of the n units in ascending order. */
static void sort_sizes(struct size *size, const struct iz_plan *p)
{
    for (int u = 0; u < p->n_units; u++)
        size[u] = (struct size){iz_plan_gathered(&p->unit[u]),
                                iz_plan_sent(&p->unit[u]), u};
    qsort(size, (size_t)p->n_units, sizeof(*size), by_size);
}

/* Slots of the common ring: asked for directly, or as DeepSpeed's elements to
 * fetch ahead, bounded by its live parameters; two are the least that overlap.
 */
static int ring_slots(const struct iz_config *c, int64_t elems, int members)
{
    int64_t k = c->run.ring;
    if (!k) {
        k = 1 + (c->zero.prefetch_bucket_size + elems - 1) / elems;
        k = min64(k, max64(c->zero.max_live_parameters / elems, 1));
        k = max64(k, 2);
    }
    return (int)min64(k, members);
}

/* Writes first[u]: the first unit with the size of u, if there are more than
 * two of that size; else u itself. */
static void find_alike(int *first, const struct size *size, int n)
{
    for (int i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && size[end].gathered == size[i].gathered &&
                          size[end].sent == size[i].sent;)
            end++;
        for (int k = i; k < end; k++)
            first[size[k].unit] = size[end - i > 2 ? i : k].unit;
    }
}

/* Of what no unit fetches or sends there are no buffers. */
static void drop_unused(struct iz_plan *p)
{
    for (int i = 0; i < p->n_rings; i++) {
        bool needed = false, fetched = false;
        for (int u = 0; u < p->n_units; u++) {
            const struct iz_plan_unit *g = &p->unit[u];
            needed |= g->ring == i && g->n && !g->direct;
            fetched |= g->ring == i && iz_plan_fetches(p, g);
        }
        if (!fetched)
            p->ring[i].params = 0;
        if (!needed)
            p->ring[i].grads = 0;
        /* All slices of a micro-batch are held until they are added. */
        else if (p->ring[i].grads < p->slices)
            p->ring[i].grads = p->slices;
    }
}

/* Units near the median size share ring 0, and more than two of another size,
 * such as parts of all blocks, a ring of theirs.  Any other one gets a slot of
 * its own, or every slot of a ring would have the size of the largest. */
void iz_plan_rings(struct iz_plan *p, const struct iz_config *c)
{
    int parallel = (int)min64(p->tracks, p->tasks_at_once);
    struct size *size = iz_take(p->n_units, sizeof(*size), "rings");
    int *first = iz_take(p->n_units, sizeof(*first), "rings");
    sort_sizes(size, p);
    int64_t median = size[p->n_units / 2].gathered;
    find_alike(first, size, p->n_units);
    p->n_rings = 1;
    for (int u = 0; u < p->n_units; u++) {
        struct iz_plan_unit *g = &p->unit[u];
        int64_t elems = iz_plan_gathered(g);
        bool common = elems * 4 <= median * 5 && elems * 4 >= median;
        g->ring = common         ? 0
                  : first[u] < u ? p->unit[first[u]].ring
                                 : p->n_rings++;
        struct iz_plan_ring *r = &p->ring[g->ring];
        r->elems = max64(r->elems, elems);
        r->grad_elems = max64(r->grad_elems, iz_plan_sent(g));
        r->members++;
    }
    free(size);
    free(first);
    for (int i = 0; i < p->n_rings; i++) {
        struct iz_plan_ring *r = &p->ring[i];
        bool shared = iz_plan_ring_shared(p, i);
        r->params = shared ? ring_slots(c, r->elems, r->members) : 1;
        r->grads = shared ? 2 * parallel : parallel;
    }
    drop_unused(p);
}
