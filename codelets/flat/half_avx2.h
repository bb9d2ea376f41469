/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of fp16 by the instructions that F16C has, which every AVX2 processor
 * has: included by loops.c alone.  They round to even, quiet NaN and keep
 * subnormal numbers as half.h does.  And the rounding to bf16, which a compiler
 * makes of twice as many instructions: it narrows before it chooses. */
#include <immintrin.h>

#include "codelets/flat/lookup_avx2.h"

/* Each of 8 numbers that is not NaN as bf16, in the lower half of its place;
 * a number between two of them to the even one, or away from zero. */
static inline __m256i bf16_of(__m256 x, bool away)
{
    __m256i u = _mm256_castps_si256(x), upper = _mm256_srli_epi32(u, 16);
    __m256i odd = away ? _mm256_set1_epi32(1)
                       : _mm256_and_si256(upper, _mm256_set1_epi32(1));
    __m256i half = _mm256_add_epi32(u, _mm256_set1_epi32(0x7fff));
    return _mm256_srli_epi32(_mm256_add_epi32(half, odd), 16);
}

static inline void to_bf16(uint16_t *restrict y, const float *restrict x,
                           int64_t n, bool away, bool past_caches)
{
    enum { in_order = 0xd8 }; /* packing keeps the two lanes apart */
    const int64_t whole = n - n % 16;
    for (int64_t i = 0; i < whole; i += 16) {
        __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + 8);
        __m256i two = _mm256_packus_epi32(bf16_of(a, away), bf16_of(b, away));
        two = _mm256_permute4x64_epi64(two, in_order);
        if (past_caches)
            _mm256_stream_si256((void *)(y + i), two);
        else
            _mm256_storeu_si256((void *)(y + i), two);
        /* NaN, in either: seldom, so it is looked for once. */
        if (_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_UNORD_Q)))
            for (int64_t j = i; j < i + 16; j++)
                y[j] = away ? iz_half_upper(x[j]) : iz_bf16_round(x[j]);
    }
    for (int64_t i = whole; i < n; i++)
        y[i] = away ? iz_half_upper(x[i]) : iz_bf16_round(x[i]);
}

static inline void round_bf16(uint16_t *restrict y, const float *restrict x,
                              int64_t n)
{
    to_bf16(y, x, n, false, false);
}

static inline void round_upper(uint16_t *restrict y, const float *restrict x,
                               int64_t n)
{
    to_bf16(y, x, n, true, false);
}

static inline void stream_upper(uint16_t *restrict y, const float *restrict x,
                                int64_t n)
{
    to_bf16(y, x, n, true, (uintptr_t)y % 32 == 0);
}

static inline void stream_end(void)
{
    _mm_sfence();
}

static inline void load_f16(float *restrict y, const uint16_t *restrict x,
                            int64_t n)
{
    const int64_t whole = n - n % 8;
    for (int64_t i = 0; i < whole; i += 8)
        _mm256_storeu_ps(
            y + i, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(x + i))));
    for (int64_t i = whole; i < n; i++)
        y[i] = iz_f16_load(x[i]);
}

static inline void round_f16(uint16_t *restrict y, const float *restrict x,
                             int64_t n)
{
    enum { even = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC };
    const int64_t whole = n - n % 8;
    for (int64_t i = 0; i < whole; i += 8)
        _mm_storeu_si128((void *)(y + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(x + i), even));
    for (int64_t i = whole; i < n; i++)
        y[i] = iz_f16_round(x[i]);
}
