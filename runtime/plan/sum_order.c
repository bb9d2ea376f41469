/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/plan/sum_order.h"

enum iz_sum_first iz_sum_choose(const struct iz_config *c, bool gpu)
{
    bool spare = gpu && c->zero.optimizer.home != IZ_HOME_NONE;
    if (c->run.sum_order != IZ_SUM_AUTO)
        return c->run.sum_order;
    if (c->run.schedule == IZ_BREADTH_FIRST)
        return IZ_SUM_LOCAL_FIRST;
    return c->zero.stage == 3 || spare ? IZ_SUM_RANKS_FIRST
                                       : IZ_SUM_LOCAL_FIRST;
}

bool iz_sum_possible(const struct iz_config *c, int ranks)
{
    return c->run.sum_order != IZ_SUM_LOCAL_FIRST || c->zero.stage < 3 ||
           c->run.schedule == IZ_BREADTH_FIRST || c->grad_accum == 1 ||
           ranks == 1;
}

struct iz_sum_order iz_sum_order_of(enum iz_sum_first first, int slices,
                                    int micro_batches, int ranks, int group,
                                    enum iz_dtype wire, enum iz_dtype kept)
{
    int groups = group > 1 ? ranks / group : 1;
    struct iz_sum_level s = {IZ_SUM_SLICES, slices, IZ_F32, IZ_F32};
    struct iz_sum_level m = {IZ_SUM_MICRO_BATCHES, micro_batches, kept, kept};
    struct iz_sum_level r = {IZ_SUM_RANKS, ranks / groups, IZ_F32, IZ_F32};
    struct iz_sum_level g = {IZ_SUM_GROUPS, groups, IZ_F32, IZ_F32};
    bool many = ranks > 1;
    /* With one micro-batch a rank sends what it has without an accumulator. */
    bool local = many && first == IZ_SUM_LOCAL_FIRST && micro_batches > 1;
    if (local)
        m.given = wire;
    else if (many)
        s.given = wire;
    if (local)
        r.given = g.given = kept;
    if (groups > 1)
        r.given = wire; /* a link carries it */
    if (local)
        return (struct iz_sum_order){wire, {s, m, r, g}};
    return (struct iz_sum_order){wire, {s, r, g, m}};
}

int iz_sum_group(const struct iz_sum_order *o)
{
    int i = 0;
    while (o->level[i].over != IZ_SUM_RANKS)
        i++;
    return o->level[i].n;
}

bool iz_sum_is_local(const struct iz_sum_order *o)
{
    return o->level[1].over == IZ_SUM_MICRO_BATCHES && o->level[1].n > 1;
}

void iz_sum_order_print(const struct iz_sum_order *o, FILE *out)
{
    static const char *const words[] = {"slices", "micro-batches", "ranks",
                                        "groups"};
    const char *glue = "";
    for (int i = 0; i < IZ_SUM_LEVELS; i++) {
        const struct iz_sum_level *l = &o->level[i];
        if (l->n == 1)
            continue;
        fprintf(out, "%s%d %s in %s", glue, l->n, words[l->over],
                iz_dtype_name(l->kept));
        if (l->given != l->kept)
            fprintf(out, " (as %s)", iz_dtype_name(l->given));
        glue = ", then ";
    }
}
