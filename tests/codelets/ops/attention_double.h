/* SPDX-License-Identifier: Apache-2.0 */
/* Attention and its gradient in double precision, and how far a kernel
 * may be from them that multiplies numbers of type t, sums in fp32, and rounds
 * probabilities, their gradients and results to t. */
#pragma once

#include <stdbool.h>

#include "codelets/flat/dtype.h"
#include "tests/codelets/ops/fixture.h"

/* Inputs are borrowed: qkv [samples seq, (heads + 2 kv_heads) d], dy [samples
 * seq, C] or NULL. */
struct attention_double {
    int64_t samples, seq, heads, d, kv_heads;
    enum iz_dtype t;
    const double *qkv, *dy;
    struct near *o, *lse, *dqkv; /* owned; shaped as in codelets/ops/ops.h */
    bool full;                   /* not causal */
};

/* Fills o and lse, and dqkv where there is a dy. */
void attention_double_run(struct attention_double *a);
void attention_double_free(struct attention_double *a);
