/* SPDX-License-Identifier: Apache-2.0 */
/* Matrix products with weights, forward and backward, and their side on the
 * CPU.  There, 16-bit weights are widened and 16-bit gradients rounded a panel
 * of rows of w at a time, so that the scratch stays bounded whatever the size
 * of the model.  On a GPU the library needs a workspace of a fixed size. */
#include "codelets/ops/product.h"

#include <assert.h>
#include <string.h>

#include "codelets/base/build.h"
#include "codelets/base/int64.h"
#include "codelets/ops/gemm.h"
#include "codelets/ops/gemm16.h"
#include "codelets/ops/gpu_ops.h"

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
    return iz_exec_work(x, IZ_F32, convert ? panel_rows(x, w) : 0, w.cols);
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

static void product_count(struct iz_exec *x, const struct iz_product *p)
{
    int64_t n = iz_product_n(p), k = iz_product_k(p), m = p->d.rows;
    int64_t c = p->c.rows * n * iz_dtype_bytes(p->c.dtype);

    iz_exec_count(x, 2. * (double)(m * n) * (double)k,
                  (double)(m * k * iz_dtype_bytes(p->a.dtype) + c +
                           m * n * iz_dtype_bytes(p->d.dtype) +
                           iz_view_bytes(p->b) + iz_view_bytes(p->bias)));
}

/* ---- with fp32 operands ---- */

/* A panel of the weights b has columns of d, or meets columns of a. */
static void product_by_weights(const struct iz_product *p, struct iz_view panel,
                               int64_t step, bool add)
{
    for (int64_t at = 0; at < p->b.rows; at += step) {
        int64_t n = min64(step, p->b.rows - at);
        struct iz_gemm g = {.m = p->d.rows,
                            .n = p->tb ? n : p->d.cols,
                            .k = p->tb ? p->a.cols : n,
                            .a = (float *)p->a.p + (p->tb ? 0 : at),
                            .lda = p->a.cols,
                            .b = panel_load(panel, p->b, at, n),
                            .ldb = p->b.cols,
                            .tb = p->tb,
                            .c = (float *)p->d.p + (p->tb ? at : 0),
                            .ldc = p->d.cols,
                            .alpha = p->scale != 0 ? p->scale : 1,
                            .beta = add || (!p->tb && at)};
        iz_gemm_cpu(&g);
    }
}

/* A panel of the gradient d has columns of a. */
static void product_by_gradient(const struct iz_product *p,
                                struct iz_view panel, int64_t step)
{
    for (int64_t at = 0; at < p->d.rows; at += step) {
        int64_t n = min64(step, p->d.rows - at);
        struct iz_view d = iz_view_rows(p->d, at, n);
        struct iz_gemm g = {.m = n,
                            .n = d.cols,
                            .k = p->a.rows,
                            .a = (float *)p->a.p + at,
                            .lda = p->a.cols,
                            .ta = true,
                            .b = p->b.p,
                            .ldb = p->b.cols,
                            .c = panel.rows ? panel.p : d.p,
                            .ldc = d.cols,
                            .alpha = 1,
                            .beta = p->add};
        iz_gemm_cpu(&g);
        if (panel.rows)
            iz_cast(d.p, d.dtype, panel.p, IZ_F32, iz_view_len(d));
    }
}

static void product_32(struct iz_exec *x, const struct iz_product *p)
{
    struct iz_view w = p->ta ? p->d : p->b, panel = panel_take(x, w);
    struct iz_view bias = iz_exec_work(x, IZ_F32, p->bias.rows, p->bias.cols);
    bool add = bias.rows || p->c.rows;
    if (x->dry)
        return;
    if (bias.rows)
        iz_cast(bias.p, IZ_F32, p->bias.p, p->bias.dtype, bias.cols);
    if (add)
        fill(p->d, p->c, bias.rows ? bias.p : NULL);
    if (p->ta)
        product_by_gradient(p, panel, panel_rows(x, w));
    else
        product_by_weights(p, panel, panel_rows(x, w), add);
}

/* ---- with bf16 operands: weights as they are, the others rounded ---- */

/* v in bf16, in scratch unless it is of that type. */
static struct iz_view rounded(struct iz_exec *x, struct iz_view v)
{
    if (v.dtype == IZ_BF16)
        return v;

