/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of both normalisations on a GPU: with MEAN LayerNorm, else
 * RMSNorm, which has no mean and no b.  What is normalised is a piece of c
 * columns: a row, or a head of a row.  A piece belongs to a team of threads,
 * which is as small as the piece allows.  A team reads its piece again from the
 * first-level cache rather than keep it, so pieces may have any length. */
#include "codelets/kernels/launch.cuh"

#include "codelets/ops/gpu_ops.h"

enum {
    THREADS = 256,
    AHEAD = 4, /* parts of a piece of any length that a thread loads at once */
    GROUPS = 32
};

/* 2^24 rows of 128 heads: a loop over them ends below 2^32. */
#define PIECES (INT64_C(1) << 31)

/* Where pieces lie: `heads` per row of ld elements. */
template <class T> struct pieces {
    T *p; /* the first piece, or NULL */
    int64_t ld;
};

/* What forward and backward know of the norm. */
template <class T, bool MEAN> struct known {
    const T *w, *b;
    float *mean, *rstd;
    float eps, plus; /* plus: on w */
    unsigned all;    /* pieces of all rows, at most PIECES */
    int heads, c;
};

/* LayerNorm has whole rows, one behind the other. */
template <class S, class T, bool MEAN>
static __device__ __forceinline__ S *piece(const known<T, MEAN> &n,
                                           const pieces<S> &s, unsigned i)
{
    if constexpr (MEAN)
        return s.p + (int64_t)i * n.c;
    else
        return s.p + i / n.heads * s.ld + i % n.heads * n.c;
}

/* The piece of this thread's team when every team has one. */
template <int TEAM> static __device__ unsigned team_piece(void)
{
    return blockIdx.x * (THREADS / TEAM) + threadIdx.x / TEAM;
}

/* Columns of piece i, 0 where there is none: then its team goes along with the
 * others of its warp.  A block has a piece. */
template <int TEAM, class T, bool MEAN>
static __device__ int columns(const known<T, MEAN> &n, unsigned i)
{
    return TEAM == THREADS || i < n.all ? n.c : 0;
}

/* Over the team; all threads of the warp call. */
template <int TEAM> static __device__ float team_sum(float v)
{
    if constexpr (TEAM == THREADS)
        return iz_block_sum(v);
    else
        return iz_lanes_sum<TEAM>(v);
}

/* The sum of f of the c elements of a piece. */
template <int TEAM, int N, class T, class F>
static __device__ float sum_of(const T *a, int c, int lane, const F &f)
{
    float sum = 0, v[AHEAD][N];
    for (int at = lane * N; at < c; at += AHEAD * TEAM * N) {
        iz_load_ahead<TEAM * N>(v, a, at, c);
        for (int k = 0; k < AHEAD; k++)
            for (int j = 0; j < N; j++)
                sum += at + k * TEAM * N < c ? f(v[k][j]) : 0;
    }
    return team_sum<TEAM>(sum);
}

/* y may be a; kept.p may be NULL. */
template <class T, bool MEAN> struct forward {
    known<T, MEAN> n;
    pieces<T> y, kept;
    pieces<const T> a;
    bool again;
};

/* Forward and the second forward share this down to the rounding. */
template <int TEAM, int N, class T, bool MEAN>
static __device__ void apply(const forward<T, MEAN> &p, unsigned i, int c,
                             float mean, float rstd, int lane)
{
    const T *a = piece(p.n, p.a, i);
    T *y = piece(p.n, p.y, i);
    float v[N], w[N], b[N] = {};
    for (int at = lane * N; at < c; at += TEAM * N) {
        iz_load_row(v, a + at);
        iz_load_row(w, p.n.w + at);
        if constexpr (MEAN)
            iz_load_row(b, p.n.b + at);
        else if (p.kept.p)
            iz_store_row(piece(p.n, p.kept, i) + at, v);
        for (int j = 0; j < N; j++) {
            w[j] += p.n.plus;
            v[j] = MEAN ? __fmaf_rn(__fmul_rn(__fsub_rn(v[j], mean), rstd),
                                    w[j], b[j])
                        : __fmul_rn(__fmul_rn(v[j], rstd), w[j]);
        }
        iz_store_row(y + at, v);
    }
}

