/* SPDX-License-Identifier: Apache-2.0 */
/* Reads and writes parameters and states where they live, when no task runs. */
#pragma once

#include "runtime/engine/engine.h"

/* How a chunk's states lie, in memory or in a file. */
static inline struct iz_state_layout
iz_chunk_states(const struct iz_engine *e, int unit, const struct iz_chunk *k)
{
    return iz_plan_states(&e->plan, k->home,
                          k->state ? k->count : e->unit[unit].plan->chunk);
}

/* IZ_STATE and on: the optimizer's states. */
enum iz_array { IZ_FROZEN = -1, IZ_MASTER, IZ_STATE };
/* Elements [from, from + n) of this rank's owned part of a unit's trained
 * parameters (IZ_FROZEN: of its frozen ones), with no task running.
 * put(MASTER) also sets the parameters of compute type. */
void iz_access_get(struct iz_engine *e, int unit, enum iz_array a, int64_t from,
                   float *out, int64_t n);
void iz_access_put(struct iz_engine *e, int unit, enum iz_array a, int64_t from,
                   const float *in, int64_t n);
