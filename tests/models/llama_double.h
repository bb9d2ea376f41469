/* SPDX-License-Identifier: Apache-2.0 */
/* The Llama family a second time: forward only, double precision, one token
 * after another, sharing nothing with the program. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* Tensors in checkpoint order: embedding, those of each layer, norm, and the
 * head's own matrix where it is not the embedding's. */
struct llama_double {
    int layers, heads, kv_heads, head_dim, width, ffn, seq, vocab;
    double theta, eps;
    double factor, low_freq, high_freq, original_seq; /* factor 1: none */
    bool tied, qkv_bias, qk_norm;
    double **param;
};

/* Mean loss over the targets that are not -1; the logits of row `row` of sample
 * 0 go to logits when that is not NULL. */
double llama_double_loss(const struct llama_double *g, const int32_t *input,
                         const int32_t *target, int samples, int row,
                         double *logits);
