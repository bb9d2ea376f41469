/* SPDX-License-Identifier: Apache-2.0 */
/* One call of attention, forward and backward, against double precision. */
#pragma once

#include "tests/codelets/ops/scene.h"

struct shape {
    int64_t samples, seq, heads, d, kv_heads;
};

enum {
    QKV,
    O,
    LSE,
    DQKV,
    DY,
    BEGINS,
    SINKS,
    DSINKS,
    KV, /* these two: of chunks */
    DKV,
    ATTENTION_TENSORS
};

struct attention {
    struct scene s;
    struct shape shape;
    bool full;             /* not causal */
    bool cudnn, cudnn_bwd; /* whose kernels */
    /* [samples * seq]: see ops.h; the scene's own, used if `apart`, which is
     * set by attention_cut. */
    int32_t *begins;
    bool apart;
    int window; /* these four: see ops.h; the scene's sinks are used if `sinks`
                 */
    float scale, cap;
    bool sinks;
    int64_t chunk; /* rows of a call, set by attention_chunk; 0: all */
    /* What is expected of these tensors; owned, NULL until attention_double. */
    struct near *o, *lse, *dqkv, *dsinks;
};

/* scale: of queries, keys and values. */
struct attention attention_new(enum iz_dtype act, struct shape s, double scale);
void attention_free(struct attention *t);
/* Into documents of so many rows. */
void attention_cut(struct attention *t, int rows);
/* From here on the op takes so many rows of its one sample at a time.  Keys and
 * values are apart, and those in qkv are NaN; dkv and dsinks are no zeros. */
void attention_chunk(struct attention *t, int64_t rows);
scene_op attention_forward, attention_backward;
void attention_run(struct attention *t, bool backward);

/* Attention and its gradient in double precision, and how far a kernel may be
 * from them that multiplies numbers of the type of activations, sums in fp32,
 * and rounds probabilities, their gradients and results to that type. */
void attention_double(struct attention *t);
/* Runs both and compares all results. */
void attention_check(struct attention *t);
