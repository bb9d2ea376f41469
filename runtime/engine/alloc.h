/* SPDX-License-Identifier: Apache-2.0 */
/* Takes the planned memory and files and registers them with StarPU: first the
 * units (unit_memory.c), then the buffers that no unit owns: staging, lists of
 * rows, rings of gathered units and of gradients, the tracks of micro-batches,
 * scalars, collectives. */
#pragma once

#include "runtime/engine/engine.h"

/* 0, or negative errno with the reason printed; close also after an open that
 * failed. */
int iz_alloc_open(struct iz_engine *e);
void iz_alloc_close(struct iz_engine *e);

/* The next staging buffer of a kind, which take turns. */
struct iz_staging *iz_next_staging(struct iz_engine *e, enum iz_staging_kind k);
/* Buffer for the next gradient contribution to a unit. */
starpu_data_handle_t iz_next_grad(struct iz_engine *e, int unit);
