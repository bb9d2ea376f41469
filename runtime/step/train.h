/* SPDX-License-Identifier: Apache-2.0 */
/* Training as submissions: open an engine, submit steps, take events, close. */
#pragma once

#include "runtime/engine/engine.h"
#include "runtime/machine/cores.h"

struct iz_train_config {
    const struct iz_config *config; /* all borrowed until close */
    const struct iz_model *model;
    struct iz_coll *coll;
    const struct iz_data *data;
    _Atomic int *stop;      /* nonzero: finish the steps under way, then stop */
    struct iz_cores *cores; /* binds the workers; NULL: they stay as they are */
    int device;             /* index of the GPU, -1: none */
    bool simulated;
    struct iz_rate rate[IZ_RATES]; /* zero: plausible ones */
};

/* Allocates everything in `plan` (ownership is taken) and starts StarPU.
 * Negative errno with the reason printed; *out is NULL then. */
int iz_train_open(struct iz_engine **out, const struct iz_train_config *c,
                  struct iz_plan *plan);
void iz_train_close(struct iz_engine **e);

/* Fills the parameters with the model's initial values, states with zero.  All
 * ranks.  Negative errno on every rank with the reason printed. */
int iz_train_init(struct iz_engine *e);
/* Fills only the adapters with initial values, after the other parameters were
 * put; publishes all parameters. */
int iz_train_init_adapters(struct iz_engine *e);

/* Gives the copies for the reference of pairs the values of what they copy,
 * after all others were put; publishes them.  All ranks. */
int iz_train_init_references(struct iz_engine *e);

/* Gives parameters to ranks that hold them whole after they were set by
 * iz_train_init or iz_access_put.  All ranks, also one that failed to set its
 * own: err is its negative errno, the reason printed, else 0.  Then nothing is
 * given, and the error of the first such rank returned on every rank. */
int iz_train_publish(struct iz_engine *e, int err);

/* Submits one step and returns at once. */
void iz_train_step(struct iz_engine *e);
/* How many samples validation takes, each once: the first ones of its data, as
 * many as run.eval_batches steps have at most. */
int64_t iz_train_eval_samples(const struct iz_engine *e);
/* Submits the validation loss after the steps so far. */
void iz_train_eval(struct iz_engine *e);

/* The loss of one micro-batch of each rank, of validation data or, of a run
 * without, of the last step; waits for it.  Once all events were taken.  All
 * ranks, which get the same. */
struct iz_event iz_train_probe(struct iz_engine *e);

/* Waits for the next event. */
struct iz_event iz_train_event(struct iz_engine *e);

/* Generates n tokens after the prompt's (n_prompt >= 1) into out[n_prompt + n],
 * all ranks the same; waits for it.  Returns how many: fewer after a signal. */
int iz_train_sample(struct iz_engine *e, const int32_t *prompt, int n_prompt,
                    int32_t *out, int n, double temperature);
