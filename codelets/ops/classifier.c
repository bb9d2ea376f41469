/* SPDX-License-Identifier: Apache-2.0 */
/* The output layer with its cross-entropy, fused over chunks of rows: logits,
 * loss, gradient of the logits in place, then both products of the backward.
 * The side of the CPU, and the memory that the GPU's side in classifier.cu
 * works in. */
#include "codelets/ops/classifier.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "codelets/base/build.h"
#include "codelets/base/die.h"
#include "codelets/base/int64.h"
#include "codelets/ops/gpu_ops.h"
#include "codelets/ops/row_math.h"

/* Of logits at a time: the more rows, the fewer passes over dw. */
#define CHUNK_BYTES (64 << 20)

/* On a GPU the vocabulary and the rows of a chunk are rounded up to multiples
 * of these: products of an odd extent have other kernels, which took 7 times as
 * long on an H100 with 50257 columns. */
enum { CUDA_COLS = 64, CUDA_ROWS = 8 };

/* Rows of a chunk of logits in fp32: all, or as equally many as can be of a
 * multiple of `align`. */
static int64_t chunk_rows(int64_t rows, int64_t vocab, int64_t bytes,
                          int64_t align)
{
    int64_t most = bytes / (vocab * iz_dtype_bytes(IZ_F32)), chunks;
    most = max64(most / align * align, align);
    chunks = (rows + most - 1) / most;
    return chunks == 1 ? rows : round_up((rows + chunks - 1) / chunks, align);
}

int64_t iz_classifier_room(const struct iz_exec *x, struct iz_view w)
{
    bool cuda = x->backend == IZ_CUDA;
    return cuda ? (round_up(w.rows, CUDA_COLS) - w.rows) * w.cols : 0;
}

int64_t iz_classifier_targets(const int32_t *target, int64_t n, int64_t vocab)
{
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        if (target[i] < -1 || target[i] >= vocab)
            iz_die("target %d at position %lld is outside the vocabulary "
                   "0..%lld and not -1",
                   target[i], (long long)i, (long long)vocab - 1);
        count += target[i] >= 0;
    }
    return count;
}

/* Of all rows that the loss is a mean over. */
static int64_t count_targets(const struct iz_classifier *c)
{
    int64_t here = iz_classifier_targets(c->target, c->a.rows, c->w.rows);
    return c->targets ? c->targets : here;
}

/* One row of logits becomes scale times the gradient of its loss, which is
 * returned. */
static inline double row_bwd(float *s, int64_t n, int32_t target, float scale)
{
    float at = s[target], m = iz_row_max(s, n), sum = iz_row_exp(s, m, n);
    float by = scale / sum;
    for (int64_t j = 0; j < n; j++)
        s[j] *= by;
    s[target] -= scale;
    return log((double)sum) + ((double)m - (double)at);
}

/* Returns the sum of the losses of the rows, which begin with row `at` of c. */
IZ_SIMD static double rows_bwd(struct iz_view logits,
                               const struct iz_classifier *c, int64_t at,
                               float scale)
{
    const int32_t *target = c->target + at;
    int64_t rows = c->scales ? c->a.rows / c->samples : 0; /* of a sample */
    double sum = 0;
    for (int64_t i = 0; i < logits.rows; i++) {
        float *s = (float *)logits.p + i * logits.cols;
        if (rows)
            scale = c->scales[(at + i) / rows];
        if (target[i] < 0)
            memset(s, 0, (size_t)logits.cols * sizeof(*s));
        else
            sum += row_bwd(s, logits.cols, target[i], scale);
    }
    return sum;
}

/* The same of all rows of a chunk; by the slope of the cap, if there is one,
 * for which row [1,V] is scratch. */
static double chunk_bwd(struct iz_view logits, struct iz_view row,
                        const struct iz_classifier *c, int64_t at, float scale)
{
    double sum = 0;
    if (!row.rows)
        return rows_bwd(logits, c, at, scale);
    for (int64_t i = 0; i < logits.rows; i++) {
        struct iz_view s = iz_view_rows(logits, i, 1);
        float *capped = row.p, *grad = s.p;
        memcpy(capped, s.p, (size_t)iz_view_bytes(s));
        sum += rows_bwd(s, c, at + i, scale);
        for (int64_t j = 0; j < s.cols; j++)
            grad[j] *= 1 - capped[j] / c->cap * (capped[j] / c->cap);
    }
    return sum;
}

IZ_SIMD static double rows_fwd(struct iz_view logits,
                               const struct iz_classifier *c, int64_t at)
{
    const int32_t *target = c->target + at;
    int64_t rows = c->each ? c->a.rows / c->samples : 0; /* of a sample */
    double sum = 0;
    for (int64_t i = 0; i < logits.rows; i++) {
        float *s = (float *)logits.p + i * logits.cols, m;
        double here, hit;
        if (target[i] < 0)
            continue;
        hit = (double)s[target[i]];
        m = iz_row_max(s, logits.cols);
        here = log((double)iz_row_exp(s, m, logits.cols)) + ((double)m - hit);
        if (!rows) {
            sum += iz_classifier_even(here);
            continue;
        }
        sum += here;
        c->each[(at + i) / rows].sum += here;
        c->each[(at + i) / rows].targets++;
    }
    return sum;
}

