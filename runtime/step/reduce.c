/* SPDX-License-Identifier: Apache-2.0 */
/* Where a unit's gradient goes: into the accumulator of its shard, on this side
 * or the other, summed in an order that does not depend on timing; and the sum
 * of its squares, which the last sum of a step takes on its way if the host
 * does it.  See zero.h. */
#include "runtime/step/reduce.h"

#include <assert.h>
#include <string.h>

#include "codelets/flat/flat.h"
#include "runtime/engine/buffers.h"
#include "runtime/step/fetch.h"
#include "runtime/step/norm.h"
#include "runtime/step/rows_list.h"
#include "runtime/step/zero.h"

/* ---- one contribution ---- */

struct reduce_arg {
    struct iz_coll *coll;
    int64_t shard;
    int64_t own;     /* first element of this rank's part of the accumulator */
    int64_t skip;    /* elements in front of the contribution */
    int64_t n_apart; /* of the shard, that the GPU sums apart */
    int64_t blocks;  /* of their squares */
    int ranks, slots;
    /* The buffer for the sum of squares of `out`, behind which is that of the
     * sums of the blocks; 0: none. */
    int norm_buf;
    bool accumulate;
    bool whole;           /* the accumulator has all ranks' parts */
    bool gpu, out_on_gpu; /* of several ranks' sums */
    enum iz_dtype wire, type, apart_type;
    const char *unit;
    struct iz_touched_in rows; /* of them the list is the last buffer */
};

static char *out_of(const struct reduce_arg *a, void *accumulator)
{
    return (char *)accumulator + a->own * iz_dtype_bytes(a->type);
}

static double *norm_of(const struct reduce_arg *a, void **buf)
{
    return a->norm_buf ? buf[a->norm_buf] : NULL;
}

/* Elements of a contribution of one rank; list: of touched rows. */
static int64_t contributed(const struct reduce_arg *a, const void *list)
{
    struct iz_touched r;
    if (!a->rows.cols)
        return a->shard * a->ranks;
    r = iz_touched_get(&a->rows, list);
    return iz_touched_elems(&r);
}

/* buf[0]: accumulator; buf[1...]: the slices' contributions, of one rank; list
 * of touched rows; sum of squares, which the host forms; sums of blocks. */
static void run_sum(struct iz_exec *x, void **buf, const void *arg)
{
    const struct reduce_arg *a = arg;
    int64_t n = a->rows.cols ? contributed(a, buf[1 + a->slots]) : a->shard;
    const void *behind = (char *)buf[1] + a->skip * iz_dtype_bytes(a->wire);
    const void *const *in = a->skip ? &behind : (const void *const *)&buf[1];
    char *out = out_of(a, buf[0]);
    struct iz_norm2 s = {0};
    assert(!a->skip || a->slots == 1);
    if (!a->norm_buf) {
        iz_buffer_sum(x, out, a->type, a->accumulate, in, a->slots, a->wire, n);
        return;
    }
    iz_flat_sum_norm2(&s, out, a->type, a->accumulate, in, a->slots, a->wire,
                      n);
    if (a->blocks)
        iz_norm2_add_blocks(&s, buf[a->norm_buf + 1], a->blocks);
    *norm_of(a, buf) = iz_norm2_end(&s);
}

/* acc: the accumulator, of which this rank's part is summed. */
static void scatter_rows(const struct reduce_arg *a, void *acc, void *full,
                         const void *list, double *norm2)
{
    struct iz_touched r = iz_touched_get(&a->rows, list);
    int64_t at = a->whole ? iz_touched_first(&a->rows, &r, a->rows.rank) : 0;
    iz_touched_parts(&a->rows, &r, a->coll, 1);
    iz_coll_reduce_scatter_parts(
        a->coll, (char *)acc + at * iz_dtype_bytes(a->type), a->type,
        a->accumulate, full, a->wire, norm2, a->unit);
}

