/* SPDX-License-Identifier: Apache-2.0 */
/* A run to save and load: a few arrays whose every element says which one it is
 * and of which step. */
#pragma once

#include "tests/runtime/fixture.h"

#include "runtime/ckpt/ckpt.h"

#define ARRAYS 4
#define MODEL "{\"layers\": 2, \"width\": 64, \"rope\": 1e4}"

/* Elements of the arrays: of less and of more than a block. */
extern const int64_t small[ARRAYS], large[ARRAYS];

/* A run's state on one rank; put compares it. */
struct run {
    struct iz_ckpt k;
    struct iz_rank_range array[ARRAYS];
    struct iz_ckpt_sink sink[ARRAYS];
    struct iz_ckpt_name name[2];
    struct iz_ckpt_scalar scalar[4];
    struct state {
        const struct iz_rank_range *part;
        int array;
        int64_t step, put;
        bool wrong;
    } state[ARRAYS];
};

/* What a rank holds of arrays of these sizes, at `step`. */
void run_set(struct run *r, const int64_t *total, const struct iz_coll *c,
             int64_t step);

/* Elements put. */
int64_t number_put(const struct run *r);

/* "step-00000005/name" among the checkpoints of the folder. */
const char *in_step(int step, const char *name);

/* Saves a run as it is; all ranks.  Negative errno on every one. */
int save(const struct iz_ckpt *k, int64_t step, struct iz_coll *c);

/* A run of one rank and small arrays.  load_alone expects what was saved at
 * step `saved`, and nothing put when it fails. */
int save_alone(int64_t step, int keep_last);
int load_alone(int64_t step, int64_t saved);
int64_t latest(void);

/* On several ranks; f of on_ranks. */
struct job {
    const int64_t *total;
    int64_t step;
};

int save_one(struct iz_coll *c, void *job);
int load_one(struct iz_coll *c, void *job);
