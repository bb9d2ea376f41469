/* SPDX-License-Identifier: Apache-2.0 */
/* Where a unit's gradient goes: into the accumulator of its shard, on this side
 * or the other, summed in an order that does not depend on timing; and the sum
 * of its squares, which the last sum of a step takes on its way if the host
 * does it, and which else is a pass of its own.  What the host adds and squares
 * outside its collectives are tasks of pieces, for all of its workers.  See
 * zero.h. */
#include "runtime/step/zero.h"

#include <assert.h>

#include "codelets/flat/flat.h"
#include "runtime/engine/alloc.h"
#include "runtime/plan/split.h"
#include "runtime/plan/unit_sizes.h"

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

/* buf: accumulator; the slices' contributions; list of touched rows; sum of
 * squares; other pieces of the accumulator. */
static void run_reduce(struct iz_exec *x, void **buf, const void *arg)
{
    const struct reduce_arg *a = arg;
    void **next = buf + 1 + a->slots, *full = buf[a->slots > 0];
    const void *list = a->rows.cols ? *next++ : NULL;
    double *norm2 = a->squares ? *next++ : NULL;
    const void *behind = (char *)full + a->skip * iz_dtype_bytes(a->wire);
    const void *const *in = (const void *const *)&buf[1];
    char *out = (char *)buf[0] + a->own * iz_dtype_bytes(a->type);
    int64_t n = a->coll ? a->shard * a->ranks : a->shard;
    struct iz_touched r = {0};
    assert(!a->skip || a->slots == 1);
    if (list) {
        r = iz_touched_get(&a->rows, list);
        n = iz_touched_elems(&r);
    }
    if (!a->coll && !norm2) {
        iz_buffer_sum(x, out, a->type, a->accumulate, a->skip ? &behind : in,
                      a->slots, a->wire, n);
        if (a->narrow)
            iz_buffer_sum(x, full, a->wire, false, (const void *const *)buf, 1,
                          a->type, n);
        return;
    }
    if (!a->coll) {
        struct iz_norm2 s = {0};
        iz_flat_sum_norm2(&s, out, a->type, a->accumulate, in, a->slots,
                          a->wire, n);
        *norm2 = iz_norm2_end(&s);
        return;
    }
    if (a->slots > 1)
        iz_buffer_sum(x, full, a->wire, false, in, a->slots, a->wire, n);
    if (list) { /* only this rank's part of the rows is summed */
        int64_t at =
            a->whole ? iz_touched_first(&a->rows, &r, a->rows.rank) : 0;
        iz_touched_parts(&a->rows, &r, a->coll, 1);
        iz_coll_reduce_scatter_parts(
            a->coll, (char *)buf[0] + at * iz_dtype_bytes(a->type), a->type,
            a->accumulate, full, a->wire, norm2, a->unit);
    } else if (!a->gpu) {
        iz_coll_reduce_scatter(a->coll, out, a->type, a->accumulate, full,
                               a->wire, a->shard, norm2, a->unit);
    } else {
        struct iz_coll_gpu_sum s = {.full = full,
                                    .wire = a->wire,
                                    .shard = a->shard,
                                    .out = out,
                                    .out_type = a->type,
                                    .out_on_gpu = a->out_on_gpu,
                                    .accumulate = a->accumulate,
                                    .norm2 = norm2,
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
    if (t->where == IZ_ON_DOWN)
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

/* Nobody waits for the sum of a single rank, unless its update follows at once
 * and comes first. */
static int sum_urgency(const struct iz_engine *e)
{
    return iz_step_updates_early(e) && iz_step_updates_first(e) ? 0 : -3500;
}

/* ---- pieces of an accumulator on the host ---- */

/* What is done to piece i, whose first element is `first`. */
struct piece_arg {
    int64_t first, n;
    int inputs;
    bool accumulate, squares;
    enum iz_dtype from, type;
};

/* buf: the piece; what is added to it; sums of its blocks' squares. */
static void run_piece(struct iz_exec *x, void **buf, const void *arg)
{
    const struct piece_arg *a = arg;
    const void *in[IZ_SLICES_MAX];
    for (int i = 0; i < a->inputs; i++)
        in[i] = (char *)buf[1 + i] + a->first * iz_dtype_bytes(a->from);
    iz_flat_add_squares(a->squares ? buf[1 + a->inputs] : NULL, buf[0], a->type,
                        a->accumulate, in, a->inputs, a->from, a->n);
}

/* The inputs, of the whole accumulator's length unless a.first stays 0, are
 * added to piece i, and its squares are taken.  The workers of the host share
 * the pieces. */
static void submit_piece(struct iz_engine *e, struct iz_task t, int acc, int i,
                         const starpu_data_handle_t *from, struct piece_arg a)
{
    struct iz_unit_memory *g = &e->unit[t.unit];
    struct iz_access more[IZ_SLICES_MAX + 1];
    double size = (double)iz_dtype_bytes(a.type);
    a.n = iz_plan_piece(&e->plan, g->plan, i);
    iz_task_add(&t, g->grad_handle[acc][i],
                !a.inputs      ? STARPU_R
                : a.accumulate ? STARPU_RW
                               : STARPU_W);
    for (int k = 0; k < a.inputs; k++)
        more[t.n_more++] = (struct iz_access){from[k], STARPU_R};
    if (a.squares)
        more[t.n_more++] =
            (struct iz_access){g->block_sums_handle[i], STARPU_W};
    t.more = more;
    t.bytes = (double)a.n * size;
    if (a.inputs)
        t.bytes = (double)a.n * ((double)(a.inputs * iz_dtype_bytes(a.from)) +
                                 size * (a.accumulate ? 2 : 1));
    t.squares = a.squares && a.inputs ? (double)a.n : 0;
    iz_step_submit(e, &t, &a, sizeof(a));
}

/* All pieces, from the buffers of contributions on the host. */
static void add_pieces(struct iz_engine *e, int unit, int acc,
                       const starpu_data_handle_t *from, struct piece_arg a)
{
    struct iz_task t = iz_task_of(e, IZ_REDUCE, IZ_ON_HOST, run_piece, unit);
    t.urgency = sum_urgency(e) + iz_step_in_order(unit);
    for (int i = 0; i < e->unit[unit].plan->pieces; i++) {
        submit_piece(e, t, acc, i, from, a);
        a.first += e->unit[unit].plan->piece;
    }
}

/* Appends those which a task that is given the first one as the whole
 * accumulator writes as well; returns how many there are now. */
static int other_pieces(const struct iz_unit_memory *g, int acc,
                        enum starpu_data_access_mode mode, struct iz_access *to,
                        int n)
{
    for (int i = 1; i < g->plan->pieces; i++)
        to[n++] = (struct iz_access){g->grad_handle[acc][i], mode};
    return n;
}

/* ---- squares that the GPU forms ---- */

struct norm_arg {
    int64_t n, own;
    enum iz_dtype type;
    bool add; /* the tied use's accumulator comes on top */
    bool whole;
    struct iz_touched_in rows;
};

/* Bytes of a pass over n elements; with the tied use's accumulator first, which
 * on a GPU is a pass before it. */
static double pass_bytes(int64_t n, const struct norm_arg *a, bool gpu)
{
    int times = !a->add ? 1 : gpu ? 4 : 3;
    return (double)(n * iz_dtype_bytes(a->type)) * times;
}

/* buf: accumulator on the GPU, sums of its blocks, tied accumulator. */
static void run_squares(struct iz_exec *x, void **buf, const void *arg)
{
    const struct norm_arg *a = arg;
    const void *tied = a->add ? buf[2] : NULL;
    if (a->add)
        iz_buffer_sum(x, buf[0], a->type, true, &tied, 1, a->type, a->n);
    iz_buffer_squares(x, buf[1], buf[0], a->type, a->n);
}

/* The squares, block by block, of piece i of a sum that the GPU has.  tied:
 * what is added to the sum first. */
static void submit_squares(struct iz_engine *e, int unit, int i,
                           starpu_data_handle_t sum, starpu_data_handle_t tied)
{
    struct iz_unit_memory *g = &e->unit[unit];
    struct norm_arg a = {.n = iz_plan_piece(&e->plan, g->plan, i),
                         .type = e->plan.grad_type,
                         .add = tied != NULL};
    struct iz_task t = iz_task_of(e, IZ_NORM, IZ_ON_COMPUTE, run_squares, unit);
    iz_task_add(&t, sum, a.add ? STARPU_RW : STARPU_R);
    iz_task_add(&t, g->block_sums_handle[i], STARPU_W);
    iz_task_add(&t, tied, STARPU_R);
    t.urgency = iz_step_in_order(unit) + 3500;
    t.rate = IZ_RATE_SQUARES;
    t.bytes = pass_bytes(a.n, &a, true);
    iz_step_submit(e, &t, &a, sizeof(a));
}

/* ---- to the accumulators ---- */

/* The GPU of a single rank adds n elements of a contribution, behind the first
 * `skip` ones. */
static void add_part(struct iz_engine *e, int unit, starpu_data_handle_t sum,
                     starpu_data_handle_t contribution, int64_t skip, int64_t n,
                     struct reduce_arg a)
{
    struct iz_task t =
        iz_task_of(e, IZ_REDUCE, IZ_ON_COMPUTE, run_reduce, unit);
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
                       many ? IZ_ON_COMM : IZ_ON_DOWN, run_offload, unit);
        iz_task_add(&t, contribution, many ? STARPU_RW : STARPU_R);
        iz_task_add(&t, to, STARPU_W);
        move.n_apart = many ? apart : 0;
        move.shard -= many ? 0 : apart;
        if (move.n_apart)
            iz_task_add(&t, g->grad_apart_handle[acc], mode);
        if (!straight)
            move.type = many ? IZ_F32 : move.wire;
        t.more = pieces;
        t.n_more = straight ? other_pieces(g, acc, STARPU_W, pieces, 0) : 0;
        submit_reduce(e, &t, &move);
    }
    e->counts.down_bytes += iz_plan_host_elems(g->plan) *
                            iz_dtype_bytes(many ? move.type : move.wire);
    if (!straight)
        add_pieces(e, unit, acc, &to,
                   (struct piece_arg){.inputs = 1,
                                      .accumulate = !first,
                                      .squares = last && g->plan->sums_squares,
                                      .from = move.type,
                                      .type = a.type});
}

/* Where the GPU of a single rank forms the sums and takes their squares: what
 * the host updates comes down after the last contribution. */
static void add_near(struct iz_engine *e, int unit, int acc, bool last,
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
            iz_task_of(e, IZ_OFFLOAD, IZ_ON_DOWN, run_offload, unit);
        submit_squares(e, unit, 0, sum, g->sum_handle[1]);
        iz_task_add(&t, sum, STARPU_R);
        iz_task_add(&t, g->grad_handle[0][0], STARPU_W);
        a.shard = host;
        submit_reduce(e, &t, &a);
        e->counts.down_bytes += host * iz_dtype_bytes(a.wire);
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
    starpu_data_handle_t *sum =
        p->zero.sums_in_place ? g->grad_handle[acc] : &g->sum_handle[acc];
    struct iz_task t =
        iz_task_of(e, IZ_REDUCE, IZ_ON_COMPUTE, run_reduce, unit);
    struct iz_access from[IZ_SLICES_MAX + 1];
    int n = 0;
    if (iz_plan_ring_sum(p, g->plan) && !a.accumulate)
        *sum = iz_engine_next_sum(e, unit);
    a.coll = NULL;
    a.own = 0;
    a.shard = iz_plan_sent(g->plan);
    a.narrow = last && a.type != a.wire;
    iz_task_add(&t, *sum, a.accumulate ? STARPU_RW : STARPU_W);
    for (; n < a.slots; n++)
        from[n] =
            (struct iz_access){slot[n], n || !a.narrow ? STARPU_R : STARPU_RW};
    if (a.rows.cols)
        from[n++] = (struct iz_access){iz_touched_list(e, unit), STARPU_R};
    t.more = from;
    t.n_more = n;
    t.urgency = last ? 0 : sum_urgency(e);
    submit_reduce(e, &t, &a);
    if (last && !a.narrow)
        slot[0] = p->zero.sums_in_place ? NULL : *sum;
    return last;
}

/* Elsewhere the sum is formed on the side where the gradient is computed, or by
 * the host's collectives. */
void iz_reduce(struct iz_engine *e, int unit, int use,
               starpu_data_handle_t *slot, int slots)
{
    const struct iz_plan *p = &e->plan;
    struct iz_unit_memory *g = &e->unit[unit];
    bool many = p->ranks > 1, direct = g->plan->direct;
    bool whole = direct || p->zero.grads_full;
    int acc = g->plan->split_accum ? use : 0, k = g->contributions[acc]++;
    bool last = k + 1 == g->plan->contributions;
    struct reduce_arg a = {.coll = many ? e->coll : NULL,
                           .shard = iz_step_cost_shard(p, g->plan),
                           .slots = direct ? 0 : slots,
                           .ranks = p->ranks,
                           .accumulate = k > 0,
                           .whole = p->zero.grads_full,
                           .gpu = p->target.gpu,
                           .out_on_gpu = !p->zero.grads_down,
                           .wire = p->param_type,
                           .type = p->grad_type,
                           .apart_type = p->grad_type,
                           .unit = iz_step_unit_name(e, unit),
                           .rows = iz_touched_in(e, unit)};
    /* rows, squares */
    struct iz_access from[IZ_SLICES_MAX + 2 + IZ_PIECES_MAX];
    int n = 0;
    if (direct && !many)
        return;
    if (p->zero.sums_near) {
        add_near(e, unit, acc, last, slot[0], a);
        return;
    }
    if (iz_sum_is_local(&p->sum)) {
        if (!add_own(e, unit, acc, last, slot, a))
            return;
        a.slots = slot[0] ? 1 : 0;
        a.accumulate = false;
    }
    if (p->zero.grads_full)
        a.own = g->plan->shard * p->rank;
    if (p->zero.grads_down && (!many || p->target.nccl)) {
        offload(e, unit, acc, slot[0], last, a);
        return;
    }
    assert(slots <= IZ_SLICES_MAX);
    a.squares = last && g->plan->sums_squares;
    if (!many && g->plan->pieces > 1) {
        add_pieces(e, unit, acc, slot,
                   (struct piece_arg){.inputs = slots,
                                      .accumulate = a.accumulate,
                                      .squares = a.squares,
                                      .from = a.wire,
                                      .type = a.type});
        return;
    }
    enum starpu_data_access_mode mode =
        a.accumulate || whole ? STARPU_RW : STARPU_W;
    for (int i = 0; i < a.slots; i++)
        from[n++] =
            (struct iz_access){slot[i], i || !many ? STARPU_R : STARPU_RW};
    if (a.rows.cols)
        from[n++] = (struct iz_access){iz_touched_list(e, unit), STARPU_R};
    if (a.squares)
        from[n++] = (struct iz_access){g->norm2_handle, STARPU_W};
    n = other_pieces(g, acc, mode, from, n);
    struct iz_task t = iz_task_of(
        e, IZ_REDUCE, many ? IZ_ON_COMM : IZ_ON_COMPUTE, run_reduce, unit);
    iz_task_add(&t, g->grad_handle[acc][0], mode);
    t.more = from;
    t.n_more = n;
    t.urgency = many ? 0 : sum_urgency(e);
    submit_reduce(e, &t, &a);
    if (many && p->target.gpu && !p->target.nccl) {
        e->counts.down_bytes += iz_step_param_bytes(e, a.shard * a.ranks);
        if (!p->zero.grads_down)
            e->counts.up_bytes +=
                a.shard * iz_dtype_bytes(a.accumulate ? IZ_F32 : a.type);
    }
}

/* ---- squares that no sum has left ---- */

/* buf: sum of squares; accumulator; tied accumulator or list of touched rows.
 */
static void run_norm(struct iz_exec *x, void **buf, const void *arg)
{
    const struct norm_arg *a = arg;
    int64_t n = a->n, own = a->own;
    if (a->rows.cols) { /* this rank's part of the touched rows */
        struct iz_touched r = iz_touched_get(&a->rows, buf[2]);
        int64_t first = iz_touched_first(&a->rows, &r, a->rows.rank);
        n = iz_touched_first(&a->rows, &r, a->rows.rank + 1) - first;
        own = a->whole ? first : 0;
    }
    int64_t at = own * iz_dtype_bytes(a->type);
    char *acc = (char *)buf[1] + at;
    const void *tied = a->add ? (char *)buf[2] + at : NULL;
    if (a->add)
        iz_buffer_sum_norm2(x, buf[0], acc, a->type, true, &tied, 1, a->type,
                            n);
    else
        iz_buffer_norm2(x, buf[0], acc, a->type, n);
}

static void submit_norm(struct iz_engine *e, int unit)
{
    const struct iz_plan *p = &e->plan;
    struct iz_unit_memory *g = &e->unit[unit];
    int64_t n = iz_step_cost_shard(p, g->plan);
    struct norm_arg a = {.n = g->plan->shard,
                         .type = p->grad_type,
                         .add = g->plan->split_accum,
                         .whole = p->zero.grads_full,
                         .rows = iz_touched_in(e, unit)};
    struct iz_task t = iz_task_of(e, IZ_NORM, IZ_ON_COMPUTE, run_norm, unit);
    if (p->zero.grads_full)
        a.own = g->plan->shard * p->rank;
    iz_task_add(&t, g->norm2_handle, STARPU_W);
    iz_task_add(&t, g->grad_handle[0][0], a.add ? STARPU_RW : STARPU_R);
    iz_task_add(&t, a.add ? g->grad_handle[1][0] : iz_touched_list(e, unit),
                STARPU_R);
    t.rate = p->target.gpu ? IZ_RATE_SQUARES : 0;
    t.bytes = pass_bytes(n, &a, p->target.gpu);
    t.squares = a.add && !p->target.gpu ? (double)n : 0;
    iz_step_submit(e, &t, &a, sizeof(a));
}

/* buf: sum of squares, sums of the first blocks; those of the others follow. */
static void run_blocks(struct iz_exec *x, void **buf, const void *arg)
{
    struct iz_norm2 s = {0};
    iz_norm2_add_blocks(&s, buf[1], *(const int64_t *)arg);
    *(double *)buf[0] = iz_norm2_end(&s);
}

/* The order is that of a pass over the whole, whoever squared which piece. */
static void submit_blocks(struct iz_engine *e, int unit)
{
    struct iz_unit_memory *g = &e->unit[unit];
    int64_t blocks = iz_norm2_blocks(iz_plan_squared(&e->plan, g->plan));
    struct iz_access from[IZ_PIECES_MAX + 1];
    struct iz_task t = iz_task_of(e, IZ_NORM, IZ_ON_HOST, run_blocks, unit);
    iz_task_add(&t, g->norm2_handle, STARPU_W);
    for (int i = 0; i <= g->plan->pieces; i++)
        if (g->block_sums_handle[i])
            from[t.n_more++] =
                (struct iz_access){g->block_sums_handle[i], STARPU_R};
    t.more = from;
    t.bytes = (double)blocks * sizeof(double);
    iz_step_submit(e, &t, &blocks, sizeof(blocks));
}

/* Of pieces whose last sum has not taken their squares; the tied use's are
 * added first. */
static void square_pieces(struct iz_engine *e, int unit)
{
    const struct iz_unit_memory *g = &e->unit[unit];
    struct iz_task t = iz_task_of(e, IZ_NORM, IZ_ON_HOST, run_piece, unit);
    struct piece_arg a = {.inputs = g->plan->split_accum,
                          .accumulate = true,
                          .squares = true,
                          .from = e->plan.grad_type,
                          .type = e->plan.grad_type};
    for (int i = 0; i < g->plan->pieces; i++)
        submit_piece(e, t, 0, i, &g->grad_handle[1][i], a);
}

void iz_step_grad_norm(struct iz_engine *e, int unit)
{
    struct iz_unit_memory *g = &e->unit[unit];
    const struct iz_plan *p = &e->plan;
    if (!g->plan->n)
        return;
    assert(g->contributions[0] == g->plan->contributions);
    g->contributions[0] = g->contributions[1] = 0;
    if (iz_plan_grads_apart(p, g->plan))
        submit_squares(e, unit, g->plan->pieces, g->grad_apart_handle[0],
                       g->grad_apart_handle[1]);
    if (!g->plan->sums_squares && !iz_plan_squared(p, g->plan))
        submit_norm(e, unit);
    else if (!g->plan->sums_squares && !p->zero.sums_near)
        square_pieces(e, unit);
    if (iz_plan_squared(p, g->plan))
        submit_blocks(e, unit);
    if (p->zero.states_full && p->ranks > 1)
        iz_fetch_gather(e, IZ_REDUCE, unit, g->grad_handle[0][0],
                        iz_dtype_bytes(p->grad_type));
}
