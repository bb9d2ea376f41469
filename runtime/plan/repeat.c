/* SPDX-License-Identifier: Apache-2.0 */
/* What each unit's backward repeats of its forward, and so what the unit keeps;
 * see plan.h. */
#include "runtime/plan/fit.h"
#include "runtime/plan/unit_sizes.h"

int iz_plan_repeating(const struct iz_plan *p, const struct iz_model *m,
                      enum iz_repeat repeat)
{
    int n = 0;
    for (int u = 0; u < p->n_units; u++)
        n += iz_plan_saved(p, m, u, IZ_REPEAT_NONE) &&
             p->unit[u].repeat == repeat;
    return n;
}

double iz_plan_repeats(const struct iz_plan *p)
{
    double forward = 0, again = 0;
    for (int u = 0; u < p->n_units; u++) {
        forward += p->cost[u].forward_flops;
        again += p->cost[u].repeat_flops[p->unit[u].repeat];
    }
    return forward > 0 ? again / forward : 0;
}

void iz_plan_repeat(struct iz_plan *p, const struct iz_model *m,
                    enum iz_repeat repeat)
{
    for (int u = 0; u < p->n_units; u++) {
        enum iz_repeat *r = &p->unit[u].repeat;
        *r = repeat;
        while (*r && iz_plan_saved(p, m, u, *r) ==
                         iz_plan_saved(p, m, u, (enum iz_repeat)(*r - 1)))
            *r = (enum iz_repeat)(*r - 1);
    }
    iz_places_list_activations(p, m);
}

/* ---- as little as memory allows ---- */

struct move {
    int unit;
    enum iz_repeat to;
    int64_t bytes;
    double rate; /* flops saved per byte */
};

/* A byte counts as a flop, so that units without products count too. */
static double repeated(const struct iz_unit_cost *k, enum iz_repeat r)
{
    return k->repeat_flops[r] + k->repeat_bytes[r];
}

/* The move of less than `under` bytes that saves most for each; of equal ones
 * the last unit's: repeating hides the copies of the gradients before it. */
static bool best_move(const struct iz_plan *p, int64_t under, struct move *best)
{
    best->rate = 0;
    for (int u = 0; u < p->n_units; u++) {
        const struct iz_unit_cost *k = &p->cost[u];
        enum iz_repeat from = p->unit[u].repeat;
        for (int to = IZ_REPEAT_NONE; to < (int)from; to++) {
            struct move v = {u, (enum iz_repeat)to,
                             k->save_bytes[to] - k->save_bytes[from], 0};
            v.rate = (repeated(k, from) - repeated(k, v.to)) / (double)v.bytes;
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
        enum iz_repeat was = p->unit[v.unit].repeat;
        p->unit[v.unit].repeat = v.to;
        iz_places_list_activations(p, m);
        if (iz_plan_within(p, limit))
            continue;
        p->unit[v.unit].repeat = was;
        under = v.bytes;
    }
    iz_places_list_activations(p, m);
}

/* ---- in words ---- */

void iz_plan_repeat_print(const struct iz_plan *p, const struct iz_model *m,
                          FILE *out)
{
    int64_t rows = p->target.numerics.chunk_rows;
    int n[IZ_REPEATS];
    if (rows)
        fprintf(out, "      blocks handle %lld row%s of a sample at a time\n",
                (long long)rows, rows > 1 ? "s" : "");
    for (int r = 0; r < IZ_REPEATS; r++)
        n[r] = iz_plan_repeating(p, m, (enum iz_repeat)r);
    if (!n[IZ_REPEAT_WIDENED] && !n[IZ_REPEAT_FULL])
        return;
    fprintf(out,
            "      backward repeats %.1f %% of the forward: of %d unit%s "
            "nothing, of %d what is widened, of %d all\n",
            100 * iz_plan_repeats(p), n[IZ_REPEAT_NONE],
            n[IZ_REPEAT_NONE] == 1 ? "" : "s", n[IZ_REPEAT_WIDENED],
            n[IZ_REPEAT_FULL]);
}
