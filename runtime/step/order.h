/* SPDX-License-Identifier: Apache-2.0 */
/* The units of a pass in order, and the uses of their parameters. */
#pragma once

#include "runtime/engine/engine.h"

/* After iz_alloc_open. */
void iz_order_open(struct iz_engine *e);
/* Unit of step i of a pass: 0 ... U-1 and, when training, back down. */
int iz_order_unit(const struct iz_engine *e, int i);
/* Where step i of a pass is in the graph: forward of unit u is u, backward is
 * 2U-1-u. */
int iz_order_position(const struct iz_engine *e, int i);
