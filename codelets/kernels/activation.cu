/* SPDX-License-Identifier: Apache-2.0 */
/* Activations, and the gated units of MLPs, on a GPU, by the formulas of
 * activation_loops.h.  By the tables of CUDA the fast exponential of x errs by
 * 2
 * + 1.16 |x| ulp and the fast division by 2: a gate is right to 4e-7, and where
 * it is tiny to 1.3e-5 of itself. */
#include "codelets/kernels/launch.cuh"

#include "codelets/ops/activation.h"
#include "codelets/ops/gpu_ops.h"

enum { THREADS = 256, PER_THREAD = 8 };

/* 1 / (1 + exp(x)); 0 below 2^-126, where the fast division ends. */
static __device__ float logistic(float x)
{
    return __fdividef(1, 1 + __expf(x));
}

template <enum iz_activation K> static __device__ float gate(float a)
{
    if constexpr (K == IZ_GELU_TANH)
        return logistic(-IZ_TWO_ROOT_2_PI * (a + IZ_GELU_CUBIC * a * a * a));
    else if constexpr (K == IZ_SILU)
        return logistic(-a);
    else if constexpr (K == IZ_SWISH_7)
        return logistic(-IZ_SWISH_7_ALPHA * a);
    else
        return iz_activation_plain_gate(K, a);
}

/* f(kind), where the value of kind is a constant. */
template <class F> static void by_kind(enum iz_activation act, const F &f)
{
    switch (act) {
    case IZ_GELU_TANH:
        return f(std::integral_constant<iz_activation, IZ_GELU_TANH>());
    case IZ_GELU_ERF:
        return f(std::integral_constant<iz_activation, IZ_GELU_ERF>());
    case IZ_SILU:
        return f(std::integral_constant<iz_activation, IZ_SILU>());
    case IZ_RELU:
        return f(std::integral_constant<iz_activation, IZ_RELU>());
    case IZ_SWISH_7:
        return f(std::integral_constant<iz_activation, IZ_SWISH_7>());
    default:
        return f(std::integral_constant<iz_activation, IZ_RELU2>());
    }
}

/* Moves one element in and one out: 4 bytes with 16-bit types. */
template <enum iz_activation K, class T>
static __global__ void __launch_bounds__(THREADS)
    plain_fwd(T *y, const T *a, int64_t n, bool aligned)
{
    iz_each<THREADS, PER_THREAD>(n, aligned, [&](int64_t i, auto count) {
        constexpr int N = decltype(count)::value;
        float v[N];
        iz_load_row(v, a + i);
        for (int j = 0; j < N; j++)
            v[j] *= gate<K>(v[j]);
        iz_store_row(y + i, v);
    });
}

/* du may be dy and y may be a, so all is read before anything is written.
 * Moves two elements in and two out: 8 bytes with 16-bit types. */
template <enum iz_activation K, class T>
static __global__ void __launch_bounds__(THREADS)
    plain_bwd(T *du, T *y, const T *dy, const T *a, int64_t n, bool aligned)
{
    iz_each<THREADS, PER_THREAD>(n, aligned, [&](int64_t i, auto count) {
        constexpr int N = decltype(count)::value;
        float v[N], grad[N];
        iz_load_row(v, a + i);
        iz_load_row(grad, dy + i);
        for (int j = 0; j < N; j++) {
            float s = gate<K>(v[j]);
            grad[j] *= iz_activation_slope(K, v[j], s);
            v[j] *= s;
        }
        iz_store_row(du + i, grad);
        iz_store_row(y + i, v);
    });
}

/* The two halves of a gated row, of N columns from `at` on of f. */
template <enum iz_activation K, class T, int N>
static __device__ void load_gated(float (&g)[N], float (&u)[N], const T *row,
                                  int f, int at)
{
    if constexpr (K == IZ_SWISH_7) {
        float v[2 * N];
        iz_load_row(v, row + 2 * at);
        for (int i = 0; i < N; i++) {
            g[i] = v[2 * i];
            u[i] = v[2 * i + 1];
        }
    } else {
        iz_load_row(g, row + at);
        iz_load_row(u, row + f + at);
    }
}

