/* SPDX-License-Identifier: Apache-2.0 */
/* See experts.h.  M = rows, C = width, E = experts, k = experts of a row, F =
 * hidden channels of an expert. */
#include "models/experts.h"

#include <stdlib.h>

bool iz_experts_at(const struct iz_experts *c, int block)
{
    const char *list = c->dense;
    if (!c->n || (block + 1) % c->every || block < c->first || block > c->last)
        return false;
    while (*list) {
        char *end;
        if (strtol(list, &end, 10) == block && end > list)
            return false;
        list = end > list ? end : list + 1;
    }
    return true;
}

struct iz_routes iz_routes_saves(struct iz_exec *x, const struct iz_experts *c,
                                 int64_t m)
{
    int64_t k = c->per_token;
    struct iz_routes r = {.normalise = c->normalise,
                          .sigmoid = c->sigmoid,
                          .scale = c->scale,
                          .groups = c->groups,
                          .kept = c->kept};
    r.p = iz_exec_save(x, IZ_F32, m, c->n);
    r.lse = iz_exec_save(x, IZ_F32, m, 1);
    r.weight = iz_exec_save(x, IZ_F32, m, k);
    r.place = iz_exec_save(x, IZ_I32, m, k);
    r.chosen = iz_exec_save(x, IZ_I32, m, k);
    r.end = iz_exec_save(x, IZ_I32, 1, c->n);
    return r;
}

void iz_experts_route(struct iz_exec *x, const struct iz_experts *c,
                      const struct iz_routes *r, struct iz_view h,
                      const struct iz_linear *router, struct iz_aux *aux)
{
    iz_matmul_fwd(x, r->p, IZ_NONE, h, router);
    iz_route_fwd(x, r);
    iz_route_aux(x, aux, r, c->balance / c->blocks, c->z / c->blocks);
}

void iz_experts_route_bwd(struct iz_exec *x, const struct iz_experts *c,
                          const struct iz_routes *r, struct iz_view dweight,
                          struct iz_view h, struct iz_view dh,
                          const struct iz_linear *router, float loss_scale)
{
    int64_t mark = iz_exec_mark(x);
    double by_block = (double)loss_scale / c->blocks;
    struct iz_view dlogits = iz_exec_work(x, x->act, h.rows, c->n); /* [M,E] */
    iz_route_bwd(x, dlogits, dweight, r, (float)(c->balance * by_block),
                 (float)(c->z * by_block));
    iz_matmul_dw(x, dlogits, h, router);
    iz_matmul_da(x, h, dlogits, router);
    iz_op_add(x, h, dh);
    iz_exec_release(x, mark);
}

void iz_experts_widen(struct iz_exec *x, const struct iz_routes *r,
                      struct iz_view u, struct iz_view h,
                      const struct iz_linear *fc)
{
    int64_t mark = iz_exec_mark(x);
    struct iz_view by = iz_exec_work(x, x->act, u.rows, h.cols); /* [kM,C] */
    iz_experts_dispatch(x, by, h, r);
    iz_experts_fwd(x, u, by, fc, r);
    iz_exec_release(x, mark);
}

void iz_experts_narrow(struct iz_exec *x, const struct iz_routes *r,
                       struct iz_view u, struct iz_view y, struct iz_view c,
                       const struct iz_linear *proj, enum iz_activation act)
{
    int64_t mark = iz_exec_mark(x);
    struct iz_view g = iz_exec_work(x, x->act, u.rows, u.cols / 2);
    struct iz_view by = iz_exec_work(x, x->act, u.rows, y.cols); /* [kM,C] */
    iz_experts_gated(x, IZ_NONE, g, IZ_NONE, u, act, r);
    iz_experts_fwd(x, by, g, proj, r);
    iz_experts_combine(x, y, c, by, r, false);
    iz_exec_release(x, mark);
}

void iz_experts_narrow_bwd(struct iz_exec *x, const struct iz_routes *r,
                           struct iz_view u, struct iz_view dweight,
                           struct iz_view by, struct iz_view dy,
                           const struct iz_linear *proj, enum iz_activation act)
{
    struct iz_linear w = *proj, b = *proj;
    int64_t mark = iz_exec_mark(x);
    struct iz_view g = iz_exec_work(x, x->act, u.rows, u.cols / 2);
    struct iz_view dg = iz_exec_work(x, x->act, g.rows, g.cols); /* [kM,F] */
    iz_experts_dispatch(x, by, dy, r);
    iz_experts_da(x, dg, by, proj, r);
    iz_experts_gated(x, u, g, dg, u, act, r); /* u: du, but for weights */
    iz_experts_weigh_bwd(x, dweight, g, u, dg, r);
    w.db = b.dw = IZ_NONE;
    iz_experts_dw(x, by, g, &w, r);
    if (b.b.rows) { /* what it is added to has the weights in g, it has not */
        b.w.adapter = NULL;
        iz_experts_bias_bwd(x, dweight, by, b.b, r);
        iz_experts_dw(x, by, g, &b, r);
    }
    iz_exec_release(x, mark);
}

void iz_experts_widen_bwd(struct iz_exec *x, const struct iz_routes *r,
                          struct iz_view u, struct iz_view dh,
                          struct iz_view by, struct iz_view c, struct iz_view h,
                          const struct iz_linear *fc)
{
    iz_experts_dispatch(x, by, h, r);
    iz_experts_dw(x, u, by, fc, r);
    iz_experts_da(x, by, u, fc, r);
    iz_experts_combine(x, dh, c, by, r, true);
}
