/* SPDX-License-Identifier: Apache-2.0 */
/* The order in which the contributions to one element of a gradient are added:
 * a function of the config and the number of ranks, never of timing or of where
 * bytes are. */
#pragma once

#include <stdbool.h>
#include <stdio.h>

#include "codelets/flat/dtype.h"
#include "runtime/config/config.h"

/* Formed by runtime/step/reduce.c but for ranks, by runtime/comm/reduce.c (or,
 * with NCCL, reduce_nccl in gpu.c), and for micro-batches in pieces, by
 * accumulator.c. tests/fake/summed.c forms all of them again. */
enum iz_sum_over {
    IZ_SUM_SLICES,
    IZ_SUM_MICRO_BATCHES,
    IZ_SUM_RANKS, /* of a group: consecutive ones */
    IZ_SUM_GROUPS /* next to the level of ranks, which is below */
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

/* From the contributions up.  A contribution has the type `wire`. */
struct iz_sum_order {
    enum iz_dtype wire;
    struct iz_sum_level level[IZ_SUM_LEVELS];
};

/* What the config says, or auto: local first, where a rank has whole gradients
 * anyway or needs that of one unit at a time. */
enum iz_sum_first iz_sum_choose(const struct iz_config *c, bool gpu);

/* Whether so many ranks can add like that: in stage 3 none has a whole
 * gradient, but of the unit whose micro-batches come together. */
bool iz_sum_possible(const struct iz_config *c, int ranks);

/* group: divides the ranks; 1 and all of them mean the same, one group.  kept:
 * type of the accumulators. */
struct iz_sum_order iz_sum_order_of(enum iz_sum_first first, int slices,
                                    int micro_batches, int ranks, int group,
                                    enum iz_dtype wire, enum iz_dtype kept);
/* Ranks of a group. */
int iz_sum_group(const struct iz_sum_order *o);
/* Whether several micro-batches are added below several ranks. */
bool iz_sum_is_local(const struct iz_sum_order *o);
/* As words, from the contributions up, without levels of one. */
void iz_sum_order_print(const struct iz_sum_order *o, FILE *out);
