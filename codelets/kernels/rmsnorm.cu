/* SPDX-License-Identifier: Apache-2.0 */
/* Root-mean-square normalisation on a GPU, of rows and of the heads of a row:
 * both are pieces of c columns.  A piece belongs to a team of threads, which is
 * as small as the piece allows.  A team reads its piece again from the
 * first-level cache rather than keep it, so pieces may have any length. */
#include "codelets/kernels/launch.cuh"
#include "codelets/kernels/row.cuh"

#include "codelets/ops/gpu_ops.h"

enum {
    THREADS = 256,
    AHEAD = 4, /* parts of a piece of any length that a thread loads at once */
    GROUPS = 32
};

/* Where pieces lie: `heads` per row of ld elements. */
template <class T> struct pieces {
    T *p; /* the first piece, or NULL */
    int64_t ld;
};

template <class T>
static __device__ __forceinline__ T *piece(const struct pieces<T> &s, int i,
                                           int heads, int c)
{
    return s.p + i / heads * s.ld + i % heads * c;
}

/* Over the team; all threads of the warp call. */
template <int TEAM> static __device__ float team_sum(float v)
{
    if constexpr (TEAM == THREADS) {
        v = iz_block_sum(v);
    } else {
#pragma unroll
        for (int step = TEAM / 2; step > 0; step /= 2)
            v += __shfl_xor_sync(IZ_ALL_LANES, v, step);
    }
    return v;
}

/* This thread's part of the sum of squares. */
template <int TEAM, int N, class T>
static __device__ float squares(const T *a, int c, int lane)
{
    float sum = 0, v[AHEAD][N];

    for (int at = lane * N; at < c; at += AHEAD * TEAM * N) {
        iz_load_ahead<TEAM * N>(v, a, at, c);
        for (int k = 0; k < AHEAD; k++)
            for (int j = 0; j < N; j++)
                sum += at + k * TEAM * N < c ? v[k][j] * v[k][j] : 0;
    }
    return sum;
}

/* y may be a; kept.p may be NULL. */
template <class T> struct forward {
    struct pieces<T> y, kept;
    struct pieces<const T> a;
    const T *w;
    float *rstd;
    float eps;
    int all, heads, c; /* all: pieces of all rows */
    bool again;
};

/* Forward and the second forward share this down to the rounding. */
template <int TEAM, int N, class T>
static __device__ void apply(const struct forward<T> &p, int i, int c,
                             float rstd, int lane)
{
    const T *a = piece(p.a, i, p.heads, p.c);
    float v[N], w[N];

    for (int at = lane * N; at < c; at += TEAM * N) {
        iz_load_row(v, a + at);
        iz_load_row(w, p.w + at);
        if (p.kept.p)
            iz_store_row(piece(p.kept, i, p.heads, p.c) + at, v);
        for (int j = 0; j < N; j++)
            v[j] = __fmul_rn(__fmul_rn(v[j], rstd), w[j]);
        iz_store_row(piece(p.y, i, p.heads, p.c) + at, v);
    }
}

/* Moves one element in and one out, or two where they are kept: 4 or 6 bytes
 * with 16-bit types. */
template <class T, int N, int TEAM>
static __global__ void __launch_bounds__(THREADS) normalise(struct forward<T> p)
{
    int i = (int)(blockIdx.x * (THREADS / TEAM) + threadIdx.x / TEAM);
    int lane = (int)threadIdx.x % TEAM, c = i < p.all ? p.c : 0;
    float rstd = p.again && c ? p.rstd[i] : 0;

    if (!p.again) {
        float sum = squares<TEAM, N>(piece(p.a, i, p.heads, p.c), c, lane);

        rstd = 1 / sqrtf(team_sum<TEAM>(sum) / (float)p.c + p.eps);
        if (c && lane == 0)
            p.rstd[i] = rstd;
    }
    apply<TEAM, N>(p, i, c, rstd, lane);
}

