/* SPDX-License-Identifier: Apache-2.0 */
/* What the CPU and the GPU share of activations: each is a times a gate s, and
 * its slope is a function of both. */
#pragma once

#include <math.h>

#include "codelets/ops/ops.h"

#define IZ_TWO_ROOT_2_PI 1.5957691216f /* 2 sqrt(2/pi) */
#define IZ_GELU_CUBIC 0.044715f

/* Beyond `most` a slope is that of the limit; the clamp keeps 0 * inf away and
 * lets NaN through. */
IZ_EITHER float iz_activation_clamp(float a, float most)
{
    float c = a > most ? most : a;
    return c < -most ? -most : c;
}

#define IZ_SWISH_7_ALPHA 1.702f

/* Where g and u of column j of f are in a gated row. */
#define IZ_GATE_AT(act, j) ((act) == IZ_SWISH_7 ? 2 * (j) : (j))
#define IZ_UP_AT(act, j, f) ((act) == IZ_SWISH_7 ? 2 * (j) + 1 : (f) + (j))

/* What stands for the two halves of a gated row. */
IZ_EITHER float iz_activation_gate(enum iz_activation act, float a)
{
    return act == IZ_SWISH_7 && a > 7 ? 7 : a;
}

IZ_EITHER float iz_activation_up(enum iz_activation act, float u)
{
    return act == IZ_SWISH_7 ? iz_activation_clamp(u, 7) + 1 : u;
}

/* The gradient of u from that of iz_activation_up. */
IZ_EITHER float iz_activation_up_slope(enum iz_activation act, float u, float d)
{
    return act == IZ_SWISH_7 && (u > 7 || u < -7) ? 0 : d;
}

/* Of the kinds whose gates need no fast exponential: (1 + erf(a / sqrt 2)) / 2,
 * 0 or 1, 0 or a. */
IZ_EITHER float iz_activation_plain_gate(enum iz_activation act, float a)
{
    if (act == IZ_GELU_ERF)
        return a < -12 ? 0 : 0.5f * erfcf(a * -0.70710678119f);
    return a > 0 && act == IZ_RELU ? 1 : a <= 0 ? 0 : a; /* NaN stays NaN */
}

/* d (a s) / da. */
IZ_EITHER float iz_activation_slope(enum iz_activation act, float a, float s)
{
    float c =
        iz_activation_clamp(a, act == IZ_SILU || act == IZ_SWISH_7 ? 100 : 12);
    switch (act) {
    case IZ_GELU_TANH:
        return s + c * s * (1 - s) * IZ_TWO_ROOT_2_PI *
                       (1 + 3 * IZ_GELU_CUBIC * c * c);
    case IZ_GELU_ERF:
        return s + c * 0.39894228040f * expf(-0.5f * c * c);
    case IZ_SILU:
        return s + c * s * (1 - s);
    case IZ_RELU:
        return s;
    case IZ_SWISH_7:
        return a > 7 ? 0 : s + IZ_SWISH_7_ALPHA * c * s * (1 - s);
    default:
        return 2 * s;
    }
}
