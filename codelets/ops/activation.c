/* SPDX-License-Identifier: Apache-2.0 */
/* Activations, and the gated units of MLPs: one half of a row, through an
 * activation, times the other. */
#include <assert.h>

#include "codelets/base/build.h"
#include "codelets/ops/activation_loops.h"
#include "codelets/ops/gpu_ops.h"

/* Backward where there is a da. */
IZ_INLINE void one_kind(struct iz_view da, struct iz_view y, struct iz_view dy,
                        struct iz_view a, enum iz_activation act)
{
    bool gated = act == IZ_SWISH_7 || a.cols > y.cols;
    if (da.p)
        backward(da.p, y.p, dy.p, a.p, y.rows, y.cols, gated, act);
    else
        forward(y.p, a.p, y.rows, y.cols, gated, act);
}

/* A loop of its own for each kind. */
IZ_SIMD static void activation_on_cpu(struct iz_view da, struct iz_view y,
                                      struct iz_view dy, struct iz_view a,
                                      enum iz_activation act)
{
    if (act == IZ_SILU)
        one_kind(da, y, dy, a, IZ_SILU);
    else if (act == IZ_GELU_ERF)
        one_kind(da, y, dy, a, IZ_GELU_ERF);
    else if (act == IZ_RELU)
        one_kind(da, y, dy, a, IZ_RELU);
    else if (act == IZ_SWISH_7)
        one_kind(da, y, dy, a, IZ_SWISH_7);
    else
        one_kind(da, y, dy, a, IZ_RELU2);
}

void iz_activation_apply(struct iz_exec *x, struct iz_view da, struct iz_view y,
                         struct iz_view dy, struct iz_view a,
                         enum iz_activation act)
{
    assert(y.rows == a.rows && (y.cols == a.cols || 2 * y.cols == a.cols));
    assert(!da.rows || (da.rows == a.rows && da.cols == a.cols));
    assert(!da.rows || dy.cols == y.cols);
    iz_exec_count(x, 0,
                  (double)(iz_view_bytes(da) + iz_view_bytes(y) +
                           iz_view_bytes(dy) + iz_view_bytes(a)));
    if (iz_exec_runs(x, IZ_CPU) && act == IZ_GELU_TANH)
        iz_gelu_cpu(da, y, dy, a);
    else if (iz_exec_runs(x, IZ_CPU))
        activation_on_cpu(da, y, dy, a, act);
    if (iz_exec_runs(x, IZ_CUDA))
        iz_activation_apply_cuda(x, da, y, dy, a, act);
}
