/* SPDX-License-Identifier: Apache-2.0 */
/* Element types and the conversion of flat buffers on the CPU. */
#include "codelets/flat/dtype.h"

#include <assert.h>
#include <string.h>

#include "codelets/flat/simd.h"

enum { BLOCK = 512 }; /* elements on the stack between two 16-bit types */

int64_t iz_dtype_bytes(enum iz_dtype t)
{
    static const int64_t bytes[] = {
        [IZ_F32] = 4, [IZ_BF16] = 2, [IZ_F16] = 2, [IZ_I32] = 4, [IZ_U8] = 1};
    return bytes[t];
}

const char *iz_dtype_name(enum iz_dtype t)
{
    static const char *const name[] = {[IZ_F32] = "fp32",
                                       [IZ_BF16] = "bf16",
                                       [IZ_F16] = "fp16",
                                       [IZ_I32] = "int32",
                                       [IZ_U8] = "uint8"};
    return name[t];
}

static void cast_load(float *dst, const void *src, enum iz_dtype from,
                      int64_t n)
{
    if (from == IZ_BF16)
        iz_simd()->load_bf16(dst, src, n);
    else
        iz_simd()->load_f16(dst, src, n);
}

static void round_to(void *dst, enum iz_dtype to, const float *src, int64_t n)
{
    if (to == IZ_BF16)
        iz_simd()->round_bf16(dst, src, n);
    else
        iz_simd()->round_f16(dst, src, n);
}

/* bf16 <-> fp16: fp32 holds both exactly, so there is one rounding. */
static void cast_halves(uint16_t *dst, enum iz_dtype to, const uint16_t *src,
                        enum iz_dtype from, int64_t n)
{
    float buf[BLOCK];
    for (int64_t i = 0; i < n; i += BLOCK) {
        int64_t k = n - i < BLOCK ? n - i : BLOCK;
        cast_load(buf, src + i, from, k);
        round_to(dst + i, to, buf, k);
    }
}

void iz_cast(void *dst, enum iz_dtype to, const void *src, enum iz_dtype from,
             int64_t n)
{
    assert(to <= IZ_F16 && from <= IZ_F16 && n >= 0);
    if (n <= 0 || (dst == src && to == from))
        return;
    if (to == from)
        memcpy(dst, src, (size_t)(n * iz_dtype_bytes(to)));
    else if (to == IZ_F32)
        cast_load(dst, src, from, n);
    else if (from == IZ_F32)
        round_to(dst, to, src, n);
    else
        cast_halves(dst, to, src, from, n);
}

void iz_cast_params(void *dst, enum iz_dtype to, const float *src, int64_t n)
{
    if (to == IZ_BF16)
        iz_simd()->round_upper(dst, src, n);
    else
        iz_cast(dst, to, src, IZ_F32, n);
}

void iz_cast_split(uint16_t *upper, uint16_t *lower, const float *src,
                   int64_t n)
{
    iz_simd()->round_upper(upper, src, n);
    iz_simd()->keep_lower(lower, src, n);
}

void iz_cast_join(float *dst, const uint16_t *upper, const uint16_t *lower,
                  int64_t n)
{
    iz_simd()->join(dst, upper, lower, n);
}
