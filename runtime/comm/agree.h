/* SPDX-License-Identifier: Apache-2.0 */
/* What the ranks settle among themselves outside of steps: a few numbers of
 * each, and one result for all. */
#pragma once

#include <stdint.h>

#include "runtime/comm/coll.h"

/* mine[n] of every rank, in order of ranks; malloc'ed.  All ranks. */
int64_t *iz_agree_numbers(struct iz_coll *c, const int64_t *mine, int n);

/* The same result on all ranks: the error of the first rank that has one. */
int iz_agree(struct iz_coll *c, int err);
