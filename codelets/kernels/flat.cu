/* SPDX-License-Identifier: Apache-2.0 */
/* Sums and norms of flat buffers on a GPU, with the bits of flat.c: the same
 * operations in the same order, and nothing that a compiler may contract. */
#include "codelets/kernels/launch.cuh"

#include "codelets/flat/flat.h"
#include "codelets/ops/gpu_ops.h"

enum {
    BLOCK = 1024, /* of the norm, see flat.h */
    THREADS = 256
};

/* Elements of a sum per thread: 16 bytes of the wider type, so that a warp's
 * accesses have no gaps. */
template <class O, class T>
constexpr int per_thread = 16 / (sizeof(O) > sizeof(T) ? sizeof(O) : sizeof(T));

/* Goes to the kernel by value (CUDA 12.1 takes up to 32 KiB): the caller's
 * array is not valid for long. */
struct inputs {
    const void *p[IZ_SUM_INPUTS_MAX];
};

/* Moves n_in elements in, one out, and one more in when it accumulates. */
template <class O, class T>
static __global__ void __launch_bounds__(THREADS)
    sum_inputs(O *out, bool accumulate, struct inputs in, int n_in, int64_t n,
               bool aligned)
{
    iz_each<THREADS, per_thread<O, T>>(n, aligned, [&](int64_t i, auto count) {
        constexpr int N = decltype(count)::value;
        float sum[N], next[N];
        iz_load_row(sum, (const T *)in.p[0] + i);
        for (int s = 1; s < n_in; s++) {
            iz_load_row(next, (const T *)in.p[s] + i);
            for (int j = 0; j < N; j++)
                sum[j] = __fadd_rn(sum[j], next[j]);
        }
        if (accumulate) {
            iz_load_row(next, out + i);
            for (int j = 0; j < N; j++)
                sum[j] = __fadd_rn(next[j], sum[j]);
        }
        iz_store_row(out + i, sum);
    });
}

void iz_flat_sum_cuda(struct iz_exec *x, void *out, enum iz_dtype out_type,
                      bool accumulate, const void *const *in, int n_in,
                      enum iz_dtype in_type, int64_t n)
{
    struct inputs all = {};
    bool aligned = iz_aligned(out);
    if (n_in > IZ_SUM_INPUTS_MAX)
        iz_die("a sum of %d buffers, %d is the most", n_in, IZ_SUM_INPUTS_MAX);
    if (n == 0)
        return;
    for (int s = 0; s < n_in; s++) {
        all.p[s] = in[s];
        aligned = aligned && iz_aligned(in[s]);
    }
    iz_by_type(out_type, [&](auto to) {
        iz_by_type(in_type, [&](auto from) {
            using O = decltype(to);
            using T = decltype(from);
            IZ_LAUNCH((sum_inputs<O, T>),
                      iz_blocks(n, THREADS * per_thread<O, T>), THREADS, 0,
                      x->stream, (O *)out, accumulate, all, n_in, n, aligned);
        });
    });
}

/* What an element adds to the norm; the square of an fp32 is exact in double.
 */
template <class T> static __device__ double term(const T *x)
{
    double v = (double)iz_load(x);
    return v * v;
}

static __device__ double term(const double *x)
{
    return *x;
}

/* sum[b] = the terms of block b, by one warp: lane j reads the elements 32 i +
 * j, which is one line per load, all loads at once.  Moves n elements in. */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    sum_blocks(double *sum, const T *x, int64_t n)
{
    int lane = threadIdx.x % 32;
    int64_t b = ((int64_t)blockIdx.x * THREADS + threadIdx.x) / 32;
    int64_t left = n - b * BLOCK - lane;
    double v = 0;
    x += b * BLOCK + lane;
    if (left > BLOCK - 32) {
#pragma unroll
        for (int i = 0; i < BLOCK; i += 32)
            v = __dadd_rn(v, term(x + i));
    } else {
        for (int64_t i = 0; i < left; i += 32)
            v = __dadd_rn(v, term(x + i));
    }
    for (int step = 16; step > 0; step /= 2)
        v = __dadd_rn(v, __shfl_down_sync(IZ_ALL_LANES, v, step));
    if (lane == 0 && (left > 0 || b == 0))
        sum[b] = v;
}

/* One level; returns the number of sums. */
template <class T>
static int64_t launch_level(struct iz_exec *x, double *sum, const T *v,
                            int64_t n)
{
    int64_t blocks = n > 0 ? (n + BLOCK - 1) / BLOCK : 1;
    int64_t per = THREADS / 32;
    IZ_LAUNCH((sum_blocks<T>), (int)((blocks + per - 1) / per), THREADS, 0,
              x->stream, sum, v, n);
    return blocks;
}

static int64_t launch_first(struct iz_exec *x, double *sum, const void *p,
                            enum iz_dtype type, int64_t n)
{
    return iz_by_type(type, [&](auto zero) {
        return launch_level(x, sum, (const decltype(zero) *)p, n);
    });
}

void iz_flat_squares_cuda(struct iz_exec *x, double *sum, const void *p,
                          enum iz_dtype type, int64_t n)
{
    if (n > 0)
        launch_first(x, sum, p, type, n);
}

void iz_flat_norm2_cuda(struct iz_exec *x, double *norm2, const void *p,
                        enum iz_dtype type, int64_t n, struct iz_view scratch)
{
    double *from = (double *)scratch.p;
    n = launch_first(x, n > BLOCK ? from : norm2, p, type, n);
    while (n > 1) {
        double *to = n > BLOCK ? from + n : norm2;
        int64_t sums = launch_level(x, to, from, n);
        from += n;
        n = sums;
    }
}
