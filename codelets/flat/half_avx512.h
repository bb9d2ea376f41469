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

/* Each of 16 numbers as iz_half_upper has it, in the lower half of its place.
 */
static inline __m512i upper_of(const float *x)
{
    __m512 f = _mm512_loadu_ps(x);
    __m512i u = _mm512_castps_si512(f);
    __m512i up = _mm512_add_epi32(u, _mm512_set1_epi32(0x8000));
    up = _mm512_mask_or_epi32(up, _mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q), u,
                              _mm512_set1_epi32(0x400000));
    return _mm512_srli_epi32(up, 16);
}

static inline void to_upper(uint16_t *restrict y, const float *restrict x,
                            int64_t n, bool past_caches)
{
    const __m512i in_order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    const int64_t whole = n - n % 32;
    for (int64_t i = 0; i < whole; i += 32) {
        __m512i two =
            _mm512_packus_epi32(upper_of(x + i), upper_of(x + i + 16));
        two = _mm512_permutexvar_epi64(in_order, two);
        if (past_caches)
            _mm512_stream_si512((void *)(y + i), two);
        else
            _mm512_storeu_si512(y + i, two);
    }
    for (int64_t i = whole; i < n; i++)
        y[i] = iz_half_upper(x[i]);
}

static inline void round_upper(uint16_t *restrict y, const float *restrict x,
                               int64_t n)
{
    to_upper(y, x, n, false);
}

static inline void stream_upper(uint16_t *restrict y, const float *restrict x,
                                int64_t n)
{
    to_upper(y, x, n, (uintptr_t)y % 64 == 0);
}

static inline void stream_end(void)
{
    _mm_sfence();
}

static inline void round_bf16(uint16_t *restrict y, const float *restrict x,
                              int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = iz_bf16_round(x[i]);
}
