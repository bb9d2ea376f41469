/* SPDX-License-Identifier: Apache-2.0 */
/* Root-mean-square normalisation on a GPU, of rows and of the heads of a row:
 * the kernels are in norm.cuh. */
#include "codelets/kernels/norm.cuh"

#include "codelets/ops/gpu_ops.h"

static struct iz_norm_layer norm_like(const struct iz_rmsnorm *n)
{
    struct iz_norm_layer like = {};

    like.w = n->w;
    like.dw = n->dw;
    like.rstd = n->rstd;
    return like;
}

static void start(struct iz_exec *x, struct iz_view y, struct iz_view kept,
                  struct iz_view a, const struct iz_rmsnorm *n, int64_t first,
                  bool again)
{
    struct iz_norm_layer like = norm_like(n);

    iz_by_type(a.dtype, [&](auto zero) {
        start_forward<decltype(zero), false>(x, y, kept, a, &like, n->eps,
                                             first, again);
    });
}

void iz_rmsnorm_fwd_cuda(struct iz_exec *x, struct iz_view y, struct iz_view a,
                         const struct iz_rmsnorm *n)
{
    start(x, y, {}, a, n, 0, false);
}

void iz_rmsnorm_again_cuda(struct iz_exec *x, struct iz_view y,
                           struct iz_view a, const struct iz_rmsnorm *n)
{
    start(x, y, {}, a, n, 0, true);
}

void iz_headnorm_fwd_cuda(struct iz_exec *x, struct iz_view a,
                          struct iz_view kept, const struct iz_rmsnorm *n,
                          int64_t first)
{
    start(x, a, kept, a, n, first, false);
}

static void start_back(struct iz_exec *x, struct iz_view dx, struct iz_view r,
                       struct iz_view dy, struct iz_view a,
                       const struct iz_rmsnorm *n, int64_t first,
                       struct iz_view scratch)
{
    struct iz_norm_layer like = norm_like(n);

    iz_by_type(a.dtype, [&](auto zero) {
        start_backward<decltype(zero), false>(x, dx, r, dy, a, &like, n->eps,
                                              first, scratch);
    });
}

/* scratch fp32 [parts, c]. */
void iz_rmsnorm_bwd_cuda(struct iz_exec *x, struct iz_view dx, struct iz_view r,
                         struct iz_view dy, struct iz_view a,
                         const struct iz_rmsnorm *n, struct iz_view scratch)
{
    start_back(x, dx, r, dy, a, n, 0, scratch);
}

void iz_headnorm_bwd_cuda(struct iz_exec *x, struct iz_view da,
                          struct iz_view kept, const struct iz_rmsnorm *n,
                          int64_t first, struct iz_view scratch)
{
    start_back(x, da, {}, da, kept, n, first, scratch);
}