/* Moves one element in and one out, or two where they are kept: 4 or 6 bytes
 * with 16-bit types. */
template <class T, bool MEAN, int N, int TEAM>
static __global__ void __launch_bounds__(THREADS) normalise(forward<T, MEAN> p)
{
    unsigned i = team_piece<TEAM>();
    int c = columns<TEAM>(p.n, i), lane = (int)threadIdx.x % TEAM;
    float mean = 0, rstd = 0;
    if (!p.again) {
        const T *a = piece(p.n, p.a, i);
        if constexpr (MEAN)
            mean = sum_of<TEAM, N>(a, c, lane, [](float v) { return v; }) /
                   (float)p.n.c;
        float sum = sum_of<TEAM, N>(a, c, lane, [=](float v) {
            float d = MEAN ? v - mean : v;
            return d * d;
        });
        rstd = 1 / sqrtf(sum / (float)p.n.c + p.n.eps);
        if (c && lane == 0) {
            if constexpr (MEAN)
                p.n.mean[i] = mean;
            p.n.rstd[i] = rstd;
        }
    } else if (c) {
        mean = MEAN ? p.n.mean[i] : 0;
        rstd = p.n.rstd[i];
    }
    apply<TEAM, N>(p, i, c, mean, rstd, lane);
}

/* dx may be r or dy: whoever writes an element has read it, and the sums over
 * its piece are done. */
template <class T, bool MEAN> struct backward {
    known<T, MEAN> n;
    pieces<T> dx;
    pieces<const T> r, dy, a; /* r.p may be NULL */
    float *partial; /* [parts, c] of dw, with MEAN [parts, 2, c] of dw and db */
    int parts;
};

/* What a piece needs beyond its elements: means of g = dy w and of g xhat. */
struct means {
    float mean, rstd, g, ghat;
};

template <bool MEAN>
static __device__ __forceinline__ float xhat(float a, float mean, float rstd)
{
    return (MEAN ? a - mean : a) * rstd;
}

/* A parts of the piece at once. */
template <int TEAM, int A, int N, class T, bool MEAN>
static __device__ struct means means_of(const backward<T, MEAN> &p, unsigned i,
                                        int c, int lane)
{
    const T *from_dy = piece(p.n, p.dy, i), *from_a = piece(p.n, p.a, i);
    float mean = MEAN && c ? p.n.mean[i] : 0, rstd = c ? p.n.rstd[i] : 0;
    float g = 0, ghat = 0, dy[A][N], a[A][N], w[A][N];
#pragma unroll 1
    for (int at = lane * N; at < c; at += A * TEAM * N) {
        iz_load_ahead<TEAM * N>(dy, from_dy, at, c);
        iz_load_ahead<TEAM * N>(a, from_a, at, c);
        iz_load_ahead<TEAM * N>(w, p.n.w, at, c);
        for (int k = 0; k < A; k++)
            for (int j = 0; j < N; j++) {
                bool in = at + k * TEAM * N < c;
                float v = dy[k][j] * (w[k][j] + p.n.plus);
                if constexpr (MEAN)
                    g += in ? v : 0;
                ghat += in ? v * xhat<MEAN>(a[k][j], mean, rstd) : 0;
            }
    }
    if constexpr (MEAN)
        g = team_sum<TEAM>(g) / (float)p.n.c;
    return {mean, rstd, g, team_sum<TEAM>(ghat) / (float)p.n.c};
}

/* N elements of dx from `at` on; r comes as the residual or zeros.  Adds what
 * they mean for dw and db to gw and gb. */
