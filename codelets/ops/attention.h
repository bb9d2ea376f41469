/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of one head of one sample on the CPU: what the loops that are
 * compiled once per SIMD level are given (attention_loops.c), and how much
 * scratch they take, which is the same at every level. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* Of the rows i0 to i0 + rows of a sample, and all its keys.  Rows are `ld` (of
 * queries), `ldk` (of keys and values) or `ldo` (of o) apart.  Heads of a group
 * share keys: the first one packs them, and backward writes, or adds, the sum
 * of the group's gradients with the last one. */
struct iz_head {
    const float *q, *k, *v, *o, *dy;
    float *dq, *dk, *dv;
    float *out, *lse; /* lse: [rows] */
    int64_t d, ld, ldk, ldo, i0, rows;
    int64_t keys; /* up to the last one that a row sees */
    bool first, last;
    bool adds; /* to dk and dv */
    bool full; /* not causal */
    /* Of all rows of the sample or NULL: the first key that a row sees; never
     * less than the previous row's, never after the row. */
    const int32_t *begins;
    int64_t window;    /* keys that a row sees, itself included, at most */
    float scale;       /* 0: 1 / sqrt(d) */
    float cap;         /* as in ops.h */
    const float *sink; /* of this head, or NULL */
    float *dsink;      /* backward adds to it */
    float *work; /* [iz_attention_head_floats], 64-byte aligned, kept within a
                    group */
};

enum {
    IZ_HEAD_ROWS = 64,  /* queries of a tile */
    IZ_HEAD_KEYS = 128, /* keys of a tile */
    IZ_HEAD_PANEL = 8   /* rows of a product's result: see attention_loops.c */
};

/* Keys and columns with the zeros that round them up. */
static inline int64_t iz_attention_head_keys(int64_t keys)
{
    return (keys + IZ_HEAD_PANEL - 1) / IZ_HEAD_PANEL * IZ_HEAD_PANEL;
}

static inline int64_t iz_attention_head_cols(int64_t d)
{
    return (d + 15) / 16 * 16;
}

/* Scratch: of keys and values and their gradients; of a tile's queries, their
 * gradients and what it accumulates; of one or two squares of scores. */
static inline int64_t iz_attention_head_floats(int64_t keys, int64_t d,
                                               bool bwd)
{
    int64_t n = iz_attention_head_keys(keys), c = iz_attention_head_cols(d);
    return (bwd ? 4 : 2) * n * c + (bwd ? 5 : 3) * IZ_HEAD_ROWS * c +
           (bwd ? 2 : 1) * IZ_HEAD_ROWS * IZ_HEAD_KEYS;
}

/* The loops that are compiled once per SIMD level for speed alone: products and
 * sums are fused and vectors have the level's length, so another level has
 * other bits.  At one level the bits depend on the arguments alone: not on the
 * thread, nor on what else a task computes. */
struct iz_attention_loops {
    void (*attention_fwd)(const struct iz_head *h);
    void (*attention_bwd)(const struct iz_head *h);
};
