/* SPDX-License-Identifier: Apache-2.0 */
/* Layer normalisation on a GPU.  A row belongs to a team of threads: a warp
 * where it is short, else the block.  A team reads its row again from the
 * first-level cache rather than keep it, so rows may have any length. */
#include "codelets/kernels/launch.cuh"
#include "codelets/kernels/row.cuh"

#include "codelets/ops/gpu_ops.h"

#define EPSILON 1e-5f

enum {
    THREADS = 256,
    AHEAD = 4, /* pieces of a row of any length that a thread loads at once */
    GROUPS = 32
};

/* WIDE: the team is the block.  N: elements of a piece. */
template <bool WIDE> static __device__ constexpr int team_size(void)
{
    return WIDE ? THREADS : 32;
}

template <bool WIDE> static __device__ float team_sum(float v)
{
    if constexpr (WIDE)
        return iz_block_sum(v);
    else
        return iz_warp_sum(v);
}

/* The row of this thread's team when every team has one. */
template <bool WIDE> static __device__ int64_t team_row(void)
{
    constexpr int teams = THREADS / team_size<WIDE>();

    return (int64_t)blockIdx.x * teams + threadIdx.x / team_size<WIDE>();
}

template <bool WIDE, int N, class T>
static __device__ float row_sum(const T *a, int c, int lane)
{
    constexpr int step = team_size<WIDE>() * N;
    float sum = 0, v[AHEAD][N];

    for (int at = lane * N; at < c; at += AHEAD * step) {
        iz_load_ahead<step>(v, a, at, c);
        for (int k = 0; k < AHEAD; k++)
            for (int j = 0; j < N; j++)
                sum += at + k * step < c ? v[k][j] : 0;
    }
    return team_sum<WIDE>(sum);
}

template <bool WIDE, int N, class T>
static __device__ float row_squares(const T *a, float mean, int c, int lane)
{
    constexpr int step = team_size<WIDE>() * N;
    float sum = 0, v[AHEAD][N];

    for (int at = lane * N; at < c; at += AHEAD * step) {
        iz_load_ahead<step>(v, a, at, c);
        for (int k = 0; k < AHEAD; k++)
            for (int j = 0; j < N; j++) {
                float d = v[k][j] - mean;

                sum += at + k * step < c ? d * d : 0;
            }
    }
    return team_sum<WIDE>(sum);
}

/* Forward and the second forward share this down to the rounding. */
template <bool WIDE, int N, class T>
static __device__ void apply(T *y, const T *a, const T *w, const T *b,
                             float mean, float rstd, int c, int lane)
{
    float v[N], wv[N], bv[N];

    for (int at = lane * N; at < c; at += team_size<WIDE>() * N) {
        iz_load_row(v, a + at);
        iz_load_row(wv, w + at);
        iz_load_row(bv, b + at);
        for (int j = 0; j < N; j++)
            v[j] =
                __fmaf_rn(__fmul_rn(__fsub_rn(v[j], mean), rstd), wv[j], bv[j]);
        iz_store_row(y + at, v);
    }
}

/* Moves one element in and one out: 4 bytes with 16-bit types. */
template <class T, int N, bool WIDE>
static __global__ void __launch_bounds__(THREADS)
    forward(T *y, const T *a, const T *w, const T *b, float *mean, float *rstd,
            bool again, int64_t rows, int c)
{
    int lane = threadIdx.x % team_size<WIDE>();
    int64_t row = team_row<WIDE>();

    if (row >= rows)
        return;
    a += row * c;
    if (!again) {
        float m = row_sum<WIDE, N>(a, c, lane) / c;
        float var = row_squares<WIDE, N>(a, m, c, lane) / c;

        if (lane == 0) {
            mean[row] = m;
            rstd[row] = 1 / sqrtf(var + EPSILON);
        }
        apply<WIDE, N>(y + row * c, a, w, b, m, 1 / sqrtf(var + EPSILON), c,
                       lane);
    } else {
        apply<WIDE, N>(y + row * c, a, w, b, mean[row], rstd[row], c, lane);
    }
}

/* dx may be r or dy: whoever writes an element has read it, and the sums over
 * its row are done. */
template <class T> struct backward {
    T *dx;
    const T *r, *dy, *a, *w;
    const float *mean, *rstd;
    float *partial; /* [parts, 2, c]: of dw and of db */
    int64_t rows;
    int c, parts;
};

/* What a row needs beyond its elements: means of g = dy w and of g xhat. */
struct row {
    float mean, rstd, g, ghat;
};

