/* SPDX-License-Identifier: Apache-2.0 */
/* That a folder which a run has written is the run's model: every value of it
 * is the run's, rounded to its type; its config says the run's shape; and it
 * has the run's loss. */
#pragma once

#include "runtime/step/train.h"

/* What is proven, and of whom. */
struct iz_hf_proof {
    struct iz_engine *e;
    const struct iz_section *section;
    enum iz_dtype type; /* of the folder */
};

/* For struct iz_hf_order: arg is the proof.  Afterwards the engine's weights
 * are the folder's, and its adapters add nothing if they were merged. */
int iz_hf_prove(void *arg, const char *folder);

/* The loss of a folder beside that of the run, each on one batch or all. */
struct iz_hf_losses {
    enum iz_dtype type, own; /* of the folder; of the run's parameters */
    int units;
    bool exact; /* they must be equal */
    double run, found;
};

/* Tells both on stdout, or -EBADMSG and the reason on stderr, if `tells`: where
 * weights are rounded to a type each of `units` layers errs by a part of
 * itself, and the errors of many add up like steps of a random walk. */
int iz_hf_compare_losses(const struct iz_hf_losses *l, bool tells);
