/* SPDX-License-Identifier: Apache-2.0 */
/* What the tests of attention for a GPU that run on the CPU share: one call of
 * the op, forward and backward, against double precision. */
#ifndef IZ_TESTS_CODELETS_GPU_ATTENTION_CASE_H
#define IZ_TESTS_CODELETS_GPU_ATTENTION_CASE_H

#include "tests/codelets/gpu/attention_double.h"
#include "tests/codelets/ops/fixture.h"

struct shape {
    int64_t samples, seq, heads, d, kv_heads;
};

struct attention {
    struct tensor qkv, o, lse, dqkv, dy;
    struct iz_attention a;
    struct attention_double ref;
    struct iz_cuda *cuda; /* of who runs it */
    bool cudnn;           /* the forward */
};

/* Of the GPU that a test describes: 90 for 9.0. */
extern int attention_capability;

/* Causal; scale: of queries, keys and values. */
struct attention attention_new(enum iz_dtype t, struct shape s, double scale);
void attention_free(struct attention *t);

/* Dry first, then with exactly the scratch that was asked for, full of NaN and
 * between two strips. */
void attention_run(const struct attention *t, bool bwd);

#endif
