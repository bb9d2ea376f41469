/* SPDX-License-Identifier: Apache-2.0 */
/* The loops of activations on the CPU, for a kind that is a constant.  Two
 * files are compiled with them: gelu.c may form a product and a sum in one
 * rounding.
 */
#pragma once

#include <string.h>

#include "codelets/ops/activation.h"
#include "codelets/ops/row_math.h"

#define LOG2_E 1.4426950409f
#define BLOCK 256

/* 1 / (1 + exp(-2u)), u = sqrt(2/pi) (a + 0.044715 a^3), by a power of two.
 * What is below 1e-30 is 0, here and below: subnormal numbers are slow and say
 * nothing. */
static inline float gelu_gate(float a)
{
    float power = a * (-LOG2_E * IZ_TWO_ROOT_2_PI +
                       -LOG2_E * IZ_TWO_ROOT_2_PI * IZ_GELU_CUBIC * (a * a));
    float s = 1 / (1 + iz_math_exp2f(power));
    return power > 100 ? 0 : s;
}

/* 1 / (1 + exp(-a)). */
static inline float silu_gate(float a)
{
    float s = 1 / (1 + iz_math_expf(-a));
    return a < -69 ? 0 : s;
}

static inline float gate_of(enum iz_activation act, float a)
{
    return act == IZ_GELU_TANH ? gelu_gate(a)
           : act == IZ_SILU    ? silu_gate(a)
           : act == IZ_SWISH_7 ? silu_gate(IZ_SWISH_7_ALPHA * a)
                               : iz_activation_plain_gate(act, a);
}

/* Rows of f.  Gated ones of a are twice as long; without a gate y may be a: an
 * element is read before it is written. */
static inline __attribute__((always_inline)) void
forward(float *y, const float *a, int64_t rows, int64_t f, bool gated,
        enum iz_activation act)
{
    if (!gated)
#pragma omp simd
        for (int64_t i = 0; i < rows * f; i++)
            y[i] = a[i] * gate_of(act, a[i]);
    for (int64_t i = 0; gated && i < rows; i++, y += f, a += 2 * f)
#pragma omp simd
        for (int64_t j = 0; j < f; j++) {
            float g = iz_activation_gate(act, a[IZ_GATE_AT(act, j)]);
            float u = iz_activation_up(act, a[IZ_UP_AT(act, j, f)]);
            y[j] = g * gate_of(act, g) * u;
        }
}

/* One gated row.  Results go through blocks of their own because they may
 * replace the arguments, which would keep the compiler from vectorising. */
static inline __attribute__((always_inline)) void
backward_gated(float *da, float *y, const float *dy, const float *a, int64_t f,
               enum iz_activation act)
{
    for (int64_t i = 0; i < f; i += BLOCK) {
        int64_t m = f - i < BLOCK ? f - i : BLOCK;
        float dg[BLOCK], du[BLOCK], out[BLOCK];
        for (int64_t j = 0; j < m; j++) {
            float in = a[IZ_GATE_AT(act, i + j)],
                  up = a[IZ_UP_AT(act, i + j, f)], d = dy[i + j];
            float g = iz_activation_gate(act, in), s = gate_of(act, g),
                  u = iz_activation_up(act, up);
            dg[j] = d * u * iz_activation_slope(act, in, s);
            du[j] = iz_activation_up_slope(act, up, d * (g * s));
            out[j] = g * s * u;
        }
        if (act != IZ_SWISH_7) {
            memcpy(da + i, dg, (size_t)m * sizeof(*da));
            memcpy(da + f + i, du, (size_t)m * sizeof(*da));
        }
        for (int64_t j = 0; act == IZ_SWISH_7 && j < m; j++) {
            da[2 * (i + j)] = dg[j];
            da[2 * (i + j) + 1] = du[j];
        }
        memcpy(y + i, out, (size_t)m * sizeof(*y));
    }
}

static inline __attribute__((always_inline)) void
backward(float *da, float *y, const float *dy, const float *a, int64_t rows,
         int64_t f, bool gated, enum iz_activation act)
{
    if (!gated)
#pragma omp simd
        for (int64_t i = 0; i < rows * f; i++) {
            float v = a[i], s = gate_of(act, v),
                  g = dy[i] * iz_activation_slope(act, v, s);
            da[i] = g;
            y[i] = v * s;
        }
    for (int64_t i = 0; gated && i < rows; i++)
        backward_gated(da + i * 2 * f, y + i * f, dy + i * f, a + i * 2 * f, f,
                       act);
}

#undef BLOCK
#undef LOG2_E

/* gelu.c: the kind IZ_GELU_TANH; backward where there is a da. */
void iz_gelu_cpu(struct iz_view da, struct iz_view y, struct iz_view dy,
                 struct iz_view a);
