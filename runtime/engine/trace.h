/* SPDX-License-Identifier: Apache-2.0 */
/* When a trace is taken, and of what. */
#pragma once

#include "runtime/engine/engine.h"

/* Reads IZ_TRACE and IZ_TRACE_STEPS; before StarPU starts.  All ranks; negative
 * errno on every rank with the reason printed by one. */
int iz_trace_open(struct iz_engine *e);
void iz_trace_close(struct iz_engine *e);
/* What was measured, in flop/s of all compute workers: for the description. */
void iz_trace_rate(struct iz_engine *e, double gemm_rate);
/* Before the submission of a step: begins or ends the trace there. */
void iz_trace_step(struct iz_engine *e);
/* The description of the run that pictures of its tasks need, as JSON: of those
 * from a step and a time on. */
void iz_trace_describe(const struct iz_engine *e, FILE *f, int64_t from,
                       int64_t begin_ns);
/* Ends the trace if it is being taken, and waits for all tasks then; says so if
 * it never began. */
void iz_trace_stop(struct iz_engine *e);
