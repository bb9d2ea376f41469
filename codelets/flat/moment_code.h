/* SPDX-License-Identifier: Apache-2.0 */
/* One element of a state in fewer bytes, and back: the arithmetic of moment.h
 * for the loops of loops.c and for the kernels of update.cu, which so have the
 * same bits.  No branches, and no two operations on floats that a compiler
 * could contract. */
#pragma once

#include <stdbool.h>

#include "codelets/base/mix.h"
#include "codelets/flat/half.h"
#include "codelets/flat/moment.h"

enum {
    IZ_CODE_MANTISSA = 3,                /* bits of a code of fp8 */
    IZ_CODE_CUT = 23 - IZ_CODE_MANTISSA, /* bits of an fp32 that it drops */
    IZ_M_BINADES = 15, /* exponents above 0, the number zero */
    IZ_V_BINADES = 31
};

/* The element of a block whose code is byte j of word w of its codes: words w
 * and w + 16 of the same elements in 16 bits have the other bytes' ones. */
IZ_EITHER int iz_code_place(int w, int j)
{
    return 2 * w + j / 2 * (IZ_MOMENT_BLOCK / 2) + j % 2;
}

/* Random bits of the block whose first element has this position. */
IZ_EITHER uint32_t iz_moment_block_bits(uint64_t key, int64_t first)
{
    return (uint32_t)(iz_mix(key +
                             (uint64_t)(first / IZ_MOMENT_BLOCK) * IZ_GOLDEN) >>
                      32);
}

/* Random bits of element i of a block that has h are h times this odd number,
 * and so each of 2^32 values for one h.  The numbers are no progression: sums
 * of a few of them that are near 0 would show as sums of roundings. */
IZ_EITHER uint32_t iz_moment_odd(uint32_t i)
{
    return (i * 0x9e3779b9u ^ 0x846ca68bu) | 1u;
}

/* So many bits of these for m, and others for v.  The lower bits of a product
 * know little of its factors; the upper ones are added to them. */
IZ_EITHER uint32_t iz_moment_noise(uint32_t random, int bits, bool v)
{
    uint32_t upper = random >> (32 - bits);
    return v ? (random ^ upper) & ((1u << bits) - 1) : upper;
}

/* x, the result of an operation, as bf16 in the upper half, rounded by 16
 * random bits; what is in the lower half is left over. */
IZ_EITHER uint32_t iz_moment_bf16_random(float x, uint32_t noise)
{
    return iz_float_bits(x) + (noise & -(uint32_t)(x == x));
}

/* most: the bits of the largest magnitude of a block.  The exponent field of
 * the fp32 numbers that have the largest exponent of a code; 255 when there is
 * infinity or NaN, or as good as.  One more when the largest number could be
 * rounded up out of its binade; never so small that a code would leave the
 * range of fp32, or so large that the inverse of its unit would. */
IZ_EITHER uint32_t iz_moment_block_power(uint32_t most, uint32_t binades)
{
    uint32_t p = (most + ((1u << IZ_CODE_CUT) - 1)) >> 23;
    p = p < binades + 16 ? binades + 16 : p;
    return most >= 0x7e800000u ? 255 : p;
}

/* What the numbers of iz_moment_m8 and iz_moment_v8 are multiplied by, and what
 * those of a block are to become such numbers: powers of two, so both are
 * exact. */
IZ_EITHER float iz_code_unit(uint32_t power)
{
    return iz_float_of_bits(power == 255 ? 0x7fc00000u : power << 23);
}

IZ_EITHER float iz_code_inverse(uint32_t power)
{
    return iz_float_of_bits(power == 255 ? 0 : (254 - power) << 23);
}

/* The code in the 8 bits above IZ_CODE_CUT as byte j of a word. */
IZ_EITHER uint32_t iz_code_byte(uint32_t c, int j)
{
    uint32_t x = j < 3 ? c >> (IZ_CODE_CUT - 8 * j) : c << (24 - IZ_CODE_CUT);
    return x & 0xffu << 8 * j;
}

/* The number of the code in byte j of a word: 0, or at least 2^-14 or 2^-30 and
 * less than 2. */
IZ_EITHER float iz_moment_m8(uint32_t word, int j)
{
    int32_t high = (int32_t)(word << (24 - 8 * j));
    return iz_float_of_bits((uint32_t)(high >> 4) & 0x87f00000u) * 0x1p112f;
}

IZ_EITHER float iz_moment_v8(uint32_t word, int j)
{
    uint32_t u = j < 3 ? word << (IZ_CODE_CUT - 8 * j) : word >> 4;
    return iz_float_of_bits(u & 0x0ff00000u) * 0x1p96f;
}

/* The code of x, multiplied by the block's inverse and rounded by IZ_CODE_CUT
 * random bits, in the 8 bits above those; what is in the others is left over.
 */
IZ_EITHER uint32_t iz_moment_m8_random(float x, float inverse, uint32_t noise)
{
    const uint32_t least = 113u << 23; /* 2^-14 */
    uint32_t u = iz_float_bits(x * inverse), a = u & 0x7fffffffu;
    /* noise is a fraction of 2^20, a smaller number one of the smallest */
    bool up = iz_float_of_bits(a) * 0x1p34f > (float)(int32_t)noise;
    a = a > least ? a : least;
    return ((up ? a + noise : 0) & 0xf7ffffffu) | (u >> 4 & 0x08000000u);
}

IZ_EITHER uint32_t iz_moment_v8_random(float x, float inverse, uint32_t noise)
{
    const uint32_t least = 97u << 23; /* 2^-30 */
    uint32_t u = iz_float_bits(x * inverse);
    u = u > least ? u : least;
    return x > 0 ? u + noise : 0;
}
