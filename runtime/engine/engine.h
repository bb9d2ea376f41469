/* SPDX-License-Identifier: Apache-2.0 */
/* What a rank holds in a run, shared by the files that submit its tasks; each
 * file's header declares what it does with it. */
#pragma once

#include <math.h>
#include <semaphore.h>

#include "codelets/task/task.h"
#include "codelets/unit/unit.h"
#include "runtime/comm/coll.h"
#include "runtime/config/config.h"
#include "runtime/data/data.h"
#include "runtime/engine/schedule.h"
#include "runtime/model/rules.h"
#include "runtime/plan/plan.h"
#include "runtime/tier/memory.h"
#include "runtime/tier/nvme.h"

/* The optimizer's state and this rank's parameters are updated chunk by chunk.
 */
struct iz_chunk {
    enum iz_home home;                /* of its states */
    enum iz_home param_home;          /* of its parameters */
    int64_t first, count;             /* in the owned elements of the unit */
    int64_t lacks;                    /* see iz_plan_chunk_lacks */
    int64_t state_bytes, param_bytes; /* in a file */
    int64_t param_first;              /* in its parameters in memory */
    char *param;                      /* they there; NULL when on disk */
    float *state;               /* see iz_chunk_states; NULL when on disk */
    int64_t state_at, param_at; /* file offsets, bytes */
    starpu_data_handle_t
        state_handle; /* the state, or a void token of the file */
    starpu_data_handle_t param_handle; /* child of the unit's, or a token */
};

/* One unit's parameters, gradients and states: where they are. */
struct iz_unit_memory {
    const struct iz_plan_unit *plan;
    struct iz_unit_layout layout;
    int64_t *offset;
    struct iz_segment *segment; /* of parameters that are updated alike */
    /* Parameters in memory, full or shard: those that are frozen may have a
     * buffer of their own, and groups of quantised ones have. */
    starpu_data_handle_t param_handle, frozen_handle, quant_handle;
    starpu_data_handle_t secondary_handle; /* of a group's copy; NULL: none */
    int64_t secondary_version; /* 1 + the one that it is of; 0: of none, frozen
                                  or not */
    /* Accumulators, of its own unit and of the tied use: the pieces, which
     * follow one another in memory; and what the GPU has apart, behind them. */
    starpu_data_handle_t grad_handle[2][IZ_PIECES_MAX], grad_apart_handle[2];
    /* Sums of the blocks' squares, on the host, which follow one another too:
     * of each piece, then of what is apart; NULL: none. */
    starpu_data_handle_t block_sums_handle[IZ_PIECES_MAX + 1];
    /* A rank's sums over its micro-batches, for each accumulator: its own
     * buffer, or the one of the ring that it has this time. */
    starpu_data_handle_t sum_handle[2];
    int contributions[2]; /* of this step so far: the first one overwrites */
    starpu_data_handle_t norm2_handle;
    struct iz_chunk *chunk;
    struct iz_chunk *frozen;     /* of the frozen parameters: without states */
    struct iz_chunk *quant;      /* of the words of quantised ones: as those */
    starpu_data_handle_t *child; /* of param_handle: one per chunk */
    int64_t version; /* counts updates, so that a ring slot knows it is stale */
    struct iz_slot *slot; /* it was fetched into last; NULL: none yet */
};

/* Those of a part of the unit. */
struct iz_chunks {
    struct iz_chunk *list;
    int n;
};

static inline struct iz_chunks iz_unit_chunks(const struct iz_unit_memory *g,
                                              enum iz_unit_part part)
{
    switch (part) {
    case IZ_PART_FROZEN:
        return (struct iz_chunks){g->frozen, g->plan->frozen.chunks};
    case IZ_PART_QUANT:
        return (struct iz_chunks){g->quant, g->plan->quant.words.chunks};
    default:
        return (struct iz_chunks){g->chunk, g->plan->chunks};
    }
}

/* A buffer of a ring. */
struct iz_slot {
    starpu_data_handle_t handle;
    int unit;        /* -1: nothing */
    int64_t version; /* of the unit when it was fetched */
    bool waiting;    /* fetched, not used yet */
    int64_t used;    /* the clock after its last use */
};

