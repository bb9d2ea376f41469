/* SPDX-License-Identifier: Apache-2.0 */
/* Vectors of a SIMD level's length, and functions of each of their numbers: for
 * attention_loops.c, which is compiled once per level. */
#pragma once

#include <stdint.h>

#include "codelets/ops/row_math.h"

#define LOG2_E 1.4426950408889634

typedef float vec __attribute__((vector_size(4 * IZ_LANES), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * IZ_LANES), may_alias));

/* a where the mask is -1, b where it is 0. */
static inline vec pick(ivec mask, vec a, vec b)
{
    return (vec)((mask & (ivec)a) | (~mask & (ivec)b));
}

/* -1 in the first n lanes, 0 in the others. */
static inline ivec first_lanes(int64_t n)
{
    static const int32_t number[16] __attribute__((aligned(64))) = {
        0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return *(const ivec *)number < (int32_t)n;
}

/* As iz_math_exp2f. */
static inline vec exp2_of(vec x)
{
    const float magic =
        12582912.f; /* 1.5 * 2^23: the sum is a rounded integer */
    ivec low = x < -125.f;
    vec t = x + magic, r = x - (t - magic);
    vec p = IZ_EXP2_PART(r);
    p *= (vec)(((ivec)t + 127) << 23);
    return (vec)(~low & (ivec)p);
}

/* tanh(x) = m / (m + 2) to about 2 ulp, m = e^2|x| - 1.  With 2|x| = (n + r)
 * ln 2, m is 2^n (2^r - 1) + 2^n - 1, which loses no digits near 0. */
static inline vec tanh_of(vec x)
{
    const float magic =
        12582912.f; /* 1.5 * 2^23: the sum is a rounded integer */
    const ivec sign = (ivec){0} + INT32_MIN;
    vec a = (vec)((ivec)x & ~sign);
    a = (float)(2 * LOG2_E) * pick(a > 10.f, (vec){0} + 10.f, a);
    vec t = a + magic, r = a - (t - magic);
    vec power = (vec)(((ivec)t + 127) << 23);
    vec m = power * IZ_EXP2_LESS_1(r) + (power - 1.f);
    return (vec)((ivec)(m / (m + 2.f)) | ((ivec)x & sign));
}