template <int N, class T, bool MEAN>
static __device__ void write_dx(const backward<T, MEAN> &p, unsigned i,
                                const struct means &v, int at, float (&r)[N],
                                float (&gw)[N], float (&gb)[N])
{
    float dy[N], a[N], w[N];
    iz_load_row(dy, piece(p.n, p.dy, i) + at);
    iz_load_row(a, piece(p.n, p.a, i) + at);
    iz_load_row(w, p.n.w + at);
    for (int j = 0; j < N; j++) {
        float hat = xhat<MEAN>(a[j], v.mean, v.rstd);
        gw[j] += dy[j] * hat;
        w[j] += p.n.plus;
        if constexpr (MEAN) {
            gb[j] += dy[j];
            r[j] += v.rstd * (dy[j] * w[j] - v.g - hat * v.ghat);
        } else {
            r[j] += v.rstd * (dy[j] * w[j] - hat * v.ghat);
        }
    }
    iz_store_row(piece(p.n, p.dx, i) + at, r);
}

/* Only dx.  Moves with 16-bit types 8 bytes per element, 6 without r. */
template <class T, bool MEAN, int N, int TEAM>
static __global__ void __launch_bounds__(THREADS)
    backward_dx(backward<T, MEAN> p)
{
    unsigned i = team_piece<TEAM>();
    int c = columns<TEAM>(p.n, i), lane = (int)threadIdx.x % TEAM;
    struct means v = means_of<TEAM, AHEAD, N>(p, i, c, lane);
    float gw[N] = {}, gb[N] = {};
    for (int at = lane * N; at < c; at += TEAM * N) {
        float r[N] = {};
        if (p.r.p)
            iz_load_row(r, piece(p.n, p.r, i) + at);
        write_dx(p, i, v, at, r, gw, gb);
    }
}

/* The K parts of all teams of the block, added in the order of the teams. */
template <int TEAM, int K, int N>
static __device__ void write_partial(float *partial, int c,
                                     const float (&g)[K][N])
{
    int lane = (int)threadIdx.x % TEAM;
    if constexpr (TEAM == THREADS) {
#pragma unroll
        for (int k = 0; k < K; k++)
            if ((k * TEAM + lane) * N < c)
                iz_store_row(partial + (k * TEAM + lane) * N, g[k]);
    } else {
        __shared__ float sum[TEAM * K * N];
        for (int t = 0; t < THREADS / TEAM; t++) {
#pragma unroll
            for (int i = 0; i < K * N; i++) {
                float *s = sum + (i / N * TEAM + lane) * N + i % N;
                if (t == (int)threadIdx.x / TEAM)
                    *s = (t ? *s : 0) + g[i / N][i % N];
            }
            __syncthreads();
        }
        for (int i = (int)threadIdx.x; i < c; i += THREADS)
            partial[i] = sum[i];
        __syncthreads(); /* before the next use of sum */
    }
}

/* dx, and the sums of part blockIdx.x for dw and db, which threads keep in
 * registers: a piece has at most K parts per thread, which are loaded at once,
 * and, where registers allow, the residual with them.  Piece i belongs to part
 * i mod parts.  Moves with 16-bit types 8 bytes per element, 6 without r. */
