/* SPDX-License-Identifier: Apache-2.0 */
/* Where a unit's gradient goes: into the accumulator of its shard, on this side
 * or the other, summed in an order that does not depend on timing.  See
 * reduce.h. */
#include "runtime/step/reduce.h"

#include <assert.h>

#include "codelets/buffer/flat_buffer.h"
#include "codelets/flat/flat.h"
#include "codelets/flat/touched_rows.h"
#include "runtime/engine/alloc.h"
#include "runtime/plan/split.h"
#include "runtime/plan/unit_sizes.h"
#include "runtime/step/accumulator.h"
#include "runtime/step/submit.h"
#include "runtime/step/touched.h"

/* ---- one contribution ---- */

struct reduce_arg {
    struct iz_coll *coll; /* NULL: of this rank alone */
    int64_t shard;        /* elements of a rank's part */
    int64_t own;          /* first element of it in the accumulator */
    int64_t skip;         /* elements in front of the contribution */
    int64_t n_apart;      /* of the shard, that the GPU sums apart */
    int slots; /* contributions of slices; 0: it is in the accumulator */
    int ranks;
    bool accumulate;
    bool squares;         /* takes them too */
    bool narrow;          /* the sum goes into the first slot as well */
    bool whole;           /* the accumulator has all ranks' parts */
    bool gpu, out_on_gpu; /* of several ranks' sums */
    enum iz_dtype wire, type, apart_type;
    const char *unit;
    struct iz_touched_in rows;
};

/* What the bodies of sums have, in the order in which add_buffers appends it.
 */
struct buffers {
    void *out;             /* the accumulator */
    const void *const *in; /* the slices' contributions; none: they are in it */
    void *full;            /* the first of them, or the accumulator */
    double *norm2;         /* sum of squares; NULL: they are not taken */
    struct iz_touched rows;
    bool by_rows; /* of a sparse table */
};

static struct buffers buffers_of(const struct reduce_arg *a, void **buf)
{
    void **next = buf + 1 + a->slots;
    struct buffers b = {.out =
                            (char *)buf[0] + a->own * iz_dtype_bytes(a->type),
                        .in = (const void *const *)&buf[1],
                        .full = buf[a->slots > 0],
                        .by_rows = a->rows.cols > 0};
    if (b.by_rows)
        b.rows = iz_touched_get(&a->rows, *next++);
    if (a->squares)
        b.norm2 = *next;
    return b;
}

/* Behind the accumulator; the contributions are only read unless `written`, the
 * first one alone. */
static int add_buffers(struct iz_engine *e, int unit,
                       const struct reduce_arg *a,
                       const starpu_data_handle_t *slot, bool written,
                       struct iz_access *to)
{
    int n = 0;
    for (; n < a->slots; n++)
        to[n] =
            (struct iz_access){slot[n], n || !written ? STARPU_R : STARPU_RW};
    if (a->rows.cols)
        to[n++] = (struct iz_access){iz_touched_list(e, unit), STARPU_R};
    if (a->squares)
        to[n++] = (struct iz_access){e->unit[unit].norm2_handle, STARPU_W};
    return n;
}

/* Of this rank alone: of a contribution, what is behind the first a->skip
 * elements. */
static void run_own_sum(struct iz_exec *x, void **buf, const void *arg)
{
    const struct reduce_arg *a = arg;
    struct buffers b = buffers_of(a, buf);
    const void *behind = (char *)b.full + a->skip * iz_dtype_bytes(a->wire);
    int64_t n = b.by_rows ? iz_touched_elems(&b.rows) : a->shard;
    assert(!a->skip || a->slots == 1);
    if (b.norm2) {
        struct iz_norm2 s = {0};
        iz_flat_sum_norm2(&s, b.out, a->type, a->accumulate, b.in, a->slots,
                          a->wire, n);
        *b.norm2 = iz_norm2_end(&s);
        return;
    }
    iz_buffer_sum(x, b.out, a->type, a->accumulate, a->skip ? &behind : b.in,
                  a->slots, a->wire, n);
    if (a->narrow)
        iz_buffer_sum(x, b.full, a->wire, false, (const void *const *)buf, 1,
                      a->type, n);
}

