/* SPDX-License-Identifier: Apache-2.0 */
/* Sums, norms and hashes of flat buffers on the CPU.  The bits are part of the
 * contract: build this file with -ffp-contract=off. */
#include "codelets/flat/flat.h"

#include <assert.h>
#include <string.h>

#include "codelets/base/int64.h"
#include "codelets/flat/simd.h"

/* Elements expanded at a time, in the first-level cache; those of the norm, so
 * that a sum has one of its blocks there. */
enum { BLOCK = IZ_NORM_BLOCK };

/* n <= BLOCK elements of x as fp32: x itself or its expansion in buf. */
static const float *as_f32(float *buf, const void *x, enum iz_dtype type,
                           int64_t n)
{
    if (type == IZ_F32)
        return x;
    iz_cast(buf, IZ_F32, x, type, n);
    return buf;
}

static const void *flat_at(const void *x, enum iz_dtype type, int64_t i)
{
    return (const char *)x + i * iz_dtype_bytes(type);
}

/* Adds a value to the first level; a full block becomes a value of the next. */
static void push(struct iz_norm2_level *l, double value)
{
    l->lane[l->count++ % IZ_NORM_LANES] += value;
    if (l->count < BLOCK)
        return;
    value = iz_simd_sum(l->lane);
    memset(l, 0, sizeof(*l));
    push(l + 1, value);
}

/* Of the block that begins at element i of n. */
static double square_block(const void *x, enum iz_dtype type, int64_t n,
                           int64_t i)
{
    float buf[BLOCK];
    int64_t k = min64(n - i, BLOCK);
    return iz_simd()->squares(as_f32(buf, flat_at(x, type, i), type, k), k);
}

void iz_flat_squares(double *sum, const void *x, enum iz_dtype type, int64_t n)
{
    for (int64_t i = 0; i < n; i += BLOCK)
        sum[i / BLOCK] = square_block(x, type, n, i);
}

void iz_norm2_add(struct iz_norm2 *s, const void *x, enum iz_dtype type,
                  int64_t n)
{
    assert(s->n % BLOCK == 0);
    s->n += n;
    for (int64_t i = 0; i < n; i += BLOCK)
        push(s->level, square_block(x, type, n, i));
}

void iz_norm2_add_blocks(struct iz_norm2 *s, const double *sum, int64_t n)
{
    assert(n == 0 || s->n % BLOCK == 0);
    for (int64_t b = 0; b < n; b++)
        push(s->level, sum[b]);
}

/* The sum of one value is that value, so levels that are not needed do not
 * change it. */
double iz_norm2_end(struct iz_norm2 *s)
{
    for (struct iz_norm2_level *l = s->level; l < s->level + IZ_NORM_LEVELS;
         l++)
        if (l->count)
            push(l + 1, iz_simd_sum(l->lane));
    return iz_simd_sum(s->level[IZ_NORM_LEVELS].lane);
}

double iz_flat_norm2(const void *x, enum iz_dtype type, int64_t n)
{
    struct iz_norm2 s = {0};
    iz_norm2_add(&s, x, type, n);
    return iz_norm2_end(&s);
}

int64_t iz_flat_norm2_scratch_bytes(int64_t n)
{
    int64_t values = 0;
    for (n = (n + BLOCK - 1) / BLOCK; n > 1; n = (n + BLOCK - 1) / BLOCK)
        values += n;
    return values * (int64_t)sizeof(double);
}

/* The sum of the elements [i, i + k) of two or more inputs of bf16. */
static const float *sum_block_bf16(float *to, const void *const *in, int n_in,
                                   int64_t i, int64_t k)
{
    const struct iz_simd *simd = iz_simd();
    simd->set_pair(to, flat_at(in[0], IZ_BF16, i), flat_at(in[1], IZ_BF16, i),
                   k);
    for (int s = 2; s < n_in; s++)
        simd->add_bf16(to, flat_at(in[s], IZ_BF16, i), k);
    return to;
}

/* The sum of the elements [i, i + k) of all inputs: where it is, in `last`, or
 * in the only input.  Only the last addition writes `last`, which may be an
 * input; it may be buf, which holds the sum before that. */
