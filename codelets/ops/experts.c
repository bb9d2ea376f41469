/* SPDX-License-Identifier: Apache-2.0 */
/* A mixture of experts: which rows go where, and the products of each expert
 * with its own.  No row is dropped, so memory and work depend on the number of
 * rows and not on where they go: an op counts, and takes as scratch, what all
 * rows with one expert would take, since any other choice takes no more. */
#include "codelets/ops/ops.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "codelets/base/build.h"
#include "codelets/ops/gpu_ops.h"
#include "codelets/ops/product.h"
#include "codelets/ops/row_math.h"

enum { PARTS = 64 }; /* of what a router on a GPU tells */

/* Of those of experts; a router has p and lse, too. */
static void check_routes(const struct iz_routes *r)
{
    int64_t m = r->place.rows, e = r->end.cols, k = r->place.cols;
    assert(e <= IZ_EXPERTS_MOST && k <= e && m * k <= INT32_MAX);
    assert(r->weight.rows == m && r->chosen.rows == m);
    assert(r->weight.cols == k && r->chosen.cols == k);
    assert(r->first >= 0 && r->first + iz_route_experts_here(r) <= e);
    (void)m;
    (void)k;
    (void)e;
}

static void check_router(const struct iz_routes *r)
{
    check_routes(r);
    assert(r->p.rows == r->place.rows && r->p.cols == r->end.cols);
    assert(r->lse.rows == r->place.rows);
}

/* Of what all experts move or compute, the part of those that are here. */
static double part_here(const struct iz_routes *r)
{
    return (double)iz_route_experts_here(r) / (double)r->end.cols;
}

static double routes_bytes(const struct iz_routes *r)
{
    return (double)(iz_view_bytes(r->p) + iz_view_bytes(r->weight) +
                    iz_view_bytes(r->place) + iz_view_bytes(r->chosen));
}

/* ---- the router ---- */

IZ_SIMD static void softmax_rows(float *p, float *lse, int64_t m, int64_t e)
{
    for (int64_t t = 0; t < m; t++, p += e) {
        float most = iz_row_max(p, e), sum = iz_row_exp(p, most, e);
        float by = 1 / sum;
        for (int64_t i = 0; i < e; i++)
            p[i] *= by;
        lse[t] = most + (float)log((double)sum);
    }
}

/* The k largest of a row, in ascending order of their numbers.  Where nothing
 * can be compared (NaN), the first that are left: always k different ones. */
static void choose_experts(int32_t *chosen, const float *p, int64_t e,
                           int64_t k)
{
    bool taken[IZ_EXPERTS_MOST] = {false};
    for (int64_t j = 0; j < k; j++) {
        int64_t best = -1;
        for (int64_t i = 0; i < e; i++)
            if (!taken[i] && (best < 0 || p[i] > p[best]))
                best = i;
        taken[best] = true;
    }
    for (int64_t i = 0; i < e; i++)
        if (taken[i])
            *chosen++ = (int32_t)i;
}

static void weigh_chosen(float *weight, const int32_t *chosen, const float *p,
                         int64_t k, bool normalise)
{
    float sum = 0;
    for (int64_t j = 0; j < k; j++)
        sum += p[chosen[j]];
    for (int64_t j = 0; j < k; j++)
        weight[j] = normalise ? p[chosen[j]] / sum : p[chosen[j]];
}

/* Rows by expert: counted, then dealt in ascending order of rows.  end[i] goes
 * from the first row of expert i to behind its last. */
static void place_rows(int32_t *place, int32_t *end, const int32_t *chosen,
                       int64_t n, int64_t e)
{
    int32_t at = 0;
    memset(end, 0, (size_t)e * sizeof(*end));
    for (int64_t i = 0; i < n; i++)
        end[chosen[i]]++;
    for (int64_t i = 0; i < e; i++) {
        int32_t rows = end[i];
        end[i] = at;
        at += rows;
    }
    for (int64_t i = 0; i < n; i++)
        place[i] = end[chosen[i]]++;
}

