/* SPDX-License-Identifier: Apache-2.0 */
/* Where the time of the workers that compute units went.  At every instant each
 * of them does work of its own, or waits; what it waits for is what runs on the
 * rank at that instant. */
#ifndef IZ_RUNTIME_REPORT_TIME_SHARES_H
#define IZ_RUNTIME_REPORT_TIME_SHARES_H

#include "codelets/task/task.h"

enum iz_use {
    IZ_USE_UNITS, /* forward, backward, evaluation */
    IZ_USE_OPTIMIZER,
    IZ_USE_SUMS, /* what else workers do: sums, norms, samples, host copies */
    IZ_USE_NETWORK,
    IZ_USE_UP, /* to the GPU */
    IZ_USE_DOWN,
    IZ_USE_DISK,
    IZ_USES_RUNNING,
    IZ_USE_TASKS = IZ_USES_RUNNING, /* idle while another computes a unit */
    IZ_USE_NOTHING,                 /* idle, and nothing runs on the rank */
    IZ_USES
};

extern const char *const iz_use_names[IZ_USES];

/* Of the time between the first and the last call of iz_usage_until, without
 * what lies between iz_usage_stop and the call after it. */
struct iz_usage_total {
    double window_s;
    double share[IZ_USES];        /* of the compute workers' time; sums to 1 */
    double busy[IZ_USES_RUNNING]; /* part of the window with such a task */
    double task_s[IZ_USES_RUNNING];         /* seconds of such tasks, */
    double beside_units_s[IZ_USES_RUNNING]; /* and those beside a unit's */
    double worker[STARPU_NMAXWORKERS];      /* part of the window, of each */
};

struct iz_usage;

/* place[w]: what StarPU's worker w is for, IZ_ON_COMPUTE if it computes units;
 * copied. */
int iz_usage_open(struct iz_usage **out, const enum iz_where *place,
                  int workers);
void iz_usage_close(struct iz_usage **u);

void iz_usage_add(struct iz_usage *u, const struct iz_span *s);
/* The window reaches to this time; the first call opens it. */
void iz_usage_until(struct iz_usage *u, int64_t ns);
/* No task runs, and all have been added: the window ends where the last
 * iz_usage_until put it. */
void iz_usage_stop(struct iz_usage *u);
/* To be asked after a stop. */
struct iz_usage_total iz_usage_total(const struct iz_usage *u);
/* Seconds of all tasks added, in the window or not. */
double iz_usage_seconds(const struct iz_usage *u, enum iz_use use);

#endif
