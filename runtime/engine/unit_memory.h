/* SPDX-License-Identifier: Apache-2.0 */
/* What units own: parameters, gradients and states in memory or in files. */
#pragma once

#include "runtime/engine/engine.h"

/* -errno, with the reason printed unless it is -ENOMEM. */
int iz_unit_memory_open(struct iz_engine *e);
void iz_unit_memory_close(struct iz_engine *e);
