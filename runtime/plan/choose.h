/* SPDX-License-Identifier: Apache-2.0 */
/* What a config leaves open and the plan decides, before step 0: the ratio of
 * an offloaded optimizer, the cut of a step into micro-batches, the order of
 * sums, the logits of a GPU at a time, whose attention. */
#pragma once

#include "runtime/plan/fit.h"

/* Of what fits on all ranks, takes what makes the shortest step by iz_forecast
 * on each of them:
 * - a ratio "auto" in steps of 0.05, the largest of equal ones; 1 where nothing
 *   can be divided or nothing fits;
 * - rows of a chunk "auto": all if that fits;
 * - of micro-batches "auto" the number; without a GPU the fewest;
 * - an order of sums "auto" as iz_sum_choose says; ranks first where only that
 *   fits;
 * - bytes of logits (run.gpu_logits_bytes 0): IZ_LOGITS_LARGE_BYTES if a plan
 *   may use more than 64 GiB of the GPU and nothing more is recomputed;
 * - cuDNN's attention where it is possible, fits and recomputes little more,
 * else ours, and tells why in target. */
void iz_plan_choose(struct iz_config *c, const struct iz_plan_for *f);

/* The plan of a config that is completed so.  rates(arg) finds f->rate and the
 * rates of f->target for the plan *p as it is without.  All ranks; negative
 * errno, on each. */
int iz_plan_complete(struct iz_plan *p, struct iz_config *c,
                     const struct iz_plan_for *f, int (*rates)(void *arg),
                     void *arg);
