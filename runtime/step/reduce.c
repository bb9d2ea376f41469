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
#include "runtime/step/fetch.h"
#include "runtime/step/move.h"
#include "runtime/step/norm.h"
#include "runtime/step/submit.h"
#include "runtime/step/touched.h"

/* ---- one contribution ---- */

struct reduce_arg {
    struct iz_coll *coll; /* NULL: of this rank alone */
    /* Types, and a rank's elements; the body adds the addresses. */
    struct iz_coll_sum sum;
    /* Which buffer has what; -1: none does. */
    int out;      /* the accumulator */
    int in;       /* the first of the slices' contributions */
    int list;     /* of touched rows */
    int norm2;    /* the sum of squares */
    int apart;    /* what the GPU sums apart */
    int64_t own;  /* first element of a rank's part in the accumulator */
    int64_t skip; /* elements in front of the contribution */
    int slots;    /* contributions of slices; 0: it is in the accumulator */
    int ranks;
    bool squares; /* takes them too */
    bool narrow;  /* the sum goes into the first slot as well */
    bool whole;   /* the accumulator has all ranks' parts */
    bool gpu;     /* of several ranks' sums */
    struct iz_touched_in rows;
};

/* NULL: there is none. */
static void *buffer_at(void **buf, int i)
{
    return i < 0 ? NULL : buf[i];
}

static void *elem_at(void *p, int64_t i, enum iz_dtype type)
{
    return p ? (char *)p + i * iz_dtype_bytes(type) : NULL;
}

/* Of this rank alone: of a contribution, what is behind the first a->skip
 * elements. */
static void run_own_sum(struct iz_exec *x, void **buf, const void *arg)
{
    const struct reduce_arg *a = arg;
    const void *const *in = (const void *const *)&buf[a->in];
    void *out = elem_at(buf[a->out], a->own, a->sum.out_type);
    double *norm2 = buffer_at(buf, a->norm2);
    int64_t n = a->sum.shard;
    assert(!a->skip || a->slots == 1);
    if (a->rows.cols) {
        struct iz_touched r = iz_touched_get(&a->rows, buf[a->list]);
        n = iz_touched_elems(&r);
    }
    if (norm2) {
        struct iz_norm2 s = {0};
        iz_flat_sum_norm2(&s, out, a->sum.out_type, a->sum.accumulate, in,
                          a->slots, a->sum.wire, n);
        *norm2 = iz_norm2_end(&s);
        return;
    }
    const void *behind =
        a->skip ? elem_at(buf[a->in], a->skip, a->sum.wire) : NULL;
    iz_buffer_sum(x, out, a->sum.out_type, a->sum.accumulate,
                  a->skip ? &behind : in, a->slots, a->sum.wire, n);
    if (a->narrow)
        iz_buffer_sum(x, buf[a->in], a->sum.wire, false,
                      (const void *const *)&out, 1, a->sum.out_type, n);
}

/* Of all ranks: first a rank's slices, then what each of them gives.  Of a
 * sparse table only this rank's part of the rows is summed. */
static void run_reduce(struct iz_exec *x, void **buf, const void *arg)
{
    const struct reduce_arg *a = arg;
    const void *const *in = (const void *const *)&buf[a->in];
    struct iz_coll_sum s = a->sum;
    struct iz_touched rows = {0};
    s.full = buf[a->slots ? a->in : a->out];
    if (a->rows.cols)
        rows = iz_touched_get(&a->rows, buf[a->list]);
    if (a->slots > 1)
        iz_buffer_sum(x, s.full, s.wire, false, in, a->slots, s.wire,
                      a->rows.cols ? iz_touched_elems(&rows)
                                   : s.shard * a->ranks);
    s.out = elem_at(buffer_at(buf, a->out), a->own, s.out_type);
    s.norm2 = buffer_at(buf, a->norm2);
    s.apart = buffer_at(buf, a->apart);
    if (a->rows.cols) {
        int64_t at =
            a->whole ? iz_touched_first(&a->rows, &rows, a->rows.rank) : 0;
        iz_touched_shards(&a->rows, &rows, a->coll, 1);
        s.out = elem_at(buf[a->out], at, s.out_type);
        s.shard = -1;
    }
    if (a->gpu && !a->rows.cols)
        iz_coll_gpu_reduce_scatter(a->coll, x, &s);
    else
        iz_coll_reduce_scatter(a->coll, &s);
}

