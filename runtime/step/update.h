/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizer. */
#pragma once

#include "runtime/engine/engine.h"

/* Submits the updates of a unit's chunks.  Of a unit with matrices, on several
 * ranks, the end is held until the next such unit's directions are on their
 * way: the comm worker would wait for updates before it moves those. */
void iz_update_unit(struct iz_engine *e, int unit);
/* Submits what is held; before a step ends. */
void iz_update_end(struct iz_engine *e);
bool iz_update_held(const struct iz_engine *e, int unit);