struct iz_product iz_classifier_logits(struct iz_view logits, struct iz_view a,
                                       struct iz_view w)
{
    return (struct iz_product){.a = a, .b = w, .tb = true, .d = logits};
}

struct iz_product iz_classifier_da(struct iz_view da, struct iz_view d,
                                   struct iz_view w)
{
    return (struct iz_product){.a = d, .b = w, .d = da};
}

struct iz_product iz_classifier_dw(struct iz_view dw, struct iz_view d,
                                   struct iz_view a, bool add)
{
    return (struct iz_product){.a = d, .ta = true, .b = a, .d = dw, .add = add};
}

/* Scratch of the hungriest of a chunk's products. */
static int64_t product_bytes(const struct iz_classifier *c,
                             const struct iz_classifier_parts *p)
{
    struct iz_view a = iz_view_rows(c->a, 0, p->rows);
    struct iz_product list[] = {
        iz_classifier_logits(p->logits, a, p->w),
        iz_classifier_da(iz_view_rows(c->da, 0, p->rows), p->grad, p->w),
        iz_classifier_dw(p->dw, p->grad, a, false)};
    int64_t most = 0;
    for (int i = 0; i < (!c->da.rows ? 1 : p->dw.rows ? 3 : 2); i++)
        most = max64(most, iz_product_pad(&list[i], NULL).bytes);
    return most;
}

struct iz_classifier_parts iz_classifier_parts(const struct iz_exec *x,
                                               const struct iz_classifier *c,
                                               void *base)
{
    bool grad = c->da.rows > 0;
    struct iz_exec e = iz_exec_dry(IZ_CUDA, x->act);
    struct iz_classifier_parts p = {0};
    int64_t m = c->a.rows, v = c->w.rows, ld = round_up(v, CUDA_COLS);
    assert(x->numerics.logits_bytes > 0);
    p.rows = chunk_rows(m, ld, x->numerics.logits_bytes, CUDA_ROWS);
    e.work.base = base;
    p.loss = iz_exec_work(&e, IZ_U8, m, sizeof(double)).p;
    p.target = iz_exec_work(&e, IZ_I32, m, 1).p;
    p.logits = iz_exec_work(&e, IZ_F32, p.rows, ld);
    p.grad = p.logits;
    if (grad && x->act != IZ_F32)
        p.grad = iz_exec_work(&e, x->act, p.rows, ld);
    p.w = c->w;
    p.w.rows = ld;
    if (c->w.room < (ld - v) * c->w.cols || c->w.odd)
        p.w = iz_exec_work(&e, c->w.dtype, ld, c->w.cols);
    p.dw = iz_view_wanted(x, c->dw) ? c->dw : IZ_NONE;
    if (c->targets && p.dw.rows)
        p.dw.rows = ld;
    else if (grad && p.dw.rows &&
             (ld > v || (p.dw.dtype != IZ_F32 && p.rows < m)))
        p.dw =
            iz_exec_work(&e, p.rows < m ? IZ_F32 : p.dw.dtype, ld, p.dw.cols);
    p.b = iz_exec_work(&e, IZ_F32, c->b.rows, ld);
    if (grad && iz_view_wanted(x, c->db))
        p.db = iz_exec_work(&e, IZ_F32, 1 + (m + p.rows - 1) / p.rows, ld);
    p.product = iz_exec_work(&e, IZ_U8, 1, product_bytes(c, &p));
    p.bytes = e.work.peak;
    return p;
}

/* The products, of which dw is summed in fp32 over the chunks or rounded at the
 * end, and a pass over the logits, which writes their gradients. */
static void count_cuda(struct iz_exec *x, const struct iz_classifier *c,
                       const struct iz_classifier_parts *p)
{
    bool grad = c->da.rows > 0;
    double rows = (double)c->a.rows, v = (double)c->w.rows;
    double chunks = (double)((c->a.rows + p->rows - 1) / p->rows);
    double flops = 2 * rows * (double)iz_view_len(c->w);
    double a = (double)iz_view_bytes(c->a), w = (double)iz_view_bytes(c->w);
    double dlogits = rows * v * (double)iz_dtype_bytes(p->grad.dtype);
    double dw = (double)iz_view_bytes(p->dw);
    bool sum = p->dw.dtype == IZ_F32 && x->act != IZ_F32;
    iz_exec_count(x, flops, rows * v * 4 + a + chunks * w);
    iz_exec_count(x, 0, rows * v * 4 + (grad ? dlogits : 0));
    if (c->cap != 0)
        iz_exec_count(x, 0, 2 * rows * v * 4);
    if (p->b.rows)
        iz_exec_count(x, 0, 2 * rows * v * 4 + (p->db.rows ? dlogits : 0));
    if (grad)
        iz_exec_count(x, flops,
                      dlogits + (double)iz_view_bytes(c->da) + chunks * w);
    if (grad && p->dw.rows)
        (sum ? iz_exec_count_sum : iz_exec_count)(x, flops,
                                                  dlogits + a + chunks * dw);
    if (grad && p->dw.rows && p->dw.dtype != c->dw.dtype)
        iz_exec_count(x, 0, dw + (double)iz_view_bytes(c->dw));
}