void iz_route_fwd(struct iz_exec *x, const struct iz_routes *r)
{
    int64_t m = r->p.rows, e = r->p.cols, k = r->weight.cols;
    float *p = r->p.p, *weight = r->weight.p;
    int32_t *chosen = r->chosen.p;
    int64_t mark = iz_exec_mark(x);
    struct iz_view scratch =
        iz_exec_work(x, IZ_I32, 1, x->backend == IZ_CUDA ? e : 0);
    check_router(r);
    iz_exec_count(x, 0, routes_bytes(r));
    if (iz_exec_runs(x, IZ_CUDA))
        iz_route_fwd_cuda(x, r, scratch);
    iz_exec_release(x, mark);
    if (!iz_exec_runs(x, IZ_CPU))
        return;
    softmax_rows(p, r->lse.p, m, e);
    for (int64_t t = 0; t < m; t++) {
        choose_experts(chosen + t * k, p + t * e, e, k);
        weigh_chosen(weight + t * k, chosen + t * k, p + t * e, k,
                     r->normalise);
    }
    place_rows(r->place.p, r->end.p, chosen, m * k, e);
}

/* Rows of n experts from i on, and in *first the first of them; `end` as in
 * struct iz_routes. */
static int64_t rows_from(const int32_t *end, int64_t i, int64_t n,
                         int64_t *first)
{
    *first = i ? end[i - 1] : 0;
    return end[i + n - 1] - *first;
}

static int64_t rows_of(const struct iz_routes *r, int64_t i, int64_t *first)
{
    return rows_from(r->end.p, i, 1, first);
}

/* `end` where the host can read it. */
static const int32_t *ends_of(struct iz_exec *x, const struct iz_routes *r)
{
    return x->backend == IZ_CUDA ? iz_experts_routes_end_cuda(x, r->end)
                                 : r->end.p;
}

/* E times the sum over experts of their rows and of their p: B, but for the
 * number of rows. */
static double rows_by_mean(const struct iz_routes *r)
{
    int64_t m = r->p.rows, e = r->p.cols, first;
    const float *p = r->p.p;
    double mean[IZ_EXPERTS_MOST] = {0}, sum = 0;
    for (int64_t t = 0; t < m; t++)
        for (int64_t i = 0; i < e; i++)
            mean[i] += (double)p[t * e + i];
    for (int64_t i = 0; i < e; i++)
        sum += (double)rows_of(r, i, &first) * mean[i];
    return sum * (double)e;
}

void iz_aux_add(struct iz_aux *to, const struct iz_aux *t)
{
    to->loss += t->loss;
    to->balance += t->balance;
    to->z += t->z;
    to->routers += t->routers;
    to->least = fmin(to->least, t->least);
    to->most = fmax(to->most, t->most);
    to->pairs += t->pairs;
    for (int i = 0; i < IZ_PAIR_FIGURES; i++)
        to->pair[i] += t->pair[i];
}

void iz_route_aux(struct iz_exec *x, struct iz_aux *aux,
                  const struct iz_routes *r, double balance, double z)
{
    int64_t m = r->p.rows, e = r->p.cols, first;
    double even = (double)(m * r->weight.cols) / (double)e, z_sum = 0;
    int64_t mark = iz_exec_mark(x), wide = sizeof(double);
    struct iz_view scratch =
        iz_exec_work(x, IZ_U8, wide, x->backend == IZ_CUDA ? 2 * PARTS : 0);
    check_router(r);
    iz_exec_count(x, 0, (double)iz_view_bytes(r->p));
    if (iz_exec_runs(x, IZ_CUDA) && aux)
        iz_route_aux_cuda(x, aux, r, balance, z, scratch);
    iz_exec_release(x, mark);
    if (!iz_exec_runs(x, IZ_CPU) || !aux)
        return;
    for (int64_t t = 0; t < m; t++)
        z_sum += pow((double)((float *)r->lse.p)[t], 2);
    double b = rows_by_mean(r) / ((double)m * (double)m);
    aux->loss += balance * b + z * z_sum / (double)m;
    aux->balance += b;
    aux->z += z_sum / (double)m;
    aux->routers++;
    for (int64_t i = 0; i < e; i++) {
        double load = (double)rows_of(r, i, &first) / even;
        aux->least = fmin(aux->least, load);
        aux->most = fmax(aux->most, load);
    }
}

