/* SPDX-License-Identifier: Apache-2.0 */
/* Takes the planned memory and files and registers them with StarPU: first the
 * units (groups.c), then the buffers that no unit owns (buffers.c). */
#pragma once

#include "runtime/engine/engine.h"

/* 0, or negative errno with the reason printed; close also after an open that
 * failed. */
int iz_alloc_open(struct iz_engine *e);
void iz_alloc_close(struct iz_engine *e);
