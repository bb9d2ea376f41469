/* SPDX-License-Identifier: Apache-2.0 */
/* How the optimizer's chunks are divided between host and GPU. */
#pragma once

#include "runtime/plan/plan.h"

/* Sets host_chunks of all units and what p says of the split. */
void iz_plan_split(struct iz_plan *p, const struct iz_config *c);
/* Elements of a unit whose states are where the offloaded optimizer lives. */
int64_t iz_plan_host_elems(const struct iz_plan_unit *g);
/* Gives a plan more buffers for chunks that the GPU updates, of so many bytes
 * of its memory that are left; its places are to be listed anew. */
void iz_plan_split_widen(struct iz_plan *p, int64_t bytes);
void iz_plan_split_print(const struct iz_plan *p, FILE *out);
