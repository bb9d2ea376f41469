/* SPDX-License-Identifier: Apache-2.0 */
/* Magnitudes of adapters on a GPU: norms of weights by a block for each output,
 * and what they do to activations.  See magnitude.c. */
#include "codelets/kernels/launch.cuh"

#include "codelets/ops/gpu_ops.h"
#include "codelets/ops/ops.h"

enum { THREADS = 256, PER_THREAD = 8, COLUMNS = 32 };

/* The weights of output o: o * by_out + k * by_in for each k < in. */
template <class T> struct weights {
    const T *w, *a, *b, *m;
    int64_t by_out, by_in, in, first, part;
    int rank;
    float scale;
    bool only;
};

template <class T>
static __global__ void __launch_bounds__(THREADS)
    gains(float *gain, float *inverse, weights<T> l)
{
    int64_t o = blockIdx.x - l.first;
    bool none = o < 0 || o >= l.part;
    float sum = 0;
    if (none && l.only && threadIdx.x == 0)
        gain[blockIdx.x] = 1;
    if (none)
        return;
    for (int64_t k = threadIdx.x; k < l.in; k += THREADS) {
        float v = iz_load(l.w + blockIdx.x * l.by_out + k * l.by_in);
        for (int r = 0; r < l.rank; r++)
            v += l.scale * iz_load(l.b + o * l.rank + r) *
                 iz_load(l.a + r * l.in + k);
        sum += v * v;
    }
    float inv = 1 / sqrtf(iz_block_sum(sum));
    if (threadIdx.x == 0) {
        inverse[o] = inv;
        gain[blockIdx.x] = iz_load(l.m + o) * inv;
    }
}

void iz_magnitude_gain_cuda(struct iz_exec *x, struct iz_view gain,
                            struct iz_view inverse,
                            const struct iz_magnitude *g)
{
    iz_by_type(g->w.dtype, [&](auto zero) {
        using T = decltype(zero);
        weights<T> l = {(const T *)g->w.p,
                        (const T *)g->a.p,
                        (const T *)g->b.p,
                        (const T *)g->m.p,
                        g->out_in ? g->a.cols : 1,
                        g->out_in ? 1 : g->w.cols,
                        g->a.cols,
                        g->first,
                        g->b.rows,
                        (int)g->a.rows,
                        g->scale,
                        g->only};
        IZ_LAUNCH(gains<T>, (unsigned)gain.cols, THREADS, 0, x->stream,
                  (float *)gain.p, (float *)inverse.p, l);
    });
}

/* y = r + b + gain u; r and b may be NULL, y may be r or u. */
template <class T, class B>
static __global__ void __launch_bounds__(THREADS)
    multiplied(T *y, const T *r, const T *u, const float *gain, const B *b,
               int64_t n, int64_t cols)
{
    iz_each<THREADS, PER_THREAD>(n, false, [&](int64_t i, auto) {
        int64_t c = i % cols;
        float add = (r ? iz_load(r + i) : 0) + (b ? iz_load(b + c) : 0);
        iz_store(y + i, add + gain[c] * iz_load(u + i));
    });
}

void iz_magnitude_apply_cuda(struct iz_exec *x, struct iz_view y,
                             struct iz_view r, struct iz_view u,
                             struct iz_view gain, struct iz_view b)
{
    int64_t n = iz_view_len(u);
    iz_by_type(u.dtype, [&](auto zero) {
        using T = decltype(zero);
        iz_by_type(b.dtype, [&](auto none) {
            using B = decltype(none);
            IZ_LAUNCH((multiplied<T, B>), iz_blocks(n, THREADS * PER_THREAD),
                      THREADS, 0, x->stream, (T *)y.p, (const T *)r.p,
                      (const T *)u.p, (const float *)gain.p, (const B *)b.p, n,
                      u.cols);
        });
    });
}

/* A block has COLUMNS of them, and its warps take rows in turns. */
template <class T, class O>
static __global__ void __launch_bounds__(THREADS)
    sums(O *dm, const T *dy, const T *u, const float *inverse, int64_t n,
         int64_t rows, int64_t cols)
{
    __shared__ float part[THREADS];
    int64_t c = (int64_t)blockIdx.x * COLUMNS + threadIdx.x % COLUMNS;
    float sum = 0;
    for (int64_t i = threadIdx.x / COLUMNS; c < n && i < rows;
         i += THREADS / COLUMNS)
        sum += iz_load(dy + i * cols + c) * iz_load(u + i * cols + c);
    part[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x >= COLUMNS || c >= n)
        return;
    for (int k = 1; k < THREADS / COLUMNS; k++)
        sum += part[k * COLUMNS + threadIdx.x];
    iz_store(dm + c, sum * inverse[c]);
}

void iz_magnitude_dm_cuda(struct iz_exec *x, struct iz_view dm,
                          struct iz_view dy, struct iz_view u,
                          struct iz_view inverse, int64_t first)
{
    iz_by_type(dy.dtype, [&](auto zero) {
        using T = decltype(zero);
        iz_by_type(dm.dtype, [&](auto none) {
            using O = decltype(none);
            IZ_LAUNCH((sums<T, O>), iz_blocks(dm.cols, COLUMNS), THREADS, 0,
                      x->stream, (O *)dm.p, (const T *)dy.p + first,
                      (const T *)u.p + first, (const float *)inverse.p, dm.cols,
                      dy.rows, dy.cols);
        });
    });
}
