/* SPDX-License-Identifier: Apache-2.0 */
/* The two norm layers, forward and backward: LayerNorm of rows, and RMSNorm of
 * pieces, which are whole rows or the heads of a row. */
#include "codelets/ops/ops.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "codelets/base/build.h"
#include "codelets/base/int64.h"
#include "codelets/ops/gpu_ops.h"

/* An fp32 copy of a row vector of parameters. */
static struct iz_view widen(struct iz_exec *x, struct iz_view v)
{
    struct iz_view f = iz_exec_work(x, IZ_F32, 1, v.cols);
    if (iz_exec_runs(x, IZ_CPU))
        iz_cast(f.p, IZ_F32, v.p, v.dtype, v.cols);
    return f;
}

/* What rows of n are multiplied by. */
static struct iz_view norm_weight(struct iz_exec *x,
                                  const struct iz_norm_layer *n)
{
    struct iz_view w = widen(x, n->w);
    for (int64_t i = 0; n->plus_one && !x->dry && i < w.cols; i++)
        ((float *)w.p)[i] += 1;
    return w;
}

static struct iz_view zeros(struct iz_exec *x, int64_t c)
{
    struct iz_view v = iz_exec_work(x, x->act, 1, c);
    iz_op_clear(x, v);
    return v;
}

/* n of pieces of c with scratch in place of absent vectors. */
static struct iz_norm_layer complete(struct iz_exec *x,
                                     const struct iz_norm_layer *n, int64_t c)
{
    struct iz_norm_layer all = *n;
    all.plus_one |= !n->w.rows;
    if (!n->w.rows)
        all.w = zeros(x, c);
    if (n->mean.rows && !n->b.rows)
        all.b = zeros(x, c);
    return all;
}

static void store_gradient(const struct iz_exec *x, struct iz_view to,
                           const float *from)
{
    if (iz_view_wanted(x, to))
        iz_cast(to.p, to.dtype, from, IZ_F32, to.cols);
}

/* On a GPU blocks add up the gradients of the weights of all pieces: two blocks
 * per SM of an H100, or four where a thread of a block has 16 bytes of a row
 * and too little is on its way with two.  Each has a row of scratch for each of
 * the gradients. */
static struct iz_view norm_cuda_scratch(struct iz_exec *x,
                                        const struct iz_norm_layer *n)
{
    int64_t bytes = n->w.cols * iz_dtype_bytes(x->act);
    int64_t parts = bytes > 2048 && bytes <= 4096 ? 528 : 264;
    parts = min64(iz_view_len(n->rstd), parts);
    return iz_exec_work(x, IZ_F32, (n->mean.rows ? 2 : 1) * parts, n->w.cols);
}

/* ---- LayerNorm ---- */

static inline float row_sum(const float *a, int64_t n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++)
        sum += a[i];
    return sum;
}

static inline float row_sum_square(const float *a, float mean, int64_t n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++)
        sum += (a[i] - mean) * (a[i] - mean);
    return sum;
}

IZ_SIMD static void layernorm_stats(const struct iz_norm_layer *n,
                                    struct iz_view a)
{
    float *mean = n->mean.p, *rstd = n->rstd.p, c = (float)a.cols;
    for (int64_t i = 0; i < a.rows; i++) {
        const float *row = (float *)a.p + i * a.cols;
        mean[i] = row_sum(row, a.cols) / c;
        rstd[i] = 1 / sqrtf(row_sum_square(row, mean[i], a.cols) / c + n->eps);
    }
}

IZ_SIMD static void layernorm_apply(struct iz_view y, struct iz_view a,
                                    const struct iz_norm_layer *n,
                                    const float *w, const float *b)
{
    const float *mean = n->mean.p, *rstd = n->rstd.p;
    for (int64_t i = 0; i < a.rows; i++) {
        const float *from = (float *)a.p + i * a.cols;
        float *to = (float *)y.p + i * a.cols, m = mean[i], s = rstd[i];
        for (int64_t j = 0; j < a.cols; j++)
            to[j] = (from[j] - m) * s * w[j] + b[j];
    }
}

static void layernorm_on_cpu(struct iz_exec *x, struct iz_view y,
                             struct iz_view a, const struct iz_norm_layer *n,
                             bool again)
{
    struct iz_view w = norm_weight(x, n), b = widen(x, n->b);
    if (!x->dry && !again)
        layernorm_stats(n, a);
    if (!x->dry)
        layernorm_apply(y, a, n, w.p, b.p);
}

/* Means over a row of g = dy w and of g xhat. */
static inline void row_means(float *mg, float *mgx, const float *dy,
                             const float *w, const float *a, float m, float s,
                             int64_t n)
{
    float sum = 0, sum_hat = 0;
#pragma omp simd reduction(+ : sum, sum_hat)
    for (int64_t i = 0; i < n; i++) {
        float g = dy[i] * w[i];
        sum += g;
        sum_hat += g * ((a[i] - m) * s);
    }
    *mg = sum / (float)n;
    *mgx = sum_hat / (float)n;
}

/* scratch [3,C]: dw, db, and a row of dx, which may replace the same row of r
 * or of dy. */
