/* SPDX-License-Identifier: Apache-2.0 */
/* Layer normalisation on a GPU: the kernels are in norm.cuh. */
#include "codelets/kernels/norm.cuh"

#include "codelets/ops/gpu_ops.h"

#define EPSILON 1e-5f

static void start(struct iz_exec *x, struct iz_view y, struct iz_view a,
                  const struct iz_norm_layer *n, bool again)
{
    iz_by_type(a.dtype, [&](auto zero) {
        start_forward<decltype(zero), true>(x, y, {}, a, n, EPSILON, 0, again);
    });
}

void iz_layernorm_fwd_cuda(struct iz_exec *x, struct iz_view y,
                           struct iz_view a, const struct iz_norm_layer *n)
{
    start(x, y, a, n, false);
}

void iz_layernorm_again_cuda(struct iz_exec *x, struct iz_view y,
                             struct iz_view a, const struct iz_norm_layer *n)
{
    start(x, y, a, n, true);
}

/* scratch fp32 [2 parts, c]. */
void iz_layernorm_bwd_cuda(struct iz_exec *x, struct iz_view dx,
                           struct iz_view r, struct iz_view dy,
                           struct iz_view a, const struct iz_norm_layer *n,
                           struct iz_view scratch)
{
    iz_by_type(a.dtype, [&](auto zero) {
        start_backward<decltype(zero), true>(x, dx, r, dy, a, n, EPSILON, 0,
                                             scratch);
    });
}
