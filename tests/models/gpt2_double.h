/* SPDX-License-Identifier: Apache-2.0 */
/* GPT-2 a second time: forward only, double precision, one token after another,
 * sharing nothing with the program. */
#pragma once

#include <stdint.h>

/* Tensors in checkpoint order: wte, wpe, twelve per layer, ln_f weight, bias.
 */
struct gpt2_double {
    int layers, heads, width, seq, vocab;
    double **param;
};

/* Mean loss over the targets that are not -1; the logits of row `row` of sample
 * 0 go to logits when that is not NULL. */
double gpt2_double_loss(const struct gpt2_double *g, const int32_t *input,
                        const int32_t *target, int samples, int row,
                        double *logits);