/* dx may be r or dy: whoever writes an element has read it, and the sum over
 * its piece is done. */
template <class T> struct backward {
    struct pieces<T> dx;
    struct pieces<const T> r, dy, a; /* r.p may be NULL */
    const T *w;
    const float *rstd;
    float *partial; /* of dw [parts, c], or NULL */
    int all, heads, c, parts;
};

/* Mean over piece i of g xhat, g = dy w, A parts at once. */
template <int TEAM, int A, int N, class T>
static __device__ float mean_product(const struct backward<T> &p, int i, int c,
                                     float rstd, int lane)
{
    const T *dy = piece(p.dy, i, p.heads, p.c);
    const T *a = piece(p.a, i, p.heads, p.c);
    float sum = 0, dv[A][N], av[A][N], w[A][N];

#pragma unroll 1
    for (int at = lane * N; at < c; at += A * TEAM * N) {
        iz_load_ahead<TEAM * N>(dv, dy, at, c);
        iz_load_ahead<TEAM * N>(av, a, at, c);
        iz_load_ahead<TEAM * N>(w, p.w, at, c);
        for (int k = 0; k < A; k++)
            for (int j = 0; j < N; j++)
                sum += at + k * TEAM * N < c
                           ? dv[k][j] * w[k][j] * (av[k][j] * rstd)
                           : 0;
    }
    return team_sum<TEAM>(sum) / (float)p.c;
}

/* N elements of dx from `at` on; r comes as the residual or zeros.  Adds what
 * they mean for dw to gw. */
template <int N, class T>
static __device__ void write_dx(const struct backward<T> &p, int i, int at,
                                float rstd, float mean, float (&r)[N],
                                float (&gw)[N])
{
    float dy[N], a[N], w[N];

    iz_load_row(dy, piece(p.dy, i, p.heads, p.c) + at);
    iz_load_row(a, piece(p.a, i, p.heads, p.c) + at);
    iz_load_row(w, p.w + at);
    for (int j = 0; j < N; j++) {
        float hat = a[j] * rstd;

        gw[j] += dy[j] * hat;
        r[j] += rstd * (dy[j] * w[j] - hat * mean);
    }
    iz_store_row(piece(p.dx, i, p.heads, p.c) + at, r);
}

/* Only dx.  Moves with 16-bit types 8 bytes per element, 6 without r. */
template <class T, int N, int TEAM>
static __global__ void __launch_bounds__(THREADS)
    backward_dx(struct backward<T> p)
{
    int i = (int)(blockIdx.x * (THREADS / TEAM) + threadIdx.x / TEAM);
    int lane = (int)threadIdx.x % TEAM, c = i < p.all ? p.c : 0;
    float rstd = c ? p.rstd[i] : 0, gw[N] = {};
    float mean = mean_product<TEAM, AHEAD, N>(p, i, c, rstd, lane);

    for (int at = lane * N; at < c; at += TEAM * N) {
        float r[N] = {};

        if (p.r.p)
            iz_load_row(r, piece(p.r, i, p.heads, p.c) + at);
        write_dx(p, i, at, rstd, mean, r, gw);
    }
}

/* Adds up the K parts of all teams of the block in the order of the teams. */
template <int TEAM, int K, int N>
static __device__ void write_partial(float *partial, int c,
                                     const float (&g)[K][N])
{
    __shared__ float sum[TEAM * K * N];
    int lane = (int)threadIdx.x % TEAM, team = (int)threadIdx.x / TEAM;

    for (int t = 0; t < THREADS / TEAM; t++) {
#pragma unroll
        for (int i = 0; i < K * N; i++) {
            float *s = sum + (i / N * TEAM + lane) * N + i % N;

            if (t == team)
                *s = (t ? *s : 0) + g[i / N][i % N];
        }
        __syncthreads();
    }
    for (int i = (int)threadIdx.x; i < c; i += THREADS)
        partial[i] = sum[i];
}

