/* SPDX-License-Identifier: Apache-2.0 */
/* The formats of weights in fewer bits, and that of 8 bits; see quant.h. */
#include "codelets/flat/quant.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "codelets/base/build.h"
#include "codelets/base/int64.h"
#include "codelets/flat/nf4.h"

static const struct {
    const char *name;
    int64_t bytes;
} formats[IZ_QUANTS] = {
    [IZ_QUANT_NF4] = {"nf4", sizeof(struct iz_nf4_group)},
    [IZ_QUANT_INT8] = {"int8", sizeof(struct iz_int8_group)},
};

const char *iz_quant_name(enum iz_quant q)
{
    return formats[q].name;
}

int64_t iz_quant_bytes(enum iz_quant q)
{
    return formats[q].bytes;
}

/* ---- 8 bits ---- */

/* The nearest integer, of two the even one, in every vector width alike: |x| is
 * far below 2^22. */
static inline int8_t nearest(float x)
{
    const float large = 12582912; /* 1.5 * 2^23 */
    return (int8_t)((x + large) - large);
}

IZ_SIMD static void store_8(int8_t *restrict code, float *restrict scale,
                            const float *restrict x, int64_t n)
{
    for (int64_t b = 0; b < n; b += IZ_QUANT_BLOCK) {
        float most = 0;
        for (int i = 0; i < IZ_QUANT_BLOCK; i++)
            most = fabsf(x[b + i]) > most ? fabsf(x[b + i]) : most;
        float s = most / 127, inverse = s > 0 ? 127 / most : 0;
        if (!(inverse <= 3e38f)) /* of a block that is as good as zero */
            s = inverse = 0;
        for (int i = 0; i < IZ_QUANT_BLOCK; i++)
            code[b + i] = nearest(x[b + i] * inverse);
        scale[b / IZ_QUANT_BLOCK] = s;
    }
}

IZ_SIMD static void load_8(float *restrict y, const int8_t *restrict code,
                           const float *restrict scale, int64_t n)
{
    for (int64_t b = 0; b < n; b += IZ_QUANT_BLOCK)
        for (int i = 0; i < IZ_QUANT_BLOCK; i++)
            y[b + i] = (float)code[b + i] * scale[b / IZ_QUANT_BLOCK];
}

static void int8_codes(struct iz_int8_group *g, const float *x, int64_t n)
{
    float last[IZ_QUANT_BLOCK] = {0};
    int64_t rest = n % IZ_QUANT_BLOCK, whole = n - rest;
    memset(g, 0, sizeof(*g));
    store_8(g->code, g->scale, x, whole);
    memcpy(last, x + whole, (size_t)rest * sizeof(*x));
    if (rest)
        store_8(g->code + whole, g->scale + whole / IZ_QUANT_BLOCK, last,
                IZ_QUANT_BLOCK);
}

static void int8_load(void *out, enum iz_dtype type,
                      const struct iz_int8_group *g, int64_t n)
{
    enum { TILE = 64 * IZ_QUANT_BLOCK };
    float tile[TILE];
    int64_t size = iz_dtype_bytes(type);
    for (int64_t i = 0; i < n; i += TILE) {
        int64_t k = min64(n - i, TILE);
        load_8(tile, g->code + i, g->scale + i / IZ_QUANT_BLOCK,
               iz_quant_blocks(k) * IZ_QUANT_BLOCK);
        iz_cast((char *)out + i * size, type, tile, IZ_F32, k);
    }
}

/* ---- both ---- */

double iz_quant_codes(enum iz_quant q, void *group, float *scale,
                      const float *x, int64_t n)
{
    assert(n > 0 && n <= IZ_QUANT_GROUP);
    if (q == IZ_QUANT_NF4)
        return iz_nf4_codes(group, scale, x, n);
    int8_codes(group, x, n);
    return 0;
}

float iz_quant_mean(const double *sum, int64_t n)
{
    double all = 0;
    for (int64_t i = 0; i < iz_quant_groups(n); i++)
        all += sum[i];
    return (float)(all / (double)iz_quant_blocks(n));
}

void iz_quant_scales(enum iz_quant q, void *group, const float *scale,
                     int64_t n, float mean)
{
    if (q == IZ_QUANT_NF4)
        iz_nf4_scales(group, scale, n, mean);
}

void iz_quant_load(enum iz_quant q, void *out, enum iz_dtype type,
                   const void *group, int64_t n)
{
    if (q == IZ_QUANT_NF4)
        iz_nf4_load(out, type, group, n);
    else
        int8_load(out, type, group, n);
}
