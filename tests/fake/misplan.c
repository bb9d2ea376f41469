/* SPDX-License-Identifier: Apache-2.0 */
/* Linked into a program, between it and its planner: on rank MISPLAN_RANK the
 * plan says MISPLAN_BYTES more than it should for the class MISPLAN_CLASS in
 * the tier MISPLAN_TIER.  Without them the plan is as it is. */
#include <stdlib.h>
#include <string.h>

#include "runtime/plan/plan.h"

/* The linker's names for what the program calls and for what there is. */
int __wrap_iz_plan_make(struct iz_plan *p, const struct iz_config *c,
                        const struct iz_model *m, int ranks, int rank,
                        const struct iz_target *t);
int __real_iz_plan_make(struct iz_plan *p, const struct iz_config *c,
                        const struct iz_model *m, int ranks, int rank,
                        const struct iz_target *t);

static bool wished(const char *variable, const char *value)
{
    const char *wish = getenv(variable);
    return wish && !strcmp(wish, value);
}

int __wrap_iz_plan_make(struct iz_plan *p, const struct iz_config *c,
                        const struct iz_model *m, int ranks, int rank,
                        const struct iz_target *target)
{
    int r = __real_iz_plan_make(p, c, m, ranks, rank, target);
    const char *victim = getenv("MISPLAN_RANK");
    if (r || !victim || atoi(victim) != rank)
        return r;
    for (int t = 0; t < IZ_TIERS; t++)
        for (int k = 0; k < IZ_MEM_CLASSES; k++)
            if (wished("MISPLAN_TIER", iz_tier_names[t]) &&
                wished("MISPLAN_CLASS", iz_class_names[k]))
                p->bytes.b[t][k] += atoll(getenv("MISPLAN_BYTES"));
    return 0;
}