static void scatter(struct iz_exec *x, const struct reduce_arg *a, void *out,
                    void *full, double *norm2)
{
    if (a->gpu)
        iz_coll_gpu_reduce_scatter(
            a->coll, x,
            &(struct iz_coll_gpu_sum){.full = full,
                                      .wire = a->wire,
                                      .shard = a->shard,
                                      .out = out,
                                      .out_type = a->type,
                                      .out_on_gpu = a->out_on_gpu,
                                      .accumulate = a->accumulate,
                                      .norm2 = norm2,
                                      .what = a->unit});
    else
        iz_coll_reduce_scatter(a->coll, out, a->type, a->accumulate, full,
                               a->wire, a->shard, norm2, a->unit);
}

/* The same with the other ranks'. */
static void run_scatter(struct iz_exec *x, void **buf, const void *arg)
{
    const struct reduce_arg *a = arg;
    const void *list = a->rows.cols ? buf[1 + a->slots] : NULL;
    if (a->slots > 1)
        iz_buffer_sum(x, buf[1], a->wire, false, (const void *const *)&buf[1],
                      a->slots, a->wire, contributed(a, list));
    if (list)
        scatter_rows(a, buf[0], buf[1], list, norm_of(a, buf));
    else
        scatter(x, a, out_of(a, buf[0]), buf[1], norm_of(a, buf));
}

/* The same where the GPU keeps a part.  buf: its accumulator, full, the host's
 * if that has any. */
static void run_scatter_apart(struct iz_exec *x, void **buf, const void *arg)
{
    const struct reduce_arg *a = arg;
    iz_coll_gpu_reduce_scatter(
        a->coll, x,
        &(struct iz_coll_gpu_sum){.full = buf[1],
                                  .wire = a->wire,
                                  .shard = a->shard,
                                  .out = a->n_apart < a->shard ? buf[2] : NULL,
                                  .out_type = a->type,
                                  .n_apart = a->n_apart,
                                  .apart = buf[0],
                                  .apart_type = a->apart_type,
                                  .accumulate_apart = a->accumulate,
                                  .what = a->unit});
}

/* The gradient was written in place: the accumulator is the contribution. */
static void run_scatter_direct(struct iz_exec *x, void **buf, const void *arg)
{
    const struct reduce_arg *a = arg;
    if (a->rows.cols)
        scatter_rows(a, buf[0], buf[0], buf[1], norm_of(a, buf));
    else
        scatter(x, a, out_of(a, buf[0]), buf[0], norm_of(a, buf));
}

/* buf: host, GPU. */
static void run_down(struct iz_exec *x, void **buf, const void *arg)
{
    const struct reduce_arg *a = arg;
    iz_buffer_copy(x, buf[0], buf[1], a->shard * iz_dtype_bytes(a->wire));
}

static struct reduce_arg reduce_arg(const struct iz_engine *e, int group)
{
    const struct iz_plan *p = &e->plan;
    const struct iz_plan_group *g = e->group[group].plan;
    return (struct reduce_arg){.coll = e->coll,
                               .shard = iz_cost_shard(p, g),
                               .own =
                                   p->zero.grads_full ? g->shard * p->rank : 0,
                               .ranks = p->ranks,
                               .slots = 1,
                               .gpu = p->target.gpu,
                               .out_on_gpu = !p->zero.grads_down,
                               .wire = p->param_type,
                               .type = p->grad_type,
                               .apart_type = p->grad_type,
                               .unit = iz_unit_name(e, group),
                               .whole = p->zero.grads_full,
                               .rows = iz_touched_in(e, group)};
}

/* One task from `from` (and, of slices, more) into `to`. */
struct move {
    enum iz_kind kind;
    enum iz_where where;
    void (*run)(struct iz_exec *x, void **buf, const void *arg);
    struct iz_access to;
    const struct iz_access *from;
    int n_from, urgency;
};

/* What the link or the network moves, or a sum reads and writes. */
static double moved_bytes(const struct move *m, const struct reduce_arg *a)
{
    double wire = (double)a->shard * (double)iz_dtype_bytes(a->wire);
    if (m->where == IZ_ON_DOWN)
        return wire;
    if (m->where == IZ_ON_COMM && a->ranks > 1)
        return wire * (a->ranks - 1);
    return wire * a->slots + (double)a->shard *
                                 (double)iz_dtype_bytes(a->type) *
                                 (a->accumulate ? 2 : 1);
}