/* dx, and the sums of part blockIdx.x for dw, which threads keep in registers:
 * a piece has at most K parts per thread, which are loaded at once, and, up to
 * three, the residual with them.  Piece i belongs to part i mod parts.  Moves
 * with 16-bit types 8 bytes per element, 6 without r. */
template <class T, int N, int TEAM, int K>
static __global__ void __launch_bounds__(THREADS, K == 1 ? 4 : 2)
    backward_fused(struct backward<T> p)
{
    int lane = (int)threadIdx.x % TEAM;
    float gw[K][N] = {};

    /* All teams go on while the first has a piece, for the sums. */
    for (int first = (int)blockIdx.x; first < p.all;
         first += p.parts * (THREADS / TEAM)) {
        int i = first + p.parts * ((int)threadIdx.x / TEAM);
        int c = i < p.all ? p.c : 0;
        float rstd = c ? p.rstd[i] : 0, r[K][N] = {};
        const T *from = p.r.p ? piece(p.r, i, p.heads, p.c) : NULL;

        if (K < 4 && c && from)
            iz_load_ahead<TEAM * N>(r, from, lane * N, c);
        float mean = mean_product<TEAM, K, N>(p, i, c, rstd, lane);

#pragma unroll
        for (int k = 0; k < K; k++) {
            int at = (k * TEAM + lane) * N;

            if (at >= c)
                continue;
            if (K == 4 && from)
                iz_load_row(r[k], from + at);
            write_dx(p, i, at, rstd, mean, r[k], gw[k]);
        }
    }
    write_partial<TEAM>(p.partial + (int64_t)blockIdx.x * p.c, p.c, gw);
}

/* The same sums of part blockIdx.y for pieces that are too long, a thread for N
 * columns. */
template <class T, int N>
static __global__ void __launch_bounds__(THREADS)
    backward_columns(struct backward<T> p)
{
    int at = (int)(blockIdx.x * THREADS + threadIdx.x) * N;
    float gw[N] = {}, dy[N], a[N];

    if (at >= p.c)
        return;
    for (int i = (int)blockIdx.y; i < p.all; i += p.parts) {
        iz_load_row(dy, piece(p.dy, i, p.heads, p.c) + at);
        iz_load_row(a, piece(p.a, i, p.heads, p.c) + at);
        for (int j = 0; j < N; j++)
            gw[j] += dy[j] * (a[j] * p.rstd[i]);
    }
    iz_store_row(p.partial + (int64_t)blockIdx.y * p.c + at, gw);
}

/* dw [c] = sum over the parts, 32 columns per block: each warp adds every 32nd
 * part, then one warp adds the warps in order. */
template <class T>
static __global__ void __launch_bounds__(32 * GROUPS)
    sum_parts(T *dw, const float *partial, int parts, int c)
{
    __shared__ float group[GROUPS][32];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    int col = (int)blockIdx.x * 32 + lane;
    float sum = 0;

    for (int i = warp; i < parts && col < c; i += GROUPS)
        sum += partial[(int64_t)i * c + col];
    group[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || col >= c)
        return;
    for (int i = 1; i < GROUPS; i++)
        sum += group[i][lane];
    iz_store(dw + col, sum);
}

/* ---- launches ----------------------------------------------------------- */

/* Rows of v, and of its heads from column `first` on. */
template <class T>
static struct pieces<T> pieces_of(struct iz_view v, int64_t first) {
    return {v.p ? (T *)v.p + first : NULL, v.cols};
}

static int
count_of(const struct iz_rmsnorm *n)
{
    int64_t all = iz_view_len(n->rstd);

    if (all > INT32_MAX / 2)
        iz_die("rmsnorm of %lld pieces: too many", (long long)all);
    return (int)all;
}

static void check_types(struct iz_view a, const struct iz_rmsnorm *n)
{
    if (n->w.dtype != a.dtype)
        iz_die("rmsnorm of %s with weights of %s", iz_dtype_name(a.dtype),
               iz_dtype_name(n->w.dtype));
}

