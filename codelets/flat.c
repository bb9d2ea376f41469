/* SPDX-License-Identifier: Apache-2.0 */
/* Sums, norms and hashes of flat buffers on the CPU.  The bits are part of the
 * contract: build this file with -ffp-contract=off. */
#include "codelets/flat.h"

#include <assert.h>
#include <string.h>

#include "codelets/simd.h"

enum {
    BLOCK = 1024, /* elements expanded at a time, in the first-level cache */
    LEVELS = 6    /* of block sums: BLOCK^(LEVELS + 1) is beyond an int64_t */
};

/* n <= BLOCK elements of x as fp32: x itself or its expansion in buf. */
static const float *as_f32(float *buf, const void *x, enum iz_dtype type,
                           int64_t n)
{
    if (type == IZ_F32)
        return x;
    iz_cast(buf, IZ_F32, x, type, n);
    return buf;
}

static const void *at(const void *x, enum iz_dtype type, int64_t i)
{
    return (const char *)x + i * iz_dtype_bytes(type);
}

static int64_t block_len(int64_t n, int64_t i)
{
    return n - i < BLOCK ? n - i : BLOCK;
}

/* The block of one level that is being filled. */
struct level {
    double lane[IZ_NORM_LANES];
    int64_t count;
};

/* Adds a value to the first level; a full block becomes a value of the next. */
static void push(struct level *l, double value)
{
    l->lane[l->count++ % IZ_NORM_LANES] += value;
    if (l->count < BLOCK)
        return;
    value = iz_sum_lanes(l->lane);
    memset(l, 0, sizeof *l);
    push(l + 1, value);
}

/* The sum of one value is that value, so levels that are not needed do not
 * change it. */
double iz_flat_norm2(const void *x, enum iz_dtype type, int64_t n)
{
    struct level level[LEVELS + 1] = {0};
    float buf[BLOCK];

    for (int64_t i = 0; i < n; i += BLOCK) {
        int64_t k = block_len(n, i);

        push(level,
             iz_simd()->squares(as_f32(buf, at(x, type, i), type, k), k));
    }
    for (int l = 0; l < LEVELS; l++)
        if (level[l].count)
            push(level + l + 1, iz_sum_lanes(level[l].lane));
    return iz_sum_lanes(level[LEVELS].lane);
}

int64_t iz_flat_norm2_scratch_bytes(int64_t n)
{
    int64_t values = 0;

    for (n = (n + BLOCK - 1) / BLOCK; n > 1; n = (n + BLOCK - 1) / BLOCK)
        values += n;
    return values * (int64_t)sizeof(double);
}

void iz_flat_add(void *out, enum iz_dtype out_type, const void *in,
                 enum iz_dtype in_type, int64_t n)
{
    iz_flat_sum(out, out_type, true, &in, 1, in_type, n);
}

/* The sum of the elements [i, i + k) of all inputs: where it is, in `last`, or
 * in the only input.  Only the last addition writes `last`, which may be an
 * input; it may be buf, which holds the sum before that. */
static const float *sum_block(float *last, float *buf, float *next,
                              const void *const *in, int n_in,
                              enum iz_dtype type, int64_t i, int64_t k)
{
    const float *sum = as_f32(buf, at(in[0], type, i), type, k);

    for (int s = 1; s < n_in; s++) {
        float *to = s + 1 < n_in ? buf : last;

        iz_simd()->add(to, sum, as_f32(next, at(in[s], type, i), type, k), k);
        sum = to;
    }
    return sum;
}

void iz_flat_sum(void *out, enum iz_dtype out_type, bool accumulate,
                 const void *const *in, int n_in, enum iz_dtype in_type,
                 int64_t n)
{
    float buf[BLOCK], next[BLOCK];

    assert(n_in >= 1);
    for (int64_t i = 0; i < n; i += BLOCK) {
        int64_t k = block_len(n, i);
        char *dst = (char *)out + i * iz_dtype_bytes(out_type);
        bool straight = out_type == IZ_F32 && !accumulate;
        const float *sum = sum_block(straight ? (float *)dst : buf, buf, next,
                                     in, n_in, in_type, i, k);

        if (straight && sum == (const float *)dst)
            continue;
        if (accumulate && out_type == IZ_F32) {
            iz_simd()->add((float *)dst, (float *)dst, sum, k);
            continue;
        }
        if (accumulate) {
            iz_simd()->add(buf, as_f32(next, dst, out_type, k), sum, k);
            sum = buf;
        }
        iz_cast(dst, out_type, sum, IZ_F32, k);
    }
}

uint64_t iz_flat_hash(int64_t first, const float *x, int64_t n)
{
    return iz_simd()->hash((uint64_t)first, x, n);
}