/* Of all ranks: first a rank's slices, then what each of them gives. */
static void run_reduce(struct iz_exec *x, void **buf, const void *arg)
{
    const struct reduce_arg *a = arg;
    struct buffers b = buffers_of(a, buf);
    int64_t n = b.by_rows ? iz_touched_elems(&b.rows) : a->shard * a->ranks;
    if (a->slots > 1)
        iz_buffer_sum(x, b.full, a->wire, false, b.in, a->slots, a->wire, n);
    if (b.by_rows) { /* only this rank's part of the rows is summed */
        int64_t at =
            a->whole ? iz_touched_first(&a->rows, &b.rows, a->rows.rank) : 0;
        iz_touched_parts(&a->rows, &b.rows, a->coll, 1);
        iz_coll_reduce_scatter_parts(
            a->coll, (char *)buf[0] + at * iz_dtype_bytes(a->type), a->type,
            a->accumulate, b.full, a->wire, b.norm2, a->unit);
    } else if (!a->gpu) {
        iz_coll_reduce_scatter(a->coll, b.out, a->type, a->accumulate, b.full,
                               a->wire, a->shard, b.norm2, a->unit);
    } else {
        struct iz_coll_gpu_sum s = {.full = b.full,
                                    .wire = a->wire,
                                    .shard = a->shard,
                                    .out = b.out,
                                    .out_type = a->type,
                                    .out_on_gpu = a->out_on_gpu,
                                    .accumulate = a->accumulate,
                                    .norm2 = b.norm2,
                                    .what = a->unit};
        iz_coll_gpu_reduce_scatter(a->coll, x, &s);
    }
}

/* What leaves a GPU for the host, and with several ranks also what the GPU sums
 * apart.  buf: contribution, the host's part if there is any, the accumulator
 * on the GPU if there is one, other pieces of the host's. */
static void run_offload(struct iz_exec *x, void **buf, const void *arg)
{
    const struct reduce_arg *a = arg;
    bool down = a->n_apart < a->shard;
    if (!a->coll) {
        iz_buffer_copy(x, buf[1], buf[0], a->shard * iz_dtype_bytes(a->wire));
        return;
    }
    struct iz_coll_gpu_sum s = {.full = buf[0],
                                .wire = a->wire,
                                .shard = a->shard,
                                .out = down ? buf[1] : NULL,
                                .out_type = a->type,
                                .n_apart = a->n_apart,
                                .apart = a->n_apart ? buf[1 + down] : NULL,
                                .apart_type = a->apart_type,
                                .accumulate_apart = a->accumulate,
                                .what = a->unit};
    iz_coll_gpu_reduce_scatter(a->coll, x, &s);
}

/* Bytes: what the link or the network moves, or a sum reads and writes. */
static void submit_reduce(struct iz_engine *e, struct iz_task *t,
                          const struct reduce_arg *a)
{
    double shard = (double)a->shard;
    double wire = shard * (double)iz_dtype_bytes(a->wire);
    if (t->where == IZ_ON_D2H)
        t->bytes = wire;
    else if (a->coll)
        t->bytes = wire * (a->ranks - 1);
    else
        t->bytes = wire * a->slots + shard * (double)iz_dtype_bytes(a->type) *
                                         (a->accumulate ? 2 : 1);
    t->squares = a->squares ? shard : 0;
    t->urgency += iz_step_in_order(t->unit);
    iz_step_submit(e, t, a, sizeof(*a));
}

/* ---- to the accumulators ---- */

/* The GPU of a single rank adds n elements of a contribution, behind the first
 * `skip` ones. */
static void add_part(struct iz_engine *e, int unit, starpu_data_handle_t sum,
                     starpu_data_handle_t contribution, int64_t skip, int64_t n,
                     struct reduce_arg a)
{
    struct iz_task t =
        iz_task_of(e, IZ_REDUCE, IZ_ON_COMPUTE, run_own_sum, unit);
    iz_task_add(&t, sum, a.accumulate ? STARPU_RW : STARPU_W);
    iz_task_add(&t, contribution, STARPU_R);
    a.shard = n;
    a.skip = skip;
    submit_reduce(e, &t, &a);
}

/* From the GPU to the host: straight into the accumulator where that can be,
 * else through a pinned buffer, from which the host adds.  What the GPU keeps
 * is added there: by a task of its own, with several ranks by the one that
 * moves the host's part. */