template <enum iz_activation K, class T, int N>
static __device__ void store_gated(T *row, const float (&g)[N],
                                   const float (&u)[N], int f, int at)
{
    if constexpr (K == IZ_SWISH_7) {
        float v[2 * N];
        for (int i = 0; i < N; i++) {
            v[2 * i] = g[i];
            v[2 * i + 1] = u[i];
        }
        iz_store_row(row + 2 * at, v);
    } else {
        iz_store_row(row + at, g);
        iz_store_row(row + f + at, u);
    }
}

/* Block (i, j): columns from j THREADS N on of row i.  Moves three elements per
 * element of y: 6 bytes with 16-bit types. */
template <enum iz_activation K, class T, int N>
static __global__ void __launch_bounds__(THREADS)
    gated_fwd(T *y, const T *a, int f)
{
    int at = ((int)blockIdx.y * THREADS + (int)threadIdx.x) * N;
    int64_t row = blockIdx.x;
    float g[N], u[N];
    if (at >= f)
        return;
    load_gated<K>(g, u, a + row * 2 * f, f, at);
    for (int i = 0; i < N; i++) {
        g[i] = iz_activation_gate(K, g[i]);
        g[i] *= gate<K>(g[i]) * iz_activation_up(K, u[i]);
    }
    iz_store_row(y + row * f + at, g);
}

/* da may be a and y may be dy: a thread has read what it overwrites.  Moves six
 * elements per element of y: 12 bytes with 16-bit types. */
template <enum iz_activation K, class T, int N>
static __global__ void __launch_bounds__(THREADS)
    gated_bwd(T *da, T *y, const T *dy, const T *a, int f)
{
    int at = ((int)blockIdx.y * THREADS + (int)threadIdx.x) * N;
    int64_t row = blockIdx.x;
    float g[N], u[N], d[N];
    if (at >= f)
        return;
    load_gated<K>(g, u, a + row * 2 * f, f, at);
    iz_load_row(d, dy + row * f + at);
    for (int i = 0; i < N; i++) {
        float c = iz_activation_gate(K, g[i]), s = gate<K>(c), v = c * s;
        float up = iz_activation_up(K, u[i]);
        u[i] = iz_activation_up_slope(K, u[i], d[i] * v);
        g[i] = d[i] * up * iz_activation_slope(K, g[i], s);
        d[i] = v * up;
    }
    store_gated<K>(da + row * 2 * f, g, u, f, at);
    iz_store_row(y + row * f + at, d);
}

static dim3 gated_grid(struct iz_view y, int per_thread)
{
    int64_t step = (int64_t)THREADS * per_thread;
    int64_t columns = (y.cols + step - 1) / step;
    if (y.rows > INT32_MAX || columns > 65535)
        iz_die("gated activation of %lld x %lld: too large", (long long)y.rows,
               (long long)y.cols);
    return dim3((unsigned)y.rows, (unsigned)columns);
}

/* The kernel for what lies aligned, the one for other rows, or the one of an
 * activation that is not gated, with the tensors p. */
template <class T, class Gated, class Plain, class... P>
static void start(struct iz_exec *x, struct iz_view y, struct iz_view a,
                  Gated *pieces, Gated *one, Plain *plain, P... p)
{
    bool whole = iz_pieces_aligned<T>(y.cols, p...);
    int64_t n = iz_view_len(y);
    if (a.cols > y.cols)
        IZ_LAUNCH((whole ? pieces : one),
                  gated_grid(y, whole ? (int)(16 / sizeof(T)) : 1), THREADS, 0,
                  x->stream, p..., (int)y.cols);
    else
        IZ_LAUNCH(plain, iz_blocks(n, THREADS * PER_THREAD), THREADS, 0,
                  x->stream, p..., n, iz_aligned(p...));
}

