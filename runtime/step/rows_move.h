/* SPDX-License-Identifier: Apache-2.0 */
/* Moves parameters and gradients of sparse tables: only the rows that a step
 * touches. */
#pragma once

#include "runtime/engine/engine.h"

/* The counterparts of iz_fetch_ahead, iz_fetch_gather and iz_fetch_publish for
 * sparse tables: from a shard into a slot, and of whole accumulators and
 * parameters. */
void iz_touched_fetch(struct iz_engine *e, int group,
                      starpu_data_handle_t shard, starpu_data_handle_t slot);
void iz_touched_gather(struct iz_engine *e, enum iz_kind kind, int group,
                       starpu_data_handle_t whole, int64_t elem_bytes);
void iz_touched_publish(struct iz_engine *e, int group);
