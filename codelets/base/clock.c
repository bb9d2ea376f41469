/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/base/clock.h"

#include <time.h>

int64_t iz_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}
