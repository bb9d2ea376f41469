/* SPDX-License-Identifier: Apache-2.0 */
/* A block's experts as units of their own, so that a block need not be whole in
 * any memory.  The block's first unit ends with its router; what it hands over
 * passes through the others, each of which adds what its experts make of it.
 * The last one hands over the block's output alone. */
#pragma once

#include "models/block.h"

/* Units of a block with experts beside its first one. */
int iz_experts_units(const struct iz_experts *c);
/* Makes unit number `index` of them for a block, counted from 0.  kind: that of
 * units but for the last one, which has the next. */
void iz_experts_unit_open(struct iz_unit *u, const struct iz_block *b,
                          const struct iz_block_names *name, int block,
                          int index, int kind);
