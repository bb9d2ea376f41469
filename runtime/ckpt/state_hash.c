/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/ckpt/state_hash.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/int64.h"
#include "codelets/base/mix.h"
#include "codelets/base/take.h"
#include "codelets/flat/flat.h"

enum { RANGE_ELEMS = 1 << 16 }; /* elements; a worker's are in its caches */

struct sums {
    struct iz_engine *e;
    const struct iz_state_hash *h;
    bool states;          /* not parameters alone */
    _Atomic int64_t next; /* range, counted over all chunks */
};

/* ---- tensors ---- */

static bool has_tensor(const struct iz_arrays *s, int i,
                       const struct iz_ckpt_name *n)
{
    const char *name = s->k.array[i].name;
    size_t length = strlen(n->array);
    return s->arg[i].array != IZ_QUANT_WORDS &&
           strncmp(name, n->array, length) == 0 && name[length] == '/';
}

/* Words of quantised parameters are told of as a whole.  Arrays and names are
 * in the order of the units. */
static void list_tensors(struct iz_state_hash *h, struct iz_engine *e)
{
    const struct iz_ckpt *k = &h->arrays.k;
    int64_t most = (int64_t)k->n_names * (1 + IZ_STATES_MAX) + k->n_arrays;
    int n = 0, unit = 0, names = 0; /* of the units before */
    h->first = iz_take(k->n_arrays + 1, sizeof(*h->first), "a hash");
    h->tensor = iz_take(most, sizeof(*h->tensor), "a hash");
    for (int i = 0; i < k->n_arrays; i++) {
        const struct iz_arrays_range *p = &h->arrays.arg[i];
        for (; unit < p->unit; unit++)
            names += e->model->unit[unit].n_params;
        int end = names + e->model->unit[unit].n_params;
        for (int t = names; t < end; t++)
            if (has_tensor(&h->arrays, i, &k->names[t])) {
                h->tensor[n].name = k->names[t].name;
                h->tensor[n++].begin =
                    iz_engine_array(e, p->unit, p->array, k->names[t].offset);
            }
        if (n == h->first[i])
            h->tensor[n++].name = k->array[i].name;
        h->first[i + 1] = n;
    }
}

/* ---- ranges ---- */

/* Elements of a unit's trained, frozen or quantised parameters, in one chunk.
 */
struct range {
    int unit;
    enum iz_unit_part part;
    int64_t from, n;
};

/* What this rank hashes of a chunk. */
static struct range whole_chunk(const struct iz_engine *e, int u,
                                enum iz_unit_part part,
                                const struct iz_chunk *k)
{
    static const enum iz_array arrays[IZ_PARTS] = {IZ_MASTER, IZ_FROZEN,
                                                   IZ_QUANT_WORDS};
    struct iz_owned p = iz_owned_of_array(e, u, arrays[part]);
    int64_t from = max64(p.begin, p.first + k->first);
    int64_t end = min64(p.end, p.first + k->first + k->count);
    return (struct range){u, part, from, max64(end - from, 0)};
}

/* The chunk of a worker's last range, so many ranges behind the first one, and
 * the first array of its unit. */
struct place {
    int unit, part, chunk, array;
    int64_t before;
};

static bool next_range(struct sums *s, struct place *at, struct range *p)
{
    int64_t i = atomic_fetch_add(&s->next, 1);
    for (; at->unit < s->e->plan.n_units; at->unit++, at->part = 0)
        for (; at->part < IZ_PARTS; at->part++, at->chunk = 0) {
            struct iz_chunks k =
                iz_unit_chunks(&s->e->unit[at->unit], at->part);
            for (; at->chunk < k.n; at->chunk++) {
                *p = whole_chunk(s->e, at->unit, at->part, &k.list[at->chunk]);
                int64_t ranges = (p->n + RANGE_ELEMS - 1) / RANGE_ELEMS;
                int64_t skip = (i - at->before) * RANGE_ELEMS;
                p->from += skip;
                p->n = min64(p->n - skip, RANGE_ELEMS);
                if (i - at->before < ranges)
                    return true;
                at->before += ranges;
            }
        }
    return false;
}

/* Elements [from, end) of array i. */
static void hash_array(struct sums *s, int i, int64_t from, int64_t end,
                       float *buf)
{
    const struct iz_arrays_range *p = &s->h->arrays.arg[i];
    for (int t = s->h->first[i]; t < s->h->first[i + 1]; t++) {
        struct iz_state_tensor *x = &s->h->tensor[t];
        bool last = t + 1 == s->h->first[i + 1];
        int64_t a = max64(from, x->begin), b = last ? end : x[1].begin;
        b = min64(b, end);
        if (a >= b)
            continue;
        iz_access_get(s->e, p->unit, p->array, a, buf, b - a);
        x->hash += iz_flat_hash(((int64_t)i << 40) + a, buf, b - a);
    }
}

