/* SPDX-License-Identifier: Apache-2.0 */
/* The largest model of a shape that fits: the same units with more or fewer of
 * the kind that repeats.  See plan.h. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/plan/plan.h"

#define MOST_BLOCKS (1 << 14)

/* The run of equal kinds that is longest: a model's blocks. */
struct blocks {
    int first, count;
};

static struct blocks find_blocks(const struct iz_model *m)
{
    struct blocks best = {0, 0};
    for (int u = 0; u < m->n_units;) {
        int end = u + 1;
        while (end < m->n_units && m->unit[end].kind == m->unit[u].kind)
            end++;
        if (end - u > best.count)
            best = (struct blocks){u, end - u};
        u = end;
    }
    return best;
}

/* m with n blocks; the parameters' lists are borrowed from it. */
static struct iz_unit *with_blocks(const struct iz_model *m, struct blocks b,
                                   int n, struct iz_model *out)
{
    int after = m->n_units - b.first - b.count;
    *out = *m;
    out->n_units = b.first + n + after;
    out->unit = calloc((size_t)out->n_units, sizeof(*out->unit));
    for (int u = 0; out->unit && u < out->n_units; u++) {
        int from = u < b.first       ? u
                   : u < b.first + n ? b.first
                                     : u - n + b.count;
        out->unit[u] = m->unit[from];
    }
    return out->unit;
}

/* Whether n blocks fit, and how many parameters that is. */
static bool fits(const struct iz_plan *p, const struct iz_config *c,
                 const struct iz_model *m, struct blocks b, int n,
                 const struct iz_limits *limit, double *params)
{
    struct iz_model grown;
    struct iz_plan q;
    bool fit = false;
    *params = 0;
    if (!with_blocks(m, b, n, &grown))
        return false;
    if (!iz_plan_make(&q, c, &grown, p->ranks, p->rank, &p->target)) {
        fit = iz_plan_within(&q, limit);
        for (int u = 0; u < q.n_groups; u++)
            *params += (double)(q.group[u].n + q.group[u].frozen.n);
        iz_plan_clear(&q);
    }
    free(grown.unit);
    return fit;
}

int iz_plan_largest(const struct iz_plan *p, const struct iz_config *c,
                    const struct iz_model *m, const struct iz_limits *limit,
                    double *params)
{
    struct blocks b = find_blocks(m);
    int low = 0, high = 1;
    double n = 0;
    *params = 0;
    while (high < MOST_BLOCKS && fits(p, c, m, b, high, limit, &n)) {
        low = high;
        high *= 2;
    }
    while (high - low > 1) {
        int middle = low + (high - low) / 2;
        if (fits(p, c, m, b, middle, limit, &n))
            low = middle;
        else
            high = middle;
    }
    if (low > 0)
        fits(p, c, m, b, low, limit, params);
    return low;
}