static void offload(struct iz_engine *e, int unit, int acc,
                    starpu_data_handle_t contribution, bool last,
                    struct reduce_arg a)
{
    struct iz_unit_memory *g = &e->unit[unit];
    int64_t apart = iz_plan_grads_apart(&e->plan, g->plan);
    starpu_data_handle_t host = g->grad_handle[acc][0];
    bool many = a.coll != NULL, first = !a.accumulate;
    bool straight = !host || iz_plan_straight(&e->plan, first);
    enum starpu_data_access_mode mode = first ? STARPU_W : STARPU_RW;
    starpu_data_handle_t to =
        straight ? host : iz_engine_next_staging(e, IZ_STAGING_GRAD)->handle;
    struct iz_access pieces[IZ_PIECES_MAX];
    struct reduce_arg move = a;
    if (apart && !many)
        add_part(e, unit, g->grad_apart_handle[acc], contribution,
                 iz_plan_host_elems(g->plan), apart, a);
    if (many || to) {
        struct iz_task t =
            iz_task_of(e, to ? IZ_OFFLOAD : IZ_REDUCE,
                       many ? IZ_ON_COMM : IZ_ON_D2H, run_offload, unit);
        iz_task_add(&t, contribution, many ? STARPU_RW : STARPU_R);
        iz_task_add(&t, to, STARPU_W);
        move.n_apart = many ? apart : 0;
        move.shard -= many ? 0 : apart;
        if (move.n_apart)
            iz_task_add(&t, g->grad_apart_handle[acc], mode);
        if (!straight)
            move.type = many ? IZ_F32 : move.wire;
        t.more = pieces;
        t.n_more =
            straight ? iz_accumulator_rest(g, acc, STARPU_W, pieces, 0) : 0;
        submit_reduce(e, &t, &move);
    }
    if (many)
        iz_step_count_link(
            e, 0, iz_plan_host_elems(g->plan) * iz_dtype_bytes(move.type));
    if (!straight)
        iz_accumulator_add(
            e, unit, acc, &to,
            (struct iz_piece_sum){.inputs = 1,
                                  .accumulate = !first,
                                  .squares = last && g->plan->sums_squares,
                                  .from = move.type,
                                  .type = a.type});
}

/* Where the GPU of a single rank forms the sums and takes their squares: what
 * the host updates comes down after the last contribution. */
static void add_on_gpu(struct iz_engine *e, int unit, int acc, bool last,
                       starpu_data_handle_t contribution, struct reduce_arg a)
{
    const struct iz_plan *p = &e->plan;
    struct iz_unit_memory *g = &e->unit[unit];
    starpu_data_handle_t sum = contribution;
    int64_t host = iz_plan_host_elems(g->plan);
    int64_t apart = iz_plan_grads_apart(p, g->plan);
    if (apart)
        add_part(e, unit, g->grad_apart_handle[acc], contribution, host, apart,
                 a);
    if (iz_plan_sum(p, g->plan)) {
        if (iz_plan_ring_sum(p, g->plan) && !a.accumulate)
            g->sum_handle[acc] = iz_engine_next_sum(e, unit);
        sum = g->sum_handle[acc];
        add_part(e, unit, sum, contribution, 0, host, a);
        a.wire = a.type;
    }
    if (!last || acc) /* the tied use comes first */
        return;
    if (host) {
        struct iz_task t =
            iz_task_of(e, IZ_OFFLOAD, IZ_ON_D2H, run_offload, unit);
        iz_accumulator_squares(e, unit, 0, sum, g->sum_handle[1]);
        iz_task_add(&t, sum, STARPU_R);
        iz_task_add(&t, g->grad_handle[0][0], STARPU_W);
        a.shard = host;
        submit_reduce(e, &t, &a);
    }
}

/* Adds a micro-batch to the sum of this rank alone.  True after the last one:
 * slot[0] is what the rank gives then, or NULL, if that is in the accumulator.
 */
static bool add_own(struct iz_engine *e, int unit, int acc, bool last,
                    starpu_data_handle_t *slot, struct reduce_arg a)
{
    const struct iz_plan *p = &e->plan;
    struct iz_unit_memory *g = &e->unit[unit];
    starpu_data_handle_t *sum = p->zero.sums == IZ_SUMS_IN_ACCUMULATOR
                                    ? g->grad_handle[acc]
                                    : &g->sum_handle[acc];
    struct iz_task t =
        iz_task_of(e, IZ_REDUCE, IZ_ON_COMPUTE, run_own_sum, unit);
    struct iz_access from[IZ_SLICES_MAX + 1];
    if (iz_plan_ring_sum(p, g->plan) && !a.accumulate)
        *sum = iz_engine_next_sum(e, unit);
    a.coll = NULL;
    a.own = 0;
    a.shard = iz_plan_sent(g->plan);
    a.narrow = last && a.type != a.wire;
    iz_task_add(&t, *sum, a.accumulate ? STARPU_RW : STARPU_W);
    t.more = from;
    t.n_more = add_buffers(e, unit, &a, slot, a.narrow, from);
    t.urgency = last ? 0 : iz_accumulator_urgency(e);
    submit_reduce(e, &t, &a);
    if (last && !a.narrow)
        slot[0] = p->zero.sums == IZ_SUMS_IN_ACCUMULATOR ? NULL : *sum;
    return last;
}

