/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of the planner share: a GPT of 2.6B parameters. */
#pragma once

#include <stdio.h>

#include "runtime/plan/plan.h"

extern struct iz_model *plan_model;

int plan_open(void **state);
int plan_close(void **state);
/* One sample a step of one rank, nothing offloaded. */
struct iz_config plan_config(int stage, enum iz_dtype t);
/* iz_plan_fit into so many bytes of the host. */
int plan_fit(struct iz_plan *p, const struct iz_config *c, int64_t bytes,
             FILE *err);
/* Of the model. */
double plan_parameters(void);
