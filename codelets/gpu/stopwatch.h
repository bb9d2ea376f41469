/* SPDX-License-Identifier: Apache-2.0 */
/* How long a GPU takes for what may be done in two ways, before the first
 * step. */
#pragma once

#include <stdbool.h>

#include "codelets/ops/exec.h"

/* Less is no reason for other bits: of the time of what is taken otherwise. */
#define IZ_STOPWATCH_GAIN 0.98

/* begin, end: events of CUDA. */
struct iz_stopwatch {
    void *begin, *end;
    double spent_s, budget_s;
};

void iz_stopwatch_open(struct iz_stopwatch *w, double budget_s);
void iz_stopwatch_close(struct iz_stopwatch *w);

/* Whether the budget is spent. */
bool iz_stopwatch_over(const struct iz_stopwatch *w);

/* Enqueues what is measured on x's stream; false: it cannot be. */
typedef bool iz_stopwatch_run(struct iz_exec *x, const void *arg);

/* Seconds of the best of some runs; the first one only warms up.  Less than 0:
 * it cannot be run. */
double iz_stopwatch_best(struct iz_stopwatch *w, struct iz_exec *x,
                         iz_stopwatch_run *run, const void *arg);