static void step_reduce_submit(struct iz_engine *e, int group,
                               const struct move *m, const struct reduce_arg *a)
{
    iz_submit(e->graph,
              &(struct iz_task){.kind = m->kind,
                                .where = m->where,
                                .run = m->run,
                                .arg = a,
                                .arg_bytes = sizeof(*a),
                                .data = {m->to},
                                .more = m->from,
                                .n_more = m->n_from,
                                .urgency = iz_in_order(group) + m->urgency,
                                .bytes = moved_bytes(m, a),
                                .squares = a->norm_buf ? (double)a->shard : 0,
                                .unit = group,
                                .step = (int)e->step});
}

/* Nobody waits for the sum of a single rank, unless its update follows at once
 * and comes first. */
static int sum_urgency(const struct iz_engine *e)
{
    bool updates = iz_updates_early(e) && iz_updates_first(e);

    return updates ? 0 : -3500;
}

/* Which contribution of a step to its accumulator. */
struct contribution {
    bool first, last;
};

/* The sum that leaves the whole gradient in the accumulator gives its squares,
 * too. */
static int add_norm(struct iz_engine *e, int group, struct contribution which,
                    struct reduce_arg *a, struct iz_access *from, int n_from)
{
    struct iz_group *g = &e->group[group];
    if (!which.last || !g->plan->sums_squares)
        return n_from;
    a->norm_buf = 1 + n_from;
    a->blocks = iz_norm_blocks(iz_plan_grads_apart(&e->plan, g->plan));
    from[n_from++] = (struct iz_access){g->norm2_handle, STARPU_W};
    if (a->blocks)
        from[n_from++] = (struct iz_access){g->block_sums_handle, STARPU_R};
    return n_from;
}

/* What the GPU keeps is added there. */
static void sum_apart(struct iz_engine *e, int group, int acc,
                      const struct iz_access *from, struct contribution which)
{
    struct iz_group *g = &e->group[group];
    struct reduce_arg a = reduce_arg(e, group);
    a.shard = iz_plan_grads_apart(&e->plan, g->plan);
    a.skip = iz_plan_host_elems(g->plan);
    a.accumulate = !which.first;
    step_reduce_submit(
        e, group,
        &(struct move){.kind = IZ_REDUCE,
                       .where = IZ_ON_COMPUTE,
                       .run = run_sum,
                       .to = {g->grad_apart_handle[acc],
                              which.first ? STARPU_W : STARPU_RW},
                       .from = from,
                       .n_from = 1},
        &a);
}

/* The host's part of a contribution into `to`, its accumulator or a buffer, of
 * type `type`; with several ranks also that of the GPU into its accumulator. */
static void bring_down(struct iz_engine *e, int group, int acc,
                       struct iz_access to,
                       const struct iz_access *contribution, enum iz_dtype type,
                       struct contribution which)
{
    struct iz_group *g = &e->group[group];
    struct reduce_arg a = reduce_arg(e, group);
    bool many = a.ranks > 1;
    int64_t apart = iz_plan_grads_apart(&e->plan, g->plan);
    struct iz_access from[2] = {*contribution, to};
    struct move m = {.kind = IZ_OFFLOAD,
                     .where = many ? IZ_ON_COMM : IZ_ON_DOWN,
                     .run = many ? run_scatter : run_down,
                     .to = to,
                     .from = from,
                     .n_from = 1};
    a.type = type;
    if (many && apart) {
        m.run = run_scatter_apart;
        m.to = (struct iz_access){g->grad_apart_handle[acc],
                                  which.first ? STARPU_W : STARPU_RW};
        m.n_from = to.handle ? 2 : 1;
        m.kind = to.handle ? IZ_OFFLOAD : IZ_REDUCE;
        a.n_apart = apart;
        a.accumulate = !which.first;
    } else {
        a.shard -= apart;
    }
    if (many || to.handle)
        step_reduce_submit(e, group, &m, &a);
    e->counts.down_bytes +=
        iz_plan_host_elems(g->plan) * iz_dtype_bytes(many ? type : a.wire);
}

/* From the GPU to the host: straight into the accumulator where that can be,
 * else through a pinned buffer, from which the host adds.  What the GPU keeps
 * stays. */
