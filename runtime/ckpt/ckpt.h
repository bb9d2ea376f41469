/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints: a directory step-00000100/ with one safetensors file per rank
 * and an index that names every logical parameter, so that the files mean the
 * same at any number of ranks.  Written under a temporary name, synced, then
 * renamed: a crash leaves the previous checkpoint as it was. */
#pragma once

#include <stdint.h>
#include <stdio.h>

#include "runtime/comm/coll.h"
#include "runtime/plan/bytes.h" /* IZ_BLOCK */

/* A flat fp32 array: the master or a state of one unit's parameters, laid end
 * to end without padding.  This rank holds its elements [first, first + count).
 */
struct iz_ckpt_part {
    char name[64]; /* "h.3/m" */
    int64_t total, first, count;
    /* Copies elements [from, from + n) of the rank's piece into the run. Called
     * with n <= IZ_BLOCK, in ascending order. */
    void (*put)(void *arg, int64_t from, const float *in, int64_t n);
    void *arg;
};

/* Where one parameter lies in the flat arrays; the index lists it. */
struct iz_ckpt_name {
    char name[64], array[64]; /* "h.3.ln_1.weight" lies in "h.3/..." */
    int64_t offset, rows, cols;
};

/* A number that a resumed run needs; stored exactly, as hex-float text. */
struct iz_ckpt_scalar {
    char name[48];
    double value;
};

struct iz_ckpt {
    const char *dir; /* run's output; checkpoints lie in dir/checkpoints */
    int keep_last;   /* so many are kept after a successful save; 0: all */
    struct iz_ckpt_part *part;
    int n_parts;
    const struct iz_ckpt_name *names;
    int n_names;
    struct iz_ckpt_scalar *scalar;
    int n_scalars;
    /* Both must be the same when it is loaded: the model section as JSON, and
     * the name of the optimizer that has the states. */
    const char *model_text, *optimizer;
};

/* Finds the newest complete checkpoint; its step in *step.  -ENOENT if none. */
int iz_ckpt_latest(const struct iz_ckpt *k, int64_t *step);

/* Fills parts and scalars from the checkpoint of `step`, which any number of
 * ranks may have written.  Checks every file before it puts anything.  A
 * missing, truncated or foreign file is named, and every rank returns a
 * negative errno. */
int iz_ckpt_load(struct iz_ckpt *k, int64_t step, struct iz_coll *c);
