/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/ops/product.h"

#include <assert.h>
#include <stddef.h>

#include "codelets/base/int64.h"
#include "codelets/ops/gpu_ops.h"

struct iz_product iz_product_fwd(struct iz_view y, struct iz_view r,
                                 struct iz_view a, const struct iz_linear *l)
{
    return (struct iz_product){.a = a,
                               .b = l->w,
                               .c = r,
                               .d = y,
                               .bias = l->b,
                               .tb = l->out_in,
                               .scale = l->scale};
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

enum { EIGHT = 8 };

/* v as a matrix of rows x cols in the scratch. */
static struct iz_view in_scratch(struct iz_padded *q, char *base,
                                 struct iz_view v, int64_t rows, int64_t cols)
{
    struct iz_view to = {.p = base ? base + q->bytes : NULL,
                         .dtype = v.dtype,
                         .rows = rows,
                         .cols = cols};
    q->bytes += round_up(iz_view_bytes(to), 256);
    return to;
}

static bool is_odd(struct iz_view v)
{
    return v.rows && (v.odd || v.cols % EIGHT);
}

struct iz_padded iz_product_pad(const struct iz_product *p, char *base)
{
    struct iz_padded q = {*p, IZ_PRODUCT_SCRATCH};
    int64_t m = p->d.rows, n = iz_product_n(p), k = iz_product_k(p);
    int64_t wide_m = p->ta ? round_up(m, EIGHT) : m;
    int64_t wide_n = round_up(n, EIGHT);
    int64_t wide_k = !p->ta || p->tb ? round_up(k, EIGHT) : k;
    int64_t rows = p->tb ? wide_n : wide_k;
    if (p->a.dtype == IZ_F32)
        return q;
    if (is_odd(p->a) || wide_m > m || wide_k > k)
        q.p.a = in_scratch(&q, base, p->a, p->ta ? wide_k : wide_m,
                           p->ta ? wide_m : wide_k);
    if (is_odd(p->b) || (rows - p->b.rows) * p->b.cols > p->b.room)
        q.p.b = in_scratch(&q, base, p->b, rows, p->tb ? wide_k : wide_n);
    q.p.b.rows = rows;
    if (is_odd(p->d) || is_odd(p->c) || wide_m > m || wide_n > n) {
        q.p.d = in_scratch(&q, base, p->d, wide_m, wide_n);
        if (p->c.rows)
            q.p.c = q.p.d;
    }
    if (p->bias.rows && (p->bias.odd || wide_n > p->bias.cols))
        q.p.bias = in_scratch(&q, base, p->bias, 1, wide_n);
    return q;
}

/* Part i of e of v, which may be absent. */
static struct iz_view part(struct iz_view v, int64_t i, int64_t e)
{
    int64_t rows = v.rows / e;
    return iz_view_rows(v, i * rows, rows);
}

/* The same of a row. */
static struct iz_view columns(struct iz_view v, int64_t i, int64_t e)
{
    int64_t cols = v.cols / e, bytes = i * cols * iz_dtype_bytes(v.dtype);
    if (v.rows && v.p)
        v.p = (char *)v.p + bytes;
    v.odd |= bytes % 16 != 0;
    v.cols = cols;
    return v;
}

struct iz_linear iz_product_expert(const struct iz_linear *l, int64_t i,
                                   int64_t e,
                                   struct iz_adapter own[IZ_EXPERT_ADAPTERS])
{
    struct iz_linear one = {.w = part(l->w, i, e),
                            .dw = part(l->dw, i, e),
                            .b = columns(l->b, i, e),
                            .db = columns(l->db, i, e),
                            .out_in = true,
                            .add = l->add};
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
