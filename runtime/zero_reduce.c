/* SPDX-License-Identifier: Apache-2.0 */
/* Where a unit's gradient goes: into the accumulator of its shard, on this side
 * or the other, summed in an order that does not depend on timing; and the sum
 * of its squares.  See zero.h. */
#include <assert.h>
#include <string.h>

#include "runtime/zero.h"

starpu_data_handle_t iz_zero_grad(struct iz_engine *e, int group)
{
    const struct iz_plan_group *p = e->group[group].plan;
    if (p->direct)
        return e->group[group].grad_handle[0];
    struct iz_ring *r = &e->ring[p->ring];
    struct iz_slot *s = &r->grad[r->next_grad];
    r->next_grad = (r->next_grad + 1) % e->plan.ring[p->ring].grads;
    return s->handle;
}

/* ---- one contribution ---- */

struct reduce_arg {
    struct iz_coll *coll;
    int64_t shard;
    int64_t own; /* first element of this rank's part of the accumulator */
    int ranks, slots;
    bool accumulate;
    bool whole;           /* the accumulator has all ranks' parts */
    bool gpu, out_on_gpu; /* of several ranks' sums */
    enum iz_dtype wire, type;
    const char *unit;
    struct iz_rows_in rows; /* of them the list is the last buffer */
};

static char *out_of(const struct reduce_arg *a, void *accumulator)
{
    return (char *)accumulator + a->own * iz_dtype_bytes(a->type);
}

/* Elements of a contribution of one rank; list: of touched rows. */
static int64_t contributed(const struct reduce_arg *a, const void *list)
{
    struct iz_rows r;
    if (!a->rows.cols)
        return a->shard * a->ranks;
    r = iz_rows_get(&a->rows, list);
    return iz_rows_elems(&r);
}

/* buf[0]: accumulator; buf[1...]: the slices' contributions, of one rank. */
static void run_sum(struct iz_exec *x, void **buf, const void *arg)
{
    const struct reduce_arg *a = arg;
    int64_t n = a->rows.cols ? contributed(a, buf[1 + a->slots]) : a->shard;
    iz_buffer_sum(x, out_of(a, buf[0]), a->type, a->accumulate,
                  (const void *const *)&buf[1], a->slots, a->wire, n);
}

/* acc: the accumulator, of which this rank's part is summed. */
static void scatter_rows(const struct reduce_arg *a, void *acc, void *full,
                         const void *list)
{
    struct iz_rows r = iz_rows_get(&a->rows, list);
    int64_t at = a->whole ? iz_rows_first(&a->rows, &r, a->rows.rank) : 0;
    iz_rows_parts(&a->rows, &r, a->coll, 1);
    iz_coll_reduce_scatter_parts(
        a->coll, (char *)acc + at * iz_dtype_bytes(a->type), a->type,
        a->accumulate, full, a->wire, a->unit);
}

static void scatter(struct iz_exec *x, const struct reduce_arg *a, void *out,
                    void *full)
{
    if (a->gpu)
        iz_coll_gpu_reduce_scatter(a->coll, x, out, a->out_on_gpu, a->type,
                                   a->accumulate, full, a->wire, a->shard,
                                   a->unit);
    else
        iz_coll_reduce_scatter(a->coll, out, a->type, a->accumulate, full,
                               a->wire, a->shard, a->unit);
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
        scatter_rows(a, buf[0], buf[1], list);
    else
        scatter(x, a, out_of(a, buf[0]), buf[1]);
}

/* The gradient was written in place: the accumulator is the contribution. */
static void run_scatter_direct(struct iz_exec *x, void **buf, const void *arg)
{
    const struct reduce_arg *a = arg;
    if (a->rows.cols)
        scatter_rows(a, buf[0], buf[0], buf[1]);
    else
        scatter(x, a, out_of(a, buf[0]), buf[0]);
}

/* buf: host, GPU. */
static void run_down(struct iz_exec *x, void **buf, const void *arg)
{
    const struct reduce_arg *a = arg;
    iz_buffer_copy(x, buf[0], buf[1], a->shard * iz_dtype_bytes(a->wire));
}

