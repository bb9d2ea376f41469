/* SPDX-License-Identifier: Apache-2.0 */
/* ZeRO as submissions: what the files of a step offer each other, one after the
 * other.  The stage has already become data in the plan: what is whole on every
 * rank and what is a shard. */
#pragma once

#include "codelets/buffer/flat_buffer.h"
#include "codelets/flat/touched_rows.h"
#include "runtime/engine/access.h"

/* ---- what all of them use ---- */

/* A task of the step under submission; unit -1: of none. */
static inline struct iz_task
iz_task_of(const struct iz_engine *e, enum iz_kind kind, enum iz_where where,
           void (*run)(struct iz_exec *x, void **buf, const void *arg),
           int unit)
{
    return (struct iz_task){kind, where, run, .unit = unit,
                            .step = (int)e->step};
}

/* Appends an access and returns which buffer it is; -1 for no handle. */
static inline signed char iz_task_add(struct iz_task *t, starpu_data_handle_t h,
                                      enum starpu_data_access_mode mode)
{
    signed char n = 0;
    if (!h)
        return -1;
    while (t->data[n].handle)
        n++;
    t->data[n] = (struct iz_access){h, mode};
    return n;
}

/* Submits with an argument, which is copied. */
static inline void iz_step_submit(struct iz_engine *e, struct iz_task *t,
                                  const void *arg, size_t bytes)
{
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
    return k->first + iz_part_of(e, unit, false).first;
}

/* A rank's part; of a sparse table, which says more in the task itself, at
 * most on average. */
static inline int64_t iz_step_cost_shard(const struct iz_plan *p,
                                         const struct iz_plan_unit *g)
{
    return g->rows ? g->packed / p->ranks : g->shard;
}

