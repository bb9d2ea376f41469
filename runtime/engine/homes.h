/* SPDX-License-Identifier: Apache-2.0 */
/* What the files that allocate a run's memory share; nobody else includes it.
 * groups.c has what units own, buffers.c the buffers that no unit owns. */
#ifndef IZ_RUNTIME_ENGINE_HOMES_H
#define IZ_RUNTIME_ENGINE_HOMES_H

#include "runtime/engine/engine.h"

/* ---- groups.c ---- */

/* Registers bytes at p, which the engine's memory owns; d and x say to traces
 * what they are. */
starpu_data_handle_t iz_homes_variable(struct iz_engine *e, void *p,
                                       int64_t bytes, enum iz_datum d, int x);
/* Sets NULL, and accepts it. */
void iz_homes_unregister(starpu_data_handle_t *h);
/* Where that lies which host and device both touch: on the host. */
enum iz_tier iz_homes_near(const struct iz_engine *e);

/* ---- buffers.c ---- */

/* After the groups, of which it needs nothing but e->scalars.  0, or negative
 * errno with the reason printed. */
int iz_homes_open_buffers(struct iz_engine *e);
/* Also after an open that failed. */
void iz_homes_close_buffers(struct iz_engine *e);

#endif
