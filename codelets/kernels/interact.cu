/* SPDX-License-Identifier: Apache-2.0 */
/* Products of all pairs of a sample's vectors on a GPU, a block per sample: its
 * vectors stay in the first-level cache.  Sums are fp32 in the order of the
 * columns (forward) or of the vectors (backward). */
#include "codelets/kernels/launch.cuh"

#include "codelets/ops/gpu_ops.h"

enum {
    THREADS = 128,
    MOST = 1024 /* vectors beside z: 8 p + 1 is exact in fp32 */
};

/* The larger vector i of product p = i (i - 1) / 2 + j, j < i.  The root is
 * rounded correctly, so it is never below a whole number that it reaches. */
static __device__ int larger_of(int p)
{
    return (int)((1 + sqrtf((float)(8 * p + 1))) / 2);
}

template <class T>
static __device__ const T *vector_at(const T *z, const T *e, int i, int d)
{
    return i ? e + (i - 1) * d : z;
}

/* n vectors beside z; moves each element of e once and y. */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    interact_fwd(T *y, const T *z, const T *e, int n, int d)
{
    int64_t m = blockIdx.x, pairs = (int64_t)n * (n + 1) / 2;
    z += m * d;
    e += m * n * d;
    y += m * (d + pairs);
    for (int k = (int)threadIdx.x; k < d; k += THREADS)
        y[k] = z[k];
    for (int p = (int)threadIdx.x; p < pairs; p += THREADS) {
        int i = larger_of(p), j = p - i * (i - 1) / 2;
        const T *a = vector_at(z, e, i, d), *b = vector_at(z, e, j, d);
        float sum = 0;
        for (int k = 0; k < d; k++)
            sum += iz_load(a + k) * iz_load(b + k);
        iz_store(y + d + p, sum);
    }
}

/* A thread for a column of a vector: every other one times their product's
 * gradient. */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    interact_bwd(T *dz, T *de, const T *dy, const T *z, const T *e, int n,
                 int d)
{
    int64_t m = blockIdx.x, pairs = (int64_t)n * (n + 1) / 2;
    z += m * d;
    e += m * n * d;
    dz += m * d;
    de += m * n * d;
    dy += m * (d + pairs);
    for (int at = (int)threadIdx.x; at < (n + 1) * d; at += THREADS) {
        int i = at / d, k = at % d;
        float sum = i ? 0 : iz_load(dy + k);
        for (int j = 0; j <= n; j++) {
            int high = i > j ? i : j, low = i > j ? j : i;
            if (i != j)
                sum += iz_load(dy + d + high * (high - 1) / 2 + low) *
                       iz_load(vector_at(z, e, j, d) + k);
        }
        iz_store((i ? de + (i - 1) * d : dz) + k, sum);
    }
}

static void interact_check(struct iz_view z, struct iz_view e)
{
    if (e.rows / z.rows > MOST)
        iz_die("products of %lld vectors; possible are %d",
               (long long)(e.rows / z.rows), MOST);
}

void iz_interact_fwd_cuda(struct iz_exec *x, struct iz_view y, struct iz_view z,
                          struct iz_view e)
{
    interact_check(z, e);
    iz_by_type(y.dtype, [&](auto zero) {
        using T = decltype(zero);
        IZ_LAUNCH(interact_fwd<T>, (int)z.rows, THREADS, 0, x->stream, (T *)y.p,
                  (const T *)z.p, (const T *)e.p, (int)(e.rows / z.rows),
                  (int)z.cols);
    });
}

void iz_interact_bwd_cuda(struct iz_exec *x, struct iz_view dz,
                          struct iz_view de, struct iz_view dy,
                          struct iz_view z, struct iz_view e)
{
    interact_check(z, e);
    iz_by_type(dy.dtype, [&](auto zero) {
        using T = decltype(zero);
        IZ_LAUNCH(interact_bwd<T>, (int)z.rows, THREADS, 0, x->stream,
                  (T *)dz.p, (T *)de.p, (const T *)dy.p, (const T *)z.p,
                  (const T *)e.p, (int)(e.rows / z.rows), (int)z.cols);
    });
}