/* A pieces at once. */
template <bool WIDE, int A, int N, class T>
static __device__ struct row row_means(const struct backward<T> &p, int64_t row,
                                       int lane)
{
    constexpr int step = team_size<WIDE>() * N;
    float m = p.mean[row], s = p.rstd[row], g = 0, ghat = 0;
    float dy[A][N], a[A][N], w[A][N];

#pragma unroll 1
    for (int at = lane * N; at < p.c; at += A * step) {
        iz_load_ahead<step>(dy, p.dy + row * p.c, at, p.c);
        iz_load_ahead<step>(a, p.a + row * p.c, at, p.c);
        iz_load_ahead<step>(w, p.w, at, p.c);
        for (int k = 0; k < A; k++)
            for (int j = 0; j < N; j++) {
                float v = dy[k][j] * w[k][j];

                v = at + k * step < p.c ? v : 0;
                g += v;
                ghat += at + k * step < p.c ? v * ((a[k][j] - m) * s) : 0;
            }
    }
    return {m, s, team_sum<WIDE>(g) / p.c, team_sum<WIDE>(ghat) / p.c};
}

/* One piece of dx; r comes as the residual or zeros.  Adds what the piece means
 * for dw and db to gw and gb. */
template <int N, class T>
static __device__ void write_dx(const struct backward<T> &p, int64_t row,
                                const struct row &v, int at, float (&r)[N],
                                float (&gw)[N], float (&gb)[N])
{
    float dy[N], a[N], w[N];

    iz_load_row(dy, p.dy + row * p.c + at);
    iz_load_row(a, p.a + row * p.c + at);
    iz_load_row(w, p.w + at);
    for (int j = 0; j < N; j++) {
        float hat = (a[j] - v.mean) * v.rstd;

        gw[j] += dy[j] * hat;
        gb[j] += dy[j];
        r[j] += v.rstd * (dy[j] * w[j] - v.g - hat * v.ghat);
    }
    iz_store_row(p.dx + row * p.c + at, r);
}

/* Only dx.  Moves with 16-bit types 8 bytes per element, 6 without r. */
template <class T, int N, bool WIDE>
static __global__ void __launch_bounds__(THREADS)
    backward_dx(struct backward<T> p)
{
    int lane = threadIdx.x % team_size<WIDE>();
    int64_t row = team_row<WIDE>();
    float gw[N] = {}, gb[N] = {};

    if (row >= p.rows)
        return;
    struct row v = row_means<WIDE, AHEAD, N>(p, row, lane);

    for (int at = lane * N; at < p.c; at += team_size<WIDE>() * N) {
        float r[N] = {};

        if (p.r)
            iz_load_row(r, p.r + row * p.c + at);
        write_dx(p, row, v, at, r, gw, gb);
    }
}

/* The K pieces of the only team, a block. */
template <int K, int N>
static __device__ void write_wide(float *partial, int c, const float (&g)[K][N])
{
#pragma unroll
    for (int k = 0; k < K; k++) {
        int at = (k * THREADS + threadIdx.x) * N;

        if (at < c)
            iz_store_row(partial + at, g[k]);
    }
}

/* The K pieces of every warp, added in the order of the warps. */
template <int K, int N>
static __device__ void write_narrow(float *partial, int c,
                                    const float (&g)[K][N])
{
    __shared__ float sum[32 * K * N];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

    for (int t = 0; t < THREADS / 32; t++) {
#pragma unroll
        for (int i = 0; i < K * N; i++) {
            float *s = sum + (i / N * 32 + lane) * N + i % N;

            if (t == warp)
                *s = (t ? *s : 0) + g[i / N][i % N];
        }
        __syncthreads();
    }
    for (int i = threadIdx.x; i < c; i += THREADS)
        partial[i] = sum[i];
    __syncthreads(); /* before the next use of sum */
}

template <bool WIDE, int K, int N>
static __device__ void write_partial(float *partial, int c,
                                     const float (&g)[K][N])
{
    if constexpr (WIDE)
        write_wide(partial, c, g);
    else
        write_narrow(partial, c, g);
}

/* dx, and the sums of part blockIdx.x for dw and db, which threads keep in
 * registers: a row has at most K pieces per thread, which are loaded at once,
 * and the residual with them.  Row i belongs to part i mod parts.  Moves with
 * 16-bit types 8 bytes per element, 6 without r. */
