/* SPDX-License-Identifier: Apache-2.0 */
/* The Adam and AdamW update of one chunk of a flat fp32 shard on the CPU, with
 * the low-precision copy of the parameters written in the same pass. */
#ifndef IZ_CODELETS_ADAMW_H
#define IZ_CODELETS_ADAMW_H

#include <stdbool.h>
#include <stdint.h>

#include "codelets/dtype.h"

IZ_C_BEGIN

struct iz_adam {
    double lr, beta1, beta2, eps, weight_decay;
    bool adamw;           /* decay the parameter; false: add wd * p to g (L2) */
    bool bias_correction; /* divide m and v by 1 - beta^t */
    int64_t t;            /* 1-based number of this update */
    float grad_scale;     /* multiplies g: clip / (loss scale * N * G) */
};

/* What an update of an element needs, rounded to fp32 once. */
struct iz_adam_consts {
    float scale, beta1, rest1, beta2, rest2;
    float l2;   /* L2 decay, 0 with AdamW */
    float keep; /* 1 - lr * decay with AdamW, else 1 */
    float step; /* lr / (1 - beta1^t) * sqrt(1 - beta2^t) */
    float eps;  /* eps * sqrt(1 - beta2^t) */
};

struct iz_adam_consts iz_adam_consts_of(const struct iz_adam *a);

/* With g scaled:
 *     m = b1 m + (1 - b1) g         v = b2 v + (1 - b2) g^2
 *     p = p (1 - lr wd) - lr/(1 - b1^t) * m / (sqrt(v)/sqrt(1 - b2^t) + eps)
 * the fraction times sqrt(1 - b2^t), so that one division does it; in fp32,
 * each operation rounded once, so that the bits of an element depend neither on
 * where a chunk starts nor on the SIMD level.  p is the fp32 master;
 * p, m and v are updated in place.  out receives the new p as out_type, or is
 * NULL.  m and v below FLT_MIN become 0: an element without gradient would
 * otherwise stay subnormal for ever, at a hundred times the cost.  No two
 * buffers may overlap. */
void iz_adam_chunk(const struct iz_adam *a, int64_t n, float *p, float *m,
                   float *v, const void *g, enum iz_dtype g_type, void *out,
                   enum iz_dtype out_type);

/* The same with the numbers of iz_adam_consts_of, for many short pieces. */
void iz_adam_piece(const struct iz_adam_consts *c, int64_t n, float *p,
                   float *m, float *v, const void *g, enum iz_dtype g_type,
                   void *out, enum iz_dtype out_type);

IZ_C_END

#endif
