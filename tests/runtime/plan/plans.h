/* SPDX-License-Identifier: Apache-2.0 */
/* What the suites of the planner share: a GPT of 2.6B parameters, configs and
 * targets, and two plans that the end of a suite frees. */
#pragma once

#include "tests/runtime/fixture.h"

#include "runtime/plan/choose.h"
#include "runtime/plan/limits.h"
#include "runtime/tier/memory.h"

extern const struct iz_target target1, target2, gpu_bf16;
extern struct iz_model *model;
extern struct iz_plan p, q;

/* How a way out begins. */
#define WAY "it fits with zero_optimization.offload_optimizer."

int plans_open(void **state);
int plans_close(void **state);

/* One sample a step of one rank, nothing offloaded. */
struct iz_config plain(int stage, enum iz_dtype t);
struct iz_config offloaded(double ratio, enum iz_home params);

/* The plan of the first of these ranks, in place of the one before. */
void make(struct iz_plan *out, const struct iz_config *c, int ranks,
          const struct iz_target *t);
/* iz_plan_fit; what it says is in `said`. */
int fit(struct iz_plan *plan, const struct iz_config *c, struct iz_limits l);
/* iz_plan_choose of the first rank on a machine whose host's workers move so
 * many bytes together; others_refuse: another rank says no to all it asks. */
extern bool others_refuse;
void choose(struct iz_config *c, int ranks, struct iz_target *t,
            struct iz_limits l, double host_bytes_per_s);
/* Bytes of the host and of the GPU with this ratio; the plan is p. */
struct iz_limits needs(struct iz_config c, double ratio);
