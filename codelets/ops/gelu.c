/* SPDX-License-Identifier: Apache-2.0 */
/* GELU in the tanh form. */
#include "codelets/base/build.h"
#include "codelets/ops/activation_loops.h"

IZ_SIMD static void fwd_cpu(struct iz_view y, struct iz_view a)
{
    forward(y.p, a.p, y.rows, y.cols, a.cols > y.cols, IZ_GELU_TANH);
}

IZ_SIMD static void bwd_cpu(struct iz_view da, struct iz_view y,
                            struct iz_view dy, struct iz_view a)
{
    backward(da.p, y.p, dy.p, a.p, y.rows, y.cols, a.cols > y.cols,
             IZ_GELU_TANH);
}

void iz_gelu_fwd_cpu(struct iz_view y, struct iz_view a)
{
    fwd_cpu(y, a);
}

void iz_gelu_bwd_cpu(struct iz_view da, struct iz_view y, struct iz_view dy,
                     struct iz_view a)
{
    bwd_cpu(da, y, dy, a);
}
