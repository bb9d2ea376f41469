/* SPDX-License-Identifier: Apache-2.0 */
/* The order of updates through the disk. */
#pragma once

#include "runtime/engine/engine.h"

/* After the last gradient of a step has come: of how many units, from 0 on,
 * this rank's disk would put the updates off in the following steps, if so far
 * it was `late`. */
int iz_update_order_late(struct iz_engine *e, int late);
/* What the slowest disk has made of that: the most of all ranks, whose numbers
 * are `per` apart. */
int iz_update_order_of_all(const double *late, int per, int ranks);
