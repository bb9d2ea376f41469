/* SPDX-License-Identifier: Apache-2.0 */
/* What becomes of a unit's gradient. */
#pragma once

#include "runtime/engine/engine.h"

/* Adds the contribution in `slots` (one per slice) to the accumulator; use: 0
 * the unit's own, 1 the tied one.  Leaves slot[0] undefined. */
void iz_reduce(struct iz_engine *e, int unit, int use,
               starpu_data_handle_t *slot, int slots);
/* After the last contribution: the sum of squares where the sums have not left
 * it; in stage 0 also the other ranks' shards of the gradient. */
void iz_reduce_end(struct iz_engine *e, int unit);
