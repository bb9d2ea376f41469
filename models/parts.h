/* SPDX-License-Identifier: Apache-2.0 */
/* Small things that every model says: views of its tensors, descriptions of its
 * parameters, what a model holds. */
#pragma once

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "codelets/ops/ops.h"
#include "codelets/unit/layer.h"
#include "runtime/run/run.h"

/* A boundary tensor [samples, T*C] as [M,C]. */
static inline struct iz_view tokens(struct iz_view v, int width)
{
    v.rows = iz_view_len(v) / width;
    v.cols = width;
    return v;
}

/* The next part of v, from byte *at on. */
static inline struct iz_view next_view(struct iz_view v, int64_t *at,
                                       enum iz_dtype type, int64_t rows,
                                       int64_t cols)
{
    struct iz_view out = {.p = v.p ? (char *)v.p + *at : NULL,
                          .dtype = type,
                          .rows = rows,
                          .cols = cols};
    *at += iz_view_bytes(out);
    return out;
}

/* The gradient of parameter i of the unit; absent in forward. */
static inline struct iz_view gradient(const struct iz_layer *a, int i)
{
    return a->dw ? a->dw[i] : IZ_NONE;
}

/* Weight i and bias i + 1 of the unit. */
static inline struct iz_linear affine(const struct iz_layer *a, int i)
{
    return (struct iz_linear){.w = a->w[i],
                              .b = a->w[i + 1],
                              .dw = gradient(a, i),
                              .db = gradient(a, i + 1)};
}

/* Numbers of the input, in the type of activations and in scratch. */
static inline struct iz_view numbers_of(struct iz_exec *x, float *numbers,
                                        int64_t rows, int64_t cols)
{
    struct iz_view in = {
        .p = numbers, .dtype = IZ_F32, .rows = rows, .cols = cols};
    struct iz_view out = iz_exec_work(x, x->act, rows, cols);
    iz_convert(x, out, in);
    return out;
}

static inline struct iz_param weight(const char *name, int64_t rows,
                                     int64_t cols, float std)
{
    struct iz_param p = {
        .rows = rows, .cols = cols, .init = IZ_INIT_NORMAL, .std = std};
    snprintf(p.name, sizeof(p.name), "%s", name);
    return p;
}

static inline struct iz_param vector(const char *name, int64_t n,
                                     enum iz_init init)
{
    struct iz_param p = weight(name, 1, n, 0);
    p.init = init;
    return p;
}

/* 0, or -EINVAL with the reason printed: integers are in the ranges of their
 * keys. */
static inline int check_keys(const char *model, const struct iz_key *k,
                             const void *config)
{
    for (; k->name; k++) {
        int v;
        if (k->type != IZ_KEY_INT)
            continue;
        memcpy(&v, (const char *)config + k->offset, sizeof(v));
        if (v < k->min || v > k->max) {
            fprintf(stderr, "%s: %s = %d: must be in %.0f..%.0f\n", model,
                    k->name, v, k->min, k->max);
            return -EINVAL;
        }
    }
    return 0;
}

/* Samples are windows of so many tokens, which are 0..vocab-1. */
static inline void read_tokens(struct iz_model *m, int seq, int vocab)
{
    m->input_bytes = seq * (int64_t)sizeof(int32_t);
    m->target_bytes = m->input_bytes;
    m->tokens = seq;
    m->vocab = vocab;
}
