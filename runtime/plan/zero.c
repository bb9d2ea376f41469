/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/plan/plan.h"

/* ---- the order of sums ---- */

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

/* group: divides the ranks; 1 and all of them mean the same, one group. */
static struct iz_sum_order sum_order_of(const struct iz_plan *p,
                                        enum iz_sum_first first, int group)
{
    int groups = group > 1 ? p->ranks / group : 1, micros = p->micro_batches;
    enum iz_dtype wire = p->param_type, kept = p->grad_type;
    struct iz_sum_level s = {IZ_SUM_SLICES, p->slices, IZ_F32, IZ_F32};
    struct iz_sum_level m = {IZ_SUM_MICRO_BATCHES, micros, kept, kept};
    struct iz_sum_level r = {IZ_SUM_RANKS, p->ranks / groups, IZ_F32, IZ_F32};
    struct iz_sum_level g = {IZ_SUM_GROUPS, groups, IZ_F32, IZ_F32};
    bool many = p->ranks > 1;
    /* With one micro-batch a rank sends what it has without an accumulator. */
    bool local = many && first == IZ_SUM_LOCAL_FIRST && micros > 1;
    if (local)
        m.given = wire;
    else if (many)
        s.given = wire;
    if (local)
        r.given = g.given = kept;
    if (groups > 1)
        r.given = wire; /* a link carries it */
    if (local)
        return (struct iz_sum_order){{s, m, r, g}};
    return (struct iz_sum_order){{s, r, g, m}};
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

/* ---- what the stage becomes ---- */

/* Where a rank adds its own, if it does so before the ranks; down: the sums of
 * all ranks are kept on the host of a GPU. */
static enum iz_sums choose_sums(const struct iz_plan *p, int stage, bool down)
{
    bool broad = p->wave == p->micro_batches;
    if (!iz_sum_is_local(&p->sum))
        return IZ_SUMS_NONE;
    if (stage < 1 || (stage < 3 && !broad && !down))
        return IZ_SUMS_IN_ACCUMULATOR;
    return broad ? IZ_SUMS_IN_RING : IZ_SUMS_OF_UNIT;
}

/* On a CPU the cpu tier is the memory that units are computed in: one rank
 * reads its parameters where they are. */
static void plan_homes(struct iz_plan_zero *z, const struct iz_config *c,
                       const struct iz_plan *p)
{
    enum iz_home frozen = c->zero.param.frozen
                              ? (enum iz_home)(c->zero.param.frozen - 1)
                              : c->zero.param.home;
    enum iz_home computed = p->target.gpu ? IZ_HOME_NONE : IZ_HOME_CPU;
    enum iz_home kept =
        c->zero.param.home > frozen ? c->zero.param.home : frozen;
    z->fetch = c->zero.stage == 3 && (p->ranks > 1 || kept > computed);
    z->state.home = c->zero.optimizer.home;
    z->param.home = c->zero.param.home;
    z->frozen.home = z->fetch ? frozen : z->param.home;
    z->pin_cpu =
        (z->state.home != IZ_HOME_NONE && c->zero.optimizer.pin_memory) ||
        (kept != IZ_HOME_NONE && c->zero.param.pin_memory);
}

void iz_plan_stage(struct iz_plan *p, const struct iz_config *c)
{
    struct iz_plan_zero *z = &p->zero;
    int stage = c->zero.stage;
    bool once = p->micro_batches == 1 && p->slices == 1;
    int group = c->run.sum_group ? c->run.sum_group : p->target.host_group;
    plan_homes(z, c, p);
    bool down = p->target.gpu && z->state.home != IZ_HOME_NONE;
    p->param_type = c->dtype;
    p->grad_type = c->grad_accum_fp32 && !once ? IZ_F32 : c->dtype;
    p->sum = sum_order_of(p, iz_sum_choose(c, p->target.gpu), group);
    z->sums = choose_sums(p, stage, down);
    z->group = c->zero.hpz_partition > 1 ? c->zero.hpz_partition : p->ranks;
    z->param.whole = z->frozen.whole = stage < 3;
    z->state.whole = stage < 1;
    /* A single backward of a step may write the gradient where it is kept. */
    z->grad.whole = stage < 1 || (stage == 1 && once && !down) ||
                    z->sums == IZ_SUMS_IN_ACCUMULATOR;
    z->grad.home = z->grad.whole || z->state.home == IZ_HOME_NONE ? IZ_HOME_NONE
                                                                  : IZ_HOME_CPU;
    p->optimizer.type = c->optimizer.type;
    p->optimizer.moments = c->run.state_dtype;
    p->optimizer.remainder = c->run.master == IZ_MASTER_REMAINDER;
}

bool iz_plan_fetches(const struct iz_plan *p, const struct iz_plan_unit *g)
{
    return p->zero.fetch || g->quant.n;
}