template <class T, bool MEAN, int N, int TEAM, int K>
static __global__ void __launch_bounds__(THREADS, K == 1 ? 4 : 2)
    backward_fused(backward<T, MEAN> p)
{
    constexpr bool at_once = MEAN || K < 4;
    int lane = (int)threadIdx.x % TEAM;
    float gw[K][N] = {}, gb[K][N] = {};
    /* All teams go on while the first has a piece, for the sums. */
    for (unsigned first = blockIdx.x; first < p.n.all;
         first += p.parts * (THREADS / TEAM)) {
        unsigned i = first + p.parts * (threadIdx.x / TEAM);
        int c = columns<TEAM>(p.n, i);
        const T *from = p.r.p ? piece(p.n, p.r, i) : NULL;
        float r[K][N] = {};
        if (at_once && c && from)
            iz_load_ahead<TEAM * N>(r, from, lane * N, c);
        struct means v = means_of<TEAM, K, N>(p, i, c, lane);
#pragma unroll
        for (int k = 0; k < K; k++) {
            int at = (k * TEAM + lane) * N;
            if (at >= c)
                continue;
            if (!at_once && from)
                iz_load_row(r[k], from + at);
            write_dx(p, i, v, at, r[k], gw[k], gb[k]);
        }
    }
    p.partial += (int64_t)blockIdx.x * (MEAN ? 2 : 1) * p.n.c;
    write_partial<TEAM>(p.partial, p.n.c, gw);
    if constexpr (MEAN)
        write_partial<TEAM>(p.partial + p.n.c, p.n.c, gb);
}

/* The same sums of part blockIdx.y for pieces that are too long, a thread for N
 * columns. */
template <class T, bool MEAN, int N>
static __global__ void __launch_bounds__(THREADS)
    backward_columns(backward<T, MEAN> p)
{
    int at = (int)(blockIdx.x * THREADS + threadIdx.x) * N;
    float gw[N] = {}, gb[N] = {}, dy[N], a[N];
    if (at >= p.n.c)
        return;
    for (int64_t i = blockIdx.y; i < p.n.all; i += p.parts) {
        float mean = MEAN ? p.n.mean[i] : 0, rstd = p.n.rstd[i];
        iz_load_row(dy, piece(p.n, p.dy, i) + at);
        iz_load_row(a, piece(p.n, p.a, i) + at);
        for (int j = 0; j < N; j++) {
            gw[j] += dy[j] * xhat<MEAN>(a[j], mean, rstd);
            gb[j] += dy[j];
        }
    }
    p.partial += (int64_t)blockIdx.y * (MEAN ? 2 : 1) * p.n.c + at;
    iz_store_row(p.partial, gw);
    if constexpr (MEAN)
        iz_store_row(p.partial + p.n.c, gb);
}

/* dw and db [c] = sums over the parts of partial [parts, cols], 32 columns per
 * block: each warp adds every 32nd part, then one warp adds the warps in order.
 */
template <class T>
static __global__ void __launch_bounds__(32 * GROUPS)
    sum_parts(T *dw, T *db, const float *partial, int parts, int c, int cols)
{
    __shared__ float group[GROUPS][32];
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    int col = (int)blockIdx.x * 32 + lane;
    float sum = 0;
    for (int i = warp; i < parts && col < cols; i += GROUPS)
        sum += partial[(int64_t)i * cols + col];
    group[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || col >= cols)
        return;
    for (int i = 1; i < GROUPS; i++)
        sum += group[i][lane];
    if (col < c && dw)
        iz_store(dw + col, sum);
    if (col >= c && db)
        iz_store(db + col - c, sum);
}

/* ---- launches ----------------------------------------------------------- */

/* Rows of v, and of its heads from column `first` on. */
template <class T> static pieces<T> pieces_of(struct iz_view v, int64_t first)
{
    return {v.p ? (T *)v.p + first : NULL, v.cols};
}

template <class T> static bool whole(const pieces<T> &s)
{
    return iz_pieces_aligned<T>(s.ld, s.p);
}

template <class T, bool MEAN>
static known<T, MEAN> known_of(struct iz_view out, struct iz_view a,
                               const struct iz_norm_layer &n)
{
    const char *name = MEAN ? "layernorm" : "rmsnorm";
    int64_t all = iz_view_len(n.rstd);
    if (n.w.dtype != a.dtype || out.dtype != a.dtype)
        iz_die("%s of %s with weights of %s", name, iz_dtype_name(a.dtype),
               iz_dtype_name(n.w.dtype));
    if (all > PIECES)
        iz_die("%s of %lld pieces: too many", name, (long long)all);
    return {(const T *)n.w.p,
            (const T *)n.b.p,
            (float *)n.mean.p,
            (float *)n.rstd.p,
            n.eps,
            n.plus_one ? 1.f : 0.f,
            (unsigned)all,
            (int)(all / a.rows),
            (int)n.w.cols};
}

