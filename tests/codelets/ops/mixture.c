/* SPDX-License-Identifier: Apache-2.0 */
/* See mixture.h. */
#include "tests/codelets/ops/mixture.h"

struct mixture mixture_new(int64_t m, int64_t e, int64_t k)
{
    return (struct mixture){
        .s = {.n = ROUTED,
              .t = {[P] = tensor_new(IZ_F32, m, e, 2),
                    [LSE] = tensor_new(IZ_F32, m, 1, 1),
                    [WEIGHT] = tensor_new(IZ_F32, m, k, 1),
                    [PLACE] = bytes_new(m * k * 4),
                    [CHOSEN] = bytes_new(m * k * 4),
                    [END] = bytes_new(e * 4),
                    [CHOICE] = tensor_new(IZ_F32, 1, e, 0.3)}},
        .m = m,
        .e = e,
        .k = k};
}

static struct iz_view numbers(struct iz_view v, int64_t rows, int64_t cols)
{
    return (struct iz_view){
        .p = v.p, .dtype = IZ_I32, .rows = rows, .cols = cols};
}

struct iz_routes mixture_routes(const struct mixture *a,
                                const struct iz_view *v)
{
    return (struct iz_routes){.p = v[P],
                              .lse = v[LSE],
                              .weight = v[WEIGHT],
                              .place = numbers(v[PLACE], a->m, a->k),
                              .chosen = numbers(v[CHOSEN], a->m, a->k),
                              .end = numbers(v[END], 1, a->e),
                              .choice = a->choosy ? v[CHOICE] : IZ_NONE,
                              .normalise = a->normalise,
                              .sigmoid = a->sigmoid,
                              .groups = a->groups,
                              .kept = a->kept,
                              .scale = a->scale,
                              .first = a->first,
                              .here = a->here};
}

static void route_op(struct iz_exec *x, const struct iz_view *v,
                     const void *arg)
{
    struct iz_routes r = mixture_routes(arg, v);
    iz_route_fwd(x, &r);
}

void mixture_route(struct mixture *a)
{
    scene_run(&a->s, &(struct pass){route_op, BIT(P) | BIT(CHOICE), ROUTES}, a);
}
