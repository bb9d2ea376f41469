/* SPDX-License-Identifier: Apache-2.0 */
/* Building blocks of the CPU kernels that work row by row: an exponential that
 * the compiler vectorises, and reductions.  For use inside IZ_SIMD functions.
 * The order of a sum depends on the length and on the SIMD level of the
 * processor, so it is the same for all workers of a machine; NaN and infinity
 * pass through. */
#pragma once

#include <stdint.h>

/* e^x to about 1 ulp; 0 below -86.5 (where the result would come near the
 * subnormal range), infinity from 88.73 up. */
static inline float iz_math_expf(float x)
{
    const float magic =
        12582912.f; /* 1.5 * 2^23: the sum is a rounded integer */
    union {
        float f;
        uint32_t u;
    } t, s;
    float c = x < -86.5f ? -86.5f : x;
    c = c > 89.f ? 89.f : c;
    t.f = c * 1.44269504f + magic;
    float n = t.f - magic;
    float r = (c - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.392618359e-3f;
    p = p * r + 8.363179053e-3f;
    p = p * r + 4.166655462e-2f;
    p = p * r + 1.666657699e-1f;
    p = p * r + 0.5f;
    p = p * (r * r) + r + 1.f;
    /* 2^(n-1), doubled afterwards, so that n = 128 does not overflow early. */
    s.u = (t.u + 126u) << 23;
    p = p * s.f * 2.f;
    return x < -86.5f ? 0.f : p;
}

/* 2^r - 1 and 2^r for |r| <= 1/2, a number or a vector. */
#define IZ_EXP2_LESS_1(r)                                                      \
    ((((((1.55946778e-4f * (r) + 1.34066434e-3f) * (r) + 9.61769279e-3f) *     \
            (r) +                                                              \
        5.55031039e-2f) *                                                      \
           (r) +                                                               \
       2.40226522e-1f) *                                                       \
          (r) +                                                                \
      6.93147242e-1f) *                                                        \
     (r))
#define IZ_EXP2_PART(r) (IZ_EXP2_LESS_1(r) + 1.f)

/* 2^x to about 1 ulp for x up to 127, beyond which it may be anything; 0 below
 * -125. */
static inline float iz_math_exp2f(float x)
{
    const float magic =
        12582912.f; /* 1.5 * 2^23: the sum is a rounded integer */
    union {
        float f;
        uint32_t u;
    } t, s;
    t.f = x + magic;
    float r = x - (t.f - magic);
    float p = IZ_EXP2_PART(r);
    s.u = (t.u + 127u) << 23;
    p = p * s.f;
    return x < -125.f ? 0.f : p;
}

/* The largest of n > 0 numbers; NaN may be skipped.  Side by side, because a
 * compiler may not reorder a maximum of numbers that could be NaN. */
static inline float iz_row_max(const float *s, int64_t n)
{
    enum { LANES = 64 };
    float m[LANES], best = s[0];
    int64_t j = 0;
    for (int l = 0; l < LANES; l++)
        m[l] = s[0];
    for (; j + LANES <= n; j += LANES)
#pragma omp simd
        for (int l = 0; l < LANES; l++)
            m[l] = s[j + l] > m[l] ? s[j + l] : m[l];
    for (; j < n; j++)
        best = s[j] > best ? s[j] : best;
    for (int l = 0; l < LANES; l++)
        best = m[l] > best ? m[l] : best;
    return best;
}

/* s = exp(s - m); returns the sum, formed in short pieces because a row may
 * have a vocabulary's length. */
static inline float iz_row_exp(float *s, float m, int64_t n)
{
    enum { PIECE = 1024 };
    double sum = 0;
    for (int64_t from = 0; from < n; from += PIECE) {
        int64_t to = n - from < PIECE ? n : from + PIECE;
        float part = 0;
#pragma omp simd reduction(+ : part)
        for (int64_t j = from; j < to; j++) {
            float e = iz_math_expf(s[j] - m);
            s[j] = e;
            part += e;
        }
        sum += (double)part;
    }
    return (float)sum;
}
