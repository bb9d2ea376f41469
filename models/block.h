/* SPDX-License-Identifier: Apache-2.0 */
/* The units of a transformer: an embedding, blocks that have a norm before
 * attention and before an MLP, and a head.  There are two kinds.  GPT-2 and the
 * vision transformer have LayerNorm, GELU in the tanh form and a bias behind
 * each weight [in,out].  Llama has RMSNorm, rotary positions, a gated MLP, and
 * weights [out,in], the ones of one product stacked by rows: queries, keys,
 * values; gate, up. */
#pragma once

#include <math.h>
#include <stdbool.h>

#include "codelets/ops/ops.h"
#include "codelets/unit/layer.h"
#include "models/experts.h"

struct iz_block {
    int layers, heads, kv_heads, head_dim, width, hidden, seq;
    float norm_eps;
    bool full;  /* attention is not causal */
    bool llama; /* the second kind, with what is below */
    bool qkv_bias, qk_norm;
    struct iz_rope rope;
    struct iz_experts experts; /* in place of some blocks' MLP */
};

#define IZ_BLOCK_STD 0.02f /* of initial weights */

/* The names of the blocks, before a number, and of a block's parameters, each
 * with .weight and .bias; NULL: a block has none. */
struct iz_block_names {
    const char *block, *norm_1, *qkv, *attn_proj, *norm_2, *fc, *mlp_proj;
    const char *q_norm, *k_norm;
    /* Of a block with experts: its router, before its experts, and theirs. */
    const char *router, *experts, *expert_fc, *expert_proj;
};

/* Of initial weights before a residual addition, so that the sum over all of
 * them keeps its variance. */
static inline float iz_block_residual(const struct iz_block *b)
{
    return IZ_BLOCK_STD / sqrtf(2 * (float)b->layers);
}

/* Of the last unit: weight and, but with llama, bias of its norm; then a matrix
 * of a row per class.  A list without that has the embedding's. */
struct iz_ends {
    const struct iz_param *embed, *head;
    int n_embed, n_head;
};

/* Units of the blocks: more than blocks if their experts are units. */
int iz_block_units(const struct iz_block *b);
/* Makes the units of m, b being borrowed until m is closed; the embedding is
 * that of tokens and, but with llama, positions.  Where m has a vocabulary, the
 * head generates.  0 or -ENOMEM. */
int iz_block_open(struct iz_model *m, const struct iz_block *b,
                  const struct iz_block_names *names,
                  const struct iz_ends *ends);

/* 0, or -EINVAL with the reason printed: heads must share the width evenly. */
int iz_block_check(const char *model, int width, int heads);
