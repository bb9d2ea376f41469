/* SPDX-License-Identifier: Apache-2.0 */
/* Layer normalisation, forward and backward, one row at a time. */
#include "codelets/ops/ops.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#include "codelets/base/build.h"
#include "codelets/ops/gpu_ops.h"
#include "codelets/ops/norm_parts.h"

#define EPSILON 1e-5f

static inline float layernorm_row_sum(const float *a, int64_t n)
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

IZ_SIMD static void stats_cpu(float *mean, float *rstd, struct iz_view a)
{
    float c = (float)a.cols;

    for (int64_t i = 0; i < a.rows; i++) {
        const float *row = (float *)a.p + i * a.cols;

        mean[i] = layernorm_row_sum(row, a.cols) / c;
        rstd[i] = 1 / sqrtf(row_sum_square(row, mean[i], a.cols) / c + EPSILON);
    }
}

IZ_SIMD static void apply_cpu(struct iz_view y, struct iz_view a,
                              const float *mean, const float *rstd,
                              const float *w, const float *b)
{
    for (int64_t i = 0; i < a.rows; i++) {
        const float *from = (float *)a.p + i * a.cols;
        float *to = (float *)y.p + i * a.cols, m = mean[i], s = rstd[i];

        for (int64_t j = 0; j < a.cols; j++)
            to[j] = (from[j] - m) * s * w[j] + b[j];
    }
}

/* An fp32 copy of a row vector of parameters. */
static struct iz_view layernorm_widen(struct iz_exec *x, struct iz_view v)
{
    struct iz_view f = iz_work(x, IZ_F32, 1, v.cols);

    if (iz_runs(x, IZ_CPU))
        iz_cast(f.p, IZ_F32, v.p, v.dtype, v.cols);
    return f;
}

static void layernorm_count(struct iz_exec *x, struct iz_view y,
                            struct iz_view a, const struct iz_norm_layer *n)
{
    assert(a.rows == y.rows && a.cols == y.cols && a.cols == n->w.cols);
    assert(n->mean.rows == a.rows && n->rstd.rows == a.rows);
    iz_count(x, 0, (double)(iz_view_bytes(y) + iz_view_bytes(a)));
}

static void layernorm_apply(struct iz_exec *x, struct iz_view y,
                            struct iz_view a, const struct iz_norm_layer *n)
{
    int64_t mark = iz_work_mark(x);
    struct iz_view w = layernorm_widen(x, n->w), b = layernorm_widen(x, n->b);

    if (iz_runs(x, IZ_CPU))
        apply_cpu(y, a, n->mean.p, n->rstd.p, w.p, b.p);
    iz_work_release(x, mark);
}

void iz_layernorm_fwd(struct iz_exec *x, struct iz_view y, struct iz_view a,
                      const struct iz_norm_layer *n)
{
    layernorm_count(x, y, a, n);
    if (iz_runs(x, IZ_CPU))
        stats_cpu(n->mean.p, n->rstd.p, a);
    if (x->backend == IZ_CPU)
        layernorm_apply(x, y, a, n);
    if (iz_runs(x, IZ_CUDA))
        iz_layernorm_fwd_cuda(x, y, a, n);
}

void iz_layernorm_again(struct iz_exec *x, struct iz_view y, struct iz_view a,
                        const struct iz_norm_layer *n)
{
    layernorm_count(x, y, a, n);
    if (x->backend == IZ_CPU)
        layernorm_apply(x, y, a, n);
    if (iz_runs(x, IZ_CUDA))
        iz_layernorm_again_cuda(x, y, a, n);
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
IZ_SIMD static void bwd_cpu(struct iz_view dx, struct iz_view r,
                            struct iz_view dy, struct iz_view a,
                            const struct iz_norm_layer *n, const float *w,
                            float *restrict scratch)
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

static void store(const struct iz_exec *x, struct iz_view to, const float *from)
{
    if (iz_runs(x, IZ_CPU) && iz_wanted(x, to))
        iz_cast(to.p, to.dtype, from, IZ_F32, to.cols);
}

static void layernorm_run_bwd_cpu(struct iz_exec *x, struct iz_view dx,
                                  struct iz_view r, struct iz_view dy,
                                  struct iz_view a,
                                  const struct iz_norm_layer *n)
{
    int64_t mark = iz_work_mark(x);
    struct iz_view w = layernorm_widen(x, n->w);
    struct iz_view scratch = iz_work(x, IZ_F32, 3, a.cols);

    if (iz_runs(x, IZ_CPU)) {
        float *g = scratch.p;
        bwd_cpu(dx, r, dy, a, n, w.p, g);
        store(x, n->dw, g);
        store(x, n->db, g + a.cols);
    }
    iz_work_release(x, mark);
}

/* Scratch: per part a row of dw and one of db. */
static void run_bwd_cuda(struct iz_exec *x, struct iz_view dx, struct iz_view r,
                         struct iz_view dy, struct iz_view a,
                         const struct iz_norm_layer *n)
{
    int64_t mark = iz_work_mark(x);
    int64_t parts = iz_norm_layer_parts(a.rows, a.cols, a.dtype);
    struct iz_view scratch = iz_work(x, IZ_F32, 2 * parts, a.cols);

    if (iz_runs(x, IZ_CUDA))
        iz_layernorm_bwd_cuda(x, dx, r, dy, a, n, scratch);
    iz_work_release(x, mark);
}

void iz_layernorm_bwd(struct iz_exec *x, struct iz_view dx, struct iz_view r,
                      struct iz_view dy, struct iz_view a,
                      const struct iz_norm_layer *n)
{
    assert(dx.rows == a.rows && dy.rows == a.rows && dx.cols == a.cols);
    iz_count(x, 0,
             (double)(iz_view_bytes(dx) + iz_view_bytes(r) + iz_view_bytes(dy) +
                      iz_view_bytes(a)));
    if (x->backend == IZ_CPU)
        layernorm_run_bwd_cpu(x, dx, r, dy, a, n);
    else
        run_bwd_cuda(x, dx, r, dy, a, n);
}
