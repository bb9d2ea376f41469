/* SPDX-License-Identifier: Apache-2.0 */
/* Arrays of states in fewer bytes; the loops are in loops.c. */
#include "codelets/flat/moment.h"

#include <assert.h>
#include <string.h>

#include "codelets/flat/simd.h"

int64_t iz_moment_bytes(enum iz_moment_type t, int64_t n)
{
    if (t == IZ_MOMENT_FP8)
        return n + n / IZ_MOMENT_BLOCK;
    return n * (t == IZ_MOMENT_F32 ? 4 : 2);
}

static void moment_check(const struct iz_moments *x, int64_t at, int64_t n)
{
    assert(at % IZ_MOMENT_BLOCK == 0 && n % IZ_MOMENT_BLOCK == 0);
    assert(x->n % IZ_MOMENT_BLOCK == 0 && at >= 0 && at + n <= x->n);
}

void iz_moment_load(float *out, const struct iz_moments *x, int64_t at,
                    int64_t n)
{
    uint8_t *codes = x->p;
    moment_check(x, at, n);
    if (x->type == IZ_MOMENT_F32)
        memcpy(out, (float *)x->p + at, (size_t)n * sizeof(*out));
    else if (x->type == IZ_MOMENT_BF16)
        iz_simd()->load_bf16(out, (uint16_t *)x->p + at, n);
    else
        iz_simd()->load_8(out, codes + at, codes + x->n + at / IZ_MOMENT_BLOCK,
                          n, x->which == IZ_MOMENT_V);
}

void iz_moment_store(const struct iz_moments *x, int64_t at, const float *in,
                     int64_t n, uint64_t key, int64_t first)
{
    uint8_t *codes = x->p;
    moment_check(x, at, n);
    assert(first % IZ_MOMENT_BLOCK == 0);
    if (x->type == IZ_MOMENT_F32)
        memcpy((float *)x->p + at, in, (size_t)n * sizeof(*in));
    else if (x->type == IZ_MOMENT_BF16)
        iz_simd()->store_16((uint16_t *)x->p + at, in, n, key, first,
                            x->which == IZ_MOMENT_V);
    else
        iz_simd()->store_8(codes + at, codes + x->n + at / IZ_MOMENT_BLOCK, in,
                           n, key, first, x->which == IZ_MOMENT_V);
}

/* The part of a block that begins at element `at` of an array: its place in the
 * block, and its length if n more elements are left. */
static int64_t part_of_block(int64_t at, int64_t n, int64_t *from)
{
    *from = at % IZ_MOMENT_BLOCK;
    return IZ_MOMENT_BLOCK - *from < n ? IZ_MOMENT_BLOCK - *from : n;
}

void iz_moment_get(float *out, const struct iz_moments *x, int64_t at,
                   int64_t n)
{
    float block[IZ_MOMENT_BLOCK];
    for (int64_t i = 0, k, from; i < n; i += k) {
        k = part_of_block(at + i, n - i, &from);
        iz_moment_load(block, x, at + i - from, IZ_MOMENT_BLOCK);
        memcpy(out + i, block + from, (size_t)k * sizeof(*out));
    }
}

void iz_moment_put(const struct iz_moments *x, int64_t at, const float *in,
                   int64_t n, uint64_t key, int64_t first)
{
    float block[IZ_MOMENT_BLOCK];
    for (int64_t i = 0, k, from; i < n; i += k) {
        k = part_of_block(at + i, n - i, &from);
        iz_moment_load(block, x, at + i - from, IZ_MOMENT_BLOCK);
        memcpy(block + from, in + i, (size_t)k * sizeof(*in));
        iz_moment_store(x, at + i - from, block, IZ_MOMENT_BLOCK, key,
                        first + i - from);
    }
}