/* What a collective leaves on the host of a GPU, or takes through it. */
static void count_link(struct iz_engine *e, const struct reduce_arg *a)
{
    int64_t type = iz_dtype_bytes(a->sum.out_type),
            wire = iz_dtype_bytes(a->sum.wire);
    if (!a->coll || !a->gpu)
        return;
    if (e->plan.target.nccl)
        iz_step_count_link(
            e, 0,
            a->sum.out_on_gpu ? 0 : (a->sum.shard - a->sum.n_apart) * type);
    else
        iz_step_count_link(e,
                           a->sum.out_on_gpu
                               ? a->sum.shard * (a->sum.accumulate ? 4 : type)
                               : 0,
                           a->sum.shard * a->ranks * wire);
}

/* The contributions are only read unless `written`, the first one alone.
 * Bytes: what the network moves, or a sum reads and writes. */
static void submit_reduce(struct iz_engine *e, struct iz_task *t,
                          const starpu_data_handle_t *slot, bool written,
                          struct reduce_arg a)
{
    double shard = (double)a.sum.shard;
    double wire = shard * (double)iz_dtype_bytes(a.sum.wire);
    double type = shard * (double)iz_dtype_bytes(a.sum.out_type);
    a.in = a.slots ? iz_task_add(t, slot[0], written ? STARPU_RW : STARPU_R)
                   : a.out;
    for (int i = 1; i < a.slots; i++)
        iz_task_add(t, slot[i], STARPU_R);
    a.list = iz_task_add(t, iz_touched_list(e, t->unit), STARPU_R);
    a.norm2 = iz_task_add(t, a.squares ? e->unit[t->unit].norm2_handle : NULL,
                          STARPU_W);
    t->bytes = a.coll ? wire * (a.ranks - 1)
                      : wire * a.slots + type * (a.sum.accumulate ? 2 : 1);
    t->squares = a.squares ? shard : 0;
    t->priority_offset += iz_step_in_order(t->unit);
    count_link(e, &a);
    iz_step_submit(e, t, &a, sizeof(a));
}

/* ---- pieces of an accumulator on the host ---- */

/* Of a task that adds: nobody waits for the sum of a single rank, unless its
 * update follows at once and comes first. */
static int sum_priority(const struct iz_engine *e)
{
    return iz_step_updates_early(e) && iz_step_updates_first(e) ? 0 : -3500;
}

/* What is done to piece i, whose first element is `first`. */
struct piece_sum {
    int64_t first, n;
    int inputs;
    bool accumulate, squares;
    enum iz_dtype from, type;
};

/* buf: the piece; what is added to it; sums of its blocks' squares. */
static void run_piece(struct iz_exec *x, void **buf, const void *arg)
{
    const struct piece_sum *a = arg;
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
                         const starpu_data_handle_t *from, struct piece_sum a)
{
    struct iz_unit_memory *g = &e->unit[t.unit];
    double size = (double)iz_dtype_bytes(a.type);
    a.n = iz_plan_piece(&e->plan, g->plan, i);
    iz_task_add(&t, g->grad_handle[acc][i],
                !a.inputs      ? STARPU_R
                : a.accumulate ? STARPU_RW
                               : STARPU_W);
    for (int k = 0; k < a.inputs; k++)
        iz_task_add(&t, from[k], STARPU_R);
    if (a.squares)
        iz_task_add(&t, g->block_sums_handle[i], STARPU_W);
    t.bytes = (double)a.n * size;
    if (a.inputs)
        t.bytes = (double)a.n * ((double)(a.inputs * iz_dtype_bytes(a.from)) +
                                 size * (a.accumulate ? 2 : 1));
    t.squares = a.squares && a.inputs ? (double)a.n : 0;
    iz_step_submit(e, &t, &a, sizeof(a));
}

/* Adds to all pieces, from the buffers of contributions on the host. */
static void add_to_pieces(struct iz_engine *e, int unit, int acc,
                          const starpu_data_handle_t *from, struct piece_sum a)
{
    struct iz_task t = iz_task_of(e, IZ_REDUCE, IZ_ON_HOST, run_piece, unit);
    t.priority_offset = sum_priority(e) + iz_step_in_order(unit);
    for (int i = 0; i < e->unit[unit].plan->pieces; i++) {
        submit_piece(e, t, acc, i, from, a);
        a.first += e->unit[unit].plan->piece;
    }
}

/* As one: the task is given the address of the first, and writes all.  Returns
 * which buffer it is. */