static void on_cuda(struct iz_exec *x, const struct iz_classifier *c)
{
    struct iz_classifier_parts p = iz_classifier_parts(x, c, NULL);
    struct iz_view scratch = iz_exec_work(x, IZ_U8, 1, p.bytes);
    count_cuda(x, c, &p);
    if (!x->dry)
        iz_classifier_cuda(x, c, count_targets(c), scratch);
}

/* Where dw is summed over the chunks: in place, or in scratch when it has to be
 * rounded once at the end. */
static struct iz_view sum_take(struct iz_exec *x, struct iz_view dw)
{
    if (dw.dtype == IZ_F32 || !iz_view_wanted(x, dw))
        return dw;
    return iz_exec_work(x, IZ_F32, dw.rows, dw.cols);
}

static void on_cpu(struct iz_exec *x, const struct iz_classifier *c)
{
    bool grad = c->da.rows > 0;
    int64_t rows = chunk_rows(c->a.rows, c->w.rows, CHUNK_BYTES, 1);
    struct iz_view logits = iz_exec_work(x, IZ_F32, rows, c->w.rows);
    struct iz_view row =
        iz_exec_work(x, IZ_F32, grad && c->cap != 0, c->w.rows);
    struct iz_linear l = {.w = c->w,
                          .b = c->b,
                          .out_in = true,
                          .dw = grad ? sum_take(x, c->dw) : IZ_NONE};
    bool biased = grad && iz_view_wanted(x, c->db);
    struct iz_view db = iz_exec_work(x, IZ_F32, biased ? 2 : 0, c->w.rows);
    struct iz_view sum_db = iz_view_rows(db, 0, biased);
    int64_t count = x->dry ? 0 : count_targets(c);
    float scale = count ? c->loss_scale / (float)count : 0;
    double sum = 0;
    for (int i = 0; c->each && !x->dry && i < c->samples; i++)
        c->each[i] = (struct iz_sample_loss){0};
    for (int64_t at = 0; at < c->a.rows; at += rows) {
        int64_t n = c->a.rows - at < rows ? c->a.rows - at : rows;
        struct iz_view chunk = iz_view_rows(logits, 0, n);
        struct iz_view a = iz_view_rows(c->a, at, n);
        iz_matmul_fwd(x, chunk, IZ_NONE, a, &l);
        if (c->cap != 0)
            iz_op_scale(x, chunk, chunk, 1, c->cap);
        if (!x->dry)
            sum += grad ? chunk_bwd(chunk, row, c, at, scale)
                        : rows_fwd(chunk, c, at);
        if (!grad)
            continue;
        l.add = (at > 0 || c->adds) && iz_view_wanted(x, l.dw);
        l.db = biased ? iz_view_rows(db, at > 0, 1) : IZ_NONE;
        iz_matmul_dw(x, chunk, a, &l); /* reads a, which da may replace */
        if (biased && at)
            iz_op_add(x, sum_db, l.db);
        iz_matmul_da(x, iz_view_rows(c->da, at, n), chunk, &l);
    }
    if (biased && c->adds)
        iz_op_add(x, c->db, sum_db);
    if (x->dry)
        return;
    if (c->loss)
        *c->loss = (c->adds ? *c->loss : 0) + (count ? sum / (double)count : 0);
    if (biased && !c->adds)
        iz_cast(c->db.p, c->db.dtype, sum_db.p, IZ_F32, sum_db.cols);
    if (grad && l.dw.p != c->dw.p)
        iz_cast(c->dw.p, c->dw.dtype, l.dw.p, IZ_F32, iz_view_len(c->dw));
}

void iz_classifier(struct iz_exec *x, const struct iz_classifier *c)
{
    struct iz_classifier plain = *c; /* no linear layer: without an adapter */
    int64_t mark = iz_exec_mark(x);
    assert(c->a.cols == c->w.cols && c->a.rows > 0);
    assert(c->a.rows <= INT32_MAX);
    plain.w.adapter = NULL;
    if (x->backend == IZ_CUDA)
        on_cuda(x, &plain);
    else
        on_cpu(x, &plain);
    iz_exec_release(x, mark);
}
