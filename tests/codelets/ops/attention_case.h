/* SPDX-License-Identifier: Apache-2.0 */
/* One call of attention, forward and backward, against double precision. */
#pragma once

#include "tests/codelets/ops/attention_double.h"
#include "tests/codelets/ops/scene.h"

struct shape {
    int64_t samples, seq, heads, d, kv_heads;
};

enum { QKV, O, LSE, DQKV, DY, ATTENTION_TENSORS };

struct attention {
    struct scene s;
    struct shape shape;
    bool full;  /* not causal */
    bool cudnn; /* the forward */
};

/* scale: of queries, keys and values. */
struct attention attention_new(enum iz_dtype act, struct shape s, double scale);
void attention_free(struct attention *t);
void attention_forward(struct iz_exec *x, const struct iz_view *v,
                       const void *arg);
void attention_run(struct attention *t, bool backward);

/* Borrows what t holds. */
struct attention_double attention_double_of(const struct attention *t);
/* Runs both and compares all results. */
void attention_check(struct attention *t);