struct iz_ring {
    struct iz_slot *param, *grad, *sum;
    int next_grad, next_sum;
};

/* Boundaries that live on the host pass through slots of the GPU. */
struct iz_boundaries {
    struct iz_slot *slot; /* their units are contents; see boundary.c */
    int tracks;           /* of the pass under way */
    bool training;
};

/* The order in which the visits of a pass need the units' parameters (a tied
 * unit needs two units'); visit i begins at position item[i]. */
struct iz_uses {
    int *unit, *item;
    int *visit; /* of each position */
    int *after; /* of each position: the next one of the same unit, or n */
    int *first; /* of each unit: position of its first use, or n */
    int *next;  /* of each unit: of its first use not marked yet, or n */
    int n, visits;
};

/* A staging buffer between disk and memory, or host and GPU. */
struct iz_staging {
    void *p;
    starpu_data_handle_t handle;
};

enum iz_side {
    IZ_SIDE_HOST,
    IZ_SIDE_DEVICE,
    IZ_SIDES
}; /* of a GPU: host, device */

/* A buffer that a unit passes through whose matrices are updated as such: fp32
 * of all its trained parameters, on either side or on both.  Its tasks touch
 * parts of it beside each other, so they read its handle, and what one leaves
 * to the next is in tokens: of chunks, what the optimizer writes of each; of
 * matrices. */
struct iz_matrix_buffer {
    starpu_data_handle_t handle[IZ_SIDES], *chunk, *matrix;
    bool gathered; /* a task has waited for all chunks */
};

struct iz_matrix_ring {
    struct iz_matrix_buffer *buffer;
    int next;
    /* Where the unit is whose updates are still to go back and along; NULL:
     * there is none. */
    struct iz_matrix_buffer *held;
    int held_unit;
};

/* Staging buffers of one kind take turns. */
struct iz_staging_ring {
    struct iz_staging *buffer;
    int next;
    /* See iz_access_let_go: what the first buffer holds between tasks, and
     * whether its file does not have it yet. */
    const struct iz_chunk *held;
    bool changed;
};

#define IZ_AUX_NOTHING ((struct iz_aux){.least = HUGE_VAL})
#define IZ_AUX (int)(sizeof(struct iz_aux) / sizeof(double))

/* What each rank gives to `clip` beside the squares of its units and IZ_AUX. */
enum { IZ_CLIP_SCALARS = 6 };

/* Buffers of the micro-batches that are under way together.  Boundaries are
 * those of the host where a GPU has only slots for them. */
struct iz_track {
    void *batch;
    starpu_data_handle_t batch_handle, *boundary_handle, *saved_handle,
        d_handle;
    int64_t *boundary_at; /* of each unit's in the file, if they live there */
    /* weight: of this track's mean loss in the whole one */
    starpu_data_handle_t loss_handle, weight_handle;
    int64_t first;        /* of its samples, as in iz_units_first_sample */
    int samples, counted; /* in an evaluation; whose losses are added */
    struct iz_aux *aux;   /* of its samples; beside the losses */
    starpu_data_handle_t aux_handle; /* NULL: there are none */
    /* Of pairs: boundaries of the reference, which take turns. */
    starpu_data_handle_t reference_handle[2];
};

/* What a step decides for itself, in the task `clip`; read by adam. */
struct iz_control {
    struct iz_loss_scale scale;
    int64_t updates; /* not skipped */
    bool skip;       /* this step changes nothing */
    bool failed;     /* and neither does any later one */
    double lr, grad_scale;
};

/* The order of updates through the disk that follow their gradients; see
 * runtime/step/update_order.c. */
struct iz_update_order {
    _Atomic int64_t updated; /* chunks, in all */
    int64_t due;             /* of these, until the end of this backward */
    int next;                /* what the last step has made of `late` */
    int late; /* of the step under submission: units from 0 on whose updates
                 come after its backward, in order of need */
};

/* Why a run ends early. */
enum iz_failure { IZ_FINE, IZ_LOSS_NOT_FINITE, IZ_SCALE_AT_MINIMUM };