/* One task adds all: on the side where the gradient is computed, or by the
 * host's collectives. */
static void add_together(struct iz_engine *e, int unit, int acc,
                         const starpu_data_handle_t *slot, bool squares,
                         struct reduce_arg a)
{
    const struct iz_plan *p = &e->plan;
    struct iz_unit_memory *g = &e->unit[unit];
    bool many = a.coll != NULL;
    bool kept = a.accumulate || g->plan->direct || a.whole;
    enum starpu_data_access_mode mode = kept ? STARPU_RW : STARPU_W;
    struct iz_access from[IZ_SLICES_MAX + 2 + IZ_PIECES_MAX];
    struct iz_task t =
        iz_task_of(e, IZ_REDUCE, many ? IZ_ON_COMM : IZ_ON_COMPUTE,
                   many ? run_reduce : run_own_sum, unit);
    a.squares = squares;
    int n = add_buffers(e, unit, &a, slot, many, from);
    iz_task_add(&t, g->grad_handle[acc][0], mode);
    t.more = from;
    t.n_more = iz_accumulator_rest(g, acc, mode, from, n);
    t.urgency = many ? 0 : iz_accumulator_urgency(e);
    submit_reduce(e, &t, &a);
    if (!many || !a.gpu || p->target.nccl)
        return;
    iz_step_count_link(
        e,
        a.out_on_gpu ? a.shard * iz_dtype_bytes(a.accumulate ? IZ_F32 : a.type)
                     : 0,
        iz_step_param_bytes(e, a.shard * a.ranks));
}

/* Where the sum of a unit's contributions is formed. */
enum route {
    BACKWARD, /* which writes the only one into the accumulator */
    NEAR,     /* on the GPU of a single rank that offloads its optimizer */
    DOWN,     /* on the host, which a GPU sends it to */
    PIECES,   /* by all workers of the host */
    TOGETHER  /* by one task, as all collectives are */
};

static enum route route_of(const struct iz_plan *p,
                           const struct iz_plan_unit *g)
{
    bool many = p->ranks > 1;
    if (g->direct && !many)
        return BACKWARD;
    if (p->zero.sums_on_gpu)
        return NEAR;
    if (iz_plan_grads_to_host(p) && (!many || p->target.nccl))
        return DOWN;
    return !many && g->pieces > 1 ? PIECES : TOGETHER;
}

static struct reduce_arg reduce_arg(struct iz_engine *e, int unit, int slots,
                                    bool accumulate)
{
    const struct iz_plan *p = &e->plan;
    const struct iz_plan_unit *g = e->unit[unit].plan;
    assert(slots <= IZ_SLICES_MAX);
    return (struct reduce_arg){.coll = p->ranks > 1 ? e->coll : NULL,
                               .shard = iz_step_cost_shard(p, g),
                               .slots = g->direct ? 0 : slots,
                               .ranks = p->ranks,
                               .accumulate = accumulate,
                               .whole = p->zero.grad.whole,
                               .gpu = p->target.gpu,
                               .out_on_gpu = !iz_plan_grads_to_host(p),
                               .wire = p->param_type,
                               .type = p->grad_type,
                               .apart_type = p->grad_type,
                               .unit = iz_step_unit_name(e, unit),
                               .rows = iz_touched_in(e, unit)};
}

void iz_reduce(struct iz_engine *e, int unit, int use,
               starpu_data_handle_t *slot, int slots)
{
    const struct iz_plan *p = &e->plan;
    struct iz_unit_memory *g = &e->unit[unit];
    int acc = g->plan->split_accum ? use : 0, k = g->contributions[acc]++;
    bool last = k + 1 == g->plan->contributions;
    enum route route = route_of(p, g->plan);
    struct reduce_arg a = reduce_arg(e, unit, slots, k > 0);
    if (iz_sum_is_local(&p->sum) && route != NEAR) {
        if (!add_own(e, unit, acc, last, slot, a))
            return;
        a.slots = slot[0] ? 1 : 0;
        a.accumulate = false;
    }
    a.own = a.whole ? g->plan->shard * p->rank : 0;
    bool squares = last && g->plan->sums_squares;
    if (route == NEAR)
        add_on_gpu(e, unit, acc, last, slot[0], a);
    else if (route == DOWN)
        offload(e, unit, acc, slot[0], last, a);
    else if (route == PIECES)
        iz_accumulator_add(e, unit, acc, slot,
                           (struct iz_piece_sum){.inputs = slots,
                                                 .accumulate = a.accumulate,
                                                 .squares = squares,
                                                 .from = a.wire,
                                                 .type = a.type});
    else if (route == TOGETHER)
        add_together(e, unit, acc, slot, squares, a);
}
