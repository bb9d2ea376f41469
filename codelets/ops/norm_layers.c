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

/* ---- on the CPU ---- */

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

IZ_INLINE float *piece(struct pieces s, int64_t i)
{
    int64_t row = s.heads == 1 ? i : i / s.heads;
    return s.p + row * s.ld + (i - row * s.heads) * s.c;
}

IZ_INLINE float piece_mean(const float *a, int64_t n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++)
        sum += a[i];
    return sum / (float)n;
}

IZ_INLINE float mean_square(const float *a, float mean, int64_t n)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++)
        sum += (a[i] - mean) * (a[i] - mean);
    return sum / (float)n;
}

/* With `mean` LayerNorm, else RMSNorm, here and below. */
IZ_INLINE void pieces_stats(const struct iz_norm_layer *n, struct pieces a,
                            bool mean)
{
    float *means = n->mean.p, *rstd = n->rstd.p, eps = n->eps;
    int64_t count = iz_view_len(n->rstd);
    for (int64_t i = 0; i < count; i++) {
        float m = mean ? piece_mean(piece(a, i), a.c) : 0;
        if (mean)
            means[i] = m;
        rstd[i] = 1 / sqrtf(mean_square(piece(a, i), m, a.c) + eps);
    }
}

/* y may be a. */
IZ_INLINE void pieces_fwd(struct pieces y, struct pieces a,
                          const struct iz_norm_layer *n, const float *w,
                          const float *b, bool again, bool mean)
{
    const float *means = n->mean.p, *rstd = n->rstd.p;
    if (!again)
        pieces_stats(n, a, mean);
    int64_t count = iz_view_len(n->rstd);
    for (int64_t i = 0; i < count; i++) {
        const float *from = piece(a, i);
        float *to = piece(y, i), m = mean ? means[i] : 0, s = rstd[i];
#pragma omp simd
        for (int64_t j = 0; j < a.c; j++) {
            float scaled = (from[j] - m) * s * w[j];
            to[j] = mean ? scaled + b[j] : scaled;
        }
    }
}

/* A loop of its own for each layer, here and below. */
IZ_SIMD static void pieces_apply(struct pieces y, struct pieces a,
                                 const struct iz_norm_layer *n, const float *w,
                                 const float *b, bool again)
{
    if (n->mean.rows)
        pieces_fwd(y, a, n, w, b, again, true);
    else
        pieces_fwd(y, a, n, w, b, again, false);
}

static void norm_on_cpu(struct iz_exec *x, struct pieces y, struct pieces a,
                        const struct iz_norm_layer *n, bool again)
{
    struct iz_view w = norm_weight(x, n),
                   b = n->mean.rows ? widen(x, n->b) : IZ_NONE;
    if (!x->dry)
        pieces_apply(y, a, n, w.p, b.p, again);
}

/* Means over a piece of g = dy w and of g xhat. */
IZ_INLINE void piece_means(float *mg, float *mgx, const float *dy,
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

/* dx may be dy or r, and r.p NULL; gw: dw, then db [2,C]. */
IZ_INLINE void pieces_bwd(struct pieces dx, struct pieces r, struct pieces dy,
                          struct pieces a, const struct iz_norm_layer *n,
                          const float *w, float *restrict gw, bool mean)
{
    const float *means = n->mean.p, *rstd = n->rstd.p;
    float *restrict gb = gw + a.c;
    for (int64_t i = 0; i < iz_view_len(n->rstd); i++) {
        const float *av = piece(a, i), *dv = piece(dy, i);
        const float *rv = r.p ? piece(r, i) : NULL;
        float *to = piece(dx, i), m = mean ? means[i] : 0, s = rstd[i];
        float mg, mgx;
        piece_means(&mg, &mgx, dv, w, av, m, s, a.c);
        mg = mean ? mg : 0;
#pragma omp simd
        for (int64_t j = 0; j < a.c; j++) {
            float hat = (av[j] - m) * s, d = dv[j];
            gw[j] += d * hat;
            if (mean)
                gb[j] += d;
            float rest = rv ? rv[j] : mean ? -0.f : 0;
            to[j] = rest + s * (d * w[j] - mg - hat * mgx);
        }
    }
}

IZ_SIMD static void pieces_gradients(struct pieces dx, struct pieces r,
                                     struct pieces dy, struct pieces a,
                                     const struct iz_norm_layer *n,
                                     const float *w, float *gw)
{
    if (n->mean.rows)
        pieces_bwd(dx, r, dy, a, n, w, gw, true);
    else
        pieces_bwd(dx, r, dy, a, n, w, gw, false);
}

static void norm_bwd_on_cpu(struct iz_exec *x, struct pieces dx,
                            struct pieces r, struct pieces dy, struct pieces a,
                            const struct iz_norm_layer *n)
{
    struct iz_view w = norm_weight(x, n),
                   g = iz_exec_work(x, IZ_F32, n->mean.rows ? 2 : 1, n->w.cols);
    if (x->dry)
        return;
    memset(g.p, 0, (size_t)iz_view_bytes(g));
    pieces_gradients(dx, r, dy, a, n, w.p, g.p);
    store_gradient(x, n->dw, g.p);
    if (n->mean.rows)
        store_gradient(x, n->db, (float *)g.p + n->w.cols);
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
    if (x->backend == IZ_CPU)
        norm_on_cpu(x, norm_pieces(y, 0, 1, n), norm_pieces(a, 0, 1, n), n,
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
    if (x->backend == IZ_CPU) {
        norm_bwd_on_cpu(x, norm_pieces(dx, 0, 1, n), norm_pieces(r, 0, 1, n),
                        norm_pieces(dy, 0, 1, n), norm_pieces(a, 0, 1, n), n);
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
        norm_bwd_on_cpu(x, s, (struct pieces){0}, s,
                        norm_pieces(kept, 0, s.heads, n), n);
    } else if (x->backend == IZ_CPU) {
        norm_on_cpu(x, s, s, n, false);
    } else {
        struct iz_view scratch = back ? norm_cuda_scratch(x, n) : IZ_NONE;
        if (!x->dry)
            iz_norm_head_cuda(x, a, kept, n, first, back, scratch);
    }
    iz_exec_release(x, mark);
}