void iz_activation_apply_cuda(struct iz_exec *x, struct iz_view da,
                              struct iz_view y, struct iz_view dy,
                              struct iz_view a, enum iz_activation act)
{
    iz_by_type(a.dtype, [&](auto zero) {
        using T = decltype(zero);
        by_kind(act, [&](auto kind) {
            constexpr enum iz_activation K = decltype(kind)::value;
            constexpr int N = 16 / sizeof(T);
            T *to = (T *)y.p, *to_da = (T *)da.p;
            const T *from = (const T *)a.p, *from_dy = (const T *)dy.p;
            if (da.rows)
                start<T>(x, y, a, gated_bwd<K, T, N>, gated_bwd<K, T, 1>,
                         plain_bwd<K, T>, to_da, to, from_dy, from);
            else
                start<T>(x, y, a, gated_fwd<K, T, N>, gated_fwd<K, T, 1>,
                         plain_fwd<K, T>, to, from);
        });
    });
}

/* N neighbouring columns of a row; U is T or float. */
template <class T, class U, int N>
static __global__ void __launch_bounds__(THREADS)
    move_columns(T *y, int64_t ldy, const U *a, int64_t lda, int64_t rows,
                 int cols)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    int per = cols / N, col = (int)(i % per) * N;
    float v[N];
    if (i / per >= rows)
        return;
    iz_load_row(v, a + i / per * lda + col);
    iz_store_row(y + i / per * ldy + col, v);
}

template <class T, class U>
static void start_columns(struct iz_exec *x, T *y, int64_t ldy, const U *a,
                          int64_t lda, int64_t rows, int cols)
{
    constexpr int per = 4;
    bool whole = iz_aligned(y, a) && cols % per == 0 &&
                 ldy * sizeof(T) % 16 == 0 && lda * sizeof(U) % 16 == 0;
    int n = whole ? per : 1;
    IZ_LAUNCH((whole ? move_columns<T, U, per> : move_columns<T, U, 1>),
              iz_blocks(rows * (cols / n), THREADS), THREADS, 0, x->stream, y,
              ldy, a, lda, rows, cols);
}

void iz_op_columns_cuda(struct iz_exec *x, struct iz_view y, int64_t to,
                        struct iz_view a, int64_t from, int64_t cols)
{
    iz_by_type(y.dtype, [&](auto zero) {
        using T = decltype(zero);
        if (a.dtype == y.dtype)
            start_columns(x, (T *)y.p + to, y.cols, (const T *)a.p + from,
                          a.cols, y.rows, (int)cols);
        else
            start_columns(x, (T *)y.p + to, y.cols, (const float *)a.p + from,
                          a.cols, y.rows, (int)cols);
    });
}

/* Moves one element in and one out. */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    scale_by(T *y, const T *a, int64_t n, float scale, float cap, bool aligned)
{
    iz_each<THREADS, PER_THREAD>(n, aligned, [&](int64_t i, auto count) {
        constexpr int N = decltype(count)::value;
        float v[N];
        iz_load_row(v, a + i);
        for (int j = 0; j < N; j++) {
            v[j] *= scale;
            v[j] = cap != 0 ? cap * tanhf(v[j] / cap) : v[j];
        }
        iz_store_row(y + i, v);
    });
}

void iz_op_scale_cuda(struct iz_exec *x, struct iz_view y, struct iz_view a,
                      float scale, float cap)
{
    int64_t n = iz_view_len(a);
    iz_by_type(a.dtype, [&](auto zero) {
        using T = decltype(zero);
        IZ_LAUNCH(scale_by<T>, iz_blocks(n, THREADS * PER_THREAD), THREADS, 0,
                  x->stream, (T *)y.p, (const T *)a.p, n, scale, cap,
                  iz_aligned(y.p, a.p));
    });
}
