/* SPDX-License-Identifier: Apache-2.0 */
/* The gated unit of Llama's MLP: one half of a row, through x / (1 + exp(-x)),
 * times the other. */
#include "codelets/ops/ops.h"

#include <assert.h>
#include <string.h>

#include "codelets/base/build.h"
#include "codelets/ops/activation.h"
#include "codelets/ops/gpu_ops.h"
#include "codelets/ops/row_math.h"

#define BLOCK 256

/* 1 / (1 + exp(-a)).  What is below 1e-30 is 0: subnormal numbers are slow and
 * say nothing. */
static inline float swiglu_gate(float a)
{
    float s = 1 / (1 + iz_math_expf(-a));
    return a < -69 ? 0 : s;
}

IZ_SIMD static void fwd_cpu(float *restrict y, const float *restrict a,
                            int64_t rows, int64_t f)
{
    for (int64_t i = 0; i < rows; i++, y += f, a += 2 * f)
        for (int64_t j = 0; j < f; j++)
            y[j] = a[j] * swiglu_gate(a[j]) * a[f + j];
}

/* One row.  Results go through blocks of their own because they may replace the
 * arguments, which would keep the compiler from vectorising. */
static inline void bwd_row(float *da, float *y, const float *dy, const float *a,
                           int64_t f)
{
    for (int64_t i = 0; i < f; i += BLOCK) {
        int64_t m = f - i < BLOCK ? f - i : BLOCK;
        float dg[BLOCK], du[BLOCK], out[BLOCK];
        for (int64_t j = 0; j < m; j++) {
            float g = a[i + j], u = a[f + i + j], d = dy[i + j],
                  s = swiglu_gate(g);
            dg[j] = d * u * iz_activation_swiglu_slope(g, s);
            du[j] = d * (g * s);
            out[j] = g * s * u;
        }
        memcpy(da + i, dg, (size_t)m * sizeof(*da));
        memcpy(da + f + i, du, (size_t)m * sizeof(*da));
        memcpy(y + i, out, (size_t)m * sizeof(*y));
    }
}

IZ_SIMD static void bwd_cpu(float *da, float *y, const float *dy,
                            const float *a, int64_t rows, int64_t f)
{
    for (int64_t i = 0; i < rows; i++)
        bwd_row(da + i * 2 * f, y + i * f, dy + i * f, a + i * 2 * f, f);
}

void iz_swiglu_fwd(struct iz_exec *x, struct iz_view y, struct iz_view a)
{
    assert(y.rows == a.rows && 2 * y.cols == a.cols);
    iz_exec_count(x, 0, (double)(iz_view_bytes(y) + iz_view_bytes(a)));
    if (iz_exec_runs(x, IZ_CPU))
        fwd_cpu(y.p, a.p, y.rows, y.cols);
    if (iz_exec_runs(x, IZ_CUDA))
        iz_swiglu_fwd_cuda(x, y, a);
}

void iz_swiglu_bwd(struct iz_exec *x, struct iz_view da, struct iz_view y,
                   struct iz_view dy, struct iz_view a)
{
    assert(y.rows == a.rows && 2 * y.cols == a.cols);
    assert(da.rows == a.rows && da.cols == a.cols && dy.cols == y.cols);
    iz_exec_count(x, 0,
                  (double)(iz_view_bytes(da) + iz_view_bytes(y) +
                           iz_view_bytes(dy) + iz_view_bytes(a)));
    if (iz_exec_runs(x, IZ_CPU))
        bwd_cpu(da.p, y.p, dy.p, a.p, y.rows, y.cols);
    if (iz_exec_runs(x, IZ_CUDA))
        iz_swiglu_bwd_cuda(x, da, y, dy, a);
}
