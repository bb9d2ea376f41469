/* SPDX-License-Identifier: Apache-2.0 */
/* Parameters, and the ring they are fetched into. */
#pragma once

#include "runtime/engine/engine.h"

/* Lists the uses of parameters of a pass, in order; after iz_alloc_open. */
void iz_fetch_open(struct iz_engine *e);

/* Submits fetches so that the units of uses[from...] are on their way, as far
 * ahead as the rings allow. */
void iz_fetch_ahead(struct iz_engine *e, const struct iz_uses *u, int from);
/* Buffer that holds the parameters of a unit now. */
starpu_data_handle_t iz_fetch_param(struct iz_engine *e, int unit);
/* All-gather of the parameters that the stage keeps whole; with `frozen` also
 * of the frozen ones, after they were set: a group's copy is stale then. */
void iz_fetch_publish(struct iz_engine *e, int unit, bool frozen);

/* In-place all-gather of gradients that every rank keeps whole, of elem_bytes
 * per element. */
void iz_fetch_gather(struct iz_engine *e, enum iz_kind kind, int unit,
                     starpu_data_handle_t whole, int64_t elem_bytes);
