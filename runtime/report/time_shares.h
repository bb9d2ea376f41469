/* SPDX-License-Identifier: Apache-2.0 */
/* Where a rank's time went, from the spans of its tasks.  Each kind of task:
 * how much of it ran while units were computed.  The workers that compute
 * units: at every instant each of them does work of its own, or waits, and what
 * it waits for is what runs on the rank at that instant. */
#pragma once

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

/* All tasks of one kind so far, in the window or not.  Hidden: seconds during
 * which a forward, backward or evaluation was running on the same rank. */
struct iz_kind_time {
    double seconds, hidden_s;
    int64_t tasks;
};

/* The window: from the first to the last call of iz_time_shares_until, without
 * the time between iz_time_shares_stop and the call after it. */
struct iz_time_total {
    double window_s;
    double share[IZ_USES];        /* of the compute workers' time; sums to 1 */
    double busy[IZ_USES_RUNNING]; /* part of the window with such a task */
    double task_s[IZ_USES_RUNNING];         /* seconds of such tasks, */
    double beside_units_s[IZ_USES_RUNNING]; /* and those beside a unit's */
    double worker[STARPU_NMAXWORKERS];      /* part of the window, of each */
};

struct iz_time_shares;

/* where[w]: what StarPU's worker w is for, IZ_ON_COMPUTE if it computes units;
 * copied. */
struct iz_time_shares *iz_time_shares_open(const enum iz_where *where,
                                           int workers);
void iz_time_shares_close(struct iz_time_shares **t);

void iz_time_shares_add(struct iz_time_shares *t, const struct iz_span *s);
/* A task behind the last step: part of the window, but of no kind's time. */
void iz_time_shares_add_behind(struct iz_time_shares *t,
                               const struct iz_span *s);
/* The window reaches to this time; the first call opens it.  Young tasks wait
 * for the next call: a computation beside them may still be running. */
void iz_time_shares_until(struct iz_time_shares *t, int64_t ns);
/* The window ends where the last iz_time_shares_until put it.  last: no task
 * runs, and all have been added. */
void iz_time_shares_stop(struct iz_time_shares *t, bool last);

struct iz_kind_time iz_time_shares_kind(const struct iz_time_shares *t,
                                        enum iz_kind k);
/* Seconds and hidden seconds of several kinds, 1 << kind for each. */
struct iz_kind_time iz_time_shares_kinds(const struct iz_time_shares *t,
                                         unsigned kinds);
/* To be asked after a stop. */
struct iz_time_total iz_time_shares_total(const struct iz_time_shares *t);
/* Seconds of all tasks added, in the window or not. */
double iz_time_shares_seconds(const struct iz_time_shares *t, enum iz_use use);
