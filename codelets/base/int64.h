/* SPDX-License-Identifier: Apache-2.0 */
/* Arithmetic of sizes and counts. */
#pragma once

#include <stdint.h>

static inline int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* The least multiple of `to` > 0 that is not below n >= 0. */
static inline int64_t round_up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

/* The greatest common divisor of a > 0 and b >= 0. */
static inline int64_t gcd64(int64_t a, int64_t b)
{
    return b == 0 ? a : gcd64(b, a % b);
}
