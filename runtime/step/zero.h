/* SPDX-License-Identifier: Apache-2.0 */
/* ZeRO as submissions: which task brings a unit's parameters (fetch.c),
 * takes its gradient (reduce.c, norm.c) and updates it
 * (update.c); what is different where only some rows are moved
 * (rows.c).  The stage has already become data in the plan: what is whole
 * on every rank and what is a shard.  Here is what these files share. */
#ifndef IZ_RUNTIME_STEP_ZERO_H
#define IZ_RUNTIME_STEP_ZERO_H

#include "codelets/flat/touched_rows.h"
#include "codelets/gpu/flat_buffer.h"
#include "runtime/engine/engine.h"

static inline int64_t iz_param_bytes(const struct iz_engine *e, int64_t n)
{
    return n * iz_dtype_bytes(e->plan.param_type);
}

/* A chunk's first element in its group. */
static inline int64_t iz_chunk_first(const struct iz_engine *e, int group,
                                     const struct iz_chunk *k)
{
    return k->first + (e->plan.states_full
                           ? 0
                           : e->group[group].plan->shard * e->plan.rank);
}

/* A rank's part; of a sparse table, which says more in the task itself, at
 * most on average. */
static inline int64_t iz_cost_shard(const struct iz_plan *p,
                                    const struct iz_plan_group *g)
{
    return g->rows ? g->packed / p->ranks : g->shard;
}

static inline const char *iz_unit_name(const struct iz_engine *e, int group)
{
    return e->model->unit[group].name;
}

/* Puts the units which are needed first in front, by less than the distance
 * between the priorities of kinds. */
static inline int iz_in_order(int group)
{
    enum { LAST = 900 };
    return group < LAST ? -group : -LAST;
}

/* Whether updates go through the disk. */
static inline bool iz_on_disk(const struct iz_engine *e)
{
    return e->plan.state_home == IZ_HOME_NVME ||
           e->plan.param_home == IZ_HOME_NVME;
}

/* Whether updates go before forward and backward, so that the disk is not idle
 * while a loaded chunk waits for a core.  Where there are more cores than lanes
 * an idle one takes them, and the pass stays in the caches of its own; on a GPU
 * it needs no core. */
static inline bool iz_updates_first(const struct iz_engine *e)
{
    return iz_on_disk(e) && !e->plan.target.gpu &&
           e->plan.lanes >= e->plan.target.workers;
}

/* Updates through the disk share a few staging buffers in turns, so they go in
 * the order of submission, whatever their unit; what forward and backward wait
 * for is read before. */
#define IZ_IN_TURNS (-950)

/* Bytes between a file and `at` in a buffer. */
struct iz_io {
    struct iz_nvme *file;
    int64_t offset, bytes, at;
    /* Of a sparse table: the chunk's elements, and its arrays.  Only pages with
     * touched rows are read and written. */
    int64_t first, count;
    struct iz_state_bytes array[IZ_STATE_BYTES];
    int urgency; /* of an update; 0: that of the unit */
    int arrays;
};

/* The token stands for the region of the file: a load reads it and a store
 * writes it, so that a load waits for the store before it.  mode: of the
 * buffer. */
void iz_zero_io(struct iz_engine *e, enum iz_kind kind, int group,
                starpu_data_handle_t buffer, enum starpu_data_access_mode mode,
                starpu_data_handle_t token, struct iz_io a);

/* The next of n staging buffers that take turns. */
struct iz_stage *iz_zero_stage(struct iz_stage *all, int *next, int n);

/* All-gather in place of what a rank keeps whole: parameters or gradients, of
 * elem_bytes each. */
void iz_zero_gather(struct iz_engine *e, enum iz_kind kind, int group,
                    starpu_data_handle_t whole, int64_t elem_bytes);

/* ---- sparse tables: rows.c ---- */

/* What a task must know to find a group's rows in the list; cols = 0: the group
 * is dense. */
struct iz_rows_in {
    int units, unit, rank, ranks;
    int64_t cols, shard;
};
struct iz_rows_in iz_rows_in(const struct iz_engine *e, int group);
struct iz_rows iz_rows_get(const struct iz_rows_in *a, const void *list);
/* Where a rank's shard begins, packed. */
int64_t iz_rows_first(const struct iz_rows_in *a, const struct iz_rows *r,
                      int rank);
/* Says where all ranks' shards begin to the next collective of unequal parts,
 * in elements of `unit` each. */
void iz_rows_parts(const struct iz_rows_in *a, const struct iz_rows *r,
                   struct iz_coll *c, int64_t unit);

/* The same as for dense groups: parameters from a shard into a slot, what is
 * kept whole of accumulators and of parameters. */
void iz_rows_fetch(struct iz_engine *e, int group, starpu_data_handle_t shard,
                   starpu_data_handle_t slot);
void iz_rows_gather(struct iz_engine *e, enum iz_kind kind, int group,
                    starpu_data_handle_t whole, int64_t elem_bytes);
void iz_rows_publish(struct iz_engine *e, int group);

/* Submits the squares of what the GPU keeps of a gradient, once it is whole. */
void iz_zero_squares(struct iz_engine *e, int group);

#endif
