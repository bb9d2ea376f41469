/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizer's tasks. */
#pragma once

#include "runtime/engine/engine.h"

/* Submits the updates of a unit's chunks. */
void iz_update_unit(struct iz_engine *e, int unit);
