/* SPDX-License-Identifier: Apache-2.0 */
/* The sum of the squares of a unit's gradient where the sums of reduce.c
 * have not left it, and of what the GPU keeps of it.  See zero.h. */
#include "runtime/step/norm.h"

#include <assert.h>

#include "codelets/flat/flat.h"
#include "runtime/step/fetch.h"
#include "runtime/step/rows_list.h"
#include "runtime/step/zero.h"

/* Bytes of a pass over n elements; added: with the tied use's accumulator
 * first, which on a GPU is a pass before it. */
static double pass_bytes(int64_t n, enum iz_dtype type, bool added, bool gpu)
{
    int times = !added ? 1 : gpu ? 4 : 3;

    return (double)(n * iz_dtype_bytes(type)) * times;
}

/* ---- on the GPU ---- */

struct squares_arg {
    int64_t n;
    enum iz_dtype type;
    bool add; /* the tied use's accumulator comes on top */
};

/* buf: accumulator on the GPU, sums of its blocks, tied accumulator. */
static void run_squares(struct iz_exec *x, void **buf, const void *arg)
{
    const struct squares_arg *a = arg;
    const void *tied = a->add ? buf[2] : NULL;
    if (a->add)
        iz_buffer_sum(x, buf[0], a->type, true, &tied, 1, a->type, a->n);
    iz_buffer_squares(x, buf[1], buf[0], a->type, a->n);
}

/* The squares of what the GPU keeps, block by block: the host adds them, in the
 * step's last sum, which holds a staging buffer while it waits. */
void iz_norm_squares(struct iz_engine *e, int group)
{
    struct iz_group *g = &e->group[group];
    struct squares_arg a = {.n = iz_plan_grads_apart(&e->plan, g->plan),
                            .type = e->plan.grad_type,
                            .add = g->plan->split_accum};
    iz_submit(
        e->graph,
        &(struct iz_task){
            .kind = IZ_NORM,
            .where = IZ_ON_COMPUTE,
            .run = run_squares,
            .arg = &a,
            .arg_bytes = sizeof(a),
            .data = {{g->grad_apart_handle[0], a.add ? STARPU_RW : STARPU_R},
                     {g->block_sums_handle, STARPU_W},
                     {a.add ? g->grad_apart_handle[1] : NULL, STARPU_R}},
            .urgency = iz_in_order(group) + 3500,
            .bytes = pass_bytes(a.n, a.type, a.add, true),
            .unit = group,
            .step = (int)e->step});
}

/* ---- of the whole ---- */

struct norm_arg {
    int64_t n, own, blocks; /* blocks: that the GPU has besides */
    enum iz_dtype type;
    bool add; /* the tied use's accumulator comes on top */
    bool whole;
    struct iz_touched_in rows;
};

/* This rank's part of the touched rows. */
static void norm_rows(struct norm_arg *a, const void *list)
{
    struct iz_touched r = iz_touched_get(&a->rows, list);
    int64_t first = iz_touched_first(&a->rows, &r, a->rows.rank);
    a->n = iz_touched_first(&a->rows, &r, a->rows.rank + 1) - first;
    a->own = a->whole ? first : 0;
}

/* buf: accumulator, sum of squares (double), tied accumulator or list of
 * touched rows.  Where no sum has left the squares. */
static void run_norm(struct iz_exec *x, void **buf, const void *arg)
{
    struct norm_arg part = *(const struct norm_arg *)arg, *a = &part;
    if (a->rows.cols)
        norm_rows(a, buf[2]);
    int64_t at = a->own * iz_dtype_bytes(a->type);
    char *acc = (char *)buf[0] + at;
    const void *tied = a->add ? (char *)buf[2] + at : NULL;
    if (a->add)
        iz_buffer_sum_norm2(x, buf[1], acc, a->type, true, &tied, 1, a->type,
                            a->n);
    else
        iz_buffer_norm2(x, buf[1], acc, a->type, a->n);
}

