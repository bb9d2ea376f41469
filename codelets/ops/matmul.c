/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products with weights, forward and backward, and their side on the
 * CPU.  There, 16-bit weights are widened and 16-bit gradients rounded a panel
 * of rows of w at a time, so that the scratch stays bounded whatever the size
 * of the model.  On a GPU the library needs a workspace of a fixed size. */
#include "codelets/base/int64.h"
#include "codelets/ops/ops.h"

#include <assert.h>
#include <string.h>

#include "codelets/base/build.h"
#include "codelets/ops/gemm.h"
#include "codelets/ops/gpu_ops.h"
#include "codelets/ops/matmul_16.h"

#define PANEL_BYTES (4 << 20)

/* Rows of w that are treated at once: all when there is nothing to convert. */
static int64_t panel_rows(const struct iz_exec *x, struct iz_view w)
{
    int64_t n = PANEL_BYTES / (w.cols * iz_dtype_bytes(IZ_F32));

    if (x->act != IZ_F32 || w.dtype == IZ_F32)
        return w.rows;
    return n < 1 ? 1 : n > w.rows ? w.rows : n;
}

/* Scratch for one panel, empty when there is nothing to convert. */
static struct iz_view panel_take(struct iz_exec *x, struct iz_view w)
{
    bool convert = x->act == IZ_F32 && w.dtype != IZ_F32;

    return iz_work(x, IZ_F32, convert ? panel_rows(x, w) : 0, w.cols);
}

static const float *panel_load(struct iz_view panel, struct iz_view w,
                               int64_t from, int64_t n)
{
    struct iz_view src = iz_view_rows(w, from, n);

    if (panel.rows == 0)
        return src.p;
    iz_cast(panel.p, IZ_F32, src.p, src.dtype, n * w.cols);
    return panel.p;
}

/* y = r + b in every row: what the product is then added to. */
IZ_SIMD static void fill(struct iz_view y, struct iz_view r, const float *bias)
{
    for (int64_t i = 0; i < y.rows; i++) {
        float *to = (float *)y.p + i * y.cols;
        const float *from = r.rows ? (float *)r.p + i * y.cols : NULL;

        if (from && bias)
            for (int64_t j = 0; j < y.cols; j++)
                to[j] = from[j] + bias[j];
        else if (from != to)
            memcpy(to, from ? from : bias, (size_t)y.cols * sizeof(*to));
    }
}

/* Columns [from, from + n) of A, where op(A) is contracted with rows of w. */
static void fwd_cpu(struct iz_view y, struct iz_view a, struct iz_view panel,
                    const struct iz_linear *l, int64_t step, float beta)
{
    for (int64_t at = 0; at < l->w.rows; at += step) {
        int64_t n = min64(step, l->w.rows - at);
        struct iz_gemm g = {.m = y.rows,
                            .n = y.cols,
                            .k = a.cols,
                            .a = a.p,
                            .lda = a.cols,
                            .b = panel_load(panel, l->w, at, n),
                            .ldb = l->w.cols,
                            .tb = l->out_in,
                            .c = y.p,
                            .ldc = y.cols,
                            .alpha = 1,
                            .beta = beta};
        if (l->scale != 0)
            g.alpha = l->scale;
        if (l->out_in) {
            g.n = n;
            g.c += at;
        } else {
            g.k = n;
            g.a += at;
            g.beta = at ? 1 : beta;
        }
        iz_gemm_cpu(&g);
    }
}

static struct iz_view matmul_cuda_scratch(struct iz_exec *x)
{
    return iz_work(x, IZ_U8, 1, IZ_PRODUCT_SCRATCH);
}

static void fwd_on_cpu(struct iz_exec *x, struct iz_view y, struct iz_view r,
                       struct iz_view a, const struct iz_linear *l)
{
    struct iz_view panel = panel_take(x, l->w);
    struct iz_view bias = iz_work(x, IZ_F32, l->b.rows, l->b.cols);

    if (x->dry)
        return;
    if (bias.rows)
        iz_cast(bias.p, IZ_F32, l->b.p, l->b.dtype, bias.cols);
    if (bias.rows || r.rows)
        fill(y, r, bias.rows ? bias.p : NULL);
    fwd_cpu(y, a, panel, l, panel_rows(x, l->w), bias.rows || r.rows ? 1 : 0);
}

static void product_fwd(struct iz_exec *x, struct iz_view y, struct iz_view r,
                        struct iz_view a, const struct iz_linear *l)
{
    int64_t mark = iz_work_mark(x);

