/* SPDX-License-Identifier: Apache-2.0 */
/* A mixture of experts: rows to them and back, and the products of each with
 * its own.  No row is dropped, so memory and work depend on the number of
 * rows and not on where they go: an op counts, and takes as scratch, what all
 * rows with one expert would take, since any other choice takes no more. */
#include "codelets/ops/ops.h"

#include <assert.h>
#include <string.h>

#include "codelets/base/build.h"
#include "codelets/ops/gpu_ops.h"
#include "codelets/ops/product.h"
#include "codelets/ops/routes.h"

/* Of what all experts move or compute, the part of those that are here. */
static double part_here(const struct iz_routes *r)
{
    return (double)iz_route_experts_here(r) / (double)r->end.cols;
}

/* ---- rows to experts and back ---- */

/* Whether a row's choice number i is an expert that is here. */
static bool is_here(const struct iz_routes *r, int64_t i)
{
    int64_t expert = ((int32_t *)r->chosen.p)[i] - r->first;
    return expert >= 0 && expert < iz_route_experts_here(r);
}

void iz_experts_dispatch(struct iz_exec *x, struct iz_view y, struct iz_view a,
                         const struct iz_routes *r)
{
    int64_t m = r->place.rows, k = r->place.cols, c = a.cols;
    const int32_t *place = r->place.p;
    iz_routes_check(r);
    assert(a.rows == m && y.rows == m * k && y.cols == c);
    assert(a.dtype == y.dtype);
    iz_exec_count(x, 0,
                  (double)iz_view_bytes(a) +
                      part_here(r) * (double)iz_view_bytes(y));
    if (iz_exec_runs(x, IZ_CUDA))
        iz_experts_dispatch_cuda(x, y, a, r);
    int64_t bytes = c * iz_dtype_bytes(a.dtype);
    for (int64_t i = 0; iz_exec_runs(x, IZ_CPU) && i < m * k; i++)
        if (is_here(r, i))
            memcpy((char *)y.p + place[i] * bytes, (char *)a.p + i / k * bytes,
                   (size_t)bytes);
}

IZ_SIMD static void add_weighed(float *y, const float *a, float weight,
                                int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] += weight * a[i];
}

static void combine_row(float *y, const float *a, const struct iz_routes *r,
                        int64_t row, int64_t n, bool back)
{
    int64_t k = r->place.cols;
    for (int64_t j = 0; j < k; j++) {
        int64_t i = row * k + (back ? k - 1 - j : j);
        if (is_here(r, i))
            add_weighed(y, a + ((int32_t *)r->place.p)[i] * n,
                        back ? 1 : ((float *)r->weight.p)[i], n);
    }
}

void iz_experts_combine(struct iz_exec *x, struct iz_view y, struct iz_view c,
                        struct iz_view a, const struct iz_routes *r, bool back)
{
    int64_t m = r->place.rows, n = y.cols;
    iz_routes_check(r);
    assert(y.rows == m && a.rows == m * r->place.cols && a.cols == n);
    assert(!c.rows || (c.rows == m && c.cols == n));
    iz_exec_count(x, 0,
                  (double)(iz_view_bytes(y) + iz_view_bytes(c)) +
                      part_here(r) * (double)iz_view_bytes(a));
    if (iz_exec_runs(x, IZ_CUDA))
        iz_experts_combine_cuda(x, y, c, a, r, back);
    if (!iz_exec_runs(x, IZ_CPU))
        return;
    if (!c.rows)
        memset(y.p, 0, (size_t)iz_view_bytes(y));
    else if (c.p != y.p)
        memcpy(y.p, c.p, (size_t)iz_view_bytes(y));
    for (int64_t t = 0; t < m; t++)
        combine_row((float *)y.p + t * n, a.p, r, t, n, back);
}

/* ---- products ---- */

/* `end` where the host can read it. */
static const int32_t *ends_of(struct iz_exec *x, const struct iz_routes *r)
{
    return x->backend == IZ_CUDA ? iz_experts_routes_end_cuda(x, r->end)
                                 : r->end.p;
}

