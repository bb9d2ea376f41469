/* SPDX-License-Identifier: Apache-2.0 */
/* Which elements of a checkpoint's arrays each rank writes. */
#pragma once

#include <stdint.h>

#include "runtime/ckpt/ckpt.h"
#include "runtime/ckpt/rank_file.h"
#include "runtime/comm/agree.h"

/* Fills piece[k->n_parts] with what this rank writes; the caller frees each
 * hash.  An array of which each rank has a piece is written as it is held; of
 * one that every rank has whole, each rank writes a part.  Refuses pieces that
 * leave gaps.  Negative errno on every rank with the reason printed. */
int iz_ckpt_shares(const struct iz_ckpt *k, struct iz_coll *c,
                   struct iz_piece *piece);
