/* SPDX-License-Identifier: Apache-2.0 */
/* Updates of whole matrices, between the two passes over their chunks: the
 * directions come to their owners, which make updates of them, and those go
 * back; see matrices.h.  Where units are computed on a GPU, each chunk's part
 * of a unit's buffer is on the side of the chunk's states, then all is on the
 * side of the products and, for the exchange, on the host: what these are not
 * equal in is copied. */
#include "runtime/step/matrices.h"

#include <stdlib.h>

#include "codelets/base/int64.h"
#include "codelets/base/take.h"
#include "runtime/engine/alloc.h"
#include "runtime/plan/matrices.h"
#include "runtime/step/move.h"
#include "runtime/step/submit.h"

static const struct iz_plan_matrix *matrices_of(const struct iz_engine *e,
                                                int unit)
{
    return e->plan.matrices.list + e->unit[unit].plan->matrix;
}

/* Whether every rank has all chunks: nothing has to come to the owners. */
static bool all_here(const struct iz_engine *e)
{
    return e->plan.ranks == 1 || e->plan.zero.state.whole;
}

static const struct iz_plan_stack *stacks_of(const struct iz_engine *e,
                                             int unit)
{
    return e->plan.matrices.stack + e->unit[unit].plan->stack;
}

/* How many elements of a stack a chunk has. */
static int64_t shared(const struct iz_engine *e, int unit,
                      const struct iz_chunk *k, int stack)
{
    const struct iz_plan_stack *a = &e->plan.matrices.stack[stack];
    int64_t first = iz_chunk_first(e, unit, k);
    return max64(min64(a->end, first + k->count) - max64(a->begin, first), 0);
}

int64_t iz_matrices_elems(const struct iz_engine *e, int unit,
                          const struct iz_chunk *k)
{
    const struct iz_plan_unit *p = e->unit[unit].plan;
    int64_t n = 0;
    for (int i = 0; i < p->stacks; i++)
        n += shared(e, unit, k, p->stack + i);
    return n;
}

enum iz_side iz_matrices_side(const struct iz_engine *e,
                              const struct iz_chunk *k)
{
    return e->plan.target.gpu && k->home == IZ_HOME_NONE ? IZ_SIDE_DEVICE
                                                         : IZ_SIDE_HOST;
}

static enum iz_side side_of_products(const struct iz_engine *e)
{
    return e->plan.matrices.on_gpu ? IZ_SIDE_DEVICE : IZ_SIDE_HOST;
}

static enum iz_side other_side(enum iz_side s)
{
    return s == IZ_SIDE_DEVICE ? IZ_SIDE_HOST : IZ_SIDE_DEVICE;
}

static void run_nothing(struct iz_exec *x, void **buf, const void *arg)
{
}

struct iz_matrix_buffer *iz_matrices_begin(struct iz_engine *e, int unit)
{
    struct iz_matrix_buffer *b;
    if (!e->unit[unit].plan->matrices)
        return NULL;
    b = iz_engine_next_matrices(e);
    struct iz_task t = iz_task_of(e, IZ_MUON, IZ_ON_HOST, run_nothing, unit);
    for (int s = 0; s < IZ_SIDES; s++)
        if (b->handle[s])
            iz_task_add(&t, b->handle[s], STARPU_W);
    iz_task_submit(e->graph, &t);
    b->gathered = false;
    return b;
}

/* ---- what a task waits for ---- */

/* The task reads what all chunks have left, if no task before has, and writes
 * all of the unit's matrices. */
static void add_all(const struct iz_plan_unit *p, struct iz_matrix_buffer *b,
                    struct iz_task *t)
{
    for (int i = 0; i < p->chunks && !b->gathered; i++)
        iz_task_add(t, b->chunk[i], STARPU_R);
    for (int i = 0; i < p->matrices; i++)
        iz_task_add(t, b->matrix[i], STARPU_RW);
    b->gathered = true;
}

/* ---- between host and GPU ---- */

/* Elements of the unit whose states this rank has on a side: chunks of the host
 * come before those of the GPU. */
