/* SPDX-License-Identifier: Apache-2.0 */
/* What the ranks settle among themselves before and while a checkpoint is
 * written or read: one result for all, and who writes which elements. */
#ifndef IZ_RUNTIME_CKPT_SHARES_H
#define IZ_RUNTIME_CKPT_SHARES_H

#include <stdint.h>

#include "runtime/ckpt/ckpt.h"
#include "runtime/ckpt/rank_file.h"

/* mine[n] of every rank, in order of ranks; malloc'ed.  All ranks. */
int64_t *iz_ckpt_gather(struct iz_coll *c, const int64_t *mine, int n);

/* The same result on all ranks: the error of the first rank that has one. */
int iz_ckpt_agree(struct iz_coll *c, int err);

/* Fills piece[k->n_parts] with what this rank writes; the caller frees each
 * hash.  An array of which each rank has a piece is written as it is held; of
 * one that every rank has whole, each rank writes a part.  Refuses pieces that
 * leave gaps.  Negative errno on every rank with the reason printed. */
int iz_ckpt_shares(const struct iz_ckpt *k, struct iz_coll *c,
                   struct iz_piece *piece);

#endif