/* All arrays of a range, one after the other: of what is on disk a chunk is
 * read once. */
static void hash_ranges(void *arg, int worker, struct iz_exec *x)
{
    struct sums *s = arg;
    const struct iz_arrays *all = &s->h->arrays;
    struct place at = {0};
    struct range p;
    float *buf = iz_take(RANGE_ELEMS, sizeof(*buf), "a hash");
    while (next_range(s, &at, &p)) {
        while (all->arg[at.array].unit < p.unit)
            at.array++;
        for (int i = at.array;
             i < all->k.n_arrays && all->arg[i].unit == p.unit; i++) {
            enum iz_array a = all->arg[i].array;
            if (iz_array_part(a) == p.part && (a < IZ_STATE || s->states))
                hash_array(s, i, iz_engine_array(s->e, p.unit, a, p.from),
                           iz_engine_array(s->e, p.unit, a, p.from + p.n), buf);
        }
    }
    free(buf);
}

/* One buffer is on the way to a disk or a GPU, and the main thread has it. */
static bool all_in_memory(const struct iz_plan_zero *z, bool gpu)
{
    return !gpu && z->param.home != IZ_HOME_NVME &&
           z->state.home != IZ_HOME_NVME && z->frozen.home != IZ_HOME_NVME;
}

static void add_ranks(struct iz_state_hash *h, struct iz_coll *c)
{
    int n = h->first[h->arrays.k.n_arrays];
    int64_t *mine = iz_take(n, sizeof(*mine), "a hash");
    for (int t = 0; t < n; t++)
        mine[t] = (int64_t)h->tensor[t].hash;
    int64_t *all = iz_agree_numbers(c, mine, n, "hashes");
    for (int t = 0; t < n; t++)
        h->tensor[t].hash = 0;
    for (int64_t i = 0; i < (int64_t)n * c->size; i++)
        h->tensor[i % n].hash += (uint64_t)all[i];
    free(all);
    free(mine);
}

static uint64_t hash_scalars(const struct iz_ckpt *k)
{
    uint64_t h = 0, bits;
    for (int i = 0; i < k->n_scalars; i++) {
        memcpy(&bits, &k->scalar[i].value, sizeof(bits));
        h = iz_mix(iz_mix_text(h, k->scalar[i].name) ^ bits);
    }
    return h;
}

/* What this rank has. */
static void open_own(struct iz_state_hash *h, struct iz_engine *e,
                     const struct iz_ckpt_of *of, bool states)
{
    *h = (struct iz_state_hash){0};
    iz_graph_wait(e->graph);
    iz_arrays_open(&h->arrays, e, of, false);
    list_tensors(h, e);
    struct sums s = {.e = e, .h = h, .states = states};
    if (all_in_memory(&e->plan.zero, e->plan.target.gpu))
        iz_graph_on_workers(e->graph, hash_ranges, &s);
    else
        hash_ranges(&s, 0, NULL);
}

void iz_state_hash_open(struct iz_state_hash *h, struct iz_engine *e,
                        const struct iz_ckpt_of *of)
{
    open_own(h, e, of, true);
    add_ranks(h, e->coll);
    h->all = hash_scalars(&h->arrays.k);
    for (int t = 0; t < h->first[h->arrays.k.n_arrays]; t++)
        h->all = iz_mix(h->all + h->tensor[t].hash);
}

uint64_t iz_state_hash_weights(struct iz_engine *e, const struct iz_ckpt_of *of)
{
    struct iz_state_hash h;
    uint64_t sum = 0;
    open_own(&h, e, of, false);
    for (int t = 0; t < h.first[h.arrays.k.n_arrays]; t++)
        sum += h.tensor[t].hash;
    iz_state_hash_close(&h);
    int64_t mine = (int64_t)sum;
    int64_t *all = iz_agree_numbers(e->coll, &mine, 1, "hash");
    sum = 0;
    for (int r = 0; r < e->coll->size; r++)
        sum += (uint64_t)all[r];
    free(all);
    return sum;
}

void iz_state_hash_close(struct iz_state_hash *h)
{
    free(h->tensor);
    free(h->first);
    iz_arrays_close(&h->arrays);
}