/* A team of half a warp pays where a piece has one part for each of its
 * threads; LayerNorm has none. */
template <bool MEAN> static constexpr int least_team = MEAN ? 32 : 16;

/* Threads of a team for parts of n elements. */
template <bool MEAN> static int team_for(int c, int n)
{
    if (c <= least_team<MEAN> * n)
        return least_team<MEAN>;
    return c <= AHEAD * 32 * n ? 32 : THREADS;
}

/* The kernel for a piece: that for the smallest team, for a warp, or for the
 * block. */
template <class P>
static void launch_teams(struct iz_exec *x, const P &p, int team,
                         void (*least)(P), void (*warp)(P), void (*block)(P))
{
    unsigned teams = (unsigned)(THREADS / team);
    void (*k)(P) = team < 32 ? least : team == 32 ? warp : block;
    IZ_LAUNCH(k, (p.n.all + teams - 1) / teams, THREADS, 0, x->stream, p);
}

template <class T, bool MEAN, int N>
static void launch_forward(struct iz_exec *x, const forward<T, MEAN> &p)
{
    launch_teams(x, p, team_for<MEAN>(p.n.c, N),
                 normalise<T, MEAN, N, least_team<MEAN>>,
                 normalise<T, MEAN, N, 32>, normalise<T, MEAN, N, THREADS>);
}

/* Pieces of a from column `first` on into y. */
template <bool MEAN>
static void start_forward(struct iz_exec *x, struct iz_view y,
                          struct iz_view kept, struct iz_view a,
                          const struct iz_norm_layer &n, int64_t first,
                          bool again)
{
    iz_by_type(a.dtype, [&](auto zero) {
        using T = decltype(zero);
        forward<T, MEAN> p = {known_of<T, MEAN>(y, a, n),
                              pieces_of<T>(y, first), pieces_of<T>(kept, 0),
                              pieces_of<const T>(a, first), again};
        if (whole(p.y) && whole(p.a) && whole(p.kept) &&
            iz_pieces_aligned<T>(p.n.c, p.n.w, p.n.b))
            launch_forward<T, MEAN, 16 / sizeof(T)>(x, p);
        else
            launch_forward<T, MEAN, 1>(x, p);
    });
}

template <class T, bool MEAN, int N>
static void launch_dx(struct iz_exec *x, const backward<T, MEAN> &p)
{
    launch_teams(x, p, team_for<MEAN>(p.n.c, N),
                 backward_dx<T, MEAN, N, least_team<MEAN>>,
                 backward_dx<T, MEAN, N, 32>, backward_dx<T, MEAN, N, THREADS>);
}

/* K is part of what comes out: what the compiler contracts depends on it. Warps
 * of RMSNorm always take four parts. */
template <class T, bool MEAN, int N, int TEAM>
static void launch_fused(struct iz_exec *x, const backward<T, MEAN> &p)
{
    int each = (p.n.c + TEAM * N - 1) / (TEAM * N);
    constexpr int most = TEAM < 32 ? 1 : 4;
    void (*k)(backward<T, MEAN>) = backward_fused<T, MEAN, N, TEAM, most>;
    if constexpr (TEAM == THREADS || MEAN) {
        if (each == 1)
            k = backward_fused<T, MEAN, N, TEAM, 1>;
        else if (each == 2)
            k = backward_fused<T, MEAN, N, TEAM, 2>;
        else if (each == 3)
            k = backward_fused<T, MEAN, N, TEAM, 3>;
    }
    IZ_LAUNCH(k, p.parts, THREADS, 0, x->stream, p);
}

