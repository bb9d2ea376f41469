/* SPDX-License-Identifier: Apache-2.0 */
/* What each unit's backward recomputes of its forward, and so what the unit
 * keeps; see plan.h. */
#include "runtime/plan/fit.h"
#include "runtime/plan/unit_sizes.h"

int iz_plan_recomputing(const struct iz_plan *p, const struct iz_model *m,
                        enum iz_recompute level)
{
    int n = 0;
    for (int u = 0; u < p->n_units; u++)
        n += iz_plan_saved(p, m, u, IZ_RECOMPUTE_NONE) &&
             p->unit[u].recompute == level;
    return n;
}

double iz_plan_recomputed(const struct iz_plan *p)
{
    double forward = 0, again = 0;
    for (int u = 0; u < p->n_units; u++) {
        forward += p->cost[u].forward.flops;
        again += p->cost[u].recompute[p->unit[u].recompute].flops;
    }
    return forward > 0 ? again / forward : 0;
}

void iz_plan_recompute(struct iz_plan *p, const struct iz_model *m,
                       enum iz_recompute level)
{
    for (int u = 0; u < p->n_units; u++) {
        enum iz_recompute *r = &p->unit[u].recompute;
        *r = level;
        while (*r && iz_plan_saved(p, m, u, *r) ==
                         iz_plan_saved(p, m, u, (enum iz_recompute)(*r - 1)))
            *r = (enum iz_recompute)(*r - 1);
    }
    iz_places_list_activations(p, m);
}

/* ---- as little as memory allows ---- */

struct move {
    int unit;
    enum iz_recompute to;
    int64_t bytes;
    double rate; /* flops saved per byte */
};

/* A byte counts as a flop, so that units without products count too. */
static double recomputed_work(const struct iz_unit_cost *k, enum iz_recompute r)
{
    return k->recompute[r].flops + k->recompute[r].bytes;
}

/* The move of less than `under` bytes that saves most for each; of equal ones
 * the last unit's: recomputing hides the copies of the gradients before it. */
static bool best_move(const struct iz_plan *p, int64_t under, struct move *best)
{
    best->rate = 0;
    for (int u = 0; u < p->n_units; u++) {
        const struct iz_unit_cost *k = &p->cost[u];
        enum iz_recompute from = p->unit[u].recompute;
        for (int to = IZ_RECOMPUTE_NONE; to < (int)from; to++) {
            struct move v = {u, (enum iz_recompute)to,
                             k->save_bytes[to] - k->save_bytes[from], 0};
            v.rate = (recomputed_work(k, from) - recomputed_work(k, v.to)) /
                     (double)v.bytes;
            if (v.bytes < under && v.rate >= best->rate && v.rate > 0)
                *best = v;
        }
    }
    return best->rate > 0;
}

void iz_plan_keep(struct iz_plan *p, const struct iz_model *m,
                  const struct iz_limits *limit)
{
    int64_t under = INT64_MAX;
    struct move v;
    while (best_move(p, under, &v)) {
        enum iz_recompute was = p->unit[v.unit].recompute;
        p->unit[v.unit].recompute = v.to;
        iz_places_list_activations(p, m);
        if (iz_plan_within(p, limit))
            continue;
        p->unit[v.unit].recompute = was;
        under = v.bytes;
    }
    iz_places_list_activations(p, m);
}

/* ---- in words ---- */

void iz_plan_recompute_print(const struct iz_plan *p, const struct iz_model *m,
                             FILE *out)
{
    int64_t rows = p->target.numerics.chunk_rows;
    int n[IZ_RECOMPUTES];
    if (rows)
        fprintf(out, "      blocks handle %lld row%s of a sample at a time\n",
                (long long)rows, rows > 1 ? "s" : "");
    for (int r = 0; r < IZ_RECOMPUTES; r++)
        n[r] = iz_plan_recomputing(p, m, (enum iz_recompute)r);
    if (!n[IZ_RECOMPUTE_WIDENED] && !n[IZ_RECOMPUTE_FULL])
        return;
    fprintf(out,
            "      backward recomputes %.1f %% of the forward: of %d unit%s "
            "nothing, of %d what is widened, of %d all\n",
            100 * iz_plan_recomputed(p), n[IZ_RECOMPUTE_NONE],
            n[IZ_RECOMPUTE_NONE] == 1 ? "" : "s", n[IZ_RECOMPUTE_WIDENED],
            n[IZ_RECOMPUTE_FULL]);
}