/* Blocks for one team per piece. */
static int blocks_for(int all, int team)
{
    int teams = THREADS / team;

    return (all + teams - 1) / teams;
}

template <class T, int N>
static void launch_forward(struct iz_exec *x, const struct forward<T> &p)
{
    if (p.c <= 16 * N)
        IZ_LAUNCH((normalise<T, N, 16>), blocks_for(p.all, 16), THREADS, 0,
                  x->stream, p);
    else if (p.c <= AHEAD * 32 * N)
        IZ_LAUNCH((normalise<T, N, 32>), blocks_for(p.all, 32), THREADS, 0,
                  x->stream, p);
    else
        IZ_LAUNCH((normalise<T, N, THREADS>), p.all, THREADS, 0, x->stream, p);
}

template <class T>
static void start_forward(struct iz_exec *x, const struct forward<T> &p)
{
    if (iz_rows_aligned<T>(p.y.p, p.y.ld) &&
        iz_rows_aligned<T>(p.a.p, p.a.ld) &&
        iz_rows_aligned<T>(p.kept.p, p.kept.ld) && iz_rows_aligned<T>(p.w, p.c))
        launch_forward<T, 16 / sizeof(T)>(x, p);
    else
        launch_forward<T, 1>(x, p);
}

/* Normalises pieces of a from column `first` on into y. */
template <class T>
static void forward_of(struct iz_exec *x, struct iz_view y, struct iz_view kept,
                       struct iz_view a, const struct iz_rmsnorm *n,
                       int64_t first, bool again)
{
    int all = count_of(n);
    struct forward<T> p = {
    };

    p.y = pieces_of<T>(y, first);
    p.kept = pieces_of<T>(kept, 0);
    p.a = pieces_of<const T>(a, first);
    p.w = (const T *)n->w.p;
    p.rstd = (float *)n->rstd.p;
    p.eps = n->eps;
    p.all = all;
    p.heads = (int)(all / a.rows);
    p.c = (int)n->w.cols;
    p.again = again;
    start_forward(x, p);
}

static void forward_by_type(struct iz_exec *x, struct iz_view y,
                            struct iz_view kept, struct iz_view a,
                            const struct iz_rmsnorm *n, int64_t first,
                            bool again)
{
    check_types(a, n);
    if (a.dtype == IZ_BF16)
        forward_of<iz_bf16>(x, y, kept, a, n, first, again);
    else if (a.dtype == IZ_F16)
        forward_of<iz_f16>(x, y, kept, a, n, first, again);
    else
        forward_of<float>(x, y, kept, a, n, first, again);
}

void iz_rmsnorm_fwd_cuda(struct iz_exec *x, struct iz_view y, struct iz_view a,
                         const struct iz_rmsnorm *n)
{
    forward_by_type(x, y, {}, a, n, 0, false);
}

void iz_rmsnorm_again_cuda(struct iz_exec *x, struct iz_view y,
                           struct iz_view a, const struct iz_rmsnorm *n)
{
    forward_by_type(x, y, {}, a, n, 0, true);
}

void iz_headnorm_fwd_cuda(struct iz_exec *x, struct iz_view a,
                          struct iz_view kept, const struct iz_rmsnorm *n,
                          int64_t first)
{
    forward_by_type(x, a, kept, a, n, first, false);
}

template <class T, int N>
static void launch_dx(struct iz_exec *x, const struct backward<T> &p)
{
    if (p.c <= 16 * N)
        IZ_LAUNCH((backward_dx<T, N, 16>), blocks_for(p.all, 16), THREADS, 0,
                  x->stream, p);
    else if (p.c <= AHEAD * 32 * N)
        IZ_LAUNCH((backward_dx<T, N, 32>), blocks_for(p.all, 32), THREADS, 0,
                  x->stream, p);
    else
        IZ_LAUNCH((backward_dx<T, N, THREADS>), p.all, THREADS, 0, x->stream,
                  p);
}