/* dp of a row, without that of the balance: through the weights of the chosen.
 */
static void chosen_bwd(float *dp, const float *dweight, const float *weight,
                       const float *p, const int32_t *chosen, int64_t k,
                       bool normalise)
{
    float sum = 0, dot = 0;
    for (int64_t j = 0; j < k; j++) {
        sum += p[chosen[j]];
        dot += dweight[j] * weight[j];
    }
    for (int64_t j = 0; j < k; j++)
        dp[chosen[j]] += normalise ? (dweight[j] - dot) / sum : dweight[j];
}

/* d, which holds dp, becomes the gradient of a row's logits. */
IZ_SIMD static void softmax_bwd(float *restrict d, const float *restrict p,
                                float dlse, int64_t e)
{
    float dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < e; i++)
        dot += d[i] * p[i];
    for (int64_t i = 0; i < e; i++)
        d[i] = p[i] * (d[i] - dot + dlse);
}

void iz_route_bwd(struct iz_exec *x, struct iz_view dlogits,
                  struct iz_view dweight, const struct iz_routes *r,
                  float balance, float z)
{
    int64_t m = r->p.rows, e = r->p.cols, k = r->weight.cols, first;
    check_router(r);
    assert(dlogits.rows == m && dlogits.cols == e && dweight.cols == k);
    iz_exec_count(x, 0, routes_bytes(r) + (double)iz_view_bytes(dlogits));
    if (iz_exec_runs(x, IZ_CUDA))
        iz_route_bwd_cuda(x, dlogits, dweight, r, balance, z);
    if (!iz_exec_runs(x, IZ_CPU))
        return;
    float by = balance * (float)e / ((float)m * (float)m);
    for (int64_t t = 0; t < m; t++) {
        float *d = (float *)dlogits.p + t * e;
        const float *p = (float *)r->p.p + t * e;
        for (int64_t i = 0; i < e; i++)
            d[i] = balance != 0 ? by * (float)rows_of(r, i, &first) : 0;
        chosen_bwd(d, (float *)dweight.p + t * k, (float *)r->weight.p + t * k,
                   p, (int32_t *)r->chosen.p + t * k, k, r->normalise);
        softmax_bwd(d, p, z * 2 * ((float *)r->lse.p)[t] / (float)m, e);
    }
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
    check_routes(r);
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
    check_routes(r);
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
    for (const struct iz_adapter *f = l->w.adapter; f; f = f->next) {
        iz_op_clear(x, f->da);
        iz_op_clear(x, f->db);
    }
}

/* What a call has counted and computes. */
struct counters {
    double flops, bytes, seconds;
};

static struct counters counters_of(const struct iz_exec *x)
{
    return (struct counters){x->flops, x->bytes, x->seconds};
}

static void counters_set(struct iz_exec *x, struct counters c)
{
    x->flops = c.flops;
    x->bytes = c.bytes;
    x->seconds = c.seconds;
}

/* Counts what all rows with one expert cost, as far as its experts are here,
 * and for each other one products that read its weights. No library is asked
 * for them: on a GPU each has the first way that it finds. */
static void count_products(struct iz_exec *x, product_fn *f, struct iz_view to,
                           struct iz_view from, const struct iz_linear *l,
                           const struct iz_routes *r)
{
    struct counters before = counters_of(x);
    double part = part_here(r);
    int64_t here = iz_route_experts_here(r);
    struct iz_adapter own[IZ_EXPERT_ADAPTERS];
    struct iz_linear one = iz_product_expert(l, 0, here, own);
    bool dry = x->dry;
    x->dry = true;
    f(x, to, from, &one);
    x->dry = dry;
    x->flops = before.flops + part * (x->flops - before.flops);
    x->bytes = before.bytes + part * (x->bytes - before.bytes);
    x->seconds = before.seconds + part * (x->seconds - before.seconds);
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
    check_routes(r);
    assert(l->out_in && !l->b.rows && l->w.rows % here == 0);
    assert(to.rows == iz_view_len(r->place) && from.rows == to.rows);
    x->numerics.bf16_products =
        false; /* their scratch may be any for fewer rows */
    x->rows_vary = true;
    count_products(x, f, to, from, l, r);
    struct counters counted = counters_of(x);
    const int32_t *end = x->dry ? NULL : ends_of(x, r);
    for (int64_t i = 0; end && i < here; i++) {
        int64_t n = rows_from(end, r->first + i, 1, &first);
        struct iz_linear one = iz_product_expert(l, i, here, own);
        if (n)
            f(x, iz_view_rows(to, first, n), iz_view_rows(from, first, n),
              &one);
        else if (f == iz_matmul_dw && !l->add)
            clear_gradients(x, &one);
    }
    counters_set(x, counted);
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
    if (iz_view_wanted(x, l->dw) || (f && f->a.rows))
        each_expert(x, iz_matmul_dw, dy, a, l, r);
}

