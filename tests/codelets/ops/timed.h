/* SPDX-License-Identifier: Apache-2.0 */
/* Ops in the shapes of a block of a model, on the tensors and by the calls that
 * their cases have, for bench/ops.c. */
#pragma once

#include "tests/codelets/ops/scene.h"

struct timed_shape {
    const char *model;
    int64_t width, heads, seq, vocab, tokens;
};

struct timed {
    const char *name;
    scene_op *op;
    const void *arg;
    /* Whether the library can do it with so much scratch; else the reason is in
     * x->ask.  NULL: it is ours. */
    bool (*possible)(struct iz_exec *x, const struct iz_view *v,
                     const void *arg, int64_t scratch);
    int64_t more; /* bytes of scratch, beside those that op counts */
};

/* Times n ops on tensors of s, which have no memory (fixture_bare), but for
 * those that the host reads too.  All but the first may read what that leaves.
 */
typedef void timed_fn(void *to, const struct scene *s, const struct timed *t,
                      int n);

/* Any tokens of the vocabulary. */
void timed_tokens(const struct timed_shape *s, int32_t *token);

void norm_timed(const struct timed_shape *s, timed_fn *f, void *to);
void gelu_timed(const struct timed_shape *s, timed_fn *f, void *to);
void attention_timed(const struct timed_shape *s, timed_fn *f, void *to);
void embedding_timed(const struct timed_shape *s, timed_fn *f, void *to);
void classifier_timed(const struct timed_shape *s, timed_fn *f, void *to);
/* in, out: sides of the weights in units of the width.  As a block calls it:
 * products back to the width add the residual. */
void product_timed(const struct timed_shape *s, int in, int out,
                   const char *name, const char *shape, timed_fn *f, void *to);
