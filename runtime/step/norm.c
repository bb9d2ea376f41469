/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/step/norm.h"

#include "codelets/buffer/flat_buffer.h"
#include "codelets/flat/flat.h"
#include "runtime/plan/unit_sizes.h"
#include "runtime/step/submit.h"
#include "runtime/step/touched.h"

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

void iz_norm_squares(struct iz_engine *e, int unit, int i,
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
    t.priority_offset = iz_step_in_order(unit) + 3500;
    t.rate = IZ_RATE_SQUARES;
    t.bytes = pass_bytes(a.n, &a, true);
    iz_step_submit(e, &t, &a, sizeof(a));
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

void iz_norm_unit(struct iz_engine *e, int unit)
{
    const struct iz_plan *p = &e->plan;
    struct iz_unit_memory *g = &e->unit[unit];
    int64_t n = iz_step_shard(p, g->plan);
    struct norm_arg a = {.n = g->plan->shard,
                         .type = p->grad_type,
                         .add = g->plan->split_accum,
                         .whole = p->zero.grad.whole,
                         .rows = iz_touched_in(e, unit)};
    struct iz_task t = iz_task_of(e, IZ_NORM, IZ_ON_COMPUTE, run_norm, unit);
    if (p->zero.grad.whole)
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

void iz_norm_blocks(struct iz_engine *e, int unit)
{
    struct iz_unit_memory *g = &e->unit[unit];
    int64_t blocks = iz_norm2_blocks(iz_plan_squared(&e->plan, g->plan));
    struct iz_task t = iz_task_of(e, IZ_NORM, IZ_ON_HOST, run_blocks, unit);
    iz_task_add(&t, g->norm2_handle, STARPU_W);
    for (int i = 0; i <= g->plan->pieces; i++)
        iz_task_add(&t, g->block_sums_handle[i], STARPU_R);
    t.bytes = (double)blocks * sizeof(double);
    iz_step_submit(e, &t, &blocks, sizeof(blocks));
}
