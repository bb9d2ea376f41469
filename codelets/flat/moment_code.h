/* SPDX-License-Identifier: Apache-2.0 */
/* One element of a state in fewer bytes, and back: the arithmetic of moment.h
 * for the loops of loops.c and for the kernels of update.cu, which so have the
 * same bits.  Integers without branches, and no two operations on floats that a
 * compiler could contract. */
#pragma once

#include "codelets/base/mix.h"
#include "codelets/flat/half.h"
#include "codelets/flat/moment.h"

enum {
    IZ_CODE_MANTISSA = 3,                /* bits of a code of fp8 */
    IZ_CODE_CUT = 23 - IZ_CODE_MANTISSA, /* bits of an fp32 that it drops */
    IZ_M_BINADES = 15, /* exponents above 0, the number zero */
    IZ_V_BINADES = 31
};

/* Random bits of the block whose first element has this position. */
IZ_EITHER uint32_t iz_block_bits(uint64_t key, int64_t first)
{
    return (uint32_t)(iz_mix(key +
                             (uint64_t)(first / IZ_MOMENT_BLOCK) * IZ_GOLDEN) >>
                      32);
}

/* 16 random bits of element i of a block with random bits h: the upper half of
 * a product, on which all bits of its factors act. */
IZ_EITHER uint32_t iz_random16(uint32_t h, uint32_t i)
{
    h += i * 0x9e3779b9u;
    return ((h ^ (h >> 16)) * 0x7feb352du) >> 16;
}

/* x as bf16, rounded by 16 random bits r. */
IZ_EITHER uint16_t iz_bf16_random(float x, uint32_t r)
{
    uint32_t u = iz_float_bits(x);
    uint32_t up = (u + r) >> 16;
    uint32_t nan = (u >> 16) | 0x40u;
    return (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? nan : up);
}

/* most: the bits of the largest magnitude of a block.  The exponent field of
 * the fp32 numbers that have the largest exponent of a code; 255 when there is
 * infinity or NaN.  One more when the largest number could be rounded up out of
 * its binade; never so small that a code or its inverse would leave the range
 * of fp32. */
IZ_EITHER uint32_t iz_block_power(uint32_t most, uint32_t binades)
{
    uint32_t p = (most + ((1u << IZ_CODE_CUT) - 1)) >> 23;
    p = p < binades + 16 ? binades + 16 : p;
    return most >= 0x7f000000u ? 255 : p;
}

/* What a code of power p has more in the exponent field than it shows. */
IZ_EITHER uint32_t iz_code_hides(uint32_t power, uint32_t binades)
{
    return (power - binades) << 23;
}

IZ_EITHER float iz_m8_load(uint32_t c, uint32_t power)
{
    uint32_t a = c & 0x7fu;
    uint32_t more = iz_code_hides(power, IZ_M_BINADES);
    uint32_t u = a ? (a << IZ_CODE_CUT) + more : 0;
    return iz_bits_float(u | (c & 0x80u) << 24 |
                         (power == 255 ? 0x7fc00000u : 0));
}

IZ_EITHER float iz_v8_load(uint32_t c, uint32_t power)
{
    uint32_t more = iz_code_hides(power, IZ_V_BINADES);
    uint32_t u = c ? (c << IZ_CODE_CUT) + more : 0;
    return iz_bits_float(u | (power == 255 ? 0x7fc00000u : 0));
}

/* The code of x in a block of this power, rounded by 16 random bits r. */
IZ_EITHER uint8_t iz_m8_random(float x, uint32_t power, uint32_t r)
{
    uint32_t more = power == 255 ? 0 : iz_code_hides(power, IZ_M_BINADES);
    uint32_t least = more + (1u << 23);
    /* 2^16 divided by the smallest number, of which it is a fraction */
    float by = iz_bits_float((254u - (least >> 23) + 16u) << 23);
    uint32_t u = iz_float_bits(x), a = u & 0x7fffffffu;
    uint32_t c = (a + (r << (IZ_CODE_CUT - 16)) - more) >> IZ_CODE_CUT;
    uint32_t tiny =
        iz_bits_float(a) * by > (float)(int32_t)r ? 1u << IZ_CODE_MANTISSA : 0;
    c = a < least ? tiny : c;
    return (uint8_t)(c | (c ? (u >> 24) & 0x80u : 0));
}

IZ_EITHER uint8_t iz_v8_random(float x, uint32_t power, uint32_t r)
{
    uint32_t more = power == 255 ? 0 : iz_code_hides(power, IZ_V_BINADES);
    uint32_t least = more + (1u << 23);
    uint32_t u = iz_float_bits(x) & 0x7fffffffu;
    uint32_t c = (u + (r << (IZ_CODE_CUT - 16)) - more) >> IZ_CODE_CUT;
    c = u < least ? 1u << IZ_CODE_MANTISSA : c;
    return (uint8_t)(u ? c : 0);
}
