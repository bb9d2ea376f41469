/* SPDX-License-Identifier: Apache-2.0 */
/* Lion (Chen et al., Symbolic Discovery of Optimization Algorithms, 2023,
 * arXiv:2302.06675), element by element, for both sides as adam.h.
 *
 * With g scaled:
 *     u = b1 m + (1 - b1) g
 *     p = p (1 - lr wd) - lr sign(u)
 *     m = b2 m + (1 - b2) g
 * The sign of 0 is 0, that of NaN is NaN. */
#pragma once

#include "codelets/flat/flush.h"

/* Rounded to fp32 once. */
struct iz_lion_consts {
    float scale, beta1, rest1, beta2, rest2;
    float keep; /* 1 - lr * decay */
    float lr;
};

/* g is scaled. */
IZ_EITHER float iz_lion_p(const struct iz_lion_consts *k, float p, float m,
                          float g)
{
    float u = k->beta1 * m + k->rest1 * g;
    float step = u > 0 ? k->lr : u < 0 ? -k->lr : u;
    return p * k->keep - step;
}

IZ_EITHER float iz_lion_m(const struct iz_lion_consts *k, float m, float g)
{
    return iz_flush(k->beta2 * m + k->rest2 * g);
}
