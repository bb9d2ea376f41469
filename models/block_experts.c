/* SPDX-License-Identifier: Apache-2.0 */
/* What a block with experts has beside their products: its router, and an
 * expert that all rows go to.  M = rows, C = width, F = hidden channels of the
 * shared expert. */
#include "models/block_modules.h"

struct iz_block_routed
iz_block_routed_saves(struct iz_exec *x, const struct iz_layer *a, int64_t m)
{
    static const struct iz_experts one = {
        .n = 1, .per_token = 1, .sigmoid = true};
    const struct iz_block *c = a->self;
    struct iz_block_routed r = {.routes = iz_routes_saves(x, &c->experts, m)};
    if (c->experts.shared && has(a, IZ_HAS_SHARED_GATE))
        r.gate = iz_routes_saves(x, &one, m);
    if (c->experts.shared)
        r.shared =
            iz_exec_save_widened(x, x->act, m, 2 * (int64_t)c->experts.shared);
    return r;
}

void iz_block_route(struct iz_exec *x, const struct iz_layer *a,
                    const struct iz_block_routed *r, struct iz_view h)
{
    const struct iz_block *c = a->self;
    struct iz_linear router = linear(a, ROUTER), gate = linear(a, SHARED_GATE);
    struct iz_routes routes = r->routes;
    int64_t mark = iz_exec_mark(x);
    if (has(a, IZ_HAS_CHOICE)) {
        routes.choice = iz_exec_work(x, IZ_F32, 1, c->experts.n);
        iz_convert(x, routes.choice, linear(a, CHOICE).b);
    }
    if (gate.w.rows) {
        iz_matmul_fwd(x, r->gate.p, IZ_NONE, h, &gate);
        iz_route_fwd(x, &r->gate);
    }
    iz_experts_route(x, &c->experts, &routes, h, &router,
                     a->again ? NULL : a->aux);
    iz_exec_release(x, mark);
}

void iz_block_shared_widen(struct iz_exec *x, const struct iz_layer *a,
                           const struct iz_block_routed *r, struct iz_view h)
{
    struct iz_linear fc = linear(a, SHARED_FC);
    if (r->shared.rows)
        iz_matmul_fwd(x, r->shared, IZ_NONE, h, &fc);
}

void iz_block_shared(struct iz_exec *x, const struct iz_layer *a,
                     const struct iz_block_routed *r, struct iz_view y)
{
    const struct iz_block *c = a->self;
    struct iz_linear proj = linear(a, SHARED_PROJ);
    int64_t mark = iz_exec_mark(x);
    if (!r->shared.rows)
        return;
    struct iz_view g = iz_exec_work(x, x->act, y.rows, c->experts.shared);
    iz_activation_apply(x, IZ_NONE, g, IZ_NONE, r->shared, c->act);
    proj.scale = c->residual;
    if (r->gate.p.rows || c->residual != 0) {
        struct iz_view made = iz_exec_work(x, x->act, y.rows, y.cols);
        iz_matmul_fwd(x, made, IZ_NONE, g, &proj);
        if (r->gate.p.rows)
            iz_experts_combine(x, y, y, made, &r->gate, false);
        else
            iz_op_add(x, y, made);
    } else {
        iz_matmul_fwd(x, y, y, g, &proj);
    }
    iz_exec_release(x, mark);
}

/* dh += what `l` says of it, from dy; its gradients. */
static void add_gradient(struct iz_exec *x, struct iz_view dh,
                         struct iz_view dy, struct iz_view h,
                         const struct iz_linear *l)
{
    int64_t mark = iz_exec_mark(x);
    struct iz_view d = iz_exec_work(x, x->act, dh.rows, dh.cols);
    iz_matmul_dw(x, dy, h, l);
    iz_matmul_da(x, d, dy, l);
    iz_op_add(x, dh, d);
    iz_exec_release(x, mark);
}

void iz_block_shared_bwd(struct iz_exec *x, const struct iz_layer *a,
                         const struct iz_block_routed *r, struct iz_view dh,
                         struct iz_view h, struct iz_view dy)
{
    const struct iz_block *c = a->self;
    struct iz_linear fc = linear(a, SHARED_FC), proj = linear(a, SHARED_PROJ);
    struct iz_linear gate = linear(a, SHARED_GATE);
    int64_t mark = iz_exec_mark(x), m = dh.rows;
    if (!r->shared.rows)
        return;
    struct iz_view g = iz_exec_work(x, x->act, m, c->experts.shared);
    struct iz_view dg = iz_exec_work(x, x->act, m, c->experts.shared);
    if (c->residual != 0) {
        struct iz_view d = iz_exec_work(x, x->act, m, dy.cols);
        iz_op_scale(x, d, dy, c->residual, 0);
        dy = d;
    }
    iz_matmul_da(x, dg, dy, &proj);
    iz_activation_apply(x, r->shared, g, dg, r->shared, c->act);
    if (gate.w.rows) {
        struct iz_view dweight = iz_exec_work(x, IZ_F32, m, 1);
        struct iz_view d = iz_exec_work(x, x->act, m, 1);
        iz_experts_weigh_bwd(x, dweight, g, r->shared, dg, &r->gate);
        iz_route_bwd(x, d, dweight, &r->gate, 0, 0);
        add_gradient(x, dh, d, h, &gate);
    }
    iz_matmul_dw(x, dy, g, &proj);
    add_gradient(x, dh, r->shared, h, &fc);
    iz_exec_release(x, mark);
}

void iz_block_route_bwd(struct iz_exec *x, const struct iz_layer *a,
                        const struct iz_block_routed *r, struct iz_view dweight,
                        struct iz_view h, struct iz_view dh)
{
    const struct iz_block *c = a->self;
    struct iz_linear router = linear(a, ROUTER);
    iz_experts_route_bwd(x, &c->experts, &r->routes, dweight, h, dh, &router,
                         a->loss_scale);
}
