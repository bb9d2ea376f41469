/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in's ops that work row by row; the others are in ops.c. */
#include "codelets/ops/gpu_ops.h"
#include "tests/fake/standin/call.h"

static void norm_reach(struct call *c)
{
    standin_reach_view(&c->norm.w);
    standin_reach_view(&c->norm.b);
    standin_reach_view(&c->norm.dw);
    standin_reach_view(&c->norm.db);
    standin_reach_view(&c->norm.mean);
    standin_reach_view(&c->norm.rstd);
}

static void layernorm_fwd_op(struct iz_exec *x, const struct call *c)
{
    iz_layernorm_fwd(x, c->v[0], c->v[1], &c->norm);
}

void iz_layernorm_fwd_cuda(struct iz_exec *x, struct iz_view y,
                           struct iz_view a, const struct iz_norm_layer *n)
{
    standin_submit(x, &(struct call){.op = layernorm_fwd_op,
                                     .reach = norm_reach,
                                     .v = {y, a},
                                     .norm = *n});
}

static void layernorm_again_op(struct iz_exec *x, const struct call *c)
{
    iz_layernorm_again(x, c->v[0], c->v[1], &c->norm);
}

void iz_layernorm_again_cuda(struct iz_exec *x, struct iz_view y,
                             struct iz_view a, const struct iz_norm_layer *n)
{
    standin_submit(x, &(struct call){.op = layernorm_again_op,
                                     .reach = norm_reach,
                                     .v = {y, a},
                                     .norm = *n});
}

static void layernorm_bwd_op(struct iz_exec *x, const struct call *c)
{
    iz_layernorm_bwd(x, c->v[0], c->v[1], c->v[2], c->v[3], &c->norm);
}

void iz_layernorm_bwd_cuda(struct iz_exec *x, struct iz_view dx,
                           struct iz_view r, struct iz_view dy,
                           struct iz_view a, const struct iz_norm_layer *n,
                           struct iz_view scratch)
{
    standin_submit(x, &(struct call){.op = layernorm_bwd_op,
                                     .reach = norm_reach,
                                     .v = {dx, r, dy, a},
                                     .scratch = scratch,
                                     .norm = *n});
}

static void gelu_fwd_op(struct iz_exec *x, const struct call *c)
{
    iz_gelu_fwd(x, c->v[0], c->v[1]);
}

void iz_gelu_fwd_cuda(struct iz_exec *x, struct iz_view y, struct iz_view a)
{
    standin_submit(x, &(struct call){.op = gelu_fwd_op, .v = {y, a}});
}

static void gelu_bwd_op(struct iz_exec *x, const struct call *c)
{
    iz_gelu_bwd(x, c->v[0], c->v[1], c->v[2], c->v[3]);
}

void iz_gelu_bwd_cuda(struct iz_exec *x, struct iz_view du, struct iz_view y,
                      struct iz_view dy, struct iz_view a)
{
    standin_submit(x, &(struct call){.op = gelu_bwd_op, .v = {du, y, dy, a}});
}

static void rmsnorm_reach(struct call *c)
{
    standin_reach_view(&c->rmsnorm.w);
    standin_reach_view(&c->rmsnorm.dw);
    standin_reach_view(&c->rmsnorm.rstd);
}

static void rmsnorm_fwd_op(struct iz_exec *x, const struct call *c)
{
    iz_rmsnorm_fwd(x, c->v[0], c->v[1], &c->rmsnorm);
}

void iz_rmsnorm_fwd_cuda(struct iz_exec *x, struct iz_view y, struct iz_view a,
                         const struct iz_rmsnorm *n)
{
    standin_submit(x, &(struct call){.op = rmsnorm_fwd_op,
                                     .reach = rmsnorm_reach,
                                     .v = {y, a},
                                     .rmsnorm = *n});
}

static void rmsnorm_again_op(struct iz_exec *x, const struct call *c)
{
    iz_rmsnorm_again(x, c->v[0], c->v[1], &c->rmsnorm);
}

void iz_rmsnorm_again_cuda(struct iz_exec *x, struct iz_view y,
                           struct iz_view a, const struct iz_rmsnorm *n)
{
    standin_submit(x, &(struct call){.op = rmsnorm_again_op,
                                     .reach = rmsnorm_reach,
                                     .v = {y, a},
                                     .rmsnorm = *n});
}

static void rmsnorm_bwd_op(struct iz_exec *x, const struct call *c)
{
    iz_rmsnorm_bwd(x, c->v[0], c->v[1], c->v[2], c->v[3], &c->rmsnorm);
}

void iz_rmsnorm_bwd_cuda(struct iz_exec *x, struct iz_view dx, struct iz_view r,
                         struct iz_view dy, struct iz_view a,
                         const struct iz_rmsnorm *n, struct iz_view scratch)
{
    standin_submit(x, &(struct call){.op = rmsnorm_bwd_op,
                                     .reach = rmsnorm_reach,
                                     .v = {dx, r, dy, a},
                                     .scratch = scratch,
                                     .rmsnorm = *n});
}

static void headnorm_fwd_op(struct iz_exec *x, const struct call *c)
{
    iz_headnorm_fwd(x, c->v[0], c->v[1], &c->rmsnorm, c->count);
}

void iz_headnorm_fwd_cuda(struct iz_exec *x, struct iz_view a,
                          struct iz_view kept, const struct iz_rmsnorm *n,
                          int64_t first)
{
    standin_submit(x, &(struct call){.op = headnorm_fwd_op,
                                     .reach = rmsnorm_reach,
                                     .v = {a, kept},
                                     .rmsnorm = *n,
                                     .count = first});
}

static void headnorm_bwd_op(struct iz_exec *x, const struct call *c)
{
    iz_headnorm_bwd(x, c->v[0], c->v[1], &c->rmsnorm, c->count);
}

void iz_headnorm_bwd_cuda(struct iz_exec *x, struct iz_view da,
                          struct iz_view kept, const struct iz_rmsnorm *n,
                          int64_t first, struct iz_view scratch)
{
    standin_submit(x, &(struct call){.op = headnorm_bwd_op,
                                     .reach = rmsnorm_reach,
                                     .v = {da, kept},
                                     .scratch = scratch,
                                     .rmsnorm = *n,
                                     .count = first});
}

static void rope_op(struct iz_exec *x, const struct call *c)
{
    iz_rope(x, c->v[0], &c->rope, c->back);
}

void iz_rope_cuda(struct iz_exec *x, struct iz_view a, const struct iz_rope *r,
                  bool back)
{
    standin_submit(
        x, &(struct call){.op = rope_op, .v = {a}, .rope = *r, .back = back});
}

static void swiglu_fwd_op(struct iz_exec *x, const struct call *c)
{
    iz_swiglu_fwd(x, c->v[0], c->v[1]);
}

void iz_swiglu_fwd_cuda(struct iz_exec *x, struct iz_view y, struct iz_view a)
{
    standin_submit(x, &(struct call){.op = swiglu_fwd_op, .v = {y, a}});
}

static void swiglu_bwd_op(struct iz_exec *x, const struct call *c)
{
    iz_swiglu_bwd(x, c->v[0], c->v[1], c->v[2], c->v[3]);
}

void iz_swiglu_bwd_cuda(struct iz_exec *x, struct iz_view da, struct iz_view y,
                        struct iz_view dy, struct iz_view a)
{
    standin_submit(x, &(struct call){.op = swiglu_bwd_op, .v = {da, y, dy, a}});
}
