/* SPDX-License-Identifier: Apache-2.0 */
/* Root-mean-square normalisation, of whole rows and of the heads of a row, one
 * piece of C columns at a time. */
#include "codelets/ops/ops.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "codelets/base/build.h"
#include "codelets/ops/gpu_ops.h"
#include "codelets/ops/norm_parts.h"

/* Pieces of c columns in rows of ld: `heads` per row, from column `first` on.
 */
struct pieces {
    float *p;
    int64_t ld, first;
};

static struct pieces whole_rows(struct iz_view v)
{
    return (struct pieces){v.p, v.cols, 0};
}

static inline float *piece(struct pieces s, int64_t row, int64_t head,
                           int64_t c)
{
    return s.p + row * s.ld + s.first + head * c;
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

IZ_SIMD static void stats_cpu(float *rstd, struct pieces a, int64_t rows,
                              int64_t heads, int64_t c, float eps)
{
    for (int64_t i = 0; i < rows * heads; i++)
        rstd[i] =
            1 / sqrtf(mean_square(piece(a, i / heads, i % heads, c), c) + eps);
}

/* y may be a. */
IZ_SIMD static void apply_cpu(struct pieces y, struct pieces a,
                              const float *rstd, const float *w, int64_t rows,
                              int64_t heads, int64_t c)
{
    for (int64_t i = 0; i < rows * heads; i++) {
        const float *from = piece(a, i / heads, i % heads, c);
        float *to = piece(y, i / heads, i % heads, c), s = rstd[i];

#pragma omp simd
        for (int64_t j = 0; j < c; j++)
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

/* Operands of backward on the CPU; r.p may be NULL. */
struct backward {
    struct pieces dx, r, dy, a;
    const float *w, *rstd;
    float *gw;
    int64_t rows, heads, c;
};

IZ_SIMD static void bwd_cpu(const struct backward *b)
{
    int64_t h = b->heads, c = b->c;

    memset(b->gw, 0, (size_t)c * sizeof(*b->gw));
    for (int64_t i = 0; i < b->rows * h; i++) {
        int64_t row = i / h, head = i % h;

        bwd_piece(piece(b->dx, row, head, c),
                  b->r.p ? piece(b->r, row, head, c) : NULL,
                  piece(b->dy, row, head, c), piece(b->a, row, head, c), b->w,
                  b->rstd[i], b->gw, c);
    }
}

/* An fp32 copy of a row vector of parameters. */
static struct iz_view rmsnorm_widen(struct iz_exec *x, struct iz_view v)
{
    struct iz_view f = iz_work(x, IZ_F32, 1, v.cols);

    if (iz_runs(x, IZ_CPU))
        iz_cast(f.p, IZ_F32, v.p, v.dtype, v.cols);
    return f;
}

static void rmsnorm_check(struct iz_view y, struct iz_view a,
                          const struct iz_rmsnorm *n)
{
    assert(a.rows == y.rows && a.cols == y.cols && a.cols == n->w.cols);
    assert(iz_view_len(n->rstd) == a.rows);
}

static void rmsnorm_apply(struct iz_exec *x, struct iz_view y, struct iz_view a,
                          const struct iz_rmsnorm *n)
{
    int64_t mark = iz_work_mark(x);
    struct iz_view w = rmsnorm_widen(x, n->w);

    if (iz_runs(x, IZ_CPU))
        apply_cpu(whole_rows(y), whole_rows(a), n->rstd.p, w.p, a.rows, 1,
                  a.cols);
    iz_work_release(x, mark);
}

void iz_rmsnorm_fwd(struct iz_exec *x, struct iz_view y, struct iz_view a,
                    const struct iz_rmsnorm *n)
{
    rmsnorm_check(y, a, n);
    iz_count(x, 0, (double)(iz_view_bytes(y) + iz_view_bytes(a)));
    if (iz_runs(x, IZ_CPU))
        stats_cpu(n->rstd.p, whole_rows(a), a.rows, 1, a.cols, n->eps);
    if (x->backend == IZ_CPU)
        rmsnorm_apply(x, y, a, n);
    if (iz_runs(x, IZ_CUDA))
        iz_rmsnorm_fwd_cuda(x, y, a, n);
}

void iz_rmsnorm_again(struct iz_exec *x, struct iz_view y, struct iz_view a,
                      const struct iz_rmsnorm *n)
{
    rmsnorm_check(y, a, n);
    iz_count(x, 0, (double)(iz_view_bytes(y) + iz_view_bytes(a)));
    if (x->backend == IZ_CPU)
        rmsnorm_apply(x, y, a, n);
    if (iz_runs(x, IZ_CUDA))
        iz_rmsnorm_again_cuda(x, y, a, n);
}

/* Backward with its scratch on the CPU, [1,C] each: w and the sum for dw. */
static void rmsnorm_run_bwd_cpu(struct iz_exec *x, struct backward b,
                                const struct iz_rmsnorm *n)
{
    int64_t mark = iz_work_mark(x);
    struct iz_view w = rmsnorm_widen(x, n->w),
                   gw = iz_work(x, IZ_F32, 1, n->w.cols);

    if (iz_runs(x, IZ_CPU)) {
        b.w = w.p;
        b.gw = gw.p;
        b.rstd = n->rstd.p;
        b.c = n->w.cols;
        bwd_cpu(&b);
        if (iz_wanted(x, n->dw))
            iz_cast(n->dw.p, n->dw.dtype, gw.p, IZ_F32, n->dw.cols);
    }
    iz_work_release(x, mark);
}

/* On a GPU: a row of dw per part. */
static struct iz_view rmsnorm_cuda_scratch(struct iz_exec *x,
                                           const struct iz_rmsnorm *n)
{
    int64_t parts =
        iz_norm_layer_parts(iz_view_len(n->rstd), n->w.cols, n->w.dtype);

    return iz_work(x, IZ_F32, parts, n->w.cols);
}

void iz_rmsnorm_bwd(struct iz_exec *x, struct iz_view dx, struct iz_view r,
                    struct iz_view dy, struct iz_view a,
                    const struct iz_rmsnorm *n)
{
    int64_t mark = iz_work_mark(x);

    rmsnorm_check(dx, a, n);
    assert(dy.rows == a.rows && dy.cols == a.cols);
    iz_count(x, 0,
             (double)(iz_view_bytes(dx) + iz_view_bytes(r) + iz_view_bytes(dy) +
                      iz_view_bytes(a)));
    if (x->backend == IZ_CPU) {
        rmsnorm_run_bwd_cpu(x,
                            (struct backward){.dx = whole_rows(dx),
                                              .r = whole_rows(r),
                                              .dy = whole_rows(dy),
                                              .a = whole_rows(a),
                                              .rows = a.rows,
                                              .heads = 1},
                            n);
    } else {
        struct iz_view scratch = rmsnorm_cuda_scratch(x, n);

        if (iz_runs(x, IZ_CUDA))
            iz_rmsnorm_bwd_cuda(x, dx, r, dy, a, n, scratch);
    }
    iz_work_release(x, mark);
}

/* ---- heads -------------------------------------------------------------- */

static void check_heads(struct iz_view a, struct iz_view kept,
                        const struct iz_rmsnorm *n, int64_t first)
{
    assert(kept.rows == a.rows && kept.cols % n->w.cols == 0);
    assert(first >= 0 && first + kept.cols <= a.cols);
    assert(iz_view_len(n->rstd) == iz_view_len(kept) / n->w.cols);
}

static void keep_cpu(struct iz_view kept, struct pieces a)
{
    for (int64_t i = 0; i < kept.rows; i++)
        memcpy((float *)kept.p + i * kept.cols, piece(a, i, 0, 0),
               (size_t)kept.cols * sizeof(float));
}

void iz_headnorm_fwd(struct iz_exec *x, struct iz_view a, struct iz_view kept,
                     const struct iz_rmsnorm *n, int64_t first)
{
    int64_t mark = iz_work_mark(x), c = n->w.cols, heads = kept.cols / c;

    check_heads(a, kept, n, first);
    iz_count(x, 0, 3. * (double)iz_view_bytes(kept));
    if (x->backend == IZ_CPU) {
        struct iz_view w = rmsnorm_widen(x, n->w);

        if (iz_runs(x, IZ_CPU)) {
            struct pieces s = {a.p, a.cols, first};

            keep_cpu(kept, s);
            stats_cpu(n->rstd.p, s, a.rows, heads, c, n->eps);
            apply_cpu(s, s, n->rstd.p, w.p, a.rows, heads, c);
        }
    }
    if (iz_runs(x, IZ_CUDA))
        iz_headnorm_fwd_cuda(x, a, kept, n, first);
    iz_work_release(x, mark);
}

void iz_headnorm_bwd(struct iz_exec *x, struct iz_view da, struct iz_view kept,
                     const struct iz_rmsnorm *n, int64_t first)
{
    int64_t mark = iz_work_mark(x);

    check_heads(da, kept, n, first);
    iz_count(x, 0, 3. * (double)iz_view_bytes(kept));
    if (x->backend == IZ_CPU) {
        struct pieces d = {da.p, da.cols, first};

        rmsnorm_run_bwd_cpu(x,
                            (struct backward){.dx = d,
                                              .dy = d,
                                              .a = whole_rows(kept),
                                              .rows = da.rows,
                                              .heads = kept.cols / n->w.cols},
                            n);
    } else {
        struct iz_view scratch = rmsnorm_cuda_scratch(x, n);

        if (iz_runs(x, IZ_CUDA))
            iz_headnorm_bwd_cuda(x, da, kept, n, first, scratch);
    }
    iz_work_release(x, mark);
}
