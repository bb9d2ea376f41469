/* SPDX-License-Identifier: Apache-2.0 */
/* Muon (Jordan et al., Muon: An optimizer for hidden layers in neural networks,
 * 2024), what is done element by element, as adam.h.  A matrix is updated in
 * three passes.  The first one, with g scaled:
 *     m = mu m + (1 - mu) g
 *     d = mu m + (1 - mu) g   (Nesterov's; without: d = m)
 * The second one makes o of all of d: see codelets/ops/orthogonal.h.  Then:
 *     p = p (1 - lr wd) - lr o
 * What is no matrix is updated by Adam in the first pass. */
#pragma once

#include <stdbool.h>

#include "codelets/flat/adam.h"

/* Rounded to fp32 once. */
struct iz_muon_consts {
    bool matrix;                /* else by: */
    struct iz_adam_consts adam; /* whose scale a matrix has too */
    float momentum, rest;
    float ahead, now; /* of m and of g in d */
};

/* Of the third pass. */
struct iz_along_consts {
    float keep, lr; /* keep: 1 - lr * decay */
};

/* g is scaled. */
IZ_EITHER float iz_muon_m(const struct iz_muon_consts *k, float m, float g)
{
    return iz_flush(k->momentum * m + k->rest * g);
}

/* m is the new one. */
IZ_EITHER float iz_muon_d(const struct iz_muon_consts *k, float m, float g)
{
    return k->ahead * m + k->now * g;
}

IZ_EITHER float iz_along_p(const struct iz_along_consts *k, float p, float o)
{
    return p * k->keep - k->lr * o;
}
