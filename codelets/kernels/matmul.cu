/* SPDX-License-Identifier: Apache-2.0 */
/* What cuBLASLt may not do beside a product.  The gradient of a bias: sums of
 * columns, in an order that depends on the shape alone.  The bias itself: rows
 * that a product is added to.  And copies of matrices with odd rows. */
#include <assert.h>

#include "codelets/kernels/cuda_lib.h"
#include "codelets/kernels/launch.cuh"

enum { WARPS = 8 };

/* Blocks that fill a GPU of 132 multiprocessors with 8 each. */
enum { FULL = 1056 };

/* sum[y, j] = the sum of the elements (i, j) of dy [rows, cols] whose row i
 * belongs to block row y: 8 rows in turn, one per warp.  N neighbouring columns
 * per thread.  Moves sizeof(T) bytes per element. */
template <int N, class T, class O>
static __global__ void __launch_bounds__(32 * WARPS)
    column_sum(O *sum, const T *dy, int64_t rows, int64_t cols)
{
    __shared__ float part[WARPS][32 * N];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int64_t first = (int64_t)blockIdx.x * 32 * N, col = first + lane * N;
    int64_t step = (int64_t)gridDim.y * WARPS;
    float acc[N] = {};
    if (col < cols)
#pragma unroll 4
        for (int64_t i = blockIdx.y * WARPS + warp; i < rows; i += step) {
            float v[N];
            iz_load_row<N>(v, dy + i * cols + col);
            for (int j = 0; j < N; j++)
                acc[j] += v[j];
        }
    for (int j = 0; j < N; j++)
        part[warp][lane * N + j] = acc[j];
    __syncthreads();
    for (int j = threadIdx.x; j < 32 * N && first + j < cols; j += 32 * WARPS) {
        float s = part[0][j];
        for (int w = 1; w < WARPS; w++)
            s += part[w][j];
        iz_store(sum + blockIdx.y * cols + first + j, s);
    }
}

/* `pieces` rows of sums, each of a share of the rows of dy. */
template <class T, class O>
static void matmul_launch(struct iz_exec *x, O *sum, const T *dy, int64_t rows,
                          int64_t cols, int pieces)
{
    constexpr int wide = 16 / sizeof(T);
    bool whole = cols % wide == 0 && iz_aligned(dy);
    dim3 grid(iz_blocks(cols, 32 * (whole ? wide : 1)), (unsigned)pieces);
    IZ_LAUNCH((whole ? column_sum<wide, T, O> : column_sum<1, T, O>), grid,
              32 * WARPS, 0, x->stream, sum, dy, rows, cols);
}

/* As many shares of the rows as fill the GPU, a warp having 4 rows at least,
 * and as the scratch holds. */
static int row_shares(struct iz_view dy, struct iz_view scratch)
{
    int64_t across = (dy.cols + 255) / 256, n = FULL / across;
    int64_t room = iz_view_bytes(scratch) / (dy.cols * (int64_t)sizeof(float));
    int64_t most = dy.rows / (4 * WARPS);
    n = n < most ? n : most;
    n = n < room ? n : room;
    return n > 1 ? (int)n : 1;
}

/* The sums of the shares are summed by the same kernel. */
template <class T, class O>
static void sum_twice(struct iz_exec *x, O *sum, struct iz_view dy,
                      struct iz_view scratch)
{
    int pieces = row_shares(dy, scratch);
    float *part = (float *)scratch.p;
    if (pieces == 1) {
        matmul_launch(x, sum, (const T *)dy.p, dy.rows, dy.cols, 1);
    } else {
        matmul_launch(x, part, (const T *)dy.p, dy.rows, dy.cols, pieces);
        matmul_launch(x, sum, (const float *)part, pieces, dy.cols, 1);
    }
}

void iz_matmul_column_sum_cuda(struct iz_exec *x, struct iz_view sum,
                               struct iz_view dy, struct iz_view scratch)
{
    assert(sum.dtype == IZ_F32 || sum.dtype == dy.dtype);
    iz_by_type(dy.dtype, [&](auto zero) {
        using T = decltype(zero);
        if (sum.dtype == IZ_F32)
            sum_twice<T>(x, (float *)sum.p, dy, scratch);
        else
            sum_twice<T>(x, (T *)sum.p, dy, scratch);
    });
}

/* y[i] = r[i] + b[i mod cols] for n elements, N at a time; r NULL for zeros.
 * Moves sizeof(T) or twice that per element. */
template <int N, class T, class B>
static __global__ void __launch_bounds__(32 * WARPS)
    add_rows(T *y, const T *r, const B *b, int64_t n, int64_t cols)
{
    int64_t i = ((int64_t)blockIdx.x * 32 * WARPS + threadIdx.x) * N;
    float to[N], from[N];
    if (i >= n)
        return;
    iz_load_row<N>(to, b + i % cols);
    if (r) {
        iz_load_row<N>(from, r + i);
        for (int j = 0; j < N; j++)
            to[j] += from[j];
    }
    iz_store_row<N>(y + i, to);
}

template <class T, class B>
static void add_bias(struct iz_exec *x, T *y, const T *r, const B *b, int64_t n,
                     int64_t cols)
{
    constexpr int wide = 16 / sizeof(T);
    bool whole = cols % wide == 0 && iz_aligned(y, r, b);
    IZ_LAUNCH((whole ? add_rows<wide, T, B> : add_rows<1, T, B>),
              iz_blocks(n, 32 * WARPS * (whole ? wide : 1)), 32 * WARPS, 0,
              x->stream, y, r, b, n, cols);
}

void iz_matmul_bias_rows_cuda(struct iz_exec *x, struct iz_view y,
                              struct iz_view r, struct iz_view b)
{
    int64_t n = iz_view_len(y), cols = y.cols;
    assert((y.dtype == IZ_F32 || y.dtype == b.dtype) && b.cols == cols);
    iz_by_type(b.dtype, [&](auto zero) {
        using B = decltype(zero);
        if (y.dtype == IZ_F32)
            add_bias(x, (float *)y.p, (const float *)r.p, (const B *)b.p, n,
                     cols);
        else
            add_bias(x, (B *)y.p, (const B *)r.p, (const B *)b.p, n, cols);
    });
}

/* n elements of y in rows of `width`, ld apart. */
template <class T>
static __global__ void __launch_bounds__(32 * WARPS)
    copy_corner(T *y, int64_t ld, int64_t width, int64_t n, const T *a,
                int64_t a_ld, int64_t rows, int64_t cols)
{
    int64_t i = (int64_t)blockIdx.x * 32 * WARPS + threadIdx.x;
    int64_t row = i / width, col = i % width;
    if (i >= n)
        return;
    if (row < rows && col < cols)
        y[row * ld + col] = a[row * a_ld + col];
    else
        iz_store(y + row * ld + col, 0);
}

void iz_matmul_corner_cuda(struct iz_exec *x, struct iz_view y,
                           struct iz_view a, int64_t rows, int64_t cols,
                           bool clear)
{
    int64_t width = clear ? y.cols : cols, n = (clear ? y.rows : rows) * width;
    assert(y.dtype == a.dtype);
    iz_by_type(y.dtype, [&](auto zero) {
        using T = decltype(zero);
        IZ_LAUNCH(copy_corner<T>, iz_blocks(n, 32 * WARPS), 32 * WARPS, 0,
                  x->stream, (T *)y.p, y.cols, width, n, (const T *)a.p, a.cols,
                  rows, cols);
    });
}