typedef void product_fn(struct iz_exec *x, struct iz_view to,
                        struct iz_view from, const struct iz_linear *l);

static void forward_of(struct iz_exec *x, struct iz_view y, struct iz_view a,
                       const struct iz_linear *l)
{
    iz_matmul_fwd(x, y, IZ_NONE, a, l);
}

/* Of an expert without rows. */
static void clear_gradients(struct iz_exec *x, const struct iz_linear *l)
{
    iz_op_clear(x, l->dw);
    iz_op_clear(x, l->db);
    for (const struct iz_adapter *f = l->w.adapter; f; f = f->next) {
        iz_op_clear(x, f->da);
        iz_op_clear(x, f->db);
    }
}

/* Counts what all rows with one expert cost, as far as its experts are here,
 * and for each other one products that read its weights. No library is asked
 * for them: on a GPU each has the first way that it finds. */
static void count_products(struct iz_exec *x, product_fn *f, struct iz_view to,
                           struct iz_view from, const struct iz_linear *l,
                           const struct iz_routes *r)
{
    struct iz_cost before = x->cost;
    double part = part_here(r);
    int64_t here = iz_route_experts_here(r);
    struct iz_adapter own[IZ_EXPERT_ADAPTERS];
    struct iz_linear one = iz_product_expert(l, 0, here, own);
    bool dry = x->dry;
    x->dry = true;
    f(x, to, from, &one);
    x->dry = dry;
    struct iz_cost all = x->cost;
    iz_cost_add(&all, &before, -1);
    x->cost = before;
    iz_cost_add(&x->cost, &all, part);
    for (int64_t i = 1; i < here; i++) {
        iz_exec_count(x, 0, (double)iz_view_bytes(one.w));
        for (const struct iz_adapter *a = one.w.adapter; a; a = a->next) {
            iz_exec_count(x, 0, (double)iz_view_bytes(a->a));
            iz_exec_count(x, 0, (double)iz_view_bytes(a->b));
        }
    }
}

static void each_expert(struct iz_exec *x, product_fn *f, struct iz_view to,
                        struct iz_view from, const struct iz_linear *l,
                        const struct iz_routes *r)
{
    int64_t here = iz_route_experts_here(r), first;
    bool bf16_products = x->numerics.bf16_products;
    struct iz_adapter own[IZ_EXPERT_ADAPTERS];
    iz_routes_check(r);
    assert(l->out_in && l->w.rows % here == 0);
    assert(to.rows == iz_view_len(r->place) && from.rows == to.rows);
    x->numerics.bf16_products =
        false; /* their scratch may be any for fewer rows */
    x->rows_vary = true;
    count_products(x, f, to, from, l, r);
    struct iz_cost counted = x->cost;
    const int32_t *end = x->dry ? NULL : ends_of(x, r);
    for (int64_t i = 0; end && i < here; i++) {
        int64_t n = iz_routes_rows(end, r->first + i, 1, &first);
        struct iz_linear one = iz_product_expert(l, i, here, own);
        if (n)
            f(x, iz_view_rows(to, first, n), iz_view_rows(from, first, n),
              &one);
        else if (f == iz_matmul_dw && !l->add)
            clear_gradients(x, &one);
    }
    x->cost = counted;
    x->rows_vary = false;
    x->numerics.bf16_products = bf16_products;
}

void iz_experts_fwd(struct iz_exec *x, struct iz_view y, struct iz_view a,
                    const struct iz_linear *l, const struct iz_routes *r)
{
    each_expert(x, forward_of, y, a, l, r);
}

void iz_experts_da(struct iz_exec *x, struct iz_view da, struct iz_view dy,
                   const struct iz_linear *l, const struct iz_routes *r)
{
    each_expert(x, iz_matmul_da, da, dy, l, r);
}

void iz_experts_dw(struct iz_exec *x, struct iz_view dy, struct iz_view a,
                   const struct iz_linear *l, const struct iz_routes *r)
{
    struct iz_adapter *f = l->w.adapter;
    if (f) {
        f->seen = f->out_in = true;
        f->experts = iz_route_experts_here(r);
    }
    if (iz_view_wanted(x, l->dw) || iz_view_wanted(x, l->db) ||
        (f && f->a.rows))
        each_expert(x, iz_matmul_dw, dy, a, l, r);
}