template <class T, int N, int TEAM, int K>
static void launch_fused(struct iz_exec *x, const struct backward<T> &p)
{
    void (*k)(struct backward<T>) = backward_fused<T, N, TEAM, K>;

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
                            T *dw)
{
    if (!dw) {
        launch_dx<T, N>(x, p);
        return;
    }
    if (p.c <= 16 * N)
        launch_fused<T, N, 16, 1>(x, p);
    else if (p.c <= 4 * 32 * N)
        launch_fused<T, N, 32, 4>(x, p);
    else if (p.c <= THREADS * N)
        launch_fused<T, N, THREADS, 1>(x, p);
    else if (p.c <= 2 * THREADS * N)
        launch_fused<T, N, THREADS, 2>(x, p);
    else if (p.c <= 3 * THREADS * N)
        launch_fused<T, N, THREADS, 3>(x, p);
    else if (p.c <= 4 * THREADS * N)
        launch_fused<T, N, THREADS, 4>(x, p);
    else
        launch_columns<T, N>(x, p);
    IZ_LAUNCH((sum_parts<T>), (p.c + 31) / 32, 32 * GROUPS, 0, x->stream, dw,
              (const float *)p.partial, p.parts, p.c);
}

/* Pieces of dx, dy and r from column `first` on, of a from the start. */
template <class T>
static void backward_of(struct iz_exec *x, struct iz_view dx, struct iz_view r,
                        struct iz_view dy, struct iz_view a,
                        const struct iz_rmsnorm *n, int64_t first,
                        struct iz_view scratch)
{
    int all = count_of(n);
    struct backward<T> p = {
    };

    p.dx = pieces_of<T>(dx, first);
    p.r = pieces_of<const T>(r, first);
    p.dy = pieces_of<const T>(dy, first);
    p.a = pieces_of<const T>(a, 0);
    p.w = (const T *)n->w.p;
    p.rstd = (const float *)n->rstd.p;
    p.partial = (float *)scratch.p;
    p.all = all;
    p.heads = (int)(all / a.rows);
    p.c = (int)n->w.cols;
    p.parts = (int)scratch.rows;
    if (iz_rows_aligned<T>(p.dx.p, p.dx.ld) &&
        iz_rows_aligned<T>(p.dy.p, p.dy.ld) &&
        iz_rows_aligned<T>(p.r.p, p.r.ld) &&
        iz_rows_aligned<T>(p.a.p, p.a.ld) && iz_rows_aligned<T>(p.w, p.c))
        launch_backward<T, 16 / sizeof(T)>(x, p, (T *)n->dw.p);
    else
        launch_backward<T, 1>(x, p, (T *)n->dw.p);
}

static void backward_by_type(struct iz_exec *x, struct iz_view dx,
                             struct iz_view r, struct iz_view dy,
                             struct iz_view a, const struct iz_rmsnorm *n,
                             int64_t first, struct iz_view scratch)
{
    check_types(a, n);
    if (a.dtype == IZ_BF16)
        backward_of<iz_bf16>(x, dx, r, dy, a, n, first, scratch);
    else if (a.dtype == IZ_F16)
        backward_of<iz_f16>(x, dx, r, dy, a, n, first, scratch);
    else
        backward_of<float>(x, dx, r, dy, a, n, first, scratch);
}

/* scratch fp32 [parts, c]. */
void iz_rmsnorm_bwd_cuda(struct iz_exec *x, struct iz_view dx, struct iz_view r,
                         struct iz_view dy, struct iz_view a,
                         const struct iz_rmsnorm *n, struct iz_view scratch)
{
    backward_by_type(x, dx, r, dy, a, n, 0, scratch);
}

void iz_headnorm_bwd_cuda(struct iz_exec *x, struct iz_view da,
                          struct iz_view kept, const struct iz_rmsnorm *n,
                          int64_t first, struct iz_view scratch)
{
    backward_by_type(x, da, {}, da, kept, n, first, scratch);
}
