/* SPDX-License-Identifier: Apache-2.0 */
/* Weights in 4 bits, in the format of bitsandbytes: NF4 (QLoRA, arXiv
 * 2305.14314) with a scale for every 64 weights, and scales in 8 bits (a
 * dynamic code, arXiv 1511.04561) with their mean taken off and one magnitude
 * for every 256 of them.  Reading gives the bits that bitsandbytes gives. */
#pragma once

#include "codelets/flat/quant.h"

IZ_C_BEGIN

/* So many weights of a matrix, fewer in its last group; its scales have one
 * magnitude. */
struct iz_nf4_group {
    uint8_t
        code[IZ_QUANT_GROUP / 2]; /* weight 2i in the upper half of byte i */
    uint8_t scale[IZ_QUANT_SCALES];
    float most; /* largest magnitude of a scale without the mean */
    float mean; /* of the scales of the whole matrix */
};

/* As iz_quant_codes, iz_quant_scales and iz_quant_load. */
double iz_nf4_codes(struct iz_nf4_group *g, float *scale, const float *x,
                    int64_t n);
void iz_nf4_scales(struct iz_nf4_group *g, const float *scale, int64_t n,
                   float mean);

/* What the codes of weights and of scales stand for. */
struct iz_nf4_tables {
    float value[16], scale[256];
};
void iz_nf4_tables(struct iz_nf4_tables *t);

void iz_nf4_load(void *out, enum iz_dtype type, const struct iz_nf4_group *g,
                 int64_t n);

IZ_C_END