static int add_accumulator(struct iz_task *t, const struct iz_unit_memory *g,
                           int acc, enum starpu_data_access_mode mode)
{
    int first = iz_task_add(t, g->grad_handle[acc][0], mode);
    for (int i = 1; i < g->plan->pieces; i++)
        iz_task_add(t, g->grad_handle[acc][i], mode);
    return first;
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
    a.out = iz_task_add(&t, sum, a.sum.accumulate ? STARPU_RW : STARPU_W);
    a.sum.shard = n;
    a.skip = skip;
    submit_reduce(e, &t, &contribution, false, a);
}

/* From the GPU of a single rank to the host: into the accumulator or, if there
 * is one, a buffer. */
static void take_down(struct iz_engine *e, int unit, int acc,
                      starpu_data_handle_t buffer, starpu_data_handle_t from,
                      int64_t bytes)
{
    struct iz_stretch all = {.bytes = bytes};
    struct iz_move m = {.list = &all, .n = 1};
    struct iz_task t = iz_task_of(e, IZ_OFFLOAD, IZ_ON_D2H, NULL, unit);
    m.from = iz_task_add(&t, from, STARPU_R);
    m.to = buffer ? iz_task_add(&t, buffer, STARPU_W)
                  : add_accumulator(&t, &e->unit[unit], acc, STARPU_W);
    t.priority_offset = iz_step_in_order(unit);
    iz_move(e, &t, m);
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
    int64_t host = iz_plan_host_elems(g->plan);
    bool many = a.coll != NULL, first = !a.sum.accumulate;
    bool straight = !host || iz_plan_straight(&e->plan, first);
    starpu_data_handle_t buffer =
        straight ? NULL : iz_engine_next_staging(e, IZ_STAGING_GRAD)->handle;
    struct reduce_arg down = a;
    if (!straight)
        down.sum.out_type = many ? IZ_F32 : a.sum.wire;
    if (many) {
        struct iz_task t = iz_task_of(e, host ? IZ_OFFLOAD : IZ_REDUCE,
                                      IZ_ON_COMM, run_reduce, unit);
        down.out = buffer ? iz_task_add(&t, buffer, STARPU_W)
                          : add_accumulator(&t, g, acc, STARPU_W);
        down.apart = iz_task_add(&t, g->grad_apart_handle[acc],
                                 first ? STARPU_W : STARPU_RW);
        down.sum.n_apart = apart;
        down.sum.accumulate_apart = !first;
        down.sum.accumulate = false;
        submit_reduce(e, &t, &contribution, true, down);
    } else {
        if (apart)
            add_part(e, unit, g->grad_apart_handle[acc], contribution, host,
                     apart, a);
        if (host)
            take_down(e, unit, acc, buffer, contribution,
                      host * iz_dtype_bytes(a.sum.wire));
    }
    if (!straight)
        add_to_pieces(
            e, unit, acc, &buffer,
            (struct piece_sum){.inputs = 1,
                               .accumulate = !first,
                               .squares = last && g->plan->sums_squares,
                               .from = down.sum.out_type,
                               .type = a.sum.out_type});
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
        if (iz_plan_ring_sum(p, g->plan) && !a.sum.accumulate)
            g->sum_handle[acc] = iz_engine_next_sum(e, unit);
        sum = g->sum_handle[acc];
        add_part(e, unit, sum, contribution, 0, host, a);
        a.sum.wire = a.sum.out_type;
    }
    if (!last || acc || !host) /* the tied use comes first */
        return;
    iz_norm_squares(e, unit, 0, sum, g->sum_handle[1]);
    take_down(e, unit, 0, NULL, sum, host * iz_dtype_bytes(a.sum.wire));
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
    if (iz_plan_ring_sum(p, g->plan) && !a.sum.accumulate)
        *sum = iz_engine_next_sum(e, unit);
    a.coll = NULL;
    a.sum.shard = iz_plan_sent(g->plan);
    a.narrow = last && a.sum.out_type != a.sum.wire;
    a.out = iz_task_add(&t, *sum, a.sum.accumulate ? STARPU_RW : STARPU_W);
    t.priority_offset = last ? 0 : sum_priority(e);
    submit_reduce(e, &t, slot, a.narrow, a);
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
    struct iz_unit_memory *g = &e->unit[unit];
    bool many = a.coll != NULL;
    bool kept = a.sum.accumulate || g->plan->direct || a.whole;
    struct iz_task t =
        iz_task_of(e, IZ_REDUCE, many ? IZ_ON_COMM : IZ_ON_COMPUTE,
                   many ? run_reduce : run_own_sum, unit);
    a.squares = squares;
    a.out = add_accumulator(&t, g, acc, kept ? STARPU_RW : STARPU_W);
    t.priority_offset = many ? 0 : sum_priority(e);
    submit_reduce(e, &t, slot, many, a);
}

