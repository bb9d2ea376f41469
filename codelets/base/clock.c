/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/base/clock.h"

#include <time.h>

static int64_t clock_ns(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

int64_t iz_clock_ns(void)
{
    return clock_ns(CLOCK_MONOTONIC);
}

int64_t iz_clock_cpu_ns(void)
{
    return clock_ns(CLOCK_THREAD_CPUTIME_ID);
}
