/* SPDX-License-Identifier: Apache-2.0 */
/* How a task of a step is put together and submitted, and what decides where in
 * a queue it stands. */
#pragma once

#include "runtime/engine/access.h"

/* A task of the step under submission; unit -1: of none. */
static inline struct iz_task
iz_task_of(const struct iz_engine *e, enum iz_kind kind, enum iz_where where,
           void (*run)(struct iz_exec *x, void **buf, const void *arg),
           int unit)
{
    return (struct iz_task){kind, where, run, .unit = unit,
                            .step = (int)e->step};
}

/* What moves between host and GPU is counted here: all that a task of these
 * movers moves, and what a collective of GPUs takes through the host. */
static inline void iz_step_count_link(struct iz_engine *e, int64_t h2d,
                                      int64_t d2h)
{
    e->counts.up_bytes += h2d;
    e->counts.down_bytes += d2h;
}

/* Submits with an argument, which is copied. */
static inline void iz_step_submit(struct iz_engine *e, struct iz_task *t,
                                  const void *arg, size_t bytes)
{
    iz_step_count_link(e, t->where == IZ_ON_H2D ? (int64_t)t->bytes : 0,
                       t->where == IZ_ON_D2H ? (int64_t)t->bytes : 0);
    t->arg = arg;
    t->arg_bytes = bytes;
    iz_task_submit(e->graph, t);
}

static inline int64_t iz_step_param_bytes(const struct iz_engine *e, int64_t n)
{
    return n * iz_dtype_bytes(e->plan.param_type);
}

/* A chunk's first element in its unit. */
static inline int64_t iz_chunk_first(const struct iz_engine *e, int unit,
                                     const struct iz_chunk *k)
{
    return k->first + iz_owned_of(e, unit, IZ_PART_TRAINED).first;
}

/* A rank's shard; of a sparse table, which says more in the task itself, at
 * most on average. */
static inline int64_t iz_step_shard(const struct iz_plan *p,
                                    const struct iz_plan_unit *g)
{
    return g->rows ? g->packed / p->ranks : g->shard;
}

static inline const char *iz_step_unit_name(const struct iz_engine *e, int unit)
{
    return e->model->unit[unit].name;
}

/* Unit of visit i of a pass: 0 ... U-1 and, when training, back down. */
static inline int iz_step_pass_unit(const struct iz_engine *e, int i)
{
    int units = e->model->n_units;
    return i < units ? i : 2 * units - 2 - i;
}

/* Where visit i of a pass is in the graph: forward of unit u is u, backward is
 * 2U-1-u. */
static inline int iz_step_pass_position(const struct iz_engine *e, int i)
{
    return i + (i + 1 >= e->model->n_units);
}

/* Puts the units which are needed first in front, by less than the distance
 * between the priorities of kinds. */
static inline int iz_step_in_order(int unit)
{
    enum { LAST = 900 };
    return unit < LAST ? -unit : -LAST;
}

/* Whether updates are submitted right after their gradients. */
static inline bool iz_step_updates_early(const struct iz_engine *e)
{
    return e->plan.zero.early && e->config->run.overlap;
}

/* Whether updates go through the disk. */
static inline bool iz_step_on_disk(const struct iz_engine *e)
{
    return e->plan.zero.state.home == IZ_HOME_NVME ||
           e->plan.zero.param.home == IZ_HOME_NVME;
}

/* Whether updates go before forward and backward, so that the disk is not idle
 * while a loaded chunk waits for a core.  Where there are more cores than
 * tracks an idle one takes them, and the pass stays in the caches of its own;
 * on a GPU it needs no core. */
static inline bool iz_step_updates_first(const struct iz_engine *e)
{
    return iz_step_on_disk(e) && !e->plan.target.gpu &&
           e->plan.tracks >= e->plan.target.workers;
}

/* Updates through the disk share a few staging buffers in turns, so they go in
 * the order of submission, whatever their unit; what forward and backward wait
 * for is read before. */
#define IZ_BY_SUBMISSION (-950)