    assert(l->scale == 0 || (l->b.rows == 0 && r.rows == 0));
    assert((l->out_in ? l->w.rows : l->w.cols) == y.cols);
    assert((l->out_in ? l->w.cols : l->w.rows) == a.cols && y.rows == a.rows);
    iz_count(x, 2. * (double)y.rows * (double)iz_view_len(l->w),
             (double)(iz_view_bytes(y) + iz_view_bytes(r) + iz_view_bytes(a) +
                      iz_view_bytes(l->w) + iz_view_bytes(l->b)));
    if (x->backend == IZ_CUDA) {
        struct iz_view scratch = matmul_cuda_scratch(x);

        if (!x->dry)
            iz_matmul_fwd_cuda(x, y, r, a, l, scratch);
    } else if (iz_matmul16(x, l)) {
        iz_matmul16_fwd(x, y, r, a, l);
    } else {
        fwd_on_cpu(x, y, r, a, l);
    }
    iz_work_release(x, mark);
}

static void da_cpu(struct iz_view da, struct iz_view dy, struct iz_view panel,
                   const struct iz_linear *l, int64_t step)
{
    for (int64_t at = 0; at < l->w.rows; at += step) {
        int64_t n = min64(step, l->w.rows - at);
        struct iz_gemm g = {.m = da.rows,
                            .n = da.cols,
                            .k = dy.cols,
                            .a = dy.p,
                            .lda = dy.cols,
                            .b = panel_load(panel, l->w, at, n),
                            .ldb = l->w.cols,
                            .tb = !l->out_in,
                            .c = da.p,
                            .ldc = da.cols,
                            .alpha = 1};
        if (l->out_in) {
            g.k = n;
            g.a += at;
            g.beta = at ? 1 : 0;
        } else {
            g.n = n;
            g.c += at;
        }
        iz_gemm_cpu(&g);
    }
}

static void product_da(struct iz_exec *x, struct iz_view da, struct iz_view dy,
                       const struct iz_linear *l)
{
    int64_t mark = iz_work_mark(x);

    assert(da.rows == dy.rows);
    iz_count(
        x, 2. * (double)dy.rows * (double)iz_view_len(l->w),
        (double)(iz_view_bytes(da) + iz_view_bytes(dy) + iz_view_bytes(l->w)));
    if (x->backend == IZ_CUDA) {
        struct iz_view scratch = matmul_cuda_scratch(x);

        if (!x->dry)
            iz_matmul_da_cuda(x, da, dy, l, scratch);
    } else if (iz_matmul16(x, l)) {
        iz_matmul16_da(x, da, dy, l);
    } else {
        struct iz_view panel = panel_take(x, l->w);

        if (!x->dry)
            da_cpu(da, dy, panel, l, panel_rows(x, l->w));
    }
    iz_work_release(x, mark);
}

static void dw_cpu(struct iz_view dy, struct iz_view a, struct iz_view panel,
                   const struct iz_linear *l, int64_t step)
{
    /* Rows of dw belong to columns of `left`. */
    struct iz_view left = l->out_in ? dy : a, right = l->out_in ? a : dy;

    for (int64_t at = 0; at < l->dw.rows; at += step) {
        int64_t n = min64(step, l->dw.rows - at);
        struct iz_view dw = iz_view_rows(l->dw, at, n);
        struct iz_gemm g = {.m = n,
                            .n = dw.cols,
                            .k = dy.rows,
                            .a = (float *)left.p + at,
                            .lda = left.cols,
                            .ta = true,
                            .b = right.p,
                            .ldb = right.cols,
                            .c = panel.rows ? panel.p : dw.p,
                            .ldc = dw.cols,
                            .alpha = 1,
                            .beta = l->add ? 1 : 0};
        iz_gemm_cpu(&g);
        if (panel.rows)
            iz_cast(dw.p, dw.dtype, panel.p, IZ_F32, iz_view_len(dw));
    }
}

/* sum[j] = the sum of column j, four rows at a time. */
IZ_SIMD static void sum_rows(float *restrict sum, struct iz_view dy)
{
    int64_t n = dy.cols, i = 0;

    memset(sum, 0, (size_t)n * sizeof(*sum));
    for (; i + 4 <= dy.rows; i += 4) {
        const float *p = (float *)dy.p + i * n;
        for (int64_t j = 0; j < n; j++)
            sum[j] += (p[j] + p[j + n]) + (p[j + 2 * n] + p[j + 3 * n]);
    }
    for (; i < dy.rows; i++) {
        const float *p = (float *)dy.p + i * n;
        for (int64_t j = 0; j < n; j++)
            sum[j] += p[j];
    }
}

/* db = the sum of the rows of dy. */
static void db_on_cpu(struct iz_exec *x, struct iz_view dy,
                      const struct iz_linear *l)
{
    int64_t mark = iz_work_mark(x);
    struct iz_view sum = iz_work(x, IZ_F32, 1, l->db.cols);

    if (!x->dry) {
        sum_rows(sum.p, dy);
        iz_cast(l->db.p, l->db.dtype, sum.p, IZ_F32, sum.cols);
    }
    iz_work_release(x, mark);
}

