/* SPDX-License-Identifier: Apache-2.0 */
/* Activations, and the gated units of MLPs: one half of a row, through an
 * activation, times the other. */
#include <assert.h>

#include "codelets/base/build.h"
#include "codelets/ops/activation_loops.h"
#include "codelets/ops/gpu_ops.h"

/* A loop of its own for each kind. */
IZ_SIMD static void fwd_cpu(struct iz_view y, struct iz_view a,
                            enum iz_activation act)
{
    bool gated = a.cols > y.cols;
    if (act == IZ_SILU)
        forward(y.p, a.p, y.rows, y.cols, gated, IZ_SILU);
    else if (act == IZ_GELU_ERF)
        forward(y.p, a.p, y.rows, y.cols, gated, IZ_GELU_ERF);
    else if (act == IZ_RELU)
        forward(y.p, a.p, y.rows, y.cols, gated, IZ_RELU);
    else if (act == IZ_SWISH_7)
        forward(y.p, a.p, y.rows, y.cols, true, IZ_SWISH_7);
    else
        forward(y.p, a.p, y.rows, y.cols, gated, IZ_RELU2);
}

IZ_SIMD static void bwd_cpu(struct iz_view da, struct iz_view y,
                            struct iz_view dy, struct iz_view a,
                            enum iz_activation act)
{
    bool gated = a.cols > y.cols;
    if (act == IZ_SILU)
        backward(da.p, y.p, dy.p, a.p, y.rows, y.cols, gated, IZ_SILU);
    else if (act == IZ_GELU_ERF)
        backward(da.p, y.p, dy.p, a.p, y.rows, y.cols, gated, IZ_GELU_ERF);
    else if (act == IZ_RELU)
        backward(da.p, y.p, dy.p, a.p, y.rows, y.cols, gated, IZ_RELU);
    else if (act == IZ_SWISH_7)
        backward(da.p, y.p, dy.p, a.p, y.rows, y.cols, true, IZ_SWISH_7);
    else
        backward(da.p, y.p, dy.p, a.p, y.rows, y.cols, gated, IZ_RELU2);
}

void iz_activation_fwd(struct iz_exec *x, struct iz_view y, struct iz_view a,
                       enum iz_activation act)
{
    assert(y.rows == a.rows && (y.cols == a.cols || 2 * y.cols == a.cols));
    iz_exec_count(x, 0, (double)(iz_view_bytes(y) + iz_view_bytes(a)));
    if (iz_exec_runs(x, IZ_CPU) && act == IZ_GELU_TANH)
        iz_gelu_fwd_cpu(y, a);
    else if (iz_exec_runs(x, IZ_CPU))
        fwd_cpu(y, a, act);
    if (iz_exec_runs(x, IZ_CUDA))
        iz_activation_fwd_cuda(x, y, a, act);
}

void iz_activation_bwd(struct iz_exec *x, struct iz_view da, struct iz_view y,
                       struct iz_view dy, struct iz_view a,
                       enum iz_activation act)
{
    assert(y.rows == a.rows && (y.cols == a.cols || 2 * y.cols == a.cols));
    assert(da.rows == a.rows && da.cols == a.cols && dy.cols == y.cols);
    iz_exec_count(x, 0,
                  (double)(iz_view_bytes(da) + iz_view_bytes(y) +
                           iz_view_bytes(dy) + iz_view_bytes(a)));
    if (iz_exec_runs(x, IZ_CPU) && act == IZ_GELU_TANH)
        iz_gelu_bwd_cpu(da, y, dy, a);
    else if (iz_exec_runs(x, IZ_CPU))
        bwd_cpu(da, y, dy, a, act);
    if (iz_exec_runs(x, IZ_CUDA))
        iz_activation_bwd_cuda(x, da, y, dy, a, act);
}
