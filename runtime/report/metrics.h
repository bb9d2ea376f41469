/* SPDX-License-Identifier: Apache-2.0 */
/* The progress line, metrics.jsonl and the summary of a run, on rank 0.  They
 * are made from counters and the span log; nothing here waits for a task.  Of
 * the lines of metrics.jsonl runtime/run writes start and resumed (begin.c),
 * hash (chain.c) and weights_hash (end.c). */
#pragma once

#include "codelets/base/build.h"
#include "runtime/step/train.h"

struct iz_metrics;

/* gemm_rate: flop/s of all compute workers of a rank together.  `quiet`, for
 * the ranks other than 0: the span log is emptied and nothing is printed.
 * Negative errno with the reason printed. */
int iz_metrics_open(struct iz_metrics **out, struct iz_engine *e,
                    double gemm_rate, bool quiet);
/* Makes this process the only one that writes into the output folder, until it
 * ends, for which another one has five seconds; ends a line that a crash tore.
 * Returns a descriptor to be held, or negative errno with the reason printed.
 */
int iz_metrics_claim(const char *output);
/* Takes one event of the run; call in the order of events. */
void iz_metrics_event(struct iz_metrics *m, const struct iz_event *v);
/* Call after work outside of training, such as a save that it waited for: its
 * time does not count in tokens/s. */
void iz_metrics_pause(struct iz_metrics *m);
/* Call before a line of others is printed. */
void iz_metrics_between(struct iz_metrics *m);
/* Prints where time and memory went, at the end.  reason: "finished", ... */
void iz_metrics_summary(struct iz_metrics *m, const char *reason);
void iz_metrics_close(struct iz_metrics **m);

/* Writes one JSON line of the caller's own, e.g. {"sample": ...}. */
void iz_metrics_line(struct iz_metrics *m, const char *fmt, ...)
    IZ_PRINTF(2, 3);
