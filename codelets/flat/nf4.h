/* SPDX-License-Identifier: Apache-2.0 */
/* Weights in 4 bits, in the format of bitsandbytes: NF4 (QLoRA, arXiv
 * 2305.14314) with a scale for every 64 weights, and scales in 8 bits (a
 * dynamic code, arXiv 1511.04561) with their mean taken off and one magnitude
 * for every 256 of them.  Reading gives the bits that bitsandbytes gives. */
#pragma once

#include <stdint.h>

#include "codelets/flat/dtype.h"

IZ_C_BEGIN

enum {
    IZ_NF4_BLOCK = 64,   /* weights with one scale */
    IZ_NF4_SCALES = 256, /* scales with one magnitude */
    IZ_NF4_GROUP = IZ_NF4_BLOCK * IZ_NF4_SCALES
};

/* So many weights of a matrix, fewer in its last group; it can be read without
 * the others. */
struct iz_nf4_group {
    uint8_t code[IZ_NF4_GROUP / 2]; /* weight 2i in the upper half of byte i */
    uint8_t scale[IZ_NF4_SCALES];
    float most; /* largest magnitude of a scale without the mean */
    float mean; /* of the scales of the whole matrix */
};

/* Groups of a matrix of n weights. */
static inline int64_t iz_nf4_groups(int64_t n)
{
    return (n + IZ_NF4_GROUP - 1) / IZ_NF4_GROUP;
}

/* A group of n weights is written in two steps, since the mean is known when
 * all groups of the matrix have had the first.  It writes the codes and the
 * scales in fp32 to scale[IZ_NF4_SCALES], and returns their sum. */
double iz_nf4_codes(struct iz_nf4_group *g, float *scale, const float *x,
                    int64_t n);
/* The mean of the scales of a matrix of n weights, whose groups returned these
 * sums. */
float iz_nf4_mean(const double *sum, int64_t n);
void iz_nf4_scales(struct iz_nf4_group *g, const float *scale, int64_t n,
                   float mean);

/* What the codes of weights and of scales stand for. */
struct iz_nf4_tables {
    float value[16], scale[256];
};
void iz_nf4_tables(struct iz_nf4_tables *t);

/* The n weights of a group: products in fp32, then rounded to nearest even. */
void iz_nf4_load(void *out, enum iz_dtype type, const struct iz_nf4_group *g,
                 int64_t n);

IZ_C_END
