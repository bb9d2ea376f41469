/* SPDX-License-Identifier: Apache-2.0 */
/* What becomes of a unit's gradient. */
#pragma once

#include "runtime/engine/engine.h"

/* Adds the contribution in `slots` (one per slice) to the accumulator; use: 0
 * the group's own unit, 1 the tied one. */
void iz_reduce(struct iz_engine *e, int group, int use,
               const starpu_data_handle_t *slot, int slots);
