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

/* How far losses may be apart where weights are rounded to a type: of `units`
 * layers each errs by a part of itself, and the errors of many add up like
 * steps of a random walk. */
double iz_hf_rounding(enum iz_dtype t, int units, double loss);
