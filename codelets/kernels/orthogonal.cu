/* SPDX-License-Identifier: Apache-2.0 */
/* What is around the products of Newton-Schulz's iteration: a matrix of fp32
 * with gaps between its rows becomes one of norm 1 in 16 bits, and back. */
#include <assert.h>

#include "codelets/kernels/cuda_lib.h"
#include "codelets/kernels/launch.cuh"

enum { THREADS = 256, MOST = IZ_ORTHOGONAL_SUMS };

/* sum[b] = the squares of rows b, b + blocks, ..., in an order that depends on
 * the shape alone.  Moves 4 bytes per element. */
static __global__ void __launch_bounds__(THREADS)
    square_rows(double *sum, const float *p, int64_t rows, int64_t cols,
                int64_t stride)
{
    double v = 0;
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x)
        for (int64_t i = threadIdx.x; i < cols; i += THREADS) {
            double e = (double)p[r * stride + i];
            v += e * e;
        }
    v = iz_block_sum(v);
    if (threadIdx.x == 0)
        sum[blockIdx.x] = v;
}

/* sum[MOST] = 1 / the root of all sums, by one block. */
static __global__ void __launch_bounds__(THREADS)
    invert_norm(double *sum, int n)
{
    double v = 0;
    for (int i = threadIdx.x; i < n; i += THREADS)
        v += sum[i];
    v = iz_block_sum(v);
    if (threadIdx.x == 0)
        sum[MOST] = 1 / fmax(sqrt(v), IZ_ORTHOGONAL_LEAST);
}

/* Moves 6 bytes per element. */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    normalise(T *y, const float *p, const double *sum, int64_t n, int64_t cols,
              int64_t stride)
{
    float scale = (float)sum[MOST];
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < n)
        iz_store(y + i, p[i / cols * stride + i % cols] * scale);
}

/* Moves 6 bytes per element. */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    spread(float *p, const T *y, float scale, int64_t n, int64_t cols,
           int64_t stride)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < n)
        p[i / cols * stride + i % cols] = iz_load(y + i) * scale;
}

/* d = c + a I.  Moves 4 bytes per element. */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    shift(T *d, const T *c, float a, int64_t n, int64_t cols)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < n)
        iz_store(d + i, iz_load(c + i) + (i / cols == i % cols ? a : 0));
}

void iz_orthogonal_normalise_cuda(struct iz_exec *x, struct iz_view y,
                                  const struct iz_orthogonal *m, double *sums)
{
    int blocks = m->rows < MOST ? (int)m->rows : MOST;
    int64_t n = iz_view_len(y);
    IZ_LAUNCH(square_rows, blocks, THREADS, 0, x->stream, sums, m->p, m->rows,
              m->cols, m->stride);
    IZ_LAUNCH(invert_norm, 1, THREADS, 0, x->stream, sums, blocks);
    iz_by_type(y.dtype, [&](auto zero) {
        using T = decltype(zero);
        IZ_LAUNCH((normalise<T>), iz_blocks(n, THREADS), THREADS, 0, x->stream,
                  (T *)y.p, (const float *)m->p, (const double *)sums, n,
                  m->cols, m->stride);
    });
}

void iz_orthogonal_spread_cuda(struct iz_exec *x, const struct iz_orthogonal *m,
                               struct iz_view y)
{
    int64_t n = iz_view_len(y);
    iz_by_type(y.dtype, [&](auto zero) {
        using T = decltype(zero);
        IZ_LAUNCH((spread<T>), iz_blocks(n, THREADS), THREADS, 0, x->stream,
                  m->p, (const T *)y.p, (float)m->scale, n, m->cols, m->stride);
    });
}

void iz_orthogonal_shift_square_cuda(struct iz_exec *x, struct iz_view d,
                                     struct iz_view c, float a)
{
    int64_t n = iz_view_len(d);
    assert(d.dtype == c.dtype && d.rows == d.cols && c.cols == d.cols);
    iz_by_type(d.dtype, [&](auto zero) {
        using T = decltype(zero);
        IZ_LAUNCH((shift<T>), iz_blocks(n, THREADS), THREADS, 0, x->stream,
                  (T *)d.p, (const T *)c.p, a, n, d.cols);
    });
}
