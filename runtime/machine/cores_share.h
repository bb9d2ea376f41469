/* SPDX-License-Identifier: Apache-2.0 */
/* How ranks of one host divide processors that several of them may use. */
#pragma once

#include <hwloc.h>

/* set[n]: what each rank may use, none empty; afterwards what it computes on.
 * Sets may be equal, apart, or inside one another: each processor goes to one
 * of the ranks that may use it, so that they have as equal numbers as can be,
 * in order of rank, the last ones one more.  A rank for which none is left
 * takes a processor of another one, all of those in turn.  Sets that overlap in
 * part are refused: -EINVAL, with the first such pair in cross[2] and nothing
 * changed. */
int iz_share_out(hwloc_bitmap_t *set, int n, int cross[2]);
