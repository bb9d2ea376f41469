/* SPDX-License-Identifier: Apache-2.0 */
/* GELU in the tanh form. */
#include "codelets/base/build.h"
#include "codelets/ops/activation_loops.h"

IZ_SIMD static void on_cpu(struct iz_view da, struct iz_view y,
                           struct iz_view dy, struct iz_view a)
{
    bool gated = a.cols > y.cols;
    if (da.p)
        backward(da.p, y.p, dy.p, a.p, y.rows, y.cols, gated, IZ_GELU_TANH);
    else
        forward(y.p, a.p, y.rows, y.cols, gated, IZ_GELU_TANH);
}

void iz_gelu_cpu(struct iz_view da, struct iz_view y, struct iz_view dy,
                 struct iz_view a)
{
    on_cpu(da, y, dy, a);
}