template <class T, int N, bool WIDE, int K>
static __global__ void __launch_bounds__(THREADS, K > 1 || !WIDE ? 2 : 4)
    backward_fused(struct backward<T> p)
{
    constexpr int team = team_size<WIDE>(), teams = THREADS / team;
    int lane = threadIdx.x % team;
    int64_t row = blockIdx.x + (int64_t)p.parts * (threadIdx.x / team);
    float gw[K][N] = {}, gb[K][N] = {};

    for (; row < p.rows; row += (int64_t)p.parts * teams) {
        float r[K][N] = {};

        if (p.r)
            iz_load_ahead<team * N>(r, p.r + row * p.c, lane * N, p.c);
        struct row v = row_means<WIDE, K, N>(p, row, lane);

#pragma unroll
        for (int k = 0; k < K; k++)
            if ((k * team + lane) * N < p.c)
                write_dx(p, row, v, (k * team + lane) * N, r[k], gw[k], gb[k]);
    }
    p.partial += (int64_t)blockIdx.x * 2 * p.c;
    write_partial<WIDE>(p.partial, p.c, gw);
    write_partial<WIDE>(p.partial + p.c, p.c, gb);
}

/* The same sums of part blockIdx.y for rows that are too long, a thread for N
 * columns. */
template <class T, int N>
static __global__ void __launch_bounds__(THREADS)
    backward_columns(struct backward<T> p)
{
    int at = (blockIdx.x * THREADS + threadIdx.x) * N;
    float gw[N] = {}, gb[N] = {}, dy[N], a[N];

    if (at >= p.c)
        return;
    for (int64_t row = blockIdx.y; row < p.rows; row += p.parts) {
        float m = p.mean[row], s = p.rstd[row];

        iz_load_row(dy, p.dy + row * p.c + at);
        iz_load_row(a, p.a + row * p.c + at);
        for (int j = 0; j < N; j++) {
            gw[j] += dy[j] * ((a[j] - m) * s);
            gb[j] += dy[j];
        }
    }
    p.partial += (int64_t)blockIdx.y * 2 * p.c + at;
    iz_store_row(p.partial, gw);
    iz_store_row(p.partial + p.c, gb);
}

/* dw and db [c] = sums over the parts, 32 columns of [dw, db] per block: each
 * warp adds every 32nd part, then one warp adds the warps in order. */