IZ_SIMD static void layernorm_gradients(struct iz_view dx, struct iz_view r,
                                        struct iz_view dy, struct iz_view a,
                                        const struct iz_norm_layer *n,
                                        const float *w, float *restrict scratch)
{
    const float *mean = n->mean.p, *rstd = n->rstd.p;
    int64_t c = a.cols;
    float *restrict gw = scratch, *restrict gb = scratch + c;
    float *restrict to = scratch + 2 * c;
    memset(scratch, 0, 2 * (size_t)c * sizeof(*scratch));
    for (int64_t i = 0; i < a.rows; i++) {
        const float *av = (float *)a.p + i * c, *dv = (float *)dy.p + i * c;
        const float *rv = r.rows ? (float *)r.p + i * c : NULL;
        float m = mean[i], s = rstd[i], mg, mgx;
        row_means(&mg, &mgx, dv, w, av, m, s, c);
        for (int64_t j = 0; j < c; j++) {
            float hat = (av[j] - m) * s;
            gw[j] += dv[j] * hat;
            gb[j] += dv[j];
            to[j] = s * (dv[j] * w[j] - mg - hat * mgx);
        }
        if (rv)
            for (int64_t j = 0; j < c; j++)
                to[j] += rv[j];
        memcpy((float *)dx.p + i * c, to, (size_t)c * sizeof(*to));
    }
}

static void layernorm_bwd_on_cpu(struct iz_exec *x, struct iz_view dx,
                                 struct iz_view r, struct iz_view dy,
                                 struct iz_view a,
                                 const struct iz_norm_layer *n)
{
    struct iz_view w = norm_weight(x, n),
                   g = iz_exec_work(x, IZ_F32, 3, a.cols);
    if (x->dry)
        return;
    layernorm_gradients(dx, r, dy, a, n, w.p, g.p);
    store_gradient(x, n->dw, g.p);
    store_gradient(x, n->db, (float *)g.p + a.cols);
}

/* ---- RMSNorm ---- */

/* `heads` pieces of c columns per row of ld. */
struct pieces {
    float *p; /* the first piece */
    int64_t ld, heads, c;
};

/* The columns of v from `first` on, as many as `heads` have. */
static struct pieces norm_pieces(struct iz_view v, int64_t first, int64_t heads,
                                 const struct iz_norm_layer *n)
{
    return (struct pieces){v.p ? (float *)v.p + first : NULL, v.cols, heads,
                           n->w.cols};
}

static inline float *piece(struct pieces s, int64_t i)
{
    return s.p + i / s.heads * s.ld + i % s.heads * s.c;
}

static inline float mean_square(const float *a, int64_t n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++)
        sum += a[i] * a[i];
    return sum / (float)n;
}

/* Mean over a piece of dy w xhat. */
static inline float mean_product(const float *dy, const float *w,
                                 const float *a, float s, int64_t n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++)
        sum += dy[i] * w[i] * (a[i] * s);
    return sum / (float)n;
}

IZ_SIMD static void rmsnorm_stats(struct iz_view rstd, struct pieces a,
                                  float eps)
{
    float *to = rstd.p;
    for (int64_t i = 0; i < iz_view_len(rstd); i++)
        to[i] = 1 / sqrtf(mean_square(piece(a, i), a.c) + eps);
}

/* y may be a. */
IZ_SIMD static void rmsnorm_apply(struct pieces y, struct pieces a,
                                  struct iz_view rstd, const float *w)
{
    for (int64_t i = 0; i < iz_view_len(rstd); i++) {
        const float *from = piece(a, i);
        float *to = piece(y, i), s = ((float *)rstd.p)[i];
#pragma omp simd
        for (int64_t j = 0; j < a.c; j++)
            to[j] = from[j] * s * w[j];
    }
}

/* One piece: dx, which may be dy or r, and what it adds to gw. */
static inline void bwd_piece(float *dx, const float *r, const float *dy,
                             const float *a, const float *w, float s,
                             float *restrict gw, int64_t c)
{
    float mean = mean_product(dy, w, a, s, c);
#pragma omp simd
    for (int64_t j = 0; j < c; j++) {
        float hat = a[j] * s, d = dy[j];
        gw[j] += d * hat;
        dx[j] = (r ? r[j] : 0) + s * (d * w[j] - hat * mean);
    }
}

/* r.p may be NULL. */
IZ_SIMD static void rmsnorm_gradients(struct pieces dx, struct pieces r,
                                      struct pieces dy, struct pieces a,
                                      struct iz_view rstd, const float *w,
                                      float *gw)
{
    memset(gw, 0, (size_t)a.c * sizeof(*gw));
    for (int64_t i = 0; i < iz_view_len(rstd); i++)
        bwd_piece(piece(dx, i), r.p ? piece(r, i) : NULL, piece(dy, i),
                  piece(a, i), w, ((float *)rstd.p)[i], gw, a.c);
}

static void rmsnorm_on_cpu(struct iz_exec *x, struct pieces y, struct pieces a,
                           const struct iz_norm_layer *n, bool again)
{
    struct iz_view w = norm_weight(x, n);
    if (!x->dry && !again)
        rmsnorm_stats(n->rstd, a, n->eps);
    if (!x->dry)
        rmsnorm_apply(y, a, n->rstd, w.p);
}