static inline const char *iz_step_unit_name(const struct iz_engine *e, int unit)
{
    return e->model->unit[unit].name;
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

/* ---- order.c: the units of a pass in order, and the uses of their parameters
 * ---- */

/* -ENOMEM, nothing printed; close also after an open that failed. */
int iz_order_open(struct iz_engine *e);
void iz_order_close(struct iz_engine *e);
/* Unit of step i of a pass: 0 ... U-1 and, when training, back down. */
int iz_order_unit(const struct iz_engine *e, int i);
/* Where step i of a pass is in the graph: forward of unit u is u, backward is
 * 2U-1-u. */
int iz_order_position(const struct iz_engine *e, int i);

/* ---- units.c: the tasks of a pass over the units ---- */

struct iz_call {
    enum iz_kind kind;
    enum iz_unit_call call;
    int unit, samples;
    starpu_data_handle_t grad, tied_grad; /* backward: what it writes */
    int64_t row;    /* generation: position whose logits are wanted */
    bool reference; /* a forward of the reference of pairs */
};

/* Counts the targets that the mask keeps among `samples` samples of all ranks:
 * those of the next batches. */
void iz_units_count(struct iz_engine *e, enum iz_split split, int64_t first,
                    int64_t samples);
/* `tasks`: batches of all ranks whose mean losses are added to one. */
void iz_units_batch(struct iz_engine *e, struct iz_track *track,
                    enum iz_split split, int64_t first, int64_t tasks);
int64_t iz_units_first_sample(const struct iz_engine *e, int micro, int slice);
void iz_units_call(struct iz_engine *e, const struct iz_call *c,
                   struct iz_track *track);
/* Adds the track's loss to the sum; the order of calls is the order of the sum.
 */
void iz_units_add_loss(struct iz_engine *e, struct iz_track *track);
/* A pass without gradients over the first `tracks` ones; c: what its calls have
 * in common, and the call of the last unit. */
void iz_units_pass(struct iz_engine *e, struct iz_call c, int tracks);

/* ---- boundary.c: where activations between units are ---- */

/* Every pass begins with this: tracks that take part in it. */
void iz_boundary_begin(struct iz_engine *e, int tracks, bool training);
/* The handle that forward of a unit writes its output to. */
starpu_data_handle_t iz_boundary_written(struct iz_engine *e, int unit,
                                         int track);
/* Where the output of a unit is now. */
starpu_data_handle_t iz_boundary_read(struct iz_engine *e, int unit, int track);
/* After backward of a unit was submitted: submits copies of what the next ones
 * read, as far ahead as there are slots. */
void iz_boundary_ahead(struct iz_engine *e, int unit, int track);

/* ---- fetch.c: parameters, and the ring they are fetched into ---- */

/* Submits fetches so that the units of uses[from...] are on their way, as far
 * ahead as the rings allow. */
void iz_fetch_ahead(struct iz_engine *e, const struct iz_uses *u, int from);
/* Buffer that holds the parameters of a unit now. */
starpu_data_handle_t iz_fetch_param(struct iz_engine *e, int unit);
/* All-gather of the parameters that the stage keeps whole; with `frozen` also
 * of the frozen ones, after they were set. */
void iz_fetch_publish(struct iz_engine *e, int unit, bool frozen);

/* In-place all-gather of an array that every rank keeps whole: parameters or
 * gradients, of elem_bytes per element. */
void iz_fetch_gather(struct iz_engine *e, enum iz_kind kind, int unit,
                     starpu_data_handle_t whole, int64_t elem_bytes);

/* ---- disk.c: chunks between files and buffers ---- */

/* Bytes between a file and `at` in a buffer. */
struct iz_io {
    struct iz_nvme *file;
    int64_t offset, bytes, at;
    /* For a sparse table: the chunk's elements, and its arrays.  Only pages
     * with touched rows are read and written. */
    int64_t first, count;
    struct iz_state_bytes array[IZ_STATE_BYTES];
    int urgency; /* of an update; 0: that of the unit */
    int arrays;
};

/* The token stands for the region of the file: a load reads it and a store
 * writes it, so that a load waits for the store before it.  mode: of the
 * buffer. */
void iz_disk_io(struct iz_engine *e, enum iz_kind kind, int unit,
                starpu_data_handle_t buffer, enum starpu_data_access_mode mode,
                starpu_data_handle_t token, struct iz_io a);

/* ---- reduce.c: what becomes of a unit's gradient ---- */

/* Adds the contribution in `slots` (one per slice) to the accumulator; use: 0
 * the unit's own, 1 the tied one.  Leaves slot[0] undefined. */
void iz_reduce(struct iz_engine *e, int unit, int use,
               starpu_data_handle_t *slot, int slots);
/* After the last contribution: the sum of squares where the sums have not left
 * it; in stage 0 also the other ranks' parts of the gradient. */
void iz_step_grad_norm(struct iz_engine *e, int unit);

/* ---- clip.c: loss, gradient norm, clipping, loss scale, learning rate ---- */

void iz_clip_clip(struct iz_engine *e, int64_t step);
void iz_clip_eval(struct iz_engine *e, int64_t step);

/* ---- update.c: the optimizer ---- */

/* Submits the updates of a unit's chunks.  Of a unit with matrices, on several
 * ranks, the end is held until the next such unit's directions are on their
 * way: the comm worker would wait for updates before it moves those. */
void iz_update_unit(struct iz_engine *e, int unit);
/* Submits what is held; before a step ends. */
void iz_update_end(struct iz_engine *e);
bool iz_update_held(const struct iz_engine *e, int unit);

/* ---- matrices.c: updates of whole matrices ---- */

/* Buffer for the directions of a unit's matrices, free by then; NULL: it has
 * none. */
struct iz_matrix_buffer *iz_matrices_begin(struct iz_engine *e, int unit);
/* Where a chunk's directions are written and updates read: by its states. */
enum iz_side iz_matrices_side(const struct iz_engine *e,
                              const struct iz_chunk *k);
/* Whether a chunk has elements of matrices. */
bool iz_matrices_in(const struct iz_engine *e, int unit,
                    const struct iz_chunk *k);
/* Whether it has no others. */
bool iz_matrices_alone(const struct iz_engine *e, int unit,
                       const struct iz_chunk *k);
/* After the directions of all chunks: the owners make updates of them. */
void iz_matrices_update(struct iz_engine *e, int unit,
                        struct iz_matrix_buffer *b);
/* The updates go to the ranks that have the chunks. */
void iz_matrices_back(struct iz_engine *e, int unit,
                      struct iz_matrix_buffer *b);
/* Adds to t that it reads the updates of a chunk; `more` has room for so many
 * accesses as the unit has matrices. */
void iz_matrices_add(struct iz_engine *e, int unit, const struct iz_chunk *k,
                     const struct iz_matrix_buffer *b, struct iz_task *t,
                     struct iz_access *more);

/* ---- update_order.c: the order of updates through the disk ---- */

/* Call before a step is submitted. */
void iz_update_order_begin(struct iz_engine *e);
/* Call after the last gradient of a step has come: chooses the order for the
 * following steps. */
void iz_update_order_end(struct iz_engine *e);

/* ---- touched.c: rows of sparse tables ---- */

/* Only the rows that a step touches are moved, of parameters and of gradients.
 * Every rank reads the samples of all ranks, so that all know the same rows and
 * nobody has to be asked. */

/* Samples of all ranks: n of them from first, first + stride, ... on. */
struct iz_touched_samples {
    enum iz_split split;
    int times;
    int64_t first, n, stride;
};
/* From here on these samples are trained with or evaluated: submits the task
 * that lists the rows which they touch. */
void iz_touched_begin(struct iz_engine *e, struct iz_touched_samples s);
/* The list of the rows that the step under way touches; NULL: the unit is
 * dense. */
starpu_data_handle_t iz_touched_list(const struct iz_engine *e, int unit);

/* What a task must know to find a unit's rows in the list; cols = 0: the unit
 * is dense. */
struct iz_touched_in {
    int units, unit, rank, ranks;
    int64_t cols, shard;
};
struct iz_touched_in iz_touched_in(const struct iz_engine *e, int unit);
struct iz_touched iz_touched_get(const struct iz_touched_in *a,
                                 const void *list);
/* Where a rank's shard begins, packed. */
int64_t iz_touched_first(const struct iz_touched_in *a,
                         const struct iz_touched *r, int rank);
/* Fills c->first for the next collective of unequal parts: where each rank's
 * shard starts, in elements of `elem_bytes` each. */
void iz_touched_parts(const struct iz_touched_in *a, const struct iz_touched *r,
                      struct iz_coll *c, int64_t elem_bytes);

/* The counterparts of iz_fetch_gather and iz_fetch_publish for sparse tables:
 * of parameters from a shard into a slot, or of accumulators in place (shard
 * NULL), and of parameters that are whole. */
void iz_touched_gather(struct iz_engine *e, enum iz_kind kind, int unit,
                       starpu_data_handle_t whole, starpu_data_handle_t shard,
                       int64_t elem_bytes);
void iz_touched_publish(struct iz_engine *e, int unit);
