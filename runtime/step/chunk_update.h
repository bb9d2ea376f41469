/* SPDX-License-Identifier: Apache-2.0 */
/* What a task of the optimizer does to a chunk, on its worker: the body of the
 * tasks that update.c submits. */
#pragma once

#include "runtime/step/touched.h"

/* Which of a body's buffers has what. */
struct iz_chunk_buffers {
    /* 0 is the gradient or, in the last pass over matrices, their updates; 1
     * the states, masters first. */
    signed char param, control;
    signed char rows;   /* lists the touched rows; 0: dense */
    signed char matrix; /* of the unit whose matrices are updated as such; 0:
                           there are none in the chunk */
};

struct iz_chunk_update {
    struct iz_hyper_at step; /* lr, t and grad_scale come from the control,
                                decay from the segments */
    int64_t n, grad_first;
    const struct iz_plan *plan;
    const struct iz_plan_unit *unit;
    const struct iz_segment *segment; /* of the unit */
    int64_t first;                    /* element of the unit */
    enum iz_dtype grad_type, param_type;
    bool early; /* the scalars are those above; the control is not read */
    struct iz_state_layout states;
    uint64_t key; /* of their rounding: seed and unit */
    struct iz_chunk_buffers in;
    int64_t param_at; /* byte of its buffer at which the parameters begin */
    struct iz_touched_in rows;
    bool along;       /* their updates: the last pass over matrices */
    bool whole_grads; /* those of all ranks' touched rows */
    bool still; /* masters and parameters stay as they are, and may be absent */
    _Atomic int64_t *updated; /* NULL: a pass before has told; this
                               * one may wait for the step's end */
};

void iz_chunk_update(struct iz_exec *x, void **buf, const void *arg);