/* A rank's part; of a sparse table, which says more in the task itself, at
 * most on average. */
static int64_t cost_shard(const struct iz_plan *p,
                          const struct iz_plan_group *g)
{
    return g->rows ? g->packed / p->ranks : g->shard;
}

static struct reduce_arg reduce_arg(const struct iz_engine *e, int group)
{
    const struct iz_plan *p = &e->plan;
    const struct iz_plan_group *g = e->group[group].plan;
    return (struct reduce_arg){.coll = e->coll,
                               .shard = cost_shard(p, g),
                               .own = p->grads_full ? g->shard * p->rank : 0,
                               .ranks = p->ranks,
                               .slots = 1,
                               .gpu = p->target.gpu,
                               .out_on_gpu = !p->grads_down,
                               .wire = p->param_type,
                               .type = p->grad_type,
                               .unit = iz_unit_name(e, group),
                               .whole = p->grads_full,
                               .rows = iz_rows_in(e, group)};
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
    if (m->where == IZ_ON_LANE && a->ranks > 1)
        return wire * (a->ranks - 1);
    return wire * a->slots + (double)a->shard *
                                 (double)iz_dtype_bytes(a->type) *
                                 (a->accumulate ? 2 : 1);
}

static void submit(struct iz_engine *e, int group, const struct move *m,
                   const struct reduce_arg *a)
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
                                .unit = group,
                                .step = (int)e->step});
}

/* Nobody waits for the sum of a single rank. */
#define NOT_WAITED_FOR (-3500)

/* From the GPU to the host: straight into the accumulator if nothing is to be
 * added and the type is right, else through a pinned buffer, from which the
 * host adds. */
static void offload(struct iz_engine *e, int group, starpu_data_handle_t acc,
                    const struct iz_access *from, bool first)
{
    struct reduce_arg a = reduce_arg(e, group);
    bool many = a.ranks > 1, straight = first && (many || a.wire == a.type);
    struct iz_stage *s = straight
                             ? NULL
                             : iz_zero_stage(e->grad_stage, &e->next_grad_stage,
                                             e->plan.grad_stages);
    enum iz_dtype staged = many && !straight ? IZ_F32 : a.wire;
    struct reduce_arg down = a;
    if (many && !straight)
        down.type = IZ_F32;
    submit(e, group,
           &(struct move){.kind = IZ_OFFLOAD,
                          .where = many ? IZ_ON_LANE : IZ_ON_DOWN,
                          .run = many ? run_scatter : run_down,
                          .to = {straight ? acc : s->handle, STARPU_W},
                          .from = from,
                          .n_from = 1},
           &down);
    e->down_bytes += a.shard * iz_dtype_bytes(many ? down.type : a.wire);
    if (straight)
        return;
    struct iz_access staged_access = {s->handle, STARPU_R};
    a.wire = staged;
    a.accumulate = !first;
    submit(e, group,
           &(struct move){.kind = IZ_REDUCE,
                          .where = IZ_ON_HOST,
                          .run = run_sum,
                          .to = {acc, first ? STARPU_W : STARPU_RW},
                          .from = &staged_access,
                          .n_from = 1,
                          .urgency = NOT_WAITED_FOR},
           &a);
}

/* On the side where the gradient is computed, or through collectives of the
 * host. */
static void accumulate(struct iz_engine *e, int group, starpu_data_handle_t acc,
                       struct iz_access *from, int slots, bool first)
{
    struct reduce_arg a = reduce_arg(e, group);
    bool many = a.ranks > 1, direct = e->group[group].plan->direct;
    a.slots = slots;
    a.accumulate = !first;
    bool whole = direct || e->plan.grads_full;
    int n_from = direct ? 0 : slots;
    if (a.rows.cols)
        from[n_from++] = (struct iz_access){iz_rows_list(e, group), STARPU_R};
    submit(e, group,
           &(struct move){.kind = IZ_REDUCE,
                          .where = many ? IZ_ON_LANE : IZ_ON_COMPUTE,
                          .run = direct ? run_scatter_direct
                                 : many ? run_scatter
                                        : run_sum,
                          .to = {acc, first && !whole ? STARPU_W : STARPU_RW},
                          .from = from,
                          .n_from = n_from,
                          .urgency = many ? 0 : NOT_WAITED_FOR},
           &a);
    if (many && e->plan.target.gpu && !e->plan.target.nccl) {
        e->down_bytes += iz_param_bytes(e, a.shard * a.ranks);
        e->up_bytes +=
            e->plan.grads_down
                ? 0
                : a.shard * iz_dtype_bytes(a.accumulate ? IZ_F32 : a.type);
    }
}