static void offload(struct iz_engine *e, int group, int acc,
                    const struct iz_access *from, struct contribution which)
{
    struct iz_group *g = &e->group[group];
    struct reduce_arg a = reduce_arg(e, group);
    int64_t apart = iz_plan_grads_apart(&e->plan, g->plan);
    starpu_data_handle_t host = g->grad_handle[acc];
    bool many = a.ranks > 1, first = which.first;
    bool straight = !host || iz_plan_straight(&e->plan, first);
    struct iz_staging *s =
        straight ? NULL : iz_next_staging(e, IZ_STAGING_GRAD);
    enum iz_dtype staged = !many ? a.wire : straight ? a.type : IZ_F32;
    struct iz_access to = {straight ? host : s->handle, STARPU_W};
    if (apart && !many)
        sum_apart(e, group, acc, from, which);
    bring_down(e, group, acc, to, from, staged, which);
    if (apart && which.last && g->plan->sums_squares)
        iz_norm_squares(e, group);
    if (straight)
        return;
    struct iz_access staged_from[3] = {{s->handle, STARPU_R}};
    int n_from = add_norm(e, group, which, &a, staged_from, 1);
    a.shard -= apart;
    a.wire = staged;
    a.accumulate = !first;
    step_reduce_submit(
        e, group,
        &(struct move){.kind = IZ_REDUCE,
                       .where = IZ_ON_HOST,
                       .run = run_sum,
                       .to = {host, first ? STARPU_W : STARPU_RW},
                       .from = staged_from,
                       .n_from = n_from,
                       .urgency = sum_urgency(e)},
        &a);
}

/* On the side where the gradient is computed, or through collectives of the
 * host. */
static void accumulate(struct iz_engine *e, int group, starpu_data_handle_t acc,
                       struct iz_access *from, int slots,
                       struct contribution which)
{
    struct reduce_arg a = reduce_arg(e, group);
    bool many = a.ranks > 1, direct = e->group[group].plan->direct;
    bool first = which.first;
    a.slots = slots;
    a.accumulate = !first;
    bool whole = direct || e->plan.zero.grads_full;
    int n_from = direct ? 0 : slots;
    if (a.rows.cols)
        from[n_from++] =
            (struct iz_access){iz_touched_list(e, group), STARPU_R};
    n_from = add_norm(e, group, which, &a, from, n_from);
    step_reduce_submit(
        e, group,
        &(struct move){.kind = IZ_REDUCE,
                       .where = many ? IZ_ON_COMM : IZ_ON_COMPUTE,
                       .run = direct ? run_scatter_direct
                              : many ? run_scatter
                                     : run_sum,
                       .to = {acc, first && !whole ? STARPU_W : STARPU_RW},
                       .from = from,
                       .n_from = n_from,
                       .urgency = many ? 0 : sum_urgency(e)},
        &a);
    if (many && e->plan.target.gpu && !e->plan.target.nccl) {
        e->counts.down_bytes += iz_param_bytes(e, a.shard * a.ranks);
        e->counts.up_bytes +=
            e->plan.zero.grads_down
                ? 0
                : a.shard * iz_dtype_bytes(a.accumulate ? IZ_F32 : a.type);
    }
}

void iz_reduce(struct iz_engine *e, int group, int use,
               const starpu_data_handle_t *slot, int slots)
{
    const struct iz_plan *p = &e->plan;
    struct iz_group *g = &e->group[group];
    bool many = p->ranks > 1;
    int acc = g->plan->split_accum ? use : 0;
    int k = g->contributions[acc]++;
    struct contribution which = {k == 0, k + 1 == g->plan->contributions};
    if (g->plan->direct && !many)
        return;
    struct iz_access from[IZ_SLICES_MAX + 2]; /* rows, sum of squares */
    assert(slots <= IZ_SLICES_MAX);
    for (int i = 0; i < slots; i++)
        from[i] =
            (struct iz_access){slot[i], i || !many ? STARPU_R : STARPU_RW};
    if (p->zero.grads_down && (!many || p->target.nccl))
        offload(e, group, acc, from, which);
    else
        accumulate(e, group, g->grad_handle[acc], from, slots, which);
}
