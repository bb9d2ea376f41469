/* SPDX-License-Identifier: Apache-2.0 */
/* The three products of a linear layer; see product.h. */
#include "codelets/ops/product.h"

#include <assert.h>
#include <stddef.h>

struct iz_product iz_product_fwd(struct iz_view y, struct iz_view r,
                                 struct iz_view a, const struct iz_linear *l)
{
    return (struct iz_product){.a = a,
                               .b = l->w,
                               .c = r,
                               .d = y,
                               .bias = l->b,
                               .tb = l->out_in,
                               .use = l->b.rows ? IZ_BIAS_ADD : IZ_BIAS_NONE,
                               .scale = l->scale};
}

struct iz_product iz_product_da(struct iz_view da, struct iz_view dy,
                                const struct iz_linear *l)
{
    return (struct iz_product){.a = dy, .b = l->w, .d = da, .tb = !l->out_in};
}

struct iz_product iz_product_dw(struct iz_view dy, struct iz_view a,
                                const struct iz_linear *l)
{
    return (struct iz_product){.a = l->out_in ? dy : a,
                               .b = l->out_in ? a : dy,
                               .d = l->dw,
                               .ta = true,
                               .add = l->add};
}

/* Part i of e of v, which may be absent. */
static struct iz_view part(struct iz_view v, int64_t i, int64_t e)
{
    int64_t rows = v.rows / e;
    return iz_view_rows(v, i * rows, rows);
}

struct iz_linear iz_expert_of(const struct iz_linear *l, int64_t i, int64_t e,
                              struct iz_adapter own[IZ_EXPERT_ADAPTERS])
{
    struct iz_linear one = {
        .w = part(l->w, i, e), .dw = part(l->dw, i, e), .out_in = true};
    struct iz_adapter **to = &one.w.adapter;
    const struct iz_adapter *f = l->w.adapter;
    for (int n = 0; f && f->a.rows; f = f->next, n++) {
        assert(n < IZ_EXPERT_ADAPTERS && f->drop.p == 0);
        own[n] = *f;
        own[n].a = part(f->a, i, e);
        own[n].b = part(f->b, i, e);
        own[n].da = part(f->da, i, e);
        own[n].db = part(f->db, i, e);
        *to = &own[n];
        to = &own[n].next;
    }
    *to = NULL;
    return one;
}