static void range_of_side(const struct iz_engine *e, int unit,
                          enum iz_side side, int64_t *begin, int64_t *end)
{
    const struct iz_unit_memory *g = &e->unit[unit];
    for (int i = 0; i < g->plan->chunks; i++) {
        int64_t first = iz_chunk_first(e, unit, &g->chunk[i]);
        if (iz_matrices_side(e, &g->chunk[i]) != side)
            continue;
        if (*end == 0)
            *begin = first;
        *end = first + g->chunk[i].count;
    }
}

/* Copies from the other side: what has its states on the side `states`,
 * IZ_SIDES: anywhere on any rank; owned: only what this rank owns. */
static void copy_across(struct iz_engine *e, int unit,
                        struct iz_matrix_buffer *b, enum iz_side to,
                        enum iz_side states, bool owned)
{
    const struct iz_plan_unit *p = e->unit[unit].plan;
    const struct iz_plan_stack *a = stacks_of(e, unit);
    struct iz_stretch *list =
        iz_take(p->stacks, sizeof(*list), "the matrices of a unit");
    struct iz_move m = {.list = list};
    struct iz_task t = iz_task_of(
        e, IZ_MUON, to == IZ_SIDE_DEVICE ? IZ_ON_H2D : IZ_ON_D2H, NULL, unit);
    int64_t from = 0, end = states == IZ_SIDES ? p->padded : 0;
    if (states != IZ_SIDES)
        range_of_side(e, unit, states, &from, &end);
    for (int i = 0; i < p->stacks; i++) {
        int64_t at = max64(a[i].begin, from) * (int64_t)sizeof(float);
        int64_t n = min64(a[i].end, end) * (int64_t)sizeof(float) - at;
        if (n > 0 && (!owned || a[i].owner == e->plan.rank))
            list[m.n++] = (struct iz_stretch){at, at, n};
    }
    if (m.n) {
        t.priority_offset = iz_step_in_order(unit);
        m.from = iz_task_add(&t, b->handle[other_side(to)], STARPU_R);
        m.to = iz_task_add(&t, b->handle[to], STARPU_R);
        add_all(p, b, &t);
        iz_move(e, &t, m);
    }
    free(list);
}

/* ---- to the owners and back ---- */

struct exchange_arg {
    struct iz_coll *coll;
    const struct iz_plan_stack *stack;
    int stacks;
    int64_t shard_bytes; /* 0: every rank has all chunks */
    bool back;
    const char *unit;
};

/* buf: the unit's buffer. */
static void run_exchange(struct iz_exec *x, void **buf, const void *arg)
{
    const struct exchange_arg *a = arg;
    struct iz_coll_range *range =
        iz_take(a->stacks, sizeof(*range), "the matrices of %s", a->unit);
    const int64_t size = sizeof(float);
    for (int i = 0; i < a->stacks; i++)
        range[i] =
            (struct iz_coll_range){a->stack[i].begin * size,
                                   a->stack[i].end * size, a->stack[i].owner};
    iz_coll_exchange(a->coll, buf[0], a->shard_bytes, range, a->stacks, a->back,
                     a->unit);
    free(range);
}

/* What crosses the network for a rank: of all ranges what is in its shard but
 * not its own, at most. */
static double crossing_bytes(const struct iz_engine *e, int unit)
{
    const struct iz_plan_stack *a = stacks_of(e, unit);
    double sum = 0;
    for (int i = 0; i < e->unit[unit].plan->stacks; i++)
        sum += (double)(a[i].end - a[i].begin);
    return sum * sizeof(float) / (e->plan.zero.state.whole ? 1 : e->plan.ranks);
}

static void submit_exchange(struct iz_engine *e, int unit,
                            struct iz_matrix_buffer *b, bool back)
{
    const struct iz_plan_unit *p = e->unit[unit].plan;
    struct exchange_arg a = {
        .coll = e->coll,
        .stack = stacks_of(e, unit),
        .stacks = p->stacks,
        .shard_bytes =
            e->plan.zero.state.whole ? 0 : p->shard * (int64_t)sizeof(float),
        .back = back,
        .unit = iz_step_unit_name(e, unit)};
    struct iz_task t = iz_task_of(e, IZ_MUON, IZ_ON_COMM, run_exchange, unit);
    t.bytes = crossing_bytes(e, unit);
    iz_task_add(&t, b->handle[IZ_SIDE_HOST], STARPU_R);
    /* Nothing may be written over what comes back. */
    add_all(p, b, &t);
    iz_step_submit(e, &t, &a, sizeof(a));
}

