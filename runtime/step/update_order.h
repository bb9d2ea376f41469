/* SPDX-License-Identifier: Apache-2.0 */
/* The order of updates through the disk. */
#pragma once

#include "runtime/engine/engine.h"

/* Call before a step is submitted. */
void iz_update_order_begin(struct iz_engine *e);
/* Call after the last gradient of a step has come: chooses the order for the
 * following steps. */
void iz_update_order_end(struct iz_engine *e);
