/* SPDX-License-Identifier: Apache-2.0 */
/* A block's experts as units of their own, so that a block need not be whole in
 * any memory.  The block's first unit ends with its router; what it hands over
 * passes through the others, each of which adds what its experts make of it.
 * The last one hands over the block's output alone. */
#pragma once

#include "models/block.h"

/* What is handed over, or its gradient: a boundary of iz_passed_len elements
 * for every sample, of M rows. */
struct iz_passed {
    struct iz_view c; /* [M,C] the output so far; its gradient */
    struct iz_view h; /* [M,C] what experts read; its gradient so far */
    /* weight, place, chosen, end; or, in weight's place, its gradient. */
    struct iz_routes r;
};

int64_t iz_passed_len(const struct iz_block *b);
/* The parts of the boundary v; of the block's output alone, c is all. */
struct iz_passed iz_passed_of(const struct iz_block *b, struct iz_view v,
                              bool whole);
/* What is handed over of routes. */
void iz_routes_copy(struct iz_exec *x, const struct iz_routes *to,
                    const struct iz_routes *from);

/* Units of a block with experts beside its first one. */
int iz_experts_units(const struct iz_experts *c);
/* Makes unit number `part` of them for a block, counted from 0; 0 or -ENOMEM.
 * kind: that of units but for the last one, which has the next. */
int iz_experts_unit_open(struct iz_unit *u, const struct iz_block *b,
                         const struct iz_block_names *name, int block, int part,
                         int kind);
