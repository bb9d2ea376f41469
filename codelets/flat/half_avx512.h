/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of fp16 by the instructions that AVX-512 has: included by
 * loops.c alone.  They round to even, quiet NaN and keep subnormal numbers as
 * half.h does. */
#include <immintrin.h>

#include "codelets/flat/lookup_avx2.h"

static inline void load_f16(float *restrict y, const uint16_t *restrict x,
                            int64_t n)
{
    const int64_t whole = n - n % 16;
    for (int64_t i = 0; i < whole; i += 16)
        _mm512_storeu_ps(
            y + i, _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(x + i))));
    for (int64_t i = whole; i < n; i++)
        y[i] = iz_f16_load(x[i]);
}

static inline void round_f16(uint16_t *restrict y, const float *restrict x,
                             int64_t n)
{
    enum { even = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    const int64_t whole = n - n % 16;
    for (int64_t i = 0; i < whole; i += 16)
        _mm256_storeu_si256((void *)(y + i),
                            _mm512_cvtps_ph(_mm512_loadu_ps(x + i), even));
    for (int64_t i = whole; i < n; i++)
        y[i] = iz_f16_round(x[i]);
}

static inline void round_upper(uint16_t *restrict y, const float *restrict x,
                               int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = iz_upper(x[i]);
}

static inline void round_bf16(uint16_t *restrict y, const float *restrict x,
                              int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = iz_bf16_round(x[i]);
}
