/* SPDX-License-Identifier: Apache-2.0 */
/* A call of an op that waits in a stream of the stand-in: when its turn comes,
 * it reaches device memory through the stand-in and calls the op of the CPU
 * with scratch of its own, so that the bits are those of a run on a CPU.  The
 * scratch of the GPU is overwritten before and after, because nothing may rely
 * on what is in it. */
#pragma once

#include "codelets/ops/gpu_ops.h"

/* Arguments of a kernel on flat buffers of n elements. */
struct flat {
    int64_t n;
    void *out;
    const void *g;
    double *norm2; /* `sums` of them */
    int64_t sums;
    enum iz_dtype in_type, out_type;
    bool accumulate;
    int n_in;
};

/* An op with its arguments: device pointers until it runs. */
struct call {
    void (*op)(struct iz_exec *x, const struct call *c);
    void (*reach)(struct call *c); /* makes them pointers of the host */
    struct iz_view v[5], scratch;
    union {
        struct iz_linear linear;
        struct iz_norm_layer norm;
        struct iz_rmsnorm rmsnorm;
        struct iz_rope rope;
        struct iz_attention attention;
        struct iz_classifier classifier;
        struct iz_update update;
        struct iz_table table;
    };
    struct flat flat;
    struct iz_alike span[IZ_ALIKE_MAX];
    const int32_t *token;
    int64_t count; /* of tokens, or the first column of heads */
    bool back;
    const void *in[]; /* flat.n_in of them */
};

/* A device pointer as one of the host; in `reach` only. */
void *standin_reach(const void *p, int64_t bytes);
void standin_reach_view(struct iz_view *v);

/* Copies c and enqueues it on x's stream; in: c->flat.n_in pointers, copied
 * too. */
void standin_submit(struct iz_exec *x, const struct call *c);
void standin_submit_more(struct iz_exec *x, const struct call *c,
                         const void *const *in);
