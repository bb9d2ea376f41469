/* SPDX-License-Identifier: Apache-2.0 */
/* What is done to the accumulator of a unit's gradient beside its collectives:
 * the workers of the host add to its pieces, each to other ones, and take the
 * squares on the way; squares that no sum has taken are a pass of their own. */
#pragma once

#include "runtime/engine/engine.h"

/* What is done to piece i, whose first element is `first`. */
struct iz_piece_sum {
    int64_t first, n;
    int inputs;
    bool accumulate, squares;
    enum iz_dtype from, type;
};

/* Of a task that adds: nobody waits for the sum of a single rank, unless its
 * update follows at once and comes first. */
int iz_accumulator_priority(const struct iz_engine *e);
/* Adds to all pieces, from the buffers of contributions on the host. */
void iz_accumulator_add(struct iz_engine *e, int unit, int acc,
                        const starpu_data_handle_t *from,
                        struct iz_piece_sum a);
/* Appends all pieces to a task that writes them as one accumulator, and returns
 * which buffer it is. */
int iz_accumulator_whole(struct iz_task *t, const struct iz_unit_memory *g,
                         int acc, enum starpu_data_access_mode mode);
/* The squares, block by block, of piece i of a sum that the GPU has.  tied:
 * what is added to the sum first. */
void iz_accumulator_squares(struct iz_engine *e, int unit, int i,
                            starpu_data_handle_t sum,
                            starpu_data_handle_t tied);
/* After the last contribution: the sum of squares where the sums have not left
 * it; in stage 0 also the other ranks' parts of the gradient. */
void iz_step_grad_norm(struct iz_engine *e, int unit);
