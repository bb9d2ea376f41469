/* SPDX-License-Identifier: Apache-2.0 */
/* Hashes of all that a checkpoint would have of a run, where it lives and while
 * no task runs.  Each element is hashed with its position, and the hashes are
 * added: no stage, home, chunk or number of ranks changes the sum. */
#pragma once

#include "runtime/ckpt/engine_parts.h"

struct iz_state_hash {
    struct iz_parts parts;
    uint64_t *part;   /* of each of parts.k's, over all ranks */
    uint64_t weights; /* of those that are parameters */
    uint64_t all;     /* of all parts and the scalars */
};

/* All ranks; waits for what was submitted.  What is on a GPU or a disk goes
 * through the main thread, else all workers share the work. */
void iz_state_hash_open(struct iz_state_hash *h, struct iz_engine *e,
                        const struct iz_ckpt_of *of);
void iz_state_hash_close(struct iz_state_hash *h);
