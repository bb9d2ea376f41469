/* SPDX-License-Identifier: Apache-2.0 */
/* The units of a transformer: an embedding, blocks of attention and an MLP, and
 * a head.  What a block has of what there is, a set of bits says, and some
 * numbers; families.c has those of published models. */
#pragma once

#include <math.h>
#include <stdbool.h>

#include "codelets/ops/ops.h"
#include "codelets/unit/layer.h"
#include "models/experts.h"

/* Weights of one product are stacked: queries, keys, values; gate, up. */
enum iz_block_has {
    IZ_HAS_IN_OUT = 1,         /* weights are [in,out], each bias behind its
                                * weight; else [out,in], stacked by rows */
    IZ_HAS_MEAN = 1 << 1,      /* norms are LayerNorm, else RMSNorm ... */
    IZ_HAS_NORM_BIAS = 1 << 2, /* ... with a bias, */
    IZ_HAS_PLUS_ONE = 1 << 3,  /* multiply by 1 + weight, */
    IZ_HAS_BARE = 1 << 4,      /* or have no weight */
    IZ_HAS_BEFORE = 1 << 5,    /* there is a norm before attention and one
                                * before the MLP, */
    IZ_HAS_BEHIND = 1 << 6,    /* one behind each, before it is added */
    IZ_HAS_PARALLEL = 1 << 7,  /* the MLP reads what attention reads, ... */
    IZ_HAS_ONE_NORM = 1 << 8,  /* ... behind the same norm */
    IZ_HAS_QKV_BIAS = 1 << 9,
    IZ_HAS_PROJ_BIAS = 1 << 10, /* of attention's output */
    IZ_HAS_MLP_BIAS = 1 << 11,
    IZ_HAS_GATE = 1 << 12,
    IZ_HAS_QK_NORM =
        1 << 13, /* RMSNorm of each head of queries and keys, ... */
    IZ_HAS_QK_WHOLE = 1 << 14,       /* ... or of all heads together, */
    IZ_HAS_QK_LATE = 1 << 15,        /* ... after they are turned */
    IZ_HAS_PLACES = 1 << 16,         /* positions are learned vectors, */
    IZ_HAS_ROPE = 1 << 17,           /* or turn queries and keys, */
    IZ_HAS_ROPE_PAIRS = 1 << 18,     /* column by column with its neighbour, */
    IZ_HAS_ROPE_IN_WINDOW = 1 << 19, /* in blocks with a window alone */
    IZ_HAS_HEAD_BIAS = 1 << 20,      /* of the logits */
    IZ_HAS_SINKS = 1 << 24,          /* each head has a key without a value */
    IZ_HAS_ROUTER_BIAS = 1 << 25,
    IZ_HAS_SIGMOID = 1 << 26,    /* of the router's logits, else softmax */
    IZ_HAS_CHOICE = 1 << 27,     /* a bias that is not learnt, for choosing */
    IZ_HAS_SHARED_GATE = 1 << 28 /* of the expert that all rows go to */
};

/* GPT-2 and the vision transformer; Llama. */
#define IZ_HAS_GPT2                                                            \
    (IZ_HAS_IN_OUT | IZ_HAS_MEAN | IZ_HAS_NORM_BIAS | IZ_HAS_BEFORE |          \
     IZ_HAS_QKV_BIAS | IZ_HAS_PROJ_BIAS | IZ_HAS_MLP_BIAS | IZ_HAS_PLACES)
#define IZ_HAS_LLAMA (IZ_HAS_BEFORE | IZ_HAS_GATE | IZ_HAS_ROPE)

/* Blocks are of so many sorts: with a window or without, turned or not. */
enum { IZ_SORT_WINDOW = 1, IZ_SORT_UNTURNED = 2, IZ_SORTS = 4 };

enum { IZ_LAYERS_MOST = 512 }; /* of which each may be of another sort */

/* Some rows of one sample, where a block handles these at a time. */
struct iz_sequence_chunk {
    int64_t seq, first;     /* rows of the sample; the first of these */
    struct iz_view kv, dkv; /* [seq, 2KD] as in struct iz_attention */
    bool adds;              /* to the gradients of matrices */
    int64_t targets;        /* of the last unit, as in struct iz_classifier */
};

struct iz_block {
    int layers, heads, kv_heads, head_dim, width, hidden, seq;
    float norm_eps;
    bool full; /* attention is not causal */
    unsigned has;
    enum iz_activation act;
    /* 0: of all blocks; else a bit of each sort, by block. */
    unsigned char sort[IZ_LAYERS_MOST];
    int window;                   /* of blocks with one */
    struct iz_rope rope[2];       /* of blocks without a window, and with one */
    float score_scale, score_cap; /* as in struct iz_attention */
    float residual, embedding;    /* factors, 0: 1; of what is added */
    float logit_scale, logit_cap; /* 0: 1; 0: none */
    struct iz_experts experts;    /* in place of some blocks' MLP */
    const struct iz_sequence_chunk *chunk; /* NULL: all rows of all samples */
};

#define IZ_BLOCK_STD 0.02f /* of initial weights */

/* The names of the blocks, before a number, and of a block's parameters, each
 * with .weight and .bias; NULL: a block has none. */
struct iz_block_names {
    const char *block, *norm_1, *qkv, *attn_proj, *norm_2, *fc, *mlp_proj;
    const char *q_norm, *k_norm, *behind_1, *behind_2;
    const char *sinks;
    /* Of a block with experts: its router, before its experts, and theirs;
     * those of the shared one. */
    const char *router, *choice, *experts, *expert_fc, *expert_proj;
    const char *shared_fc, *shared_proj, *shared_gate;
};

/* Of initial weights before a residual addition, so that the sum over all of
 * them keeps its variance. */
static inline float iz_block_residual(const struct iz_block *b)
{
    return IZ_BLOCK_STD / sqrtf(2 * (float)b->layers);
}

/* Of the last unit: what its norm has, a bias of the logits, if there is one,
 * then a matrix of a row per class.  A list without that has the embedding's.
 */
struct iz_ends {
    const struct iz_param *embed, *head;
    int n_embed, n_head;
};

/* Units of the blocks: more than blocks if their experts are units. */
int iz_block_units(const struct iz_block *b);
/* Makes the units of m, b being borrowed until m is closed; the embedding is
 * that of tokens and of learned positions, if there are some.  Where m has a
 * vocabulary, the head generates. */
void iz_block_open(struct iz_model *m, const struct iz_block *b,
                   const struct iz_block_names *names,
                   const struct iz_ends *ends);

/* 0, or -EINVAL with the reason printed: heads must share the width evenly. */
int iz_block_check(const char *model, int width, int heads);