static const float *sum_block(float *last, float *buf, float *next,
                              const void *const *in, int n_in,
                              enum iz_dtype type, int64_t i, int64_t k)
{
    if (type == IZ_BF16 && n_in > 1) /* of another type than `last` */
        return sum_block_bf16(last, in, n_in, i, k);
    const float *sum = as_f32(buf, flat_at(in[0], type, i), type, k);
    for (int s = 1; s < n_in; s++) {
        float *to = s + 1 < n_in ? buf : last;
        iz_simd()->add(to, sum, as_f32(next, flat_at(in[s], type, i), type, k),
                       k);
        sum = to;
    }
    return sum;
}

/* iz_flat_sum of the elements [i, i + k), at most a block. */
static void store_block(char *dst, enum iz_dtype out_type, bool accumulate,
                        const void *const *in, int n_in, enum iz_dtype in_type,
                        int64_t i, int64_t k)
{
    float buf[BLOCK], next[BLOCK];
    bool straight = out_type == IZ_F32 && !accumulate;
    const float *sum = sum_block(straight ? (float *)dst : buf, buf, next, in,
                                 n_in, in_type, i, k);
    if (straight && sum == (const float *)dst)
        return;
    if (accumulate && out_type == IZ_F32) {
        iz_simd()->add((float *)dst, (float *)dst, sum, k);
        return;
    }
    if (accumulate) {
        iz_simd()->add(buf, as_f32(next, dst, out_type, k), sum, k);
        sum = buf;
    }
    iz_cast(dst, out_type, sum, IZ_F32, k);
}

/* Two gradients of bf16 are added to fp32 by one loop, which needs no blocks.
 */
static bool adds_pair(enum iz_dtype out_type, bool accumulate, int n_in,
                      enum iz_dtype in_type)
{
    return accumulate && out_type == IZ_F32 && in_type == IZ_BF16 && n_in == 2;
}

/* iz_flat_sum of the elements [i, i + k): at most a block, unless it is that
 * of a pair. */
static void sum_some(char *dst, enum iz_dtype out_type, bool accumulate,
                     const void *const *in, int n_in, enum iz_dtype in_type,
                     int64_t i, int64_t k)
{
    if (adds_pair(out_type, accumulate, n_in, in_type))
        iz_simd()->add_pair((float *)dst, flat_at(in[0], IZ_BF16, i),
                            flat_at(in[1], IZ_BF16, i), k);
    else
        store_block(dst, out_type, accumulate, in, n_in, in_type, i, k);
}

void iz_flat_sum_norm2(struct iz_norm2 *norm2, void *out,
                       enum iz_dtype out_type, bool accumulate,
                       const void *const *in, int n_in, enum iz_dtype in_type,
                       int64_t n)
{
    int64_t most =
        !norm2 && adds_pair(out_type, accumulate, n_in, in_type) ? n : BLOCK;
    assert(n_in >= 1);
    for (int64_t i = 0; i < n; i += most) {
        int64_t k = n - i < most ? n - i : most;
        char *dst = (char *)out + i * iz_dtype_bytes(out_type);
        sum_some(dst, out_type, accumulate, in, n_in, in_type, i, k);
        if (norm2)
            iz_norm2_add(norm2, dst, out_type, k);
    }
}

void iz_flat_sum(void *out, enum iz_dtype out_type, bool accumulate,
                 const void *const *in, int n_in, enum iz_dtype in_type,
                 int64_t n)
{
    iz_flat_sum_norm2(NULL, out, out_type, accumulate, in, n_in, in_type, n);
}

void iz_flat_add_squares(double *sum, void *out, enum iz_dtype out_type,
                         bool accumulate, const void *const *in, int n_in,
                         enum iz_dtype in_type, int64_t n)
{
    if (!sum) {
        if (n_in)
            iz_flat_sum(out, out_type, accumulate, in, n_in, in_type, n);
        return;
    }
    for (int64_t i = 0; i < n; i += BLOCK) {
        int64_t k = min64(n - i, BLOCK);
        char *dst = (char *)out + i * iz_dtype_bytes(out_type);
        if (n_in)
            sum_some(dst, out_type, accumulate, in, n_in, in_type, i, k);
        sum[i / BLOCK] = square_block(dst, out_type, k, 0);
    }
}

uint64_t iz_flat_hash(int64_t first, const float *x, int64_t n)
{
    return iz_simd()->hash((uint64_t)first, x, n);
}