template <class T>
static __global__ void __launch_bounds__(32 * GROUPS)
    sum_parts(T *dw, T *db, const float *partial, int parts, int c)
{
    __shared__ float group[GROUPS][32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int col = blockIdx.x * 32 + lane;
    float sum = 0;

    for (int i = warp; i < parts && col < 2 * c; i += GROUPS)
        sum += partial[(int64_t)i * 2 * c + col];
    group[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || col >= 2 * c)
        return;
    for (int i = 1; i < GROUPS; i++)
        sum += group[i][lane];
    if (col < c && dw)
        iz_store(dw + col, sum);
    if (col >= c && db)
        iz_store(db + col - c, sum);
}

template <class T, int N>
static void launch_forward(struct iz_exec *x, struct iz_view y,
                           struct iz_view a, const struct iz_norm *n,
                           bool again)
{
    bool wide = a.cols > AHEAD * 32 * N;
    int64_t teams = wide ? 1 : THREADS / 32;
    void (*k)(T *, const T *, const T *, const T *, float *, float *, bool,
              int64_t, int) = wide ? forward<T, N, true> : forward<T, N, false>;

    IZ_LAUNCH(k, (int)((a.rows + teams - 1) / teams), THREADS, 0, x->stream,
              (T *)y.p, (const T *)a.p, (const T *)n->w.p, (const T *)n->b.p,
              (float *)n->mean.p, (float *)n->rstd.p, again, a.rows,
              (int)a.cols);
}

template <class T>
static void choose_forward(struct iz_exec *x, struct iz_view y,
                           struct iz_view a, const struct iz_norm *n,
                           bool again)
{
    int64_t c = a.cols;

    if (iz_rows_aligned<T>(y.p, c) && iz_rows_aligned<T>(a.p, c) &&
        iz_rows_aligned<T>(n->w.p, c) && iz_rows_aligned<T>(n->b.p, c))
        launch_forward<T, 16 / sizeof(T)>(x, y, a, n, again);
    else
        launch_forward<T, 1>(x, y, a, n, again);
}

static void start_forward(struct iz_exec *x, struct iz_view y, struct iz_view a,
                          const struct iz_norm *n, bool again)
{
    if (n->w.dtype != a.dtype || y.dtype != a.dtype)
        iz_die("layernorm of %s with weights of %s", iz_dtype_name(a.dtype),
               iz_dtype_name(n->w.dtype));
    if (a.dtype == IZ_BF16)
        choose_forward<iz_bf16>(x, y, a, n, again);
    else if (a.dtype == IZ_F16)
        choose_forward<iz_f16>(x, y, a, n, again);
    else
        choose_forward<float>(x, y, a, n, again);
}

void iz_layernorm_fwd_cuda(struct iz_exec *x, struct iz_view y,
                           struct iz_view a, const struct iz_norm *n)
{
    start_forward(x, y, a, n, false);
}

void iz_layernorm_again_cuda(struct iz_exec *x, struct iz_view y,
                             struct iz_view a, const struct iz_norm *n)
{
    start_forward(x, y, a, n, true);
}

template <class T, int N>
static void launch_dx(struct iz_exec *x, const struct backward<T> &p)
{
    bool wide = p.c > AHEAD * 32 * N;
    int64_t teams = wide ? 1 : THREADS / 32;
    void (*k)(struct backward<T>) =
        wide ? backward_dx<T, N, true> : backward_dx<T, N, false>;

    IZ_LAUNCH(k, (int)((p.rows + teams - 1) / teams), THREADS, 0, x->stream, p);
}

template <class T, int N, bool WIDE>
static void launch_fused(struct iz_exec *x, const struct backward<T> &p)
{
    int pieces = (p.c + team_size<WIDE>() * N - 1) / (team_size<WIDE>() * N);
    void (*k)(struct backward<T>) = backward_fused<T, N, WIDE, 4>;

    if (pieces == 1)
        k = backward_fused<T, N, WIDE, 1>;
    else if (pieces == 2)
        k = backward_fused<T, N, WIDE, 2>;
    else if (pieces == 3)
        k = backward_fused<T, N, WIDE, 3>;
    IZ_LAUNCH(k, p.parts, THREADS, 0, x->stream, p);
}

/* The columns come first, because dx may replace dy. */
template <class T, int N>
static void launch_columns(struct iz_exec *x, const struct backward<T> &p)
{
    dim3 grid((p.c + THREADS * N - 1) / (THREADS * N), p.parts);

    IZ_LAUNCH((backward_columns<T, N>), grid, THREADS, 0, x->stream, p);
    launch_dx<T, N>(x, p);
}

template <class T, int N>
static void launch_backward(struct iz_exec *x, const struct backward<T> &p,
                            const struct iz_norm *n)
{
    if (!n->dw.p && !n->db.p) {
        launch_dx<T, N>(x, p);
        return;
    }
    if (p.c <= 4 * 32 * N)
        launch_fused<T, N, false>(x, p);
    else if (p.c <= 4 * THREADS * N)
        launch_fused<T, N, true>(x, p);
    else
        launch_columns<T, N>(x, p);
    IZ_LAUNCH((sum_parts<T>), (2 * p.c + 31) / 32, 32 * GROUPS, 0, x->stream,
              (T *)n->dw.p, (T *)n->db.p, (const float *)p.partial, p.parts,
              p.c);
}

template <class T>
static void start_backward(struct iz_exec *x, struct iz_view dx,
                           struct iz_view r, struct iz_view dy,
                           struct iz_view a, const struct iz_norm *n,
                           struct iz_view scratch)
{
    int64_t c = a.cols;
    struct backward<T> p = {
        (T *)dx.p, (const T *)r.p, (const T *)dy.p, (const T *)a.p,
            (const T *)n->w.p, (const float *)n->mean.p,
            (const float *)n->rstd.p, (float *)scratch.p, a.rows, (int)c,
            (int)(scratch.rows / 2)
    };

    if (iz_rows_aligned<T>(dx.p, c) && iz_rows_aligned<T>(r.p, c) &&
        iz_rows_aligned<T>(dy.p, c) && iz_rows_aligned<T>(a.p, c) &&
        iz_rows_aligned<T>(n->w.p, c))
        launch_backward<T, 16 / sizeof(T)>(x, p, n);
    else
        launch_backward<T, 1>(x, p, n);
}

/* scratch fp32 [2 parts, c]. */
void iz_layernorm_bwd_cuda(struct iz_exec *x, struct iz_view dx,
                           struct iz_view r, struct iz_view dy,
                           struct iz_view a, const struct iz_norm *n,
                           struct iz_view scratch)
{
    if (a.dtype == IZ_BF16)
        start_backward<iz_bf16>(x, dx, r, dy, a, n, scratch);
    else if (a.dtype == IZ_F16)
        start_backward<iz_f16>(x, dx, r, dy, a, n, scratch);
    else
        start_backward<float>(x, dx, r, dy, a, n, scratch);
}
