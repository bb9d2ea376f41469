/* SPDX-License-Identifier: Apache-2.0 */
/* Hashes of all that a checkpoint would have of a run, where it lives and while
 * no task runs.  Each element is hashed with its position, and the hashes are
 * added: no stage, home, chunk or number of ranks changes the sum. */
#pragma once

#include "runtime/ckpt/engine_arrays.h"

/* A parameter in one of the arrays: up to the next one's begin. */
struct iz_state_tensor {
    const char *name;
    int64_t begin;
    _Atomic uint64_t hash; /* over all ranks */
};

struct iz_state_hash {
    struct iz_arrays arrays;
    /* Those of array i are [first[i], first[i + 1]). */
    struct iz_state_tensor *tensor;
    int *first;
    uint64_t all; /* of all tensors and the scalars */
};

/* All ranks; waits for what was submitted.  What is on a GPU or a disk goes
 * through the main thread, else all workers share the work. */
void iz_state_hash_open(struct iz_state_hash *h, struct iz_engine *e,
                        const struct iz_ckpt_of *of);
/* The hash of the parameters alone. */
uint64_t iz_state_hash_weights(struct iz_engine *e,
                               const struct iz_ckpt_of *of);
void iz_state_hash_close(struct iz_state_hash *h);
