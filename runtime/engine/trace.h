/* SPDX-License-Identifier: Apache-2.0 */
/* What a trace calls things, and when it is taken. */
#pragma once

#include "runtime/engine/engine.h"

/* What a buffer holds; the second coordinate of its handle, after the unit or
 * the place in its ring. */
enum iz_datum {
    IZ_DATUM_PARAM,
    IZ_DATUM_GRAD,
    IZ_DATUM_STATE,
    IZ_DATUM_GATHERED,
    IZ_DATUM_UNIT_GRAD,
    IZ_DATUM_BOUNDARY,
    IZ_DATUM_RAISED, /* a boundary that came back from the host */
    IZ_DATUM_SAVED,
    IZ_DATUM_DY,
    IZ_DATUM_BATCH,
    IZ_DATUM_STAGING,
    IZ_DATUM_SPLIT_STATE, /* on the GPU, of an offloaded optimizer */
    IZ_DATUM_SPLIT_STAGING,
    IZ_DATUM_SPLIT_GRAD,
    IZ_DATUM_BLOCK_SUMS, /* squares of the blocks that the GPU keeps */
    IZ_DATUM_SQUARES,    /* a unit's sum of squares */
    IZ_DATUM_SCALAR,     /* losses, control */
    IZ_DATUM_PIECE, /* a part of a parameter that has a handle of its own */
    IZ_DATA
};
/* Names and places a handle for traces. */
void iz_trace_datum(starpu_data_handle_t h, enum iz_datum d, int x);

/* Reads IZ_TRACE and IZ_TRACE_STEPS; before StarPU starts.  All ranks; negative
 * errno on every rank with the reason printed by one. */
int iz_trace_open(struct iz_engine *e);
void iz_trace_close(struct iz_engine *e);
/* Before the submission of a step: begins or ends the trace there. */
void iz_trace_step(struct iz_engine *e);
/* Ends the trace if it is being taken; waits for all tasks then. */
void iz_trace_stop(struct iz_engine *e);
