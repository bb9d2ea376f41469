/* SPDX-License-Identifier: Apache-2.0 */
/* Makes a plan fit into the memory there is: what units recompute, where a
 * single rank adds, and, where nothing helps, what to change. */
#pragma once

#include "runtime/plan/limits.h"

/* What a config is completed for, or tried. */
struct iz_plan_for {
    const struct iz_model *model;
    int ranks, rank;
    /* With rates of what it computes on; told why its attention is ours. */
    struct iz_target *target;
    const struct iz_limits *limit;
    const struct iz_rate *rate; /* IZ_RATES of them; read if there is a GPU */
    /* Whether all ranks say yes; NULL: this one is alone. */
    bool (*all)(void *arg, bool ok);
    void *arg;
};

/* Fits the plan into the limits: with recompute "auto" units keep what fits.
 * Where nothing fits, prints the table and the smallest change of
 * the config that would, and returns -ENOMEM. */
int iz_plan_fit(struct iz_plan *p, const struct iz_config *c,
                const struct iz_model *m, const struct iz_limits *limit,
                FILE *err);

/* A plan of a config, which is cleared again. */
struct iz_trial {
    bool within;                                     /* the limits */
    int64_t host_bytes, device_bytes, scratch_bytes; /* that it needs */
    double params;
    const char *why_own; /* of the plan */
    /* Of one that is within and keeps activations: seconds, 0: not predicted;
     * INFINITY of others. */
    double step_s;
    double recomputed;         /* iz_plan_recomputed */
    bool sums_on_gpu, attends; /* units attend */
};

/* keep: as iz_plan_fit fits it, and its step is predicted; else with recompute
 * "auto" all units recompute all. */
struct iz_trial iz_plan_try(const struct iz_plan_for *f,
                            const struct iz_config *c, bool keep);

/* Whether a part of the optimizer may be left to a GPU, as
 * runtime/config/check.c wants of a ratio below 1; and the steps in which one
 * is looked for. */
bool iz_plan_may_split(const struct iz_config *c);
#define IZ_RATIO_STEPS 20

/* Blocks of the largest model of this shape that fits with this config, 0: not
 * one, or so many of which no more are tried; *params: its parameters.  The
 * model has blocks between its first unit and its last. */
#define IZ_PLAN_MOST_BLOCKS (1 << 12)
int iz_plan_largest(const struct iz_plan *p, const struct iz_config *c,
                    const struct iz_model *m, const struct iz_limits *limit,
                    double *params);

/* Counts anew with sums on the GPU or not, where they can be. */
void iz_plan_sum_on_gpu(struct iz_plan *p, const struct iz_config *c,
                        const struct iz_model *m, bool on_gpu);
/* ---- recompute.c ---- */

/* Counts anew with units that recompute this, but no more than gains memory. */
void iz_plan_recompute(struct iz_plan *p, const struct iz_model *m,
                       enum iz_recompute level);
/* Lets units recompute less, of the flops as many less as memory allows: p is
 * within the limits and stays there. */
void iz_plan_keep(struct iz_plan *p, const struct iz_model *m,
                  const struct iz_limits *limit);
/* Of the flops of all forwards, those that backwards recompute; 0: none does.
 */
double iz_plan_recomputed(const struct iz_plan *p);
/* How many units that have something to keep recompute this. */
int iz_plan_recomputing(const struct iz_plan *p, const struct iz_model *m,
                        enum iz_recompute level);
/* A line with that part and these numbers, if anything is recomputed. */
void iz_plan_recompute_print(const struct iz_plan *p, const struct iz_model *m,
                             FILE *out);
