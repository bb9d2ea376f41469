/* SPDX-License-Identifier: Apache-2.0 */
/* The engine's states as the arrays of a checkpoint, and resuming from one. */
#pragma once

#include "runtime/ckpt/ckpt.h"
#include "runtime/engine/access.h"
#include "runtime/step/train.h"

/* Which elements of the engine an array of a checkpoint is. */
struct iz_arrays_range {
    struct iz_engine *e;
    int unit;
    enum iz_array array;
    int64_t first; /* element of the unit with which the array begins */
};

struct iz_arrays {
    struct iz_ckpt k;
    struct iz_arrays_range *arg; /* of each of k's arrays */
};

/* What a rank saves or loads of the run. */
void iz_arrays_open(struct iz_arrays *s, struct iz_engine *e,
                    const struct iz_ckpt_of *of, bool load);
void iz_arrays_close(struct iz_arrays *s);
/* Of all parameters of m, in order, as the index lists them; malloc'ed, *n of
 * them. */
struct iz_ckpt_name *iz_arrays_names(const struct iz_model *m, int *n);
/* The scalars after `step` steps, of which c is the control. */
void iz_arrays_scalars(const struct iz_engine *e, const struct iz_control *c,
                       int64_t step, struct iz_ckpt_scalar *s);

/* Loads the checkpoint of `step` of the run's output, whose model must be that
 * of `of`.  All ranks; negative errno on every one, reason printed. */
int iz_arrays_load(struct iz_engine *e, const struct iz_ckpt_of *of,
                   int64_t step);