/* Returns <g, dg>; g and du are multiplied by w. */
IZ_SIMD static float weigh_row(float *restrict g, float *restrict du,
                               const float *restrict dg, float w, int64_t f)
{
    float dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < f; i++) {
        dot += g[i] * dg[i];
        g[i] *= w;
    }
    for (int64_t i = 0; i < 2 * f; i++)
        du[i] *= w;
    return dot;
}

void iz_experts_weigh_bwd(struct iz_exec *x, struct iz_view dweight,
                          struct iz_view g, struct iz_view du,
                          struct iz_view dg, const struct iz_routes *r)
{
    int64_t f = g.cols;
    const int32_t *place = r->place.p;
    check_routes(r);
    assert(dg.cols == f && du.cols == 2 * f && g.rows == du.rows);
    assert(g.rows == iz_view_len(r->place) && dg.rows == g.rows);
    iz_exec_count(x, 0,
                  part_here(r) *
                      (double)(2 * iz_view_bytes(g) + 2 * iz_view_bytes(du)));
    if (iz_exec_runs(x, IZ_CUDA))
        iz_experts_weigh_bwd_cuda(x, dweight, g, du, dg, r);
    for (int64_t i = 0; iz_exec_runs(x, IZ_CPU) && i < iz_view_len(r->place);
         i++)
        if (is_here(r, i))
            ((float *)dweight.p)[i] = weigh_row(
                (float *)g.p + place[i] * f, (float *)du.p + place[i] * 2 * f,
                (float *)dg.p + place[i] * f, ((float *)r->weight.p)[i], f);
}

/* ---- gates ---- */

/* In *first the first of the rows by expert of those that are here, and their
 * number; 0 in a dry run. */
static int64_t rows_here(struct iz_exec *x, const struct iz_routes *r,
                         int64_t *first)
{
    check_routes(r);
    *first = 0;
    return x->dry ? 0
                  : rows_from(ends_of(x, r), r->first, iz_route_experts_here(r),
                              first);
}

void iz_experts_swiglu_fwd(struct iz_exec *x, struct iz_view y,
                           struct iz_view a, const struct iz_routes *r)
{
    int64_t first, n = rows_here(x, r, &first);
    iz_exec_count(x, 0,
                  part_here(r) * (double)(iz_view_bytes(y) + iz_view_bytes(a)));
    struct counters counted = counters_of(x);
    if (n)
        iz_activation_fwd(x, iz_view_rows(y, first, n),
                          iz_view_rows(a, first, n), IZ_SILU);
    counters_set(x, counted);
}

void iz_experts_swiglu_bwd(struct iz_exec *x, struct iz_view da,
                           struct iz_view y, struct iz_view dy,
                           struct iz_view a, const struct iz_routes *r)
{
    int64_t first, n = rows_here(x, r, &first);
    iz_exec_count(x, 0,
                  part_here(r) *
                      (double)(iz_view_bytes(da) + iz_view_bytes(y) +
                               iz_view_bytes(dy) + iz_view_bytes(a)));
    struct counters counted = counters_of(x);
    if (n)
        iz_activation_bwd(x, iz_view_rows(da, first, n),
                          iz_view_rows(y, first, n), iz_view_rows(dy, first, n),
                          iz_view_rows(a, first, n), IZ_SILU);
    counters_set(x, counted);
}
