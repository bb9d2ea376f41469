/* SPDX-License-Identifier: Apache-2.0 */
/* Buffers that no unit owns: staging, lists of rows, rings of gathered units
 * and of gradients, the tracks of micro-batches, scalars, collectives. */
#pragma once

#include "runtime/engine/engine.h"

/* Call after the groups are open; of their work only e->scalars is used.
 * Returns 0, or negative errno with the reason printed. */
int iz_buffers_open(struct iz_engine *e);
/* Also after an open that failed. */
void iz_buffers_close(struct iz_engine *e);

/* The next staging buffer of a kind, which take turns. */
struct iz_staging *iz_next_staging(struct iz_engine *e, enum iz_staging_kind k);
/* Buffer for the next gradient contribution to a group. */
starpu_data_handle_t iz_next_grad(struct iz_engine *e, int group);
