/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizer's tasks. */
#ifndef IZ_RUNTIME_STEP_UPDATE_H
#define IZ_RUNTIME_STEP_UPDATE_H

#include "runtime/engine/engine.h"

/* Submits the updates of a group's chunks. */
void iz_update_group(struct iz_engine *e, int group);

#endif
