/* SPDX-License-Identifier: Apache-2.0 */
/* What limited a run, from measured shares alone; the rule is in
 * docs/monitor.md.  Pure functions. */
#pragma once

#include <stdbool.h>
#include <stddef.h>

#include "runtime/report/time_shares.h"

/* A loss below this part of the compute workers' time is no limit. */
#define IZ_BOTTLENECK_COST 0.10
/* A link or worker that is busy for more than this part of the window is full.
 */
#define IZ_BOTTLENECK_FULL 0.80

enum iz_bottleneck {
    IZ_BOTTLENECK_UNKNOWN, /* no whole step was measured */
    IZ_BOTTLENECK_COMPUTE,
    IZ_BOTTLENECK_OPTIMIZER,
    IZ_BOTTLENECK_WORKERS, /* of the host: too few for the optimizer and the
                              sums */
    IZ_BOTTLENECK_SUMS,
    IZ_BOTTLENECK_NETWORK, /* full, and waited for */
    IZ_BOTTLENECK_UP,
    IZ_BOTTLENECK_DOWN,
    IZ_BOTTLENECK_DISK,
    IZ_BOTTLENECK_LATE,       /* waited for, but not full: begins too late */
    IZ_BOTTLENECK_TASKS,      /* too few tasks side by side */
    IZ_BOTTLENECK_SUBMISSION, /* nothing to run: the main thread is submitting
                               */
    IZ_BOTTLENECK_GAPS,       /* nothing runs, although it was submitted */
    IZ_BOTTLENECKS
};

extern const char *const iz_bottleneck_names[IZ_BOTTLENECKS];

struct iz_bottleneck_measured {
    struct iz_time_total usage;
    double host_busy;  /* mean of the host's workers beside a GPU, 0..1 */
    double submitting; /* part of the window that the main thread worked */
};

/* What the sentence needs to know to name a setting that is not there yet. */
struct iz_bottleneck_setting {
    bool gpu, recomputes, overlap, overlap_comm, breadth_first, rings, half;
    bool param_on_disk, frozen_on_disk, state_on_disk, boundary_on_disk;
    bool few_slices;      /* more are possible */
    bool recompute_asked; /* by run.recompute, not for want of memory */
    bool divisible; /* more of the optimizer can go from the host to the GPU */
    int workers, ring, slices, samples, micro_batches, in_flight;
};

enum iz_bottleneck iz_bottleneck_find(const struct iz_bottleneck_measured *m);
/* One sentence without "limited by: ": what, how much, and the setting. */
void iz_bottleneck_text(char *out, size_t size,
                        const struct iz_bottleneck_measured *m,
                        const struct iz_bottleneck_setting *s);
