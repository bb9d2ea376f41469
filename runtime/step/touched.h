/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of sparse tables.  Only the rows that a step touches are moved, of
 * parameters and of gradients. Every rank reads the samples of all ranks, so
 * that all know the same rows and nobody has to be asked. */
#pragma once

#include "codelets/flat/touched_rows.h"
#include "runtime/engine/engine.h"

/* From here on these samples are trained with or evaluated: submits the task
 * that lists the rows which they touch. */
void iz_touched_begin(struct iz_engine *e, struct iz_samples s);
/* The list of the rows that the step under way touches; NULL: the unit is
 * dense. */
starpu_data_handle_t iz_touched_list(const struct iz_engine *e, int unit);

/* What a task must know to find a unit's rows in the list; cols = 0: the unit
 * is dense. */
struct iz_touched_in {
    int units, unit, rank, ranks;
    int64_t cols, shard;
};
struct iz_touched_in iz_touched_in(const struct iz_engine *e, int unit);
struct iz_touched iz_touched_get(const struct iz_touched_in *a,
                                 const void *list);
/* Where a rank's shard begins, packed. */
int64_t iz_touched_first(const struct iz_touched_in *a,
                         const struct iz_touched *r, int rank);
/* Fills c->first for the next collective of unequal shards: where each rank's
 * shard starts, in elements of `elem_bytes` each. */
void iz_touched_shards(const struct iz_touched_in *a,
                       const struct iz_touched *r, struct iz_coll *c,
                       int64_t elem_bytes);

/* The counterparts of iz_fetch_gather and iz_fetch_publish for sparse tables:
 * of parameters from a shard into a slot, or of accumulators in place (shard
 * NULL), and of parameters that are whole. */
void iz_touched_gather(struct iz_engine *e, enum iz_kind kind, int unit,
                       starpu_data_handle_t whole, starpu_data_handle_t shard,
                       int64_t elem_bytes);
void iz_touched_publish(struct iz_engine *e, int unit);
