/* SPDX-License-Identifier: Apache-2.0 */
/* Weights in 4 bits; the loops over weights are in loops.c. */
#include "codelets/flat/nf4.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/flat/simd.h"

enum { CODES = 256, ZERO = 127 }; /* of a scale; the code of 0 */

/* The codes from zero up.  Those below are the same with a minus, and there is
 * none of -1. */
static const float upward[CODES - ZERO] = {
    0.0000000f,      5.50000038e-07f, 3.25000019e-06f, 7.7499999e-06f,
    2.12499981e-05f, 4.37499984e-05f, 6.62500024e-05f, 8.87499991e-05f,
    0.000156250011f, 0.000268750038f, 0.000381250022f, 0.000493750034f,
    0.000606250076f, 0.00071875006f,  0.000831249985f, 0.000943750085f,
    0.00128124992f,  0.00184375001f,  0.00240624999f,  0.00296874996f,
    0.00353124971f,  0.00409374991f,  0.00465624966f,  0.00521875033f,
    0.00578125007f,  0.00634374982f,  0.00690625003f,  0.00746874977f,
    0.00803124998f,  0.00859375019f,  0.00915624946f,  0.00971874967f,
    0.0114062503f,   0.0142187504f,   0.0170312505f,   0.0198437516f,
    0.0226562507f,   0.0254687499f,   0.028281251f,    0.0310937501f,
    0.0339062512f,   0.0367187522f,   0.0395312496f,   0.0423437469f,
    0.0451562516f,   0.047968749f,    0.05078125f,     0.053593751f,
    0.0564062484f,   0.0592187531f,   0.0620312504f,   0.0648437515f,
    0.0676562563f,   0.0704687461f,   0.0732812509f,   0.0760937482f,
    0.078906253f,    0.0817187577f,   0.0845312476f,   0.0873437524f,
    0.0901562497f,   0.0929687545f,   0.0957812592f,   0.0985937491f,
    0.107031256f,    0.12109375f,     0.135156244f,    0.149218753f,
    0.163281247f,    0.177343756f,    0.19140625f,     0.205468744f,
    0.219531253f,    0.233593747f,    0.247656241f,    0.26171875f,
    0.275781274f,    0.289843738f,    0.303906262f,    0.317968726f,
    0.33203125f,     0.346093744f,    0.360156238f,    0.374218762f,
    0.388281226f,    0.40234375f,     0.416406244f,    0.430468738f,
    0.444531262f,    0.458593726f,    0.47265625f,     0.486718714f,
    0.500781238f,    0.514843702f,    0.528906226f,    0.54296875f,
    0.557031274f,    0.571093798f,    0.585156262f,    0.599218726f,
    0.61328125f,     0.627343774f,    0.641406298f,    0.655468762f,
    0.669531226f,    0.68359375f,     0.697656274f,    0.711718798f,
    0.725781262f,    0.739843726f,    0.75390625f,     0.767968774f,
    0.782031238f,    0.796093762f,    0.810156226f,    0.82421875f,
    0.838281274f,    0.852343738f,    0.866406262f,    0.880468726f,
    0.89453125f,     0.908593774f,    0.922656238f,    0.936718762f,
    0.950781226f,    0.96484375f,     0.978906274f,    0.992968738f,
    1.00000000f,
};

/* No branch: nobody can foretell a code. */
static float dynamic_value(int code)
{
    float x = upward[abs(code - ZERO)];
    return code < ZERO ? -x : x;
}

void iz_nf4_tables(struct iz_nf4_tables *t)
{
    static const uint8_t every[IZ_QUANT_BLOCK / 2] = {0x01, 0x23, 0x45, 0x67,
                                                      0x89, 0xab, 0xcd, 0xef};
    float value[IZ_QUANT_BLOCK], one = 1;
    iz_simd()->load_4(value, every, &one, IZ_QUANT_BLOCK);
    memcpy(t->value, value, sizeof(t->value));
    for (int c = 0; c < CODES; c++)
        t->scale[c] = dynamic_value(c);
}

/* The nearest code of -1 <= x <= 1, of two equally near ones the lower. */
static uint8_t dynamic_code(float x)
{
    int low = 0, high = CODES - 1; /* value(low) < x <= value(high) */
    if (x <= dynamic_value(low))
        return 0;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (dynamic_value(middle) < x)
            low = middle;
        else
            high = middle;
    }
    float below = fabsf(x - dynamic_value(low));
    return (uint8_t)(fabsf(dynamic_value(high) - x) < below ? high : low);
}

double iz_nf4_codes(struct iz_nf4_group *g, float *scale, const float *x,
                    int64_t n)
{
    float last[IZ_QUANT_BLOCK] = {0};
    int64_t whole = n / IZ_QUANT_BLOCK, rest = n % IZ_QUANT_BLOCK;
    double sum = 0;
    assert(n > 0 && n <= IZ_QUANT_GROUP);
    memset(g, 0, sizeof(*g));
    iz_simd()->store_4(g->code, scale, x, whole * IZ_QUANT_BLOCK);
    if (rest) {
        memcpy(last, x + n - rest, (size_t)rest * sizeof(*x));
        iz_simd()->store_4(g->code + (n - rest) / 2, scale + whole, last,
                           IZ_QUANT_BLOCK);
        /* Nothing but zeros is behind the last weight. */
        memset(g->code + (n + 1) / 2, 0, (size_t)(IZ_QUANT_BLOCK - rest) / 2);
    }
    for (int64_t b = 0; b < iz_quant_blocks(n); b++)
        sum += scale[b];
    return sum;
}

void iz_nf4_scales(struct iz_nf4_group *g, const float *scale, int64_t n,
                   float mean)
{
    int64_t blocks = iz_quant_blocks(n);
    float most = 0;
    for (int64_t b = 0; b < blocks; b++)
        most = fmaxf(most, fabsf(scale[b] - mean));
    float inverse = 1.0f / most;
    for (int64_t b = 0; b < blocks; b++) {
        float x = most > 0 ? (scale[b] - mean) * inverse : -1;
        g->scale[b] = dynamic_code(fminf(fmaxf(x, -1), 1));
    }
    g->most = most;
    g->mean = mean;
}

/* Whole blocks. */
static void load_blocks(void *out, enum iz_dtype type, const uint8_t *code,
                        const float *scale, int64_t n)
{
    if (type == IZ_F32)
        iz_simd()->load_4(out, code, scale, n);
    else
        iz_simd()->load_4_to_16(out, type, code, scale, n);
}

void iz_nf4_load(void *out, enum iz_dtype type, const struct iz_nf4_group *g,
                 int64_t n)
{
    float scale[IZ_QUANT_SCALES], last[IZ_QUANT_BLOCK];
    int64_t rest = n % IZ_QUANT_BLOCK, whole = n - rest;
    int64_t size = iz_dtype_bytes(type);
    for (int64_t b = 0; b < iz_quant_blocks(n); b++) {
        float without = dynamic_value(g->scale[b]) * g->most;
        scale[b] = without + g->mean;
    }
    load_blocks(out, type, g->code, scale, whole);
    if (rest) {
        load_blocks(last, type, g->code + whole / 2,
                    scale + whole / IZ_QUANT_BLOCK, IZ_QUANT_BLOCK);
        memcpy((char *)out + whole * size, last, (size_t)(rest * size));
    }
}
