/* SPDX-License-Identifier: Apache-2.0 */
/* Named by STARPU_SCHED_LIB: StarPU's scheduler of the wanted name, which on
 * rank KEEP_RANK takes task number KEEP_TASK and gives it to nobody. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include <starpu.h>
#include <starpu_scheduler.h>

#include "tests/fake/rank.h"

static struct starpu_sched_policy policy;
static int (*push)(struct starpu_task *task);

static int keep_one(struct starpu_task *task)
{
    static atomic_int n;
    if (is_rank("KEEP_RANK") &&
        atomic_fetch_add(&n, 1) == atoi(getenv("KEEP_TASK")))
        return 0;
    return push(task);
}

struct starpu_sched_policy *starpu_get_sched_lib_policy(const char *name)
{
    struct starpu_sched_policy **p = starpu_sched_get_predefined_policies();
    while (*p && strcmp((*p)->policy_name, name) != 0)
        p++;
    if (!*p)
        return NULL;
    policy = **p;
    push = policy.push_task;
    policy.push_task = keep_one;
    return &policy;
}
