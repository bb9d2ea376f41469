/* SPDX-License-Identifier: Apache-2.0 */
/* The three products of a linear layer; see product.h. */
#include "codelets/ops/product.h"

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

struct iz_linear iz_expert_of(const struct iz_linear *l, int64_t i, int64_t e)
{
    int64_t rows = l->w.rows / e;
    struct iz_linear one = {.w = iz_view_rows(l->w, i * rows, rows),
                            .out_in = true};
    one.w.adapter = NULL;
    if (l->dw.rows)
        one.dw = iz_view_rows(l->dw, i * rows, rows);
    return one;
}

int64_t iz_expert_rows(const int32_t *end, int64_t i, int64_t n, int64_t *first)
{
    *first = i ? end[i - 1] : 0;
    return end[i + n - 1] - *first;
}
