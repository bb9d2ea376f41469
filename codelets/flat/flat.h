/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels on flat buffers of n elements on the CPU.  All of them give the same
 * bits at every SIMD level, and flat.cu gives these bits on a GPU; buffers of
 * one call must not overlap unless a function says otherwise.  Types are fp32,
 * bf16 and fp16. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "codelets/flat/dtype.h"

IZ_C_BEGIN

/* Sum of x[i]^2 in double.  The order: in each block of 1024 elements lane j of
 * 32 adds the squares of the elements 32 i + j, i ascending; then lane j adds
 * lane j + 16, then + 8, 4, 2, 1.  The sums of the blocks are summed by the
 * same rule (as they are, not squared), until one is left.  Infinity or NaN in
 * x makes the result not finite; nothing else does. */
double iz_flat_norm2(const void *x, enum iz_dtype type, int64_t n);

enum {
    IZ_NORM_BLOCK = 1024,
    IZ_NORM_LANES = 32,
    /* Levels of sums of blocks.  Together with the squares and the last sum
     * they suffice for any int64_t. */
    IZ_NORM_LEVELS = 6
};

/* The state of an iz_flat_norm2 over a buffer that comes in pieces, in order.
 * It starts as {0}.  All pieces except the last are multiples of
 * IZ_NORM_BLOCK. */
struct iz_norm2 {
    int64_t n; /* elements so far */
    struct iz_norm2_level {
        double lane[IZ_NORM_LANES];
        int64_t count; /* of values in the block that is being filled */
    } level[IZ_NORM_LEVELS + 1];
};

void iz_norm2_add(struct iz_norm2 *s, const void *x, enum iz_dtype type,
                  int64_t n);
/* Adds n blocks of elements that are elsewhere, given the sums of their squares
 * from iz_flat_squares. */
void iz_norm2_add_blocks(struct iz_norm2 *s, const double *sum, int64_t n);
/* Returns the sum of all pieces; nothing may be added afterwards. */
double iz_norm2_end(struct iz_norm2 *s);

/* sum[b] = x[i]^2 of the elements of block b alone, in the order above. */
void iz_flat_squares(double *sum, const void *x, enum iz_dtype type, int64_t n);
static inline int64_t iz_norm2_blocks(int64_t n)
{
    return (n + IZ_NORM_BLOCK - 1) / IZ_NORM_BLOCK;
}

/* Scratch that the GPU needs for the norm: the sums of the blocks of all levels
 * except the last. */
int64_t iz_flat_norm2_scratch_bytes(int64_t n);

/* Sums give the same bits at every SIMD level, but for NaN: of two only that
 * the result is one. */

/* Buffers that a GPU adds in one pass. */
#define IZ_SUM_INPUTS_MAX 1024

/* sum = ((in_0[i] + in_1[i]) + in_2[i]) + ... in fp32, then
 * out[i] = accumulate ? out[i] + sum : sum, rounded to out_type.  Without
 * accumulate out may be one of the n_in >= 1 inputs, if it has their type. */
void iz_flat_sum(void *out, enum iz_dtype out_type, bool accumulate,
                 const void *const *in, int n_in, enum iz_dtype in_type,
                 int64_t n);
/* The same; out as it is stored is added to *norm2, unless that is NULL, while
 * it is in the cache. */
void iz_flat_sum_norm2(struct iz_norm2 *norm2, void *out,
                       enum iz_dtype out_type, bool accumulate,
                       const void *const *in, int n_in, enum iz_dtype in_type,
                       int64_t n);

/* iz_flat_sum, if there are inputs; then the squares of out as it is stored,
 * block by block, unless sum is NULL, while it is in the cache. */
void iz_flat_add_squares(double *sum, void *out, enum iz_dtype out_type,
                         bool accumulate, const void *const *in, int n_in,
                         enum iz_dtype in_type, int64_t n);

/* Hash of the bits and the positions of x: the sum modulo 2^64 over the pieces
 * of a buffer is the hash of the buffer, however it is cut.  first: index of
 * x[0]. */
uint64_t iz_flat_hash(int64_t first, const float *x, int64_t n);

/* out[i] = std * z, z standard normal and a function of (seed, stream, first +
 * i) alone: the same on every machine and however a buffer is cut.  |z| < 6.7;
 * beyond lie 3 in 10^11 of a normal distribution. */
void iz_flat_normal(float *out, int64_t n, uint64_t seed, uint64_t stream,
                    int64_t first, float std);

IZ_C_END
