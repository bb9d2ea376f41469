/* SPDX-License-Identifier: Apache-2.0 */
/* Adam and AdamW, element by element: what the loops of codelets/flat/loops.c
 * and the kernels of update.cu compute.  Both are compiled without contraction,
 * so every operation is rounded once, here as there: the bits of an element
 * depend neither on where a chunk begins, nor on the SIMD level, nor on the
 * side.
 *
 * With g scaled:
 *     m = b1 m + (1 - b1) g         v = b2 v + (1 - b2) g^2
 *     p = p (1 - lr wd) - lr/(1 - b1^t) * m / (sqrt(v)/sqrt(1 - b2^t) + eps)
 * The fraction is multiplied by sqrt(1 - b2^t), so that there is one division.
 */
#pragma once

#include <math.h>
#include <stdbool.h>

#include "codelets/flat/flush.h"

/* What an update of an element needs, rounded to fp32 once. */
struct iz_adam_consts {
    float scale, beta1, rest1, beta2, rest2;
    float l2;   /* L2 decay, 0 with AdamW */
    float keep; /* 1 - lr * decay with AdamW, else 1 */
    float step; /* lr / (1 - beta1^t) * sqrt(1 - beta2^t) */
    float eps;  /* eps * sqrt(1 - beta2^t) */
};

/* The scaled gradient, with L2 decay if `l2`.  AdamW has none.  It could add
 * 0 * p as well: that changes only the sign of a zero, which iz_flush and the
 * square remove. */
IZ_EITHER float iz_adam_gradient(const struct iz_adam_consts *k, bool l2,
                                 float g, float p)
{
    return l2 ? g * k->scale + k->l2 * p : g * k->scale;
}

IZ_EITHER float iz_adam_m(const struct iz_adam_consts *k, float m, float g)
{
    return iz_flush(k->beta1 * m + k->rest1 * g);
}

IZ_EITHER float iz_adam_v(const struct iz_adam_consts *k, float v, float g)
{
    return iz_flush_square(k->beta2 * v + k->rest2 * (g * g));
}

IZ_EITHER float iz_adam_p(const struct iz_adam_consts *k, float p, float m,
                          float v)
{
    return p * k->keep - k->step * (m / (sqrtf(v) + k->eps));
}
