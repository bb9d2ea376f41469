/* SPDX-License-Identifier: Apache-2.0 */
/* The block of GPT-2 and of the vision transformer: LayerNorm before attention
 * and before an MLP with GELU in the tanh form, all with biases; and the head
 * that follows the last block. */
#pragma once

#include <stdbool.h>

#include "codelets/unit/layer.h"

struct iz_block {
    int layers, heads, width, hidden, seq;
    bool full; /* attention is not causal */
};

#define IZ_BLOCK_STD 0.02f /* of initial weights */

/* The names of the blocks, before a number, and of a block's parameters, each
 * with .weight and .bias. */
struct iz_block_names {
    const char *block, *norm_1, *qkv, *attn_proj, *norm_2, *fc, *mlp_proj;
};

enum iz_block_kind { IZ_KIND_EMBED, IZ_KIND_BLOCK, IZ_KIND_HEAD };

/* Whether heads share the width evenly; else false with the reason printed. */
bool iz_block_possible(const struct iz_block *b, const char *model);

/* Makes units 1 to b->layers of m blocks; b is borrowed until m is closed.  0
 * or -ENOMEM. */
int iz_block_open(struct iz_model *m, const struct iz_block *b,
                  const struct iz_block_names *name);

/* Parameters of the head: weight and bias of its norm, then a matrix of a row
 * per class, its own or a tied one. */
enum { IZ_HEAD_NORM = 0, IZ_HEAD_MATRIX = 2 };

/* Makes u the head behind blocks b, borrowed too, with these n parameters. */
int iz_head_open(struct iz_unit *u, const struct iz_block *b,
                 const struct iz_param *list, int n);
/* The logits of row a->row, for a head of tokens. */
void iz_head_generate(struct iz_exec *x, const struct iz_layer *a);