    struct iz_view to = iz_exec_work(x, IZ_BF16, v.rows, v.cols);
    if (!x->dry)
        iz_cast(to.p, IZ_BF16, v.p, v.dtype, iz_view_len(v));
    return to;
}

static void product_16(struct iz_exec *x, const struct iz_product *p)
{
    struct iz_gemm16 g = {.m = p->d.rows,
                          .n = p->d.cols,
                          .k = iz_product_k(p),
                          .a = rounded(x, p->a).p,
                          .b = rounded(x, p->b).p,
                          .ta = p->ta,
                          .tb = p->tb,
                          .bias = p->bias.p,
                          .bias_type = p->bias.dtype,
                          .biased = p->bias.rows > 0,
                          .c = p->d.p,
                          .c_type = p->d.dtype,
                          .add = p->add || p->c.rows > 0};
    struct iz_view scratch = iz_exec_work(x, IZ_U8, 1, iz_gemm16_scratch(&g));
    if (x->dry)
        return;
    if (p->c.rows && p->c.p != p->d.p)
        memcpy(p->d.p, p->c.p, (size_t)iz_view_bytes(p->d));
    g.scratch = scratch.p;
    iz_gemm16(&g);
}

static void product_on_cpu(struct iz_exec *x, const struct iz_product *p,
                           const struct iz_linear *l)
{
    bool whole = p->d.cols == iz_product_n(p) &&
                 p->a.cols == (p->ta ? p->d.rows : iz_product_k(p));
    if (x->numerics.bf16_products && l->w.dtype == IZ_BF16 && l->scale == 0 &&
        whole)
        product_16(x, p);
    else
        product_32(x, p);
}

/* ---- a layer's products, its adapter left out ---- */

static struct iz_view matmul_cuda_scratch(struct iz_exec *x,
                                          const struct iz_product *p)
{
    return iz_exec_work(x, IZ_U8, 1, iz_product_pad(p, NULL).bytes);
}

static void product_fwd(struct iz_exec *x, struct iz_view y, struct iz_view r,
                        struct iz_view a, const struct iz_linear *l)
{
    struct iz_product p = iz_product_fwd(y, r, a, l);
    int64_t mark = iz_exec_mark(x);
    assert(l->scale == 0 || (l->b.rows == 0 && r.rows == 0));
    assert(iz_product_n(&p) <= y.cols && iz_product_k(&p) <= a.cols);
    assert(y.rows == a.rows);
    product_count(x, &p);
    if (x->backend == IZ_CUDA) {
        struct iz_view scratch = matmul_cuda_scratch(x, &p);
        if (!x->dry)
            iz_matmul_fwd_cuda(x, y, r, a, l, scratch);
    } else {
        product_on_cpu(x, &p, l);
    }
    iz_exec_release(x, mark);
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
    int64_t mark = iz_exec_mark(x);
    struct iz_view sum = iz_exec_work(x, IZ_F32, 1, l->db.cols);
    if (!x->dry) {
        sum_rows(sum.p, dy);
        iz_cast(l->db.p, l->db.dtype, sum.p, IZ_F32, sum.cols);
    }
    iz_exec_release(x, mark);
}

