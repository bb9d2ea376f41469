/* SPDX-License-Identifier: Apache-2.0 */
/* One 16-bit float to fp32 and back, as integer arithmetic without branches, so
 * that a loop over any of these is vectorised and gives the same bits at every
 * SIMD level.  Whole buffers are converted by iz_cast. */
#pragma once

#include <stdint.h>
#include <string.h>

#include "codelets/base/build.h"

IZ_EITHER uint32_t iz_float_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof(u));
    return u;
}

IZ_EITHER float iz_float_of_bits(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof(x));
    return x;
}

static inline float iz_bf16_load(uint16_t h)
{
    return iz_float_of_bits((uint32_t)h << 16);
}

static inline uint16_t iz_bf16_round(float x)
{
    uint32_t u = iz_float_bits(x);
    uint32_t even = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    uint32_t nan = (u >> 16) | 0x40u;
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? nan : even);
}

/* ---- fp32 in two halves ----
 *
 * The upper half of x is the nearest bf16, and of two equally near ones that
 * away from zero.  The lower half is what x lies beyond it, in units in the
 * last place of x.  Both together are x.  Rounding to even would not do: 65537
 * numbers round to an even bf16, and a lower half has 65536 values.  NaN stays
 * NaN, but not the same one: there are fewer NaN among bf16. */

IZ_EITHER uint16_t iz_half_upper(float x)
{
    uint32_t u = iz_float_bits(x);
    return (uint16_t)((x != x ? u | 0x400000u : u + 0x8000u) >> 16);
}

IZ_EITHER uint16_t iz_half_lower(float x)
{
    return (uint16_t)iz_float_bits(x);
}

IZ_EITHER float iz_half_join(uint16_t upper, uint16_t lower)
{
    return iz_float_of_bits(((uint32_t)upper << 16) + lower -
                            ((uint32_t)(lower & 0x8000u) << 1));
}

static inline float iz_f16_load(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t a = (uint32_t)(h & 0x7fffu) << 13;
    /* Subnormal: 2^-14 (1 + m/1024) - 2^-14 is exact and is m * 2^-24. */
    float tiny = iz_float_of_bits(a + 0x38800000u) - 0x1p-14f;
    uint32_t u = a + 0x38000000u; /* exponent bias 15 -> 127 */

    u = a >= 0x0f800000u ? u + 0x38000000u : u; /* infinity, NaN */
    u = a > 0x0f800000u ? u | 0x00400000u : u;  /* NaN becomes quiet */
    u = a < 0x00800000u ? iz_float_bits(tiny) : u;
    return iz_float_of_bits(u | sign);
}

static inline uint16_t iz_f16_round(float x)
{
    uint32_t u = iz_float_bits(x), a = u & 0x7fffffffu;
    /* Below 2^-14: an addition whose ulp is 2^-24 does the rounding. */
    uint32_t tiny = iz_float_bits(iz_float_of_bits(a) + 0.5f) - 0x3f000000u;
    uint32_t nan = 0x7e00u | ((a >> 13) & 0x3ffu);
    uint32_t h = (a - 0x38000000u + 0xfffu + ((a >> 13) & 1u)) >> 13;
    h = a < 0x38800000u ? tiny : h;
    h = a >= 0x47800000u ? 0x7c00u : h; /* 65536 and more */
    h = a > 0x7f800000u ? nan : h;
    return (uint16_t)(h | ((u >> 16) & 0x8000u));
}