template <class T, bool MEAN, int N>
static void launch_backward(struct iz_exec *x, const backward<T, MEAN> &p,
                            struct iz_view dw, struct iz_view db)
{
    int team = team_for<MEAN>(p.n.c, N), cols = (MEAN ? 2 : 1) * p.n.c;
    if (!dw.p && !db.p) {
        launch_dx<T, MEAN, N>(x, p);
        return;
    }
    if (p.n.c > 4 * THREADS * N) {
        dim3 grid(iz_blocks(p.n.c, THREADS * N), p.parts);
        IZ_LAUNCH((backward_columns<T, MEAN, N>), grid, THREADS, 0, x->stream,
                  p);
        launch_dx<T, MEAN, N>(x, p); /* later, because dx may replace dy */
    } else if (team == THREADS)
        launch_fused<T, MEAN, N, THREADS>(x, p);
    else if (team == 32)
        launch_fused<T, MEAN, N, 32>(x, p);
    else
        launch_fused<T, MEAN, N, least_team<MEAN>>(x, p);
    iz_by_type(dw.p ? dw.dtype : db.dtype, [&](auto zero) {
        using O = decltype(zero);
        IZ_LAUNCH((sum_parts<O>), (cols + 31) / 32, 32 * GROUPS, 0, x->stream,
                  (O *)dw.p, (O *)db.p, (const float *)p.partial, p.parts,
                  p.n.c, cols);
    });
}

/* Pieces of dx, dy and r from column `first` on, of a from the start.  scratch
 * is what `partial` needs. */
template <bool MEAN>
static void start_backward(struct iz_exec *x, struct iz_view dx,
                           struct iz_view r, struct iz_view dy,
                           struct iz_view a, const struct iz_norm_layer &n,
                           int64_t first, struct iz_view scratch)
{
    iz_by_type(a.dtype, [&](auto zero) {
        using T = decltype(zero);
        backward<T, MEAN> p = {known_of<T, MEAN>(dx, a, n),
                               pieces_of<T>(dx, first),
                               pieces_of<const T>(r, first),
                               pieces_of<const T>(dy, first),
                               pieces_of<const T>(a, 0),
                               (float *)scratch.p,
                               (int)(scratch.rows / (MEAN ? 2 : 1))};
        if (whole(p.dx) && whole(p.r) && whole(p.dy) && whole(p.a) &&
            iz_pieces_aligned<T>(p.n.c, p.n.w))
            launch_backward<T, MEAN, 16 / sizeof(T)>(x, p, n.dw, n.db);
        else
            launch_backward<T, MEAN, 1>(x, p, n.dw, n.db);
    });
}

/* ---- the ops ------------------------------------------------------------ */

void iz_norm_layer_fwd_cuda(struct iz_exec *x, struct iz_view y,
                            struct iz_view a, const struct iz_norm_layer *n,
                            bool again)
{
    auto start = n->mean.rows ? start_forward<true> : start_forward<false>;
    start(x, y, {}, a, *n, 0, again);
}

/* scratch fp32 [parts, c], of LayerNorm [2 parts, c]. */
void iz_norm_layer_bwd_cuda(struct iz_exec *x, struct iz_view dx,
                            struct iz_view r, struct iz_view dy,
                            struct iz_view a, const struct iz_norm_layer *n,
                            struct iz_view scratch)
{
    auto start = n->mean.rows ? start_backward<true> : start_backward<false>;
    start(x, dx, r, dy, a, *n, 0, scratch);
}

void iz_norm_head_cuda(struct iz_exec *x, struct iz_view a, struct iz_view kept,
                       const struct iz_norm_layer *n, int64_t first, bool back,
                       struct iz_view scratch)
{
    if (back)
        start_backward<false>(x, a, {}, a, kept, *n, first, scratch);
    else
        start_forward<false>(x, a, kept, a, *n, first, false);
}