/* The host's part of a gradient of which the GPU keeps another.  buf: sum of
 * squares, sums of blocks, accumulator if there is one, tied accumulator. */
static void run_norm_apart(struct iz_exec *x, void **buf, const void *arg)
{
    const struct norm_arg *a = arg;
    const void *tied = a->add ? buf[3] : NULL;
    struct iz_norm2 s = {0};
    if (a->n && a->add)
        iz_flat_sum_norm2(&s, buf[2], a->type, true, &tied, 1, a->type, a->n);
    else if (a->n)
        iz_norm2_add(&s, buf[2], a->type, a->n);
    iz_norm2_add_blocks(&s, buf[1], a->blocks);
    *(double *)buf[0] = iz_norm2_end(&s);
}

static void submit_norm_apart(struct iz_engine *e, int group)
{
    struct iz_group *g = &e->group[group];
    int64_t apart = iz_plan_grads_apart(&e->plan, g->plan);
    struct norm_arg a = {.n = iz_plan_host_elems(g->plan),
                         .blocks = iz_norm_blocks(apart),
                         .type = e->plan.grad_type};
    a.add = a.n && g->plan->split_accum;
    iz_norm_squares(e, group);
    iz_submit(e->graph,
              &(struct iz_task){
                  .kind = IZ_NORM,
                  .where = IZ_ON_HOST,
                  .run = run_norm_apart,
                  .arg = &a,
                  .arg_bytes = sizeof(a),
                  .data = {{g->norm2_handle, STARPU_W},
                           {g->block_sums_handle, STARPU_R},
                           {g->grad_handle[0], a.add ? STARPU_RW : STARPU_R},
                           {a.add ? g->grad_handle[1] : NULL, STARPU_R}},
                  .bytes = pass_bytes(a.n, a.type, a.add, false),
                  .squares = a.add ? (double)a.n : 0,
                  .unit = group,
                  .step = (int)e->step});
}

static void submit_norm(struct iz_engine *e, int group)
{
    struct iz_group *g = &e->group[group];
    bool gpu = e->plan.target.gpu && !e->plan.zero.grads_down;
    int64_t n = iz_cost_shard(&e->plan, g->plan);
    struct norm_arg a = {
        .n = g->plan->shard,
        .own = e->plan.zero.grads_full ? g->plan->shard * e->plan.rank : 0,
        .type = e->plan.grad_type,
        .add = g->plan->split_accum,
        .whole = e->plan.zero.grads_full,
        .rows = iz_touched_in(e, group)};
    iz_submit(
        e->graph,
        &(struct iz_task){
            .kind = IZ_NORM,
            .where = e->plan.zero.grads_down ? IZ_ON_HOST : IZ_ON_COMPUTE,
            .run = run_norm,
            .arg = &a,
            .arg_bytes = sizeof(a),
            .data = {{g->grad_handle[0], a.add ? STARPU_RW : STARPU_R},
                     {g->norm2_handle, STARPU_W},
                     {a.add ? g->grad_handle[1] : iz_touched_list(e, group),
                      STARPU_R}},
            .bytes = pass_bytes(n, a.type, a.add, gpu),
            .squares = a.add && !gpu ? (double)n : 0,
            .unit = group,
            .step = (int)e->step});
}

void iz_grad_norm(struct iz_engine *e, int group)
{
    struct iz_group *g = &e->group[group];
    if (!g->plan->n)
        return;
    assert(g->contributions[0] == g->plan->contributions);
    g->contributions[0] = g->contributions[1] = 0;
    if (!g->plan->sums_squares)
        (iz_plan_grads_apart(&e->plan, g->plan) ? submit_norm_apart
                                                : submit_norm)(e, group);
    if (e->plan.zero.states_full && e->plan.ranks > 1)
        iz_fetch_gather(e, IZ_REDUCE, group, g->grad_handle[0],
                        iz_dtype_bytes(e->plan.grad_type));
}
