/* SPDX-License-Identifier: Apache-2.0 */
/* GELU in the tanh form.  (1 + tanh(u)) / 2 is the logistic function of 2u,
 * which loses no digits where tanh is near -1. */
#include "codelets/ops/ops.h"

#include <assert.h>

#include "codelets/base/build.h"
#include "codelets/ops/activation.h"
#include "codelets/ops/gpu_ops.h"
#include "codelets/ops/row_math.h"

#define LOG2_E 1.4426950409f

/* 1 / (1 + exp(-2u)), u = sqrt(2/pi) (a + 0.044715 a^3), by a power of two.
 * What is below 1e-30 is 0: subnormal numbers are slow and say nothing. */
static inline float gelu_gate(float a)
{
    float power = a * (-LOG2_E * IZ_TWO_ROOT_2_PI +
                       -LOG2_E * IZ_TWO_ROOT_2_PI * IZ_GELU_CUBIC * (a * a));
    float s = 1 / (1 + iz_math_exp2f(power));
    return power > 100 ? 0 : s;
}

/* Results may replace the arguments: an element is read before it is written.
 */
IZ_SIMD static void fwd_cpu(float *y, const float *a, int64_t n)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++)
        y[i] = a[i] * gelu_gate(a[i]);
}

IZ_SIMD static void bwd_cpu(float *du, float *y, const float *dy,
                            const float *a, int64_t n)
{
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        float v = a[i], s = gelu_gate(v),
              g = dy[i] * iz_activation_gelu_slope(v, s);
        du[i] = g;
        y[i] = v * s;
    }
}

void iz_gelu_fwd(struct iz_exec *x, struct iz_view y, struct iz_view a)
{
    assert(y.rows == a.rows && y.cols == a.cols);
    iz_exec_count(x, 0, (double)(iz_view_bytes(y) + iz_view_bytes(a)));
    if (iz_exec_runs(x, IZ_CPU))
        fwd_cpu(y.p, a.p, iz_view_len(a));
    if (iz_exec_runs(x, IZ_CUDA))
        iz_gelu_fwd_cuda(x, y, a);
}

void iz_gelu_bwd(struct iz_exec *x, struct iz_view du, struct iz_view y,
                 struct iz_view dy, struct iz_view a)
{
    assert(du.rows == a.rows && du.cols == a.cols && y.cols == a.cols);
    iz_exec_count(x, 0,
                  (double)(iz_view_bytes(du) + iz_view_bytes(y) +
                           iz_view_bytes(dy) + iz_view_bytes(a)));
    if (iz_exec_runs(x, IZ_CPU))
        bwd_cpu(du.p, y.p, dy.p, a.p, iz_view_len(a));
    if (iz_exec_runs(x, IZ_CUDA))
        iz_gelu_bwd_cuda(x, du, y, dy, a);
}
