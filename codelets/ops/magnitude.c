/* SPDX-License-Identifier: Apache-2.0 */
/* Adapters with a magnitude of each output (DoRA, arXiv 2402.09353); see ops.h.
 */
#include "codelets/ops/ops.h"

#include <assert.h>
#include <string.h>

#include "codelets/base/build.h"
#include "codelets/ops/gpu_ops.h"

enum { LANES = 16 };

/* v + c a, element by element. */
IZ_SIMD static void add_scaled(float *restrict v, const float *a, float c,
                               int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        v[i] += c * a[i];
}

IZ_SIMD static void add_squares(float *restrict sum, const float *v, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        sum[i] += v[i] * v[i];
}

IZ_SIMD static float squares(const float *v, int64_t n)
{
    float sum[LANES] = {0}, all = 0;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int k = 0; k < LANES; k++)
            sum[k] += v[i + k] * v[i + k];
    for (; i < n; i++)
        sum[0] += v[i] * v[i];
    for (int k = 0; k < LANES; k++)
        all += sum[k];
    return all;
}

/* As fp32, in scratch. */
static const float *widened(struct iz_exec *x, struct iz_view v)
{
    struct iz_view to = iz_exec_work(x, IZ_F32, v.rows, v.cols);
    if (!x->dry)
        iz_cast(to.p, IZ_F32, v.p, v.dtype, iz_view_len(v));
    return to.p;
}

/* sum[o]: of the squares of the weights of the adapter's output o, with what it
 * adds. */
static void norms_on_cpu(struct iz_exec *x, float *sum,
                         const struct iz_magnitude *g)
{
    int64_t in = g->a.cols, rank = g->a.rows, part = g->b.rows;
    int64_t rows = g->out_in ? part : in, cols = g->out_in ? in : part;
    const float *a = widened(x, g->a), *b = widened(x, g->b);
    float *v = iz_exec_work(x, IZ_F32, 1, cols).p;
    float *turned = iz_exec_work(x, IZ_F32, rank, part).p; /* b */
    if (x->dry)
        return;
    memset(sum, 0, (size_t)part * sizeof(*sum));
    for (int64_t o = 0; o < part; o++)
        for (int64_t r = 0; r < rank; r++)
            turned[r * part + o] = b[o * rank + r];
    for (int64_t i = 0; i < rows; i++) {
        int64_t at = g->out_in ? (g->first + i) * in : i * g->w.cols + g->first;
        iz_cast(v, IZ_F32, (char *)g->w.p + at * iz_dtype_bytes(g->w.dtype),
                g->w.dtype, cols);
        for (int64_t r = 0; r < rank; r++)
            add_scaled(v, g->out_in ? a + r * in : turned + r * part,
                       g->scale * (g->out_in ? b[i * rank + r] : a[r * in + i]),
                       cols);
        if (g->out_in)
            sum[i] = squares(v, cols);
        else
            add_squares(sum, v, cols);
    }
}

void iz_magnitude_gain(struct iz_exec *x, struct iz_view gain,
                       struct iz_view inverse, const struct iz_magnitude *g)
{
    int64_t part = g->b.rows, mark = iz_exec_mark(x);
    double n = (double)(part * g->a.cols);
    iz_exec_count(x, 2 * n * (double)(g->a.rows + 1),
                  n * (double)iz_dtype_bytes(g->w.dtype));
    if (iz_exec_runs(x, IZ_CUDA))
        iz_magnitude_gain_cuda(x, gain, inverse, g);
    if (x->backend == IZ_CPU) {
        const float *m = widened(x, g->m);
        float *to = gain.p, *inv = inverse.p;
        norms_on_cpu(x, inv, g);
        for (int64_t o = 0; !x->dry && g->only && o < gain.cols; o++)
            to[o] = 1;
        for (int64_t o = 0; !x->dry && o < part; o++) {
            inv[o] = 1 / sqrtf(inv[o]);
            to[g->first + o] = m[o] * inv[o];
        }
    }
    iz_exec_release(x, mark);
}

void iz_magnitude_apply(struct iz_exec *x, struct iz_view y, struct iz_view r,
                        struct iz_view u, struct iz_view gain, struct iz_view b)
{
    int64_t n = u.cols, mark = iz_exec_mark(x);
    assert(y.rows == u.rows && y.cols == n && gain.cols == n);
    assert(y.dtype == u.dtype && (!r.rows || r.dtype == u.dtype));
    iz_exec_count(
        x, 0, (double)(iz_view_bytes(y) + iz_view_bytes(r) + iz_view_bytes(u)));
    if (iz_exec_runs(x, IZ_CUDA))
        iz_magnitude_apply_cuda(x, y, r, u, gain, b);
    if (x->backend == IZ_CPU) {
        const float *bias = b.rows ? widened(x, b) : NULL, *g = gain.p;
        for (int64_t i = 0; !x->dry && i < u.rows; i++) {
            const float *from = (float *)u.p + i * n;
            const float *add = r.rows ? (float *)r.p + i * n : NULL;
            float *to = (float *)y.p + i * n;
            for (int64_t j = 0; j < n; j++)
                to[j] =
                    (add ? add[j] : 0) + (bias ? bias[j] : 0) + g[j] * from[j];
        }
    }
    iz_exec_release(x, mark);
}

void iz_magnitude_dm(struct iz_exec *x, struct iz_view dm, struct iz_view dy,
                     struct iz_view u, struct iz_view inverse, int64_t first)
{
    int64_t n = dm.cols, mark = iz_exec_mark(x);
    iz_exec_count(x, 0, 2 * (double)(dy.rows * n * iz_dtype_bytes(dy.dtype)));
    if (iz_exec_runs(x, IZ_CUDA))
        iz_magnitude_dm_cuda(x, dm, dy, u, inverse, first);
    if (x->backend == IZ_CPU) {
        float *sum = iz_exec_work(x, IZ_F32, 1, n).p;
        for (int64_t i = 0; !x->dry && i < dy.rows; i++) {
            const float *p = (float *)dy.p + i * dy.cols + first;
            const float *q = (float *)u.p + i * u.cols + first;
            for (int64_t j = 0; j < n; j++)
                sum[j] = (i ? sum[j] : 0) + p[j] * q[j];
        }
        for (int64_t j = 0; !x->dry && j < n; j++)
            sum[j] *= ((float *)inverse.p)[j];
        if (!x->dry)
            iz_cast(dm.p, dm.dtype, sum, IZ_F32, n);
    }
    iz_exec_release(x, mark);
}
