/* SPDX-License-Identifier: Apache-2.0 */
/* The tasks of a pass over the units. */
#pragma once

#include "runtime/engine/engine.h"

struct iz_call {
    enum iz_kind kind;
    enum iz_unit_call call;
    int unit, samples;
    starpu_data_handle_t grad, tied_grad; /* backward: what it writes */
    int64_t row;    /* generation: position whose logits are wanted */
    bool reference; /* a forward of the reference of pairs */
};

/* Counts the targets of the next batches; in training a task does so only where
 * there is a mask. */
void iz_units_count(struct iz_engine *e, const struct iz_samples *all);
/* Some of `all`, with whose loss theirs is weighed. */
void iz_units_batch(struct iz_engine *e, struct iz_track *track,
                    const struct iz_samples *all, int64_t first, int samples);
int64_t iz_units_first_sample(const struct iz_engine *e, int micro, int slice);
void iz_units_call(struct iz_engine *e, const struct iz_call *c,
                   struct iz_track *track);
/* Adds the track's loss to the sum; the order of calls is the order of the sum,
 * but in an evaluation no order matters. */
void iz_units_add_loss(struct iz_engine *e, struct iz_track *track);
/* Waits for all tasks, which take memory while they wait.  False on all ranks
 * if a signal asks one of them for the end of the run.  Collective. */
bool iz_units_go_on(struct iz_engine *e);
/* A pass without gradients over the first `tracks` ones; c: what its calls have
 * in common, and the call of the last unit. */
void iz_units_pass(struct iz_engine *e, struct iz_call c, int tracks);