/* Where the sum of a unit's contributions is formed. */
enum route {
    BACKWARD, /* which writes the only one into the accumulator */
    ON_GPU,   /* on the GPU of a single rank that offloads its optimizer */
    TO_HOST,  /* on the host, which a GPU sends contributions to, or (by NCCL)
               * the sums of all ranks */
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
        return ON_GPU;
    if (iz_plan_grads_to_host(p) && (!many || p->target.nccl))
        return TO_HOST;
    return !many && g->pieces > 1 ? PIECES : TOGETHER;
}

static struct reduce_arg reduce_arg(struct iz_engine *e, int unit, int slots,
                                    bool accumulate)
{
    const struct iz_plan *p = &e->plan;
    const struct iz_plan_unit *g = e->unit[unit].plan;
    assert(slots <= IZ_SLICES_MAX);
    return (struct reduce_arg){.coll = p->ranks > 1 ? e->coll : NULL,
                               .sum = {.wire = p->param_type,
                                       .shard = iz_step_shard(p, g),
                                       .out_type = p->grad_type,
                                       .out_on_gpu = !iz_plan_grads_to_host(p),
                                       .accumulate = accumulate,
                                       .apart_type = p->grad_type,
                                       .what = iz_step_unit_name(e, unit)},
                               .apart = -1,
                               .slots = g->direct ? 0 : slots,
                               .ranks = p->ranks,
                               .whole = p->zero.grad.whole,
                               .gpu = p->target.gpu,
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
    if (iz_sum_is_local(&p->sum) && route != ON_GPU) {
        if (!add_own(e, unit, acc, last, slot, a))
            return;
        a.slots = slot[0] ? 1 : 0;
        a.sum.accumulate = false;
    }
    a.own = a.whole ? g->plan->shard * p->rank : 0;
    bool squares = last && g->plan->sums_squares;
    if (route == ON_GPU)
        add_on_gpu(e, unit, acc, last, slot[0], a);
    else if (route == TO_HOST)
        offload(e, unit, acc, slot[0], last, a);
    else if (route == PIECES)
        add_to_pieces(e, unit, acc, slot,
                      (struct piece_sum){.inputs = slots,
                                         .accumulate = a.sum.accumulate,
                                         .squares = squares,
                                         .from = a.sum.wire,
                                         .type = a.sum.out_type});
    else if (route == TOGETHER)
        add_together(e, unit, acc, slot, squares, a);
}

/* Of pieces whose last sum has not taken their squares; the tied use's are
 * added first. */
static void square_pieces(struct iz_engine *e, int unit)
{
    const struct iz_unit_memory *g = &e->unit[unit];
    struct iz_task t = iz_task_of(e, IZ_NORM, IZ_ON_HOST, run_piece, unit);
    struct piece_sum a = {.inputs = g->plan->split_accum,
                          .accumulate = true,
                          .squares = true,
                          .from = e->plan.grad_type,
                          .type = e->plan.grad_type};
    for (int i = 0; i < g->plan->pieces; i++)
        submit_piece(e, t, 0, i, &g->grad_handle[1][i], a);
}

void iz_reduce_end(struct iz_engine *e, int unit)
{
    struct iz_unit_memory *g = &e->unit[unit];
    const struct iz_plan *p = &e->plan;
    if (!g->plan->n)
        return;
    assert(g->contributions[0] == g->plan->contributions);
    g->contributions[0] = g->contributions[1] = 0;
    if (iz_plan_grads_apart(p, g->plan))
        iz_norm_squares(e, unit, g->plan->pieces, g->grad_apart_handle[0],
                        g->grad_apart_handle[1]);
    if (!g->plan->sums_squares && !iz_plan_squared(p, g->plan))
        iz_norm_unit(e, unit);
    else if (!g->plan->sums_squares && !p->zero.sums_on_gpu)
        square_pieces(e, unit);
    if (iz_plan_squared(p, g->plan))
        iz_norm_blocks(e, unit);
    if (p->zero.state.whole && p->ranks > 1)
        iz_fetch_gather(e, IZ_REDUCE, unit, g->grad_handle[0][0],
                        iz_dtype_bytes(p->grad_type));
}
