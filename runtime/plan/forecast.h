/* SPDX-License-Identifier: Apache-2.0 */
/* The time that a step of a plan is predicted to take, from the rates of a
 * machine: what choices of the plan are compared by (choose.c). */
#pragma once

#include "codelets/task/where.h"
#include "runtime/plan/plan.h"

/* Seconds of a rank's step; all 0 where no GPU computes, or a rate that is
 * needed is not known. */
struct iz_forecast {
    double step_s;
    double
        compute_s; /* of it, forwards and backwards with what they recompute */
    double host_s; /* what the host's part of the optimizer takes, beside */
};

/* rate: of IZ_RATES, for this plan; the costs of its units are those of
 * p->target.compute. */
struct iz_forecast iz_forecast(const struct iz_plan *p,
                               const struct iz_rate *rate);

/* A line with these, unless they are 0. */
void iz_forecast_print(const struct iz_plan *p, const struct iz_rate *rate,
                       FILE *out);
