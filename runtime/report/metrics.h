/* SPDX-License-Identifier: Apache-2.0 */
/* What a run tells: the progress line, metrics.jsonl and the summary.  Rank 0
 * only; reads counters and the span log, never waits for a task. */
#pragma once

#include "codelets/base/build.h"
#include "runtime/step/train.h"

struct iz_metrics;

/* gemm_rate: flop/s of all compute workers of a rank together.  `quiet`: other
 * ranks (drains the span log and prints nothing).  Negative errno, reason
 * printed. */
int iz_metrics_open(struct iz_metrics **out, struct iz_engine *e,
                    double gemm_rate, bool quiet);
/* One event of the run, as it comes. */
void iz_metrics_event(struct iz_metrics *m, const struct iz_event *v);
/* Time spent outside of training (a save), not to be counted into tokens/s. */
void iz_metrics_pause(struct iz_metrics *m);
/* The end: where the time and the memory went.  reason: "finished", ... */
void iz_metrics_summary(struct iz_metrics *m, const char *reason);
void iz_metrics_close(struct iz_metrics **m);

/* Writes one JSON line of the caller's own, e.g. {"sample": ...}. */
void iz_metrics_line(struct iz_metrics *m, const char *fmt, ...)
    IZ_PRINTF(2, 3);
