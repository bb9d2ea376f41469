/* SPDX-License-Identifier: Apache-2.0 */
/* The block of GPT-2 and of the vision transformer: LayerNorm before attention
 * and before an MLP with GELU in the tanh form, all with biases; and the head
 * that follows the last block. */
#ifndef IZ_MODELS_BLOCK_H
#define IZ_MODELS_BLOCK_H

#include <stdbool.h>

#include "codelets/unit/layer.h"

struct iz_block {
    int layers, heads, width, hidden, seq;
    bool full; /* attention is not causal */
};

#define IZ_BLOCK_STD 0.02f /* of initial weights */

/* The names of a block's parameters, each with .weight and .bias. */
struct iz_block_names {
    const char *norm_1, *qkv, *attn_proj, *norm_2, *fc, *mlp_proj;
};

/* Gives u the parameters of a block, each name after the prefix; 0 or -ENOMEM.
 */
int iz_block_params(struct iz_unit *u, const struct iz_block *b,
                    const struct iz_block_names *name, const char *prefix);
void iz_block_forward(struct iz_exec *x, const struct iz_layer *a,
                      const struct iz_block *b);
void iz_block_backward(struct iz_exec *x, const struct iz_layer *a,
                       const struct iz_block *b);

/* Parameters of the head: weight and bias of its norm, then a matrix of a row
 * per class, its own or a tied one. */
enum { IZ_HEAD_NORM = 0, IZ_HEAD_MATRIX = 2 };

void iz_head_backward(struct iz_exec *x, const struct iz_layer *a, int width);
void iz_head_evaluate(struct iz_exec *x, const struct iz_layer *a, int width);
/* The logits of row a->row. */
void iz_head_generate(struct iz_exec *x, const struct iz_layer *a, int width);

#endif