static void matmul_product_dw(struct iz_exec *x, struct iz_view dy,
                              struct iz_view a, const struct iz_linear *l)
{
    struct iz_product p = iz_product_dw(dy, a, l);
    bool dw = iz_view_wanted(x, l->dw), db = iz_view_wanted(x, l->db);
    int64_t mark = iz_exec_mark(x);
    assert(a.rows == dy.rows && (!l->add || l->dw.dtype == IZ_F32));
    if (db) { /* on a GPU a pass over dy of its own */
        bool pass = x->backend == IZ_CUDA;
        iz_exec_count(
            x, 0, (double)(iz_view_bytes(l->db) + pass * iz_view_bytes(dy)));
    }
    if (dw)
        product_count(x, &p);
    if (x->backend == IZ_CPU) {
        if (db)
            db_on_cpu(x, dy, l);
        if (dw)
            product_on_cpu(x, &p, l);
    } else if (dw || db) {
        struct iz_view scratch = matmul_cuda_scratch(x, &p);
        if (!x->dry)
            iz_matmul_dw_cuda(x, dy, a, l, scratch);
    }
    iz_exec_release(x, mark);
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

/* The outputs that an adapter adds to, in the rows of all: v begins at the
 * first one, and its rows are as long as before. */
static struct iz_view outputs_of(struct iz_view v, const struct iz_adapter *f)
{
    int64_t bytes = f->first * iz_dtype_bytes(v.dtype);
    if (v.p)
        v.p = (char *)v.p + bytes;
    v.odd |= bytes % 16 != 0;
    return v;
}

/* The layer's input as an adapter sees it; in scratch if it has dropout. */
static struct iz_view input_of(struct iz_exec *x, struct iz_view v,
                               const struct iz_adapter *f)
{
    if (f->drop.p == 0)
        return v;
    struct iz_view t = iz_exec_work(x, x->act, v.rows, v.cols);
    iz_dropout(x, t, IZ_NONE, v, &f->drop);
    return t;
}

/* scale v a^T [M,rank] of the layer's input v, or scale v b of the gradient of
 * its output; in scratch. */
static struct iz_view matmul_low_rank(struct iz_exec *x, struct iz_view v,
                                      const struct iz_adapter *f, bool gradient)
{
    struct iz_view t = iz_exec_work(x, x->act, v.rows, f->a.rows);
    struct iz_linear l = {
        .w = gradient ? f->b : f->a, .out_in = !gradient, .scale = f->scale};
    product_fwd(x, t, IZ_NONE, gradient ? outputs_of(v, f) : v, &l);
    return t;
}

static void adapted_fwd(struct iz_exec *x, struct iz_view y, struct iz_view r,
                        struct iz_view a, const struct iz_linear *l)
{
    struct iz_linear base = base_of(l);
    int64_t mark = iz_exec_mark(x);
    product_fwd(x, y, r, a, &base);
    for (const struct iz_adapter *f = adapter_of(l); f; f = f->next) {
        struct iz_linear wide = {.w = f->b, .out_in = true};
        struct iz_view part = outputs_of(y, f);
        struct iz_adapter scaled = *f;
        scaled.scale *= l->scale != 0 ? l->scale : 1;
        product_fwd(x, part, part,
                    matmul_low_rank(x, input_of(x, a, f), &scaled, false),
                    &wide);
        iz_exec_release(x, mark);
    }
}

static void adapted_da(struct iz_exec *x, struct iz_view da, struct iz_view dy,
                       const struct iz_linear *l)
{
    /* A forward through the same weights the other way round. */
    struct iz_linear back = {.w = base_of(l).w, .out_in = !l->out_in};
    int64_t mark = iz_exec_mark(x);
    product_fwd(x, da, IZ_NONE, dy, &back);
    for (const struct iz_adapter *f = adapter_of(l); f; f = f->next) {
        struct iz_linear wide = {.w = f->a};
        struct iz_view t = matmul_low_rank(x, dy, f, true);
        if (f->drop.p == 0) {
            product_fwd(x, da, da, t, &wide);
        } else {
            struct iz_view part = iz_exec_work(x, x->act, da.rows, da.cols);
            product_fwd(x, part, IZ_NONE, t, &wide);
            iz_dropout(x, da, da, part, &f->drop);
        }
        iz_exec_release(x, mark);
    }
}

static void adapted_dw(struct iz_exec *x, struct iz_view dy, struct iz_view a,
                       const struct iz_linear *l)
{
    struct iz_linear base = base_of(l);
    int64_t mark = iz_exec_mark(x);
    if (l->w.adapter) {
        l->w.adapter->seen = true;
        l->w.adapter->out_in = l->out_in;
    }
    matmul_product_dw(x, dy, a, &base);
    for (const struct iz_adapter *f = adapter_of(l); f; f = f->next) {
        struct iz_linear to_a = {
            .w = f->a, .dw = f->da, .out_in = true, .add = l->add};
        struct iz_linear to_b = {
            .w = f->b, .dw = f->db, .out_in = true, .add = l->add};
        struct iz_view in = input_of(x, a, f);
        int64_t inner = iz_exec_mark(x);
        if (iz_view_wanted(x, f->da))
            matmul_product_dw(x, matmul_low_rank(x, dy, f, true), in, &to_a);
        iz_exec_release(x, inner);
        if (iz_view_wanted(x, f->db))
            matmul_product_dw(x, outputs_of(dy, f),
                              matmul_low_rank(x, in, f, false), &to_b);
        iz_exec_release(x, mark);
    }
}

/* ---- adapters with magnitudes ---- */

static struct iz_view behind(struct iz_view v)
{
    if (v.p)
        v.p = (float *)v.p + v.cols;
    return v;
}

static bool has_gain(const struct iz_linear *l)
{
    return adapter_of(l) && l->w.adapter->m.rows;
}

/* What the outputs are multiplied by, in scratch, and 1 / norms likewise, those
 * of one adapter behind those of another. */
static struct iz_view gain_of(struct iz_exec *x, int64_t outputs,
                              const struct iz_linear *l,
                              struct iz_view *inverse)
{
    struct iz_view gain = iz_exec_work(x, IZ_F32, 1, outputs), part;
    part = *inverse = iz_exec_work(x, IZ_F32, 1, outputs);
    for (const struct iz_adapter *f = l->w.adapter; f; f = f->next) {
        struct iz_magnitude g = {
            l->w,     f->a,     f->b,      f->m,
            f->scale, f->first, l->out_in, f == l->w.adapter};
        part.cols = f->b.rows;
        iz_magnitude_gain(x, gain, part, &g);
        part = behind(part);
    }
    return gain;
}

void iz_matmul_fwd(struct iz_exec *x, struct iz_view y, struct iz_view r,
                   struct iz_view a, const struct iz_linear *l)
{
    struct iz_linear bare = *l;
    struct iz_view inverse, u;
    int64_t mark = iz_exec_mark(x);
    if (!has_gain(l)) {
        adapted_fwd(x, y, r, a, l);
        return;
    }
    bare.b = IZ_NONE;
    u = iz_exec_work(x, y.dtype, y.rows, y.cols);
    adapted_fwd(x, u, IZ_NONE, a, &bare);
    iz_magnitude_apply(x, y, r, u, gain_of(x, y.cols, l, &inverse), l->b);
    iz_exec_release(x, mark);
}

void iz_matmul_da(struct iz_exec *x, struct iz_view da, struct iz_view dy,
                  const struct iz_linear *l)
{
    struct iz_view inverse, du = dy;
    int64_t mark = iz_exec_mark(x);
    if (has_gain(l)) {
        du = iz_exec_work(x, x->act, dy.rows, dy.cols);
        iz_magnitude_apply(x, du, IZ_NONE, dy, gain_of(x, dy.cols, l, &inverse),
                           IZ_NONE);
    }
    adapted_da(x, da, du, l);
    iz_exec_release(x, mark);
}

/* What the magnitudes multiplied is computed again: to keep it for them would
 * be another activation of each layer. */
void iz_matmul_dw(struct iz_exec *x, struct iz_view dy, struct iz_view a,
                  const struct iz_linear *l)
{
    struct iz_linear bare = *l, bias = base_of(l);
    struct iz_view inverse, u;
    int64_t mark = iz_exec_mark(x);
    if (!has_gain(l)) {
        adapted_dw(x, dy, a, l);
        return;
    }
    bare.b = bare.db = IZ_NONE;
    bias.dw = (struct iz_view){.dtype = l->dw.dtype, .cols = l->dw.cols};
    matmul_product_dw(x, dy, a, &bias);
    struct iz_view gain = gain_of(x, dy.cols, l, &inverse);
    u = iz_exec_work(x, x->act, dy.rows, dy.cols);
    adapted_fwd(x, u, IZ_NONE, a, &bare);
    for (const struct iz_adapter *f = l->w.adapter; f; f = f->next) {
        inverse.cols = f->b.rows;
        if (iz_view_wanted(x, f->dm))
            iz_magnitude_dm(x, f->dm, dy, u, inverse, f->first);
        inverse = behind(inverse);
    }
    iz_magnitude_apply(x, u, IZ_NONE, dy, gain, IZ_NONE);
    adapted_dw(x, u, a, &bare);
    iz_exec_release(x, mark);
}
