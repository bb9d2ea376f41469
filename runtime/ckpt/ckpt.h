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

/* One flat fp32 array of which this rank holds the elements [first, first +
 * count): the master or a state of one unit's parameters laid end to end
 * (without padding). */
struct iz_ckpt_part {
    char name[64]; /* "h.3/m" */
    int64_t total, first, count;
    /* Copies elements [from, from + n) of the rank's piece into the run. Called
     * with n <= IZ_BLOCK, in ascending order. */
    void (*put)(void *arg, int64_t from, const float *in, int64_t n);
    void *arg;
};

/* One logical parameter inside a flat array: for the index. */
struct iz_ckpt_name {
    char name[64], array[64]; /* "h.3.ln_1.weight" lies in "h.3/..." */
    int64_t offset, rows, cols;
};

/* Scalars that resume needs; stored as decimal or hex-float text, exactly. */
struct iz_ckpt_scalar {
    char name[48];
    double value;
};

struct iz_ckpt {
    const char *dir; /* run's output; checkpoints lie in dir/checkpoints */
    int keep_last; /* older ones are removed after a successful save; 0 = all */
    struct iz_ckpt_part *part;
    int n_parts;
    const struct iz_ckpt_name *names;
    int n_names;
    struct iz_ckpt_scalar *scalar;
    int n_scalars;
    const char
        *model_text;       /* JSON text of the model section; checked on load */
    const char *optimizer; /* whose states the parts are; checked on load */
};

/* Finds the newest complete checkpoint; its step in *step.  -ENOENT if none. */
int iz_ckpt_latest(const struct iz_ckpt *k, int64_t *step);

/* Fills parts and scalars from the checkpoint of `step`.  Any number of ranks
 * may have written it.  A missing, truncated or foreign file is named; nothing
 * is put before every file has been checked.  Negative errno on every rank. */
int iz_ckpt_load(struct iz_ckpt *k, int64_t step, struct iz_coll *c);