static void dw_on_cpu(struct iz_exec *x, struct iz_view dy, struct iz_view a,
                      const struct iz_linear *l)
{
    if (iz_wanted(x, l->db))
        db_on_cpu(x, dy, l);
    if (iz_wanted(x, l->dw) && iz_matmul16(x, l)) {
        iz_matmul16_dw(x, dy, a, l);
    } else if (iz_wanted(x, l->dw)) {
        struct iz_view panel = panel_take(x, l->dw);

        if (!x->dry)
            dw_cpu(dy, a, panel, l, panel_rows(x, l->dw));
    }
}

static void matmul_product_dw(struct iz_exec *x, struct iz_view dy,
                              struct iz_view a, const struct iz_linear *l)
{
    bool dw = iz_wanted(x, l->dw), db = iz_wanted(x, l->db);
    int64_t mark = iz_work_mark(x);

    assert(a.rows == dy.rows && (!l->add || l->dw.dtype == IZ_F32));
    if (db)
        iz_count(x, 0, (double)iz_view_bytes(l->db));
    if (dw)
        iz_count(x, 2. * (double)dy.rows * (double)iz_view_len(l->dw),
                 (double)(iz_view_bytes(dy) + iz_view_bytes(a) +
                          iz_view_bytes(l->dw)));
    if (x->backend == IZ_CPU) {
        dw_on_cpu(x, dy, a, l);
    } else if (dw || db) {
        struct iz_view scratch = matmul_cuda_scratch(x);

        if (!x->dry)
            iz_matmul_dw_cuda(x, dy, a, l, scratch);
    }
    iz_work_release(x, mark);
}

/* ---- adapters ---- */

/* The layer without its adapter. */
static struct iz_linear base_of(const struct iz_linear *l)
{
    struct iz_linear base = *l;

    base.w.adapter = NULL;
    return base;
}

static struct iz_adapter *adapter_of(const struct iz_linear *l)
{
    struct iz_adapter *f = l->w.adapter;

    return f && f->a.rows ? f : NULL;
}

/* scale v a^T [M,rank] of the layer's input v, or scale v b of the gradient of
 * its output; in scratch. */
static struct iz_view matmul_narrow(struct iz_exec *x, struct iz_view v,
                                    const struct iz_adapter *f, bool gradient)
{
    struct iz_view t = iz_work(x, x->act, v.rows, f->a.rows);
    struct iz_linear l = {
        .w = gradient ? f->b : f->a, .out_in = !gradient, .scale = f->scale};

    product_fwd(x, t, IZ_NONE, v, &l);
    return t;
}

void iz_matmul_fwd(struct iz_exec *x, struct iz_view y, struct iz_view r,
                   struct iz_view a, const struct iz_linear *l)
{
    const struct iz_adapter *f = adapter_of(l);
    struct iz_linear base = base_of(l);
    int64_t mark = iz_work_mark(x);

    product_fwd(x, y, r, a, &base);
    if (f) {
        struct iz_linear wide = {.w = f->b, .out_in = true};

        product_fwd(x, y, y, matmul_narrow(x, a, f, false), &wide);
    }
    iz_work_release(x, mark);
}

void iz_matmul_da(struct iz_exec *x, struct iz_view da, struct iz_view dy,
                  const struct iz_linear *l)
{
    const struct iz_adapter *f = adapter_of(l);
    struct iz_linear base = base_of(l);
    int64_t mark = iz_work_mark(x);

    product_da(x, da, dy, &base);
    if (f) {
        struct iz_linear wide = {.w = f->a};

        product_fwd(x, da, da, matmul_narrow(x, dy, f, true), &wide);
    }
    iz_work_release(x, mark);
}

void iz_matmul_dw(struct iz_exec *x, struct iz_view dy, struct iz_view a,
                  const struct iz_linear *l)
{
    const struct iz_adapter *f = adapter_of(l);
    struct iz_linear base = base_of(l);
    int64_t mark = iz_work_mark(x);

    if (l->w.adapter) {
        l->w.adapter->seen = true;
        l->w.adapter->out_in = l->out_in;
    }
    matmul_product_dw(x, dy, a, &base);
    if (f && iz_wanted(x, f->da)) {
        struct iz_linear to_a = {.w = f->a, .dw = f->da, .out_in = true};

        matmul_product_dw(x, matmul_narrow(x, dy, f, true), a, &to_a);
    }
    iz_work_release(x, mark);
    if (f && iz_wanted(x, f->db)) {
        struct iz_linear to_b = {.w = f->b, .dw = f->db, .out_in = true};

        matmul_product_dw(x, dy, matmul_narrow(x, a, f, false), &to_b);
    }
    iz_work_release(x, mark);
}