static void rmsnorm_bwd_on_cpu(struct iz_exec *x, struct pieces dx,
                               struct pieces r, struct pieces dy,
                               struct pieces a, const struct iz_norm_layer *n)
{
    struct iz_view w = norm_weight(x, n),
                   gw = iz_exec_work(x, IZ_F32, 1, n->w.cols);
    if (x->dry)
        return;
    rmsnorm_gradients(dx, r, dy, a, n->rstd, w.p, gw.p);
    store_gradient(x, n->dw, gw.p);
}

/* ---- the ops ---- */

static void norm_check(struct iz_view y, struct iz_view a,
                       const struct iz_norm_layer *n)
{
    assert(a.rows == y.rows && a.cols == y.cols && a.cols == n->w.cols);
    assert(n->rstd.rows == a.rows && (!n->mean.rows || n->mean.rows == a.rows));
}

void iz_norm_layer_fwd(struct iz_exec *x, struct iz_view y, struct iz_view a,
                       const struct iz_norm_layer *given, bool again)
{
    int64_t mark = iz_exec_mark(x);
    struct iz_norm_layer all = complete(x, given, a.cols), *n = &all;
    norm_check(y, a, n);
    iz_exec_count(x, 0, (double)(iz_view_bytes(y) + iz_view_bytes(a)));
    if (x->backend == IZ_CPU && n->mean.rows)
        layernorm_on_cpu(x, y, a, n, again);
    else if (x->backend == IZ_CPU)
        rmsnorm_on_cpu(x, norm_pieces(y, 0, 1, n), norm_pieces(a, 0, 1, n), n,
                       again);
    else if (!x->dry)
        iz_norm_layer_fwd_cuda(x, y, a, n, again);
    iz_exec_release(x, mark);
}

void iz_norm_layer_bwd(struct iz_exec *x, struct iz_view dx, struct iz_view r,
                       struct iz_view dy, struct iz_view a,
                       const struct iz_norm_layer *given)
{
    int64_t mark = iz_exec_mark(x);
    struct iz_norm_layer all = complete(x, given, a.cols), *n = &all;
    norm_check(dx, a, n);
    assert(dy.rows == a.rows && dy.cols == a.cols);
    iz_exec_count(x, 0,
                  (double)(iz_view_bytes(dx) + iz_view_bytes(r) +
                           iz_view_bytes(dy) + iz_view_bytes(a)));
    if (x->backend == IZ_CPU && n->mean.rows) {
        layernorm_bwd_on_cpu(x, dx, r, dy, a, n);
    } else if (x->backend == IZ_CPU) {
        rmsnorm_bwd_on_cpu(x, norm_pieces(dx, 0, 1, n), norm_pieces(r, 0, 1, n),
                           norm_pieces(dy, 0, 1, n), norm_pieces(a, 0, 1, n),
                           n);
    } else {
        struct iz_view scratch = norm_cuda_scratch(x, n);
        if (!x->dry)
            iz_norm_layer_bwd_cuda(x, dx, r, dy, a, n, scratch);
    }
    iz_exec_release(x, mark);
}

/* The pieces of a row are its heads. */
static struct pieces heads_of(struct iz_exec *x, struct iz_view a,
                              struct iz_view kept,
                              const struct iz_norm_layer *n, int64_t first)
{
    int64_t c = n->w.cols;
    assert(kept.rows == a.rows && kept.cols % c == 0);
    assert(first >= 0 && first + kept.cols <= a.cols);
    assert(iz_view_len(n->rstd) == iz_view_len(kept) / c && !n->mean.rows);
    iz_exec_count(x, 0, 3. * (double)iz_view_bytes(kept));
    return norm_pieces(a, first, kept.cols / c, n);
}

void iz_norm_head(struct iz_exec *x, struct iz_view a, struct iz_view kept,
                  const struct iz_norm_layer *given, int64_t first, bool back)
{
    int64_t mark = iz_exec_mark(x);
    struct iz_norm_layer all = complete(x, given, kept.cols / given->rstd.cols);
    struct iz_norm_layer *n = &all;
    struct pieces s = heads_of(x, a, kept, n, first);
    for (int64_t i = 0; !back && iz_exec_runs(x, IZ_CPU) && i < kept.rows; i++)
        memcpy((float *)kept.p + i * kept.cols, s.p + i * s.ld,
               (size_t)kept.cols * sizeof(*s.p));
    if (x->backend == IZ_CPU && back) {
        rmsnorm_bwd_on_cpu(x, s, (struct pieces){0}, s,
                           norm_pieces(kept, 0, s.heads, n), n);
    } else if (x->backend == IZ_CPU) {
        rmsnorm_on_cpu(x, s, s, n, false);
    } else {
        struct iz_view scratch = back ? norm_cuda_scratch(x, n) : IZ_NONE;
        if (!x->dry)
            iz_norm_head_cuda(x, a, kept, n, first, back, scratch);
    }
    iz_exec_release(x, mark);
}