/* Returns <a, b>; a is multiplied by w. */
IZ_SIMD static float weigh_row(float *restrict a, const float *restrict b,
                               float w, int64_t n)
{
    float dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < n; i++) {
        dot += a[i] * b[i];
        a[i] *= w;
    }
    return dot;
}

IZ_SIMD static void scale_row(float *a, float w, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        a[i] *= w;
}

void iz_experts_weigh_bwd(struct iz_exec *x, struct iz_view dweight,
                          struct iz_view g, struct iz_view du,
                          struct iz_view dg, const struct iz_routes *r)
{
    int64_t f = g.cols;
    const int32_t *place = r->place.p;
    iz_routes_check(r);
    assert(dg.cols == f && du.cols == 2 * f && g.rows == du.rows);
    assert(g.rows == iz_view_len(r->place) && dg.rows == g.rows);
    iz_exec_count(x, 0,
                  part_here(r) *
                      (double)(2 * iz_view_bytes(g) + 2 * iz_view_bytes(du)));
    if (iz_exec_runs(x, IZ_CUDA))
        iz_experts_weigh_bwd_cuda(x, dweight, g, du, dg, r);
    for (int64_t i = 0; iz_exec_runs(x, IZ_CPU) && i < iz_view_len(r->place);
         i++)
        if (is_here(r, i)) {
            float w = ((float *)r->weight.p)[i];
            ((float *)dweight.p)[i] =
                weigh_row((float *)g.p + place[i] * f,
                          (float *)dg.p + place[i] * f, w, f);
            scale_row((float *)du.p + 2 * f * place[i], w, 2 * f);
        }
}

void iz_experts_bias_bwd(struct iz_exec *x, struct iz_view dweight,
                         struct iz_view dy, struct iz_view b,
                         const struct iz_routes *r)
{
    int64_t c = dy.cols, mark = iz_exec_mark(x);
    struct iz_view wide = iz_exec_work(x, IZ_F32, 1, b.cols);
    const int32_t *place = r->place.p, *chosen = r->chosen.p;
    iz_routes_check(r);
    assert(dy.rows == iz_view_len(r->place));
    assert(b.cols == iz_route_experts_here(r) * c);
    iz_convert(x, wide, b);
    iz_exec_count(x, 0, part_here(r) * (double)(2 * iz_view_bytes(dy)));
    if (iz_exec_runs(x, IZ_CUDA))
        iz_experts_bias_bwd_cuda(x, dweight, dy, wide, r);
    for (int64_t i = 0; iz_exec_runs(x, IZ_CPU) && i < iz_view_len(r->place);
         i++)
        if (is_here(r, i))
            ((float *)dweight.p)[i] +=
                weigh_row((float *)dy.p + place[i] * c,
                          (float *)wide.p + (chosen[i] - r->first) * c,
                          ((float *)r->weight.p)[i], c);
    iz_exec_release(x, mark);
}

/* ---- gates ---- */

void iz_experts_gated(struct iz_exec *x, struct iz_view da, struct iz_view y,
                      struct iz_view dy, struct iz_view a,
                      enum iz_activation act, const struct iz_routes *r)
{
    int64_t first = 0, n = 0;
    iz_routes_check(r);
    if (!x->dry)
        n = iz_routes_rows(ends_of(x, r), r->first, iz_route_experts_here(r),
                           &first);
    iz_exec_count(x, 0,
                  part_here(r) *
                      (double)(iz_view_bytes(da) + iz_view_bytes(y) +
                               iz_view_bytes(dy) + iz_view_bytes(a)));
    struct iz_cost counted = x->cost;
    if (n)
        iz_activation_apply(x, da.rows ? iz_view_rows(da, first, n) : da,
                            iz_view_rows(y, first, n),
                            dy.rows ? iz_view_rows(dy, first, n) : dy,
                            iz_view_rows(a, first, n), act);
    x->cost = counted;
}
