/* SPDX-License-Identifier: Apache-2.0 */
/* See experts.h.  M = rows, C = width, E = experts, k = experts of a row, F =
 * hidden channels of an expert. */
#include "models/experts.h"

#include <stdlib.h>

bool iz_experts_at(const struct iz_experts *c, int block)
{
    const char *list = c->dense;
    if (!c->n || (block + 1) % c->step)
        return false;
    while (*list) {
        char *end;
        if (strtol(list, &end, 10) == block && end > list)
            return false;
        list = end > list ? end : list + 1;
    }
    return true;
}

struct iz_experts_kept iz_experts_saves(struct iz_exec *x,
                                        const struct iz_experts *c, int64_t m)
{
    int64_t k = c->per_token;
    struct iz_experts_kept b = {.r.normalise = c->normalise};
    b.r.p = iz_save(x, IZ_F32, m, c->n);
    b.r.lse = iz_save(x, IZ_F32, m, 1);
    b.r.weight = iz_save(x, IZ_F32, m, k);
    b.r.place = iz_save(x, IZ_I32, m, k);
    b.r.chosen = iz_save(x, IZ_I32, m, k);
    b.r.end = iz_save(x, IZ_I32, 1, c->n);
    b.u = iz_save_widened(x, x->act, m * k, 2 * (int64_t)c->hidden);
    return b;
}

void iz_experts_route(struct iz_exec *x, const struct iz_experts *c,
                      const struct iz_experts_kept *b, struct iz_view h,
                      const struct iz_experts_weights *w, struct iz_told *told)
{
    iz_matmul_fwd(x, b->r.p, IZ_NONE, h, &w->router);
    iz_route_fwd(x, &b->r);
    iz_route_tell(x, told, &b->r, c->balance / c->blocks, c->z / c->blocks);
}

void iz_experts_widen(struct iz_exec *x, const struct iz_experts_kept *b,
                      struct iz_view h, const struct iz_linear *fc)
{
    int64_t mark = iz_work_mark(x);
    struct iz_view by = iz_work(x, x->act, b->u.rows, h.cols); /* [kM,C] */
    iz_dispatch(x, by, h, &b->r);
    iz_experts_fwd(x, b->u, by, fc, &b->r);
    iz_work_release(x, mark);
}

void iz_experts_narrow(struct iz_exec *x, const struct iz_experts_kept *b,
                       struct iz_view y, struct iz_view c,
                       const struct iz_linear *proj)
{
    int64_t mark = iz_work_mark(x);
    struct iz_view g = iz_work(x, x->act, b->u.rows, b->u.cols / 2);
    struct iz_view by = iz_work(x, x->act, b->u.rows, y.cols); /* [kM,C] */
    iz_swiglu_fwd(x, g, b->u);
    iz_experts_fwd(x, by, g, proj, &b->r);
    iz_combine(x, y, c, by, &b->r, true);
    iz_work_release(x, mark);
}

void iz_experts_narrow_bwd(struct iz_exec *x, const struct iz_experts_kept *b,
                           struct iz_view dweight, struct iz_view by,
                           struct iz_view dy, const struct iz_linear *proj)
{
    int64_t mark = iz_work_mark(x);
    struct iz_view g = iz_work(x, x->act, b->u.rows, b->u.cols / 2);
    struct iz_view dg = iz_work(x, x->act, g.rows, g.cols); /* [kM,F] */
    iz_dispatch(x, by, dy, &b->r);
    iz_experts_da(x, dg, by, proj, &b->r);
    iz_swiglu_bwd(x, b->u, g, dg, b->u); /* u becomes du, but for weights */
    iz_weigh_bwd(x, dweight, g, b->u, dg, &b->r);
    iz_experts_dw(x, by, g, proj, &b->r);
    iz_work_release(x, mark);
}

void iz_experts_widen_bwd(struct iz_exec *x, const struct iz_experts *c,
                          const struct iz_experts_kept *b,
                          struct iz_view dweight, struct iz_view by,
                          struct iz_view h, const struct iz_experts_weights *w,
                          float loss_scale)
{
    int64_t mark = iz_work_mark(x);
    double by_block = (double)loss_scale / c->blocks;
    struct iz_view dlogits = iz_work(x, x->act, h.rows, c->n); /* [M,E] */
    iz_dispatch(x, by, h, &b->r);
    iz_experts_dw(x, b->u, by, &w->fc, &b->r);
    iz_experts_da(x, by, b->u, &w->fc, &b->r);
    iz_route_bwd(x, dlogits, dweight, &b->r, (float)(c->balance * by_block),
                 (float)(c->z * by_block));
    iz_matmul_dw(x, dlogits, h, &w->router);
    iz_matmul_da(x, h, dlogits, &w->router);
    iz_combine(x, h, h, by, &b->r, false);
    iz_work_release(x, mark);
}
