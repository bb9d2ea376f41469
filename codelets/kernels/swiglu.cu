/* SPDX-License-Identifier: Apache-2.0 */
/* The gated unit of Llama's MLP on a GPU, by the formulas of swiglu.c.  By the
 * tables of CUDA the fast exponential of x errs by 2 + 1.16 |x| ulp and the
 * fast division by 2: the gate is right to 4e-7, and where it is tiny to 1.3e-5
 * of itself. */
#include "codelets/kernels/launch.cuh"
#include "codelets/kernels/row.cuh"

#include "codelets/ops/gpu_ops.h"

enum { THREADS = 256 };

/* 1 / (1 + exp(-a)); 0 below 2^-126, where the fast division ends. */
static __device__ float swiglu_gate(float a)
{
    return __fdividef(1, 1 + __expf(-a));
}

/* d (a swiglu_gate(a)) / da.  Beyond 100 the gate is 0 or 1; the clamp keeps 0
 * * inf away and lets NaN through. */
static __device__ float swiglu_slope(float a, float s)
{
    float c = a > 100 ? 100 : a;

    c = c < -100 ? -100 : c;
    return s + c * s * (1 - s);
}

/* Block (i, j): columns from j THREADS N on of row i.  Moves three elements per
 * element of y: 6 bytes with 16-bit types. */
template <class T, int N>
static __global__ void __launch_bounds__(THREADS) fwd(T *y, const T *a, int f)
{
    int at = ((int)blockIdx.y * THREADS + (int)threadIdx.x) * N;
    int64_t row = blockIdx.x;
    float g[N], u[N];

    if (at >= f)
        return;
    iz_load_row(g, a + row * 2 * f + at);
    iz_load_row(u, a + row * 2 * f + f + at);
    for (int i = 0; i < N; i++)
        g[i] *= swiglu_gate(g[i]) * u[i];
    iz_store_row(y + row * f + at, g);
}

/* da may be a and y may be dy: a thread has read what it overwrites.  Moves six
 * elements per element of y: 12 bytes with 16-bit types. */
template <class T, int N>
static __global__ void __launch_bounds__(THREADS)
    bwd(T *da, T *y, const T *dy, const T *a, int f)
{
    int at = ((int)blockIdx.y * THREADS + (int)threadIdx.x) * N;
    int64_t row = blockIdx.x, gates = row * 2 * f + at, ups = gates + f;
    float g[N], u[N], d[N];

    if (at >= f)
        return;
    iz_load_row(g, a + gates);
    iz_load_row(u, a + ups);
    iz_load_row(d, dy + row * f + at);
    for (int i = 0; i < N; i++) {
        float s = swiglu_gate(g[i]), v = g[i] * s, up = u[i];

        u[i] = d[i] * v;
        g[i] = d[i] * up * swiglu_slope(g[i], s);
        d[i] = v * up;
    }
    iz_store_row(da + gates, g);
    iz_store_row(da + ups, u);
    iz_store_row(y + row * f + at, d);
}

static dim3 grid_of(struct iz_view y, int per_thread)
{
    int64_t step = (int64_t)THREADS * per_thread;
    int64_t columns = (y.cols + step - 1) / step;

    if (y.rows > INT32_MAX || columns > 65535)
        iz_die("swiglu of %lld x %lld: too large", (long long)y.rows,
               (long long)y.cols);
    return dim3((unsigned)y.rows, (unsigned)columns);
}

template <class T>
static void launch_fwd(struct iz_exec *x, struct iz_view y, struct iz_view a)
{
    constexpr int per = 16 / sizeof(T);
    bool whole =
        iz_rows_aligned<T>(y.p, y.cols) && iz_rows_aligned<T>(a.p, y.cols);
    void (*k)(T *, const T *, int) = whole ? fwd<T, per> : fwd<T, 1>;

    IZ_LAUNCH(k, grid_of(y, whole ? per : 1), THREADS, 0, x->stream, (T *)y.p,
              (const T *)a.p, (int)y.cols);
}

template <class T>
static void launch_bwd(struct iz_exec *x, struct iz_view da, struct iz_view y,
                       struct iz_view dy, struct iz_view a)
{
    constexpr int per = 16 / sizeof(T);
    int64_t f = y.cols;
    bool whole = iz_rows_aligned<T>(da.p, f) && iz_rows_aligned<T>(y.p, f) &&
                 iz_rows_aligned<T>(dy.p, f) && iz_rows_aligned<T>(a.p, f);
    void (*k)(T *, T *, const T *, const T *, int) =
        whole ? bwd<T, per> : bwd<T, 1>;

    IZ_LAUNCH(k, grid_of(y, whole ? per : 1), THREADS, 0, x->stream, (T *)da.p,
              (T *)y.p, (const T *)dy.p, (const T *)a.p, (int)f);
}

void iz_swiglu_fwd_cuda(struct iz_exec *x, struct iz_view y, struct iz_view a)
{
    iz_by_type(a.dtype,
               [&](auto zero) { launch_fwd<decltype(zero)>(x, y, a); });
}

void iz_swiglu_bwd_cuda(struct iz_exec *x, struct iz_view da, struct iz_view y,
                        struct iz_view dy, struct iz_view a)
{
    iz_by_type(a.dtype,
               [&](auto zero) { launch_bwd<decltype(zero)>(x, da, y, dy, a); });
}
