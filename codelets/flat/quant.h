/* SPDX-License-Identifier: Apache-2.0 */
/* Frozen weights in fewer bits than the type of the parameters.  A matrix is
 * cut into groups, each of which can be read without the others; a format says
 * what a group holds. */
#pragma once

#include <stdint.h>

#include "codelets/flat/dtype.h"

IZ_C_BEGIN

enum iz_quant {
    IZ_QUANT_NONE,
    IZ_QUANT_NF4,  /* nf4.h */
    IZ_QUANT_INT8, /* struct iz_int8_group */
    IZ_QUANTS
};

enum {
    IZ_QUANT_BLOCK = 64,   /* weights with one scale */
    IZ_QUANT_SCALES = 256, /* of a group */
    IZ_QUANT_GROUP = IZ_QUANT_BLOCK * IZ_QUANT_SCALES
};

/* So many weights of a matrix, fewer in its last group.  A weight is its code
 * times its block's scale, which is the block's largest magnitude over 127. */
struct iz_int8_group {
    int8_t code[IZ_QUANT_GROUP];
    float scale[IZ_QUANT_SCALES];
};

/* "nf4", "int8"; and of a group, a multiple of 4. */
const char *iz_quant_name(enum iz_quant q);
int64_t iz_quant_bytes(enum iz_quant q);

/* Blocks of a group of n weights, and groups of a matrix. */
static inline int64_t iz_quant_blocks(int64_t n)
{
    return (n + IZ_QUANT_BLOCK - 1) / IZ_QUANT_BLOCK;
}
static inline int64_t iz_quant_groups(int64_t n)
{
    return (n + IZ_QUANT_GROUP - 1) / IZ_QUANT_GROUP;
}

/* A group of n weights is written in two steps, since nf4 needs the mean of the
 * scales of all groups of the matrix.  The first writes the codes, and the
 * scales in fp32 to scale[IZ_QUANT_SCALES], and returns their sum. */
double iz_quant_codes(enum iz_quant q, void *group, float *scale,
                      const float *x, int64_t n);
/* The mean of the scales of a matrix of n weights, whose groups returned these
 * sums. */
float iz_quant_mean(const double *sum, int64_t n);
void iz_quant_scales(enum iz_quant q, void *group, const float *scale,
                     int64_t n, float mean);

/* The n weights of a group: products in fp32, then rounded to nearest even. */
void iz_quant_load(enum iz_quant q, void *out, enum iz_dtype type,
                   const void *group, int64_t n);

IZ_C_END
