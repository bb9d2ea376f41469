/* SPDX-License-Identifier: Apache-2.0 */
/* Overlap of spans with computation; see overlap.h. */
#include "runtime/report/overlap.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/die.h"

struct list {
    struct iz_span *s;
    int n, room;
};

struct iz_overlap {
    struct list compute, fresh, settled; /* settled: next to be accounted */
    struct iz_kind_time kind[IZ_KINDS];
    int64_t end[3]; /* latest end seen up to the last rounds, oldest first */
};

int iz_overlap_open(struct iz_overlap **out)
{
    *out = calloc(1, sizeof(**out));
    return *out ? 0 : -ENOMEM;
}

void iz_overlap_close(struct iz_overlap **o)
{
    if (!*o)
        return;
    free((*o)->compute.s);
    free((*o)->fresh.s);
    free((*o)->settled.s);
    free(*o);
    *o = NULL;
}

static void push(struct list *l, const struct iz_span *s)
{
    if (l->n == l->room) {
        l->room = l->room ? 2 * l->room : 1024;
        l->s = realloc(l->s, (size_t)l->room * sizeof(*l->s));
        if (!l->s)
            iz_die("out of memory for the log of tasks");
    }
    l->s[l->n++] = *s;
}

static bool computes(int kind)
{
    return kind == IZ_FORWARD || kind == IZ_BACKWARD || kind == IZ_EVAL;
}

void iz_overlap_add(struct iz_overlap *o, const struct iz_span *s)
{
    struct iz_kind_time *k = &o->kind[s->kind];
    k->seconds += (double)(s->end_ns - s->begin_ns) * 1e-9;
    k->flops += s->flops;
    k->tasks++;
    if (s->end_ns > o->end[2])
        o->end[2] = s->end_ns;
    push(computes(s->kind) ? &o->compute : &o->fresh, s);
}

static int by_begin(const void *a, const void *b)
{
    const struct iz_span *x = a, *y = b;
    return (x->begin_ns > y->begin_ns) - (x->begin_ns < y->begin_ns);
}

/* Sorts the computing spans and joins those that touch. */
static void unite(struct list *l)
{
    int n = 0;
    qsort(l->s, (size_t)l->n, sizeof(*l->s), by_begin);
    for (int i = 0; i < l->n; i++) {
        if (n && l->s[i].begin_ns <= l->s[n - 1].end_ns) {
            if (l->s[i].end_ns > l->s[n - 1].end_ns)
                l->s[n - 1].end_ns = l->s[i].end_ns;
        } else {
            l->s[n++] = l->s[i];
        }
    }
    l->n = n;
}

/* ns of s that lie in the united spans. */
static int64_t covered(const struct list *l, const struct iz_span *s)
{
    int lo = 0, hi = l->n;
    while (lo < hi) { /* first that ends after s begins */
        int mid = (lo + hi) / 2;
        if (l->s[mid].end_ns <= s->begin_ns)
            lo = mid + 1;
        else
            hi = mid;
    }
    int64_t sum = 0;
    for (; lo < l->n && l->s[lo].begin_ns < s->end_ns; lo++) {
        int64_t b = l->s[lo].begin_ns, e = l->s[lo].end_ns;
        sum += (e < s->end_ns ? e : s->end_ns) -
               (b > s->begin_ns ? b : s->begin_ns);
    }
    return sum;
}

/* Computation that ended before everything still to be accounted began.  A task
 * that is still running may have begun two rounds ago. */
static void forget(struct iz_overlap *o)
{
    int64_t oldest = o->end[0];
    int n = 0;
    for (int i = 0; i < o->settled.n; i++)
        if (o->settled.s[i].begin_ns < oldest)
            oldest = o->settled.s[i].begin_ns;
    for (int i = 0; i < o->compute.n; i++)
        if (o->compute.s[i].end_ns > oldest)
            o->compute.s[n++] = o->compute.s[i];
    o->compute.n = n;
    o->end[0] = o->end[1];
    o->end[1] = o->end[2];
}

static void account(struct iz_overlap *o)
{
    if (o->compute.n)
        unite(&o->compute);
    for (int i = 0; i < o->settled.n; i++) {
        const struct iz_span *s = &o->settled.s[i];
        o->kind[s->kind].hidden_s += (double)covered(&o->compute, s) * 1e-9;
    }
}

/* Spans wait one round: a computation that ran beside them is then in the log.
 */
void iz_overlap_settle(struct iz_overlap *o, bool last)
{
    account(o);
    struct list swap = o->settled;
    o->settled = o->fresh;
    o->fresh = swap;
    o->fresh.n = 0;
    if (!last) {
        forget(o);
        return;
    }
    account(o);
    o->settled.n = 0;
}

const struct iz_kind_time *iz_overlap_kind(const struct iz_overlap *o,
                                           enum iz_kind k)
{
    return &o->kind[k];
}