/* ---- the updates ---- */

struct matrix_arg {
    struct iz_plan_matrix matrix;
    const struct iz_plan *plan;
    bool early; /* no step is skipped; the control is not read */
};

/* buf: the unit's buffer, the matrix, control. */
static void run_matrix(struct iz_exec *x, void **buf, const void *arg)
{
    const struct matrix_arg *a = arg;
    struct iz_orthogonal m = iz_plan_orthogonal(a->plan, &a->matrix, buf[0]);
    if (a->early || !((const struct iz_control *)buf[2])->skip)
        iz_orthogonal(x, &m);
}

/* Of chunks that have some of it, or of what has come with the others. */
static void submit_matrix(struct iz_engine *e, int unit,
                          struct iz_matrix_buffer *b, int i)
{
    const struct iz_unit_memory *g = &e->unit[unit];
    struct matrix_arg a = {.matrix = matrices_of(e, unit)[i],
                           .plan = &e->plan,
                           .early = e->plan.zero.early};
    struct iz_task t = iz_task_of(
        e, IZ_MUON, e->plan.matrices.on_gpu ? IZ_ON_COMPUTE : IZ_ON_HOST,
        run_matrix, unit);
    t.flops = a.matrix.flops;
    t.bytes = a.matrix.bytes;
    t.priority_offset = iz_step_in_order(unit);
    iz_task_add(&t, b->handle[side_of_products(e)], STARPU_R);
    iz_task_add(&t, b->matrix[i], b->gathered ? STARPU_RW : STARPU_W);
    if (!a.early)
        iz_task_add(&t, e->scalar.control_handle, STARPU_R);
    for (int k = 0; k < g->plan->chunks && !b->gathered; k++)
        if (shared(e, unit, &g->chunk[k], a.matrix.stack))
            iz_task_add(&t, b->chunk[k], STARPU_R);
    iz_step_submit(e, &t, &a, sizeof(a));
}

void iz_matrices_update(struct iz_engine *e, int unit,
                        struct iz_matrix_buffer *b)
{
    const struct iz_plan_matrix *a = matrices_of(e, unit);
    enum iz_side side = side_of_products(e);
    if (all_here(e)) {
        copy_across(e, unit, b, side, other_side(side), true);
    } else {
        copy_across(e, unit, b, IZ_SIDE_HOST, IZ_SIDE_DEVICE, false);
        submit_exchange(e, unit, b, false);
        if (side == IZ_SIDE_DEVICE)
            copy_across(e, unit, b, side, IZ_SIDES, true);
    }
    for (int i = 0; i < e->unit[unit].plan->matrices; i++)
        if (e->plan.matrices.stack[a[i].stack].owner == e->plan.rank)
            submit_matrix(e, unit, b, i);
    if (e->plan.ranks > 1 && side == IZ_SIDE_DEVICE)
        copy_across(e, unit, b, IZ_SIDE_HOST, IZ_SIDES, true);
}

void iz_matrices_back(struct iz_engine *e, int unit, struct iz_matrix_buffer *b)
{
    enum iz_side from = e->plan.ranks > 1 ? IZ_SIDE_HOST : side_of_products(e);
    if (e->plan.ranks > 1)
        submit_exchange(e, unit, b, true);
    copy_across(e, unit, b, other_side(from), other_side(from), false);
}

void iz_matrices_add(struct iz_engine *e, int unit, const struct iz_chunk *k,
                     const struct iz_matrix_buffer *b, struct iz_task *t)
{
    const struct iz_plan_matrix *a = matrices_of(e, unit);
    for (int i = 0; i < e->unit[unit].plan->matrices; i++)
        if (shared(e, unit, k, a[i].stack))
            iz_task_add(t, b->matrix[i], STARPU_R);
}
