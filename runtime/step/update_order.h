/* SPDX-License-Identifier: Apache-2.0 */
/* The order of updates through the disk. */
#ifndef IZ_RUNTIME_STEP_UPDATE_ORDER_H
#define IZ_RUNTIME_STEP_UPDATE_ORDER_H

#include "runtime/engine/engine.h"

/* Before a step is submitted. */
void iz_update_order_begin(struct iz_engine *e);
/* After the last gradient of a step has come: chooses for the steps to come. */
void iz_update_order_end(struct iz_engine *e);

#endif
