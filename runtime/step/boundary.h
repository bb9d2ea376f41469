/* SPDX-License-Identifier: Apache-2.0 */
/* Where activations between units are. */
#pragma once

#include "runtime/engine/engine.h"

/* Every pass begins with this: tracks that take part in it. */
void iz_boundary_begin(struct iz_engine *e, int tracks, bool training);
/* The handle that forward of a unit writes its output to. */
starpu_data_handle_t iz_boundary_written(struct iz_engine *e, int unit,
                                         int track);
/* Where the output of a unit is now. */
starpu_data_handle_t iz_boundary_read(struct iz_engine *e, int unit, int track);
/* After backward of a unit was submitted: submits copies of what the next ones
 * read, as far ahead as there are slots. */
void iz_boundary_ahead(struct iz_engine *e, int unit, int track);