struct iz_event {
    bool eval;                /* loss is that of the validation split */
    int64_t step;             /* 1-based: after this many steps */
    int64_t samples, targets; /* of all ranks; NAN is a loss of no target */
    double loss, grad_norm, lr, loss_scale;
    struct iz_aux aux; /* sums over tasks; the least and the most */
    bool skipped, stop;
    enum iz_failure failure;
    int late;       /* see iz_update_order */
    int64_t sealed; /* step whose files all ranks have written; -1: one cannot
                       write its own, 0: neither */
    int64_t time_ns;
};

/* Samples of all ranks that make a loss: of a step, or without learning. */
struct iz_samples {
    enum iz_split split;
    bool eval;
    int64_t first, n;
};

#define IZ_EVENTS 256 /* more than can be under way */

/* From `clip` to the main thread, which takes them in order. */
struct iz_events {
    struct iz_event at[IZ_EVENTS];
    int64_t taken, due; /* due: submitted */
    _Atomic int64_t put;
    sem_t ready;
    int64_t waited_ns;               /* that the main thread waited for them */
    int64_t submitted_ns[IZ_EVENTS]; /* when a step was, modulo IZ_EVENTS */
    int64_t targets[IZ_EVENTS];      /* that it has, before its `clip` */
    _Atomic int *stop;               /* set by a signal; borrowed */
    _Atomic int64_t sealed;          /* as iz_event.sealed, of this rank */
};

/* Lists of the rows that a step touches of sparse tables: one while the update
 * of the step before still reads the other. */
struct iz_touched_lists {
    struct iz_staging list[2], scratch;
    int now;
};

/* The scalars that tasks hand on, each with its handle. */
struct iz_scalars {
    double *sums; /* of squares of the units, losses of the tracks */
    struct iz_control control;
    starpu_data_handle_t control_handle;
    float loss_scale;
    starpu_data_handle_t scale_handle;
    double loss_sum;
    starpu_data_handle_t loss_handle;
    struct iz_aux aux; /* of all tracks */
    starpu_data_handle_t aux_handle;
    double
        loss_tokens; /* targets of the step that no mask excludes, all ranks */
    starpu_data_handle_t loss_tokens_handle;
    starpu_data_handle_t logits_handle;
    double *gathered; /* scratch of clip */
};

/* Counted at submission: the plan's figures.  Touched rows are counted when
 * they are fetched. */
struct iz_counts {
    _Atomic int64_t fetched_bytes;
    int64_t up_bytes, down_bytes;
    int64_t submit_ns;   /* of CPU time, to submit steps */
    int64_t fetch_clock; /* elements used so far, each time anew */
    int64_t updates;     /* right only where none can be skipped */
};

struct iz_passes {
    struct iz_uses training, forward;
    int marked; /* uses of the pass under way that were counted */
};

/* The nvme tier. */
struct iz_files {
    struct iz_nvme *state, *param, *boundary;
};

/* Of the main thread, for copies to and from a GPU between steps. */
struct iz_bounce {
    void *stream, *buffer;
};

/* All of StarPU's that the engine registered. */
struct iz_handles {
    starpu_data_handle_t *list;
    int n, room;
};

/* Arrays that are freed with the engine. */
struct iz_taken {
    void **list;
    int n, room;
};

struct iz_engine {
    const struct iz_config *config;
    const struct iz_model *model;
    struct iz_coll *coll;
    const struct iz_data *data;
    struct iz_plan plan;
    struct iz_memory *memory;
    struct iz_graph *graph;
    struct iz_handles handles;
    struct iz_taken taken;
    struct iz_bounce bounce;
    struct iz_files file;
    struct iz_unit_memory *unit;
    struct iz_ring *ring;
    struct iz_staging_ring staging[IZ_STAGINGS];
    struct iz_matrix_ring matrices;
    const struct iz_quant_source *quant_from; /* values in place of those of
                                                 quantised groups; or NULL */
    struct iz_touched_lists touched;
    struct iz_track *track;
    char **scratch; /* of the workers that compute units, then of the host's */
    struct iz_boundaries boundaries;
    struct iz_passes uses;
    struct iz_update_order update_order;
    struct iz_scalars scalar;
    struct iz_events events;
    struct iz_counts counts;
    struct iz_trace *trace;
    int64_t step; /* steps submitted */
    bool simulated;
};
