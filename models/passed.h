/* SPDX-License-Identifier: Apache-2.0 */
/* What the units of a block with experts hand over to each other: the boundary
 * from a router to the units of experts, and from each of these to the next. */
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