void iz_zero_reduce(struct iz_engine *e, int group, int use,
                    const starpu_data_handle_t *slot, int slots)
{
    const struct iz_plan *p = &e->plan;
    struct iz_group *g = &e->group[group];
    bool many = p->ranks > 1;
    int acc = g->plan->split_accum ? use : 0;
    bool first = g->contributions[acc]++ == 0;
    if (g->plan->direct && !many)
        return;
    struct iz_access from[IZ_SLICES_MAX + 1];
    assert(slots <= IZ_SLICES_MAX);
    for (int i = 0; i < slots; i++)
        from[i] =
            (struct iz_access){slot[i], i || !many ? STARPU_R : STARPU_RW};
    if (p->grads_down && (!many || p->target.nccl))
        offload(e, group, g->grad_handle[acc], from, first);
    else
        accumulate(e, group, g->grad_handle[acc], from, slots, first);
}

/* ---- norm ---- */

struct norm_arg {
    int64_t n, own;
    enum iz_dtype type;
    bool add; /* the tied use's accumulator comes on top */
    bool whole;
    struct iz_rows_in rows;
};

/* This rank's part of the touched rows. */
static void norm_rows(struct norm_arg *a, const void *list)
{
    struct iz_rows r = iz_rows_get(&a->rows, list);
    int64_t first = iz_rows_first(&a->rows, &r, a->rows.rank);
    a->n = iz_rows_first(&a->rows, &r, a->rows.rank + 1) - first;
    a->own = a->whole ? first : 0;
}

/* buf: accumulator, sum of squares (double), tied accumulator or list of
 * touched rows. */
static void run_norm(struct iz_exec *x, void **buf, const void *arg)
{
    struct norm_arg part = *(const struct norm_arg *)arg, *a = &part;
    if (a->rows.cols)
        norm_rows(a, buf[2]);
    int64_t at = a->own * iz_dtype_bytes(a->type);
    char *acc = (char *)buf[0] + at;
    const void *tied = a->add ? (char *)buf[2] + at : NULL;
    if (a->add)
        iz_buffer_sum(x, acc, a->type, true, &tied, 1, a->type, a->n);
    iz_buffer_norm2(x, buf[1], acc, a->type, a->n);
}

void iz_zero_norm(struct iz_engine *e, int group)
{
    struct iz_group *g = &e->group[group];
    struct norm_arg a = {
        .n = g->plan->shard,
        .own = e->plan.grads_full ? g->plan->shard * e->plan.rank : 0,
        .type = e->plan.grad_type,
        .add = g->plan->split_accum,
        .whole = e->plan.grads_full,
        .rows = iz_rows_in(e, group)};
    if (!g->plan->n)
        return;
    g->contributions[0] = g->contributions[1] = 0;
    iz_submit(e->graph,
              &(struct iz_task){
                  .kind = IZ_NORM,
                  .where = e->plan.grads_down ? IZ_ON_HOST : IZ_ON_COMPUTE,
                  .run = run_norm,
                  .arg = &a,
                  .arg_bytes = sizeof(a),
                  .data = {{g->grad_handle[0], a.add ? STARPU_RW : STARPU_R},
                           {g->norm2_handle, STARPU_W},
                           {a.add ? g->grad_handle[1] : iz_rows_list(e, group),
                            STARPU_R}},
                  .bytes = (double)cost_shard(&e->plan, g->plan) *
                           (double)iz_dtype_bytes(a.type),
                  .unit = group,
                  .step = (int)e->step});
    if (e->plan.states_full && e->plan.ranks > 1)
        iz_zero_gather(e, IZ_REDUCE, group, g->grad_handle[0],
                       iz_dtype_bytes(e->plan.grad_type));
}
