/* SPDX-License-Identifier: Apache-2.0 */
/* Squares of a unit's gradient that no sum has taken on the way (reduce.c). */
#pragma once

#include "runtime/engine/engine.h"

/* Those of piece i of a sum that the GPU has, block by block.  tied: what is
 * added to the sum first. */
void iz_norm_squares(struct iz_engine *e, int unit, int i,
                     starpu_data_handle_t sum, starpu_data_handle_t tied);
/* Those of this rank's part of an accumulator that is not cut, after the tied
 * use's was added. */
void iz_norm_unit(struct iz_engine *e, int unit);
/* Adds those of all blocks: in the order of a pass over the whole, whoever
 * squared which piece. */
void iz_norm_blocks(struct iz_engine *e, int unit);
