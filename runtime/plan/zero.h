/* SPDX-License-Identifier: Apache-2.0 */
/* What the stage decides: what a rank has whole, what it fetches, and the order
 * in which the contributions to one element of a gradient are added.  That is a
 * function of the config and the number of ranks, never of timing or of where
 * bytes are. */
#pragma once

#include <stdbool.h>
#include <stdio.h>

#include "codelets/flat/dtype.h"
#include "runtime/config/config.h"

/* What forms each level's sums; tests/fake/summed.c forms all of them again.
 * The tied use of a parameter has an accumulator of its own where several
 * micro-batches are added, which is added to the unit's own at the end.  Of one
 * micro-batch the use that comes first in the backward begins the sum. */
enum iz_sum_over {
    IZ_SUM_SLICES,        /* of a micro-batch, each with a buffer of its own;
                             runtime/step/reduce.c */
    IZ_SUM_MICRO_BATCHES, /* there; where ranks are added first, reduce_add
                             adds to what is there */
    IZ_SUM_RANKS,         /* of a group, which are consecutive; reduce_add in
                             runtime/comm/reduce.c */
    IZ_SUM_GROUPS         /* of ranks, whose level is the one below;
                             reduce_between there */
};

/* The n sums of the level below, in order: the first one begins the running
 * sum, each other one is added to it in fp32.  The running sum is rounded to
 * `kept` each time, and what goes to the level above to `given`. */
struct iz_sum_level {
    enum iz_sum_over over;
    int n;
    enum iz_dtype kept, given;
};

#define IZ_SUM_LEVELS 4

/* From the contributions up. */
struct iz_sum_order {
    struct iz_sum_level level[IZ_SUM_LEVELS];
};

/* What the config says.  auto: local first if breadth-first, where a rank needs
 * the whole gradient of one unit at a time; depth-first only in stages 0 to 2
 * whose optimizer no GPU offloads. */
enum iz_sum_first iz_sum_choose(const struct iz_config *c, bool gpu);

/* Whether so many ranks can add like that: in stage 3 none has a whole
 * gradient, but of the unit whose micro-batches come together. */
bool iz_sum_possible(const struct iz_config *c, int ranks);

/* Ranks of a group. */
int iz_sum_group(const struct iz_sum_order *o);
/* Whether several micro-batches are added below several ranks. */
bool iz_sum_is_local(const struct iz_sum_order *o);
/* As words, from the contributions up, without levels of one. */
void iz_sum_order_print(const struct iz_sum_order *o, FILE *out);

/* Where an array lives, and how much of it a rank keeps there. */
struct iz_plan_kept {
    enum iz_home home;
    bool whole; /* every rank has all of it; else its shard */
};

/* Where a rank adds its own micro-batches before the ranks add theirs. */
enum iz_sums {
    IZ_SUMS_NONE,           /* ranks first, or there is nothing to add */
    IZ_SUMS_IN_ACCUMULATOR, /* which is whole then */
    IZ_SUMS_IN_RING,        /* all micro-batches come together */
    IZ_SUMS_OF_UNIT         /* each unit has a buffer */
};

/* What stage, homes and ratio have become. */
struct iz_plan_zero {
    /* Frozen parameters are beside the trained ones, or have buffers of their
     * own with another home.  The home of gradients is where they are summed
     * for the optimizer. */
    struct iz_plan_kept param, frozen, grad, state;
    bool fetch; /* units are copied or gathered into a ring */
    /* Consecutive ranks that a fetch does not leave.  Less than all: they have
     * a copy of all shards among them. */
    int group;
    enum iz_sums sums;
    /* On one rank that offloads its optimizer the GPU adds, takes the squares,
     * and sends each sum to the host once per step.  The bits are the same, so
     * memory alone decides (fit.c). */
    bool sums_on_gpu;
    /* Some chunks of an offloaded optimizer are updated by the GPU: new
     * parameters come down where they live there. */
    bool divided; /* a ratio below 1 was asked for */
    bool split;   /* ... and leaves the GPU a chunk */
    /* The gradients of those chunks are summed and kept on the GPU: not where
     * the collectives of the host form the sums. */
    bool grads_apart;
    bool pin_cpu; /* lock the cpu tier into memory */
    /* Updates need neither the norm nor a loss scale: they may follow their
     * gradients at once. */
    bool early;
};

struct iz_plan;
struct iz_plan_unit;

/* Sets `zero`, the types and the order of sums of a plan that has its schedule:
 * nothing else in a plan depends on the stage itself. */
void iz_plan_stage(struct iz_plan *p, const struct iz_config *c);
/* Whether the unit is copied or gathered into a ring. */
bool iz_plan_fetches(const struct iz_plan *p, const struct iz_plan_unit *g);
