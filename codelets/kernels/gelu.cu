/* SPDX-License-Identifier: Apache-2.0 */
/* GELU in the tanh form on a GPU, by the formulas of gelu.c.  By the tables of
 * CUDA the fast exponential of x errs by 2 + 1.16 |x| ulp and the fast division
 * by 2: the gate is right to 4e-7, and where it is tiny to 1.3e-5 of itself. */
#include "codelets/kernels/launch.cuh"

#include "codelets/ops/gpu_ops.h"

#define TWO_ROOT_2_PI 1.5957691216f /* 2 sqrt(2/pi) */
#define CUBIC 0.044715f

enum { THREADS = 256, PER_THREAD = 8 };

/* 1 / (1 + exp(-2u)); 0 below 2^-126, where the fast division ends. */
static __device__ float gelu_gate(float a)
{
    float minus_2u = -TWO_ROOT_2_PI * (a + CUBIC * a * a * a);

    return __fdividef(1, 1 + __expf(minus_2u));
}

/* d gelu / da.  Beyond 12 the gate is 0 or 1 to fp32; the clamp keeps 0 * inf
 * away and lets NaN through. */
static __device__ float gelu_slope(float a, float s)
{
    float c = a > 12 ? 12 : a;

    c = c < -12 ? -12 : c;
    return s + c * s * (1 - s) * TWO_ROOT_2_PI * (1 + 3 * CUBIC * c * c);
}

template <class T, int N>
static __device__ void fwd_row(T *y, const T *a, int64_t i)
{
    float v[N];

    iz_load_row(v, a + i);
    for (int j = 0; j < N; j++)
        v[j] *= gelu_gate(v[j]);
    iz_store_row(y + i, v);
}

/* du may be dy and y may be a, so all is read before anything is written. */
template <class T, int N>
static __device__ void bwd_row(T *du, T *y, const T *dy, const T *a, int64_t i)
{
    float v[N], grad[N];

    iz_load_row(v, a + i);
    iz_load_row(grad, dy + i);
    for (int j = 0; j < N; j++) {
        float s = gelu_gate(v[j]);

        grad[j] *= gelu_slope(v[j], s);
        v[j] *= s;
    }
    iz_store_row(du + i, grad);
    iz_store_row(y + i, v);
}

/* Moves one element in and one out: 4 bytes with 16-bit types. */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    fwd(T *y, const T *a, int64_t n, bool aligned)
{
    int64_t thread = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    int64_t i = thread * PER_THREAD;

    if (aligned && i + PER_THREAD <= n)
        fwd_row<T, PER_THREAD>(y, a, i);
    else
        for (; i < n && i < (thread + 1) * PER_THREAD; i++)
            fwd_row<T, 1>(y, a, i);
}

/* Moves two elements in and two out: 8 bytes with 16-bit types. */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    bwd(T *du, T *y, const T *dy, const T *a, int64_t n, bool aligned)
{
    int64_t thread = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    int64_t i = thread * PER_THREAD;

    if (aligned && i + PER_THREAD <= n)
        bwd_row<T, PER_THREAD>(du, y, dy, a, i);
    else
        for (; i < n && i < (thread + 1) * PER_THREAD; i++)
            bwd_row<T, 1>(du, y, dy, a, i);
}

static int gelu_blocks_for(int64_t n)
{
    return (int)((n + THREADS * PER_THREAD - 1) / (THREADS * PER_THREAD));
}

static bool aligned(const void *a, const void *b)
{
    return ((uintptr_t)a | (uintptr_t)b) % 16 == 0;
}

template <class T>
static void launch_fwd(struct iz_exec *x, struct iz_view y, struct iz_view a)
{
    int64_t n = iz_view_len(a);

    IZ_LAUNCH((fwd<T>), gelu_blocks_for(n), THREADS, 0, x->stream, (T *)y.p,
              (const T *)a.p, n, aligned(y.p, a.p));
}

template <class T>
static void launch_bwd(struct iz_exec *x, struct iz_view du, struct iz_view y,
                       struct iz_view dy, struct iz_view a)
{
    int64_t n = iz_view_len(a);

    IZ_LAUNCH((bwd<T>), gelu_blocks_for(n), THREADS, 0, x->stream, (T *)du.p,
              (T *)y.p, (const T *)dy.p, (const T *)a.p, n,
              aligned(du.p, y.p) && aligned(dy.p, a.p));
}

void iz_gelu_fwd_cuda(struct iz_exec *x, struct iz_view y, struct iz_view a)
{
    iz_by_type(a.dtype,
               [&](auto zero) { launch_fwd<decltype(zero)>(x, y, a); });
}

void iz_gelu_bwd_cuda(struct iz_exec *x, struct iz_view du, struct iz_view y,
                      struct iz_view dy, struct iz_view a)
{
    iz_by_type(a.dtype,
               [&](auto zero) { launch_bwd<decltype(zero)>(x, du, y, dy, a); });
}
