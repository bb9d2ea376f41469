/* SPDX-License-Identifier: Apache-2.0 */
/* Token and position embedding, and tables of rows, on a GPU.  Backward sorts
 * the positions by token and adds each token's rows in ascending order of
 * position.  The keys, token and position together, are all different, so that
 * there is only one sorted order and timing has no part in the result. */
#include "codelets/kernels/launch.cuh"

#include "codelets/ops/embedding.h"
#include "codelets/ops/gpu_ops.h"

enum {
    THREADS = 256,
    WARPS = THREADS / 32,
    RUN = 1024, /* keys that a block sorts */
    AHEAD = 4,  /* rows that a thread loads at once */
    PIECE = IZ_EMBEDDING_PIECE,
    SLOT = IZ_EMBEDDING_SLOT
};

/* Tokens, and the part of the vocabulary that a table has.  Or positions, the
 * token being what is taken from the number of a row of its sample. */
struct lookup {
    const int32_t *token; /* [rows] */
    int64_t rows, first, vocab;
    bool positions;
};

/* The table's row of a token, or its number of rows. */
static __device__ int64_t row_of(int32_t token, int64_t first, int64_t vocab)
{
    int64_t row = token - first;
    return row >= 0 && row < vocab ? row : vocab;
}

/* Of the token of row t. */
static __device__ uint64_t row_at(const struct lookup &l, int64_t t)
{
    return l.positions ? (uint64_t)(t % l.vocab - l.token[t])
                       : (uint64_t)row_of(l.token[t], l.first, l.vocab);
}

/* y [rows, c], a warp per row and 32 N columns of it; r or zeros where the
 * table has not the token.  The tokens lie in host memory, so a block reads
 * them in one go.  Moves with 16-bit types 4 bytes per element and wpe once. */
template <class T, int N>
static __global__ void __launch_bounds__(THREADS)
    embed(T *y, struct lookup l, const T *wte, const T *wpe, const T *r,
          const int32_t *begins, int64_t seq, int64_t c)
{
    __shared__ int32_t tokens[WARPS], starts[WARPS];
    int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x;
    float v[N], p[N];
    if (threadIdx.x < WARPS && row < l.rows) {
        tokens[threadIdx.x] = l.token[row];
        starts[threadIdx.x] = begins ? begins[row] : 0;
    }
    __syncthreads();
    row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    if (row >= l.rows)
        return;
    int64_t at_table = row_of(tokens[threadIdx.x / 32], l.first, l.vocab);
    const T *from = r ? r + row * c : NULL;
    if (at_table < l.vocab)
        from = wte + at_table * c;
    wpe += wpe ? (row % seq - starts[threadIdx.x / 32]) * c : 0;
    for (int64_t at = threadIdx.x % 32 * N; at < c; at += 32 * N) {
        for (int j = 0; j < N; j++)
            v[j] = 0;
        if (from)
            iz_load_row(v, from + at);
        if (wpe) {
            iz_load_row(p, wpe + at);
            for (int j = 0; j < N; j++)
                v[j] += p[j];
        }
        iz_store_row(y + row * c + at, v);
    }
}

/* Sorts runs of RUN keys, row of the table * 2^32 + position, by bitonic
 * merging; keys beyond n are larger than all. */
static __global__ void __launch_bounds__(RUN / 2)
    sort_runs(uint64_t *keys, struct lookup l)
{
    __shared__ uint64_t key[RUN];
    int64_t base = (int64_t)blockIdx.x * RUN;
    for (int i = threadIdx.x; i < RUN; i += RUN / 2)
        key[i] = base + i < l.rows ? row_at(l, base + i) << 32 | (base + i)
                                   : UINT64_MAX;
    for (int size = 2; size <= RUN; size *= 2)
        for (int step = size / 2; step > 0; step /= 2) {
            int i = threadIdx.x / step * 2 * step + threadIdx.x % step;
            bool down = i & size;
            __syncthreads();
            uint64_t a = key[i], b = key[i + step];
            if ((a > b) != down) {
                key[i] = b;
                key[i + step] = a;
            }
        }
    __syncthreads();
    for (int i = threadIdx.x; i < RUN && base + i < l.rows; i += RUN / 2)
        keys[base + i] = key[i];
}

/* The number of keys[0..n) that are less than key. */
static __device__ int64_t count_less(const uint64_t *keys, int64_t n,
                                     uint64_t key)
{
    int64_t from = 0;
    while (n > 0) {
        int64_t half = n / 2;
        bool less = keys[from + half] < key;
        from = less ? from + half + 1 : from;
        n = less ? n - half - 1 : half;
    }
    return from;
}

/* Merges neighbouring sorted runs of len keys: a key goes to its place in its
 * own run plus its place in the other. */
static __global__ void __launch_bounds__(THREADS)
    merge_runs(uint64_t *to, const uint64_t *keys, int64_t n, int64_t len)
{
    int64_t i = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    int64_t run = i / len, other = (run ^ 1) * len;
    if (i >= n)
        return;
    int64_t room = min(len, max((int64_t)0, n - other));
    int64_t at = i - run * len + count_less(keys + other, room, keys[i]);
    to[run / 2 * 2 * len + at] = keys[i];
}

/* first[v] = the first of token v's keys, or of the next token's. */
static __global__ void __launch_bounds__(THREADS)
    find_tokens(int32_t *first, const uint64_t *keys, int64_t n, int64_t vocab)
{
    int64_t v = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    if (v <= vocab)
        first[v] = (int32_t)count_less(keys, n, (uint64_t)v << 32);
}

/* sum = the rows of `from` with the numbers that keys[0..n) end with, in
 * order. */
template <class T, int N>
static __device__ void add_rows(float (&sum)[N], const T *from,
                                const uint64_t *keys, int64_t n, int64_t c)
{
    float v[AHEAD][N];
    for (int64_t i = 0; i < n; i += AHEAD) {
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            iz_load_row(v[k], from + (uint32_t)keys[min(i + k, n - 1)] * c);
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            for (int j = 0; j < N; j++)
                sum[j] = i + k < n ? sum[j] + v[k][j] : sum[j];
    }
}

struct sorted {
    const uint64_t *keys; /* [n] */
    const int32_t *first; /* [vocab + 1] */
    int64_t n, vocab, c;
};

/* A token with more than PIECE positions is summed in pieces.  The sum of its
 * piece k is in slot first / SLOT + k.  Slots of different tokens differ, as a
 * token with count > 2 SLOT positions has at most count / SLOT pieces, rounded
 * down; and position SLOT s + SLOT - 1 belongs to the token of slot s, if that
 * slot has one. */
template <class T, int N>
static __global__ void __launch_bounds__(32)
    sum_pieces(float *sums, const T *dy, struct sorted s)
{
    int64_t slot = blockIdx.x,
            at = ((int64_t)blockIdx.y * 32 + threadIdx.x) * N;
    int64_t token = s.keys[min(slot * SLOT + SLOT - 1, s.n - 1)] >> 32;
    if (token >= s.vocab) /* not in the table */
        return;
    int64_t first = s.first[token], end = s.first[token + 1];
    int64_t from = first + (slot - first / SLOT) * PIECE;
    float sum[N] = {};
    if (end - first <= PIECE || from < first || from >= end || at >= s.c)
        return;
    add_rows(sum, dy + at, s.keys + from, min((int64_t)PIECE, end - from), s.c);
    iz_store_row(sums + slot * s.c + at, sum);
}

/* A row of dwte: zero, the rows of dy, or the sums of pieces in order.  A warp
 * for 32 N columns.  Moves dwte once and the rows of dy once. */
template <class T, int N>
static __global__ void __launch_bounds__(THREADS)
    sum_tokens(T *dwte, const float *sums, const T *dy, struct sorted s)
{
    int64_t v = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    int64_t at = ((int64_t)blockIdx.y * 32 + threadIdx.x % 32) * N;
    float sum[N] = {}, part[N];
    if (v >= s.vocab || at >= s.c)
        return;
    int64_t first = s.first[v], count = s.first[v + 1] - first;
    if (count <= PIECE)
        add_rows(sum, dy + at, s.keys + first, count, s.c);
    for (int64_t k = 0; count > PIECE && k * PIECE < count; k++) {
        iz_load_row(part, sums + (first / SLOT + k) * s.c + at);
        for (int j = 0; j < N; j++)
            sum[j] += part[j];
    }
    iz_store_row(dwte + v * s.c + at, sum);
}

/* A row of dwpe: the rows p, p + seq, ... of dy in order.  Moves dy once. */
template <class T, int N>
static __global__ void __launch_bounds__(THREADS)
    sum_positions(T *dwpe, const T *dy, int64_t seq, int64_t rows, int64_t c)
{
    int64_t p = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32;
    int64_t at = ((int64_t)blockIdx.y * 32 + threadIdx.x % 32) * N;
    float sum[N] = {}, v[AHEAD][N];
    if (p >= seq || at >= c)
        return;
    for (int64_t t = p; t < rows; t += AHEAD * seq) {
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            iz_load_row(v[k],
                        dy + (t + k * seq < rows ? t + k * seq : t) * c + at);
#pragma unroll
        for (int k = 0; k < AHEAD; k++)
            for (int j = 0; j < N; j++)
                sum[j] = t + k * seq < rows ? sum[j] + v[k][j] : sum[j];
    }
    iz_store_row(dwpe + p * c + at, sum);
}

void iz_table_fwd_cuda(struct iz_exec *x, struct iz_view y, struct iz_view r,
                       const struct iz_table *t)
{
    struct lookup l = {t->row, y.rows, t->first, t->w.rows, false};
    void *wpe = t->wpe.rows ? t->wpe.p : NULL, *kept = r.rows ? r.p : NULL;
    if (t->w.dtype != y.dtype || (t->wpe.rows && t->wpe.dtype != y.dtype))
        iz_die("embedding of %s with weights of %s", iz_dtype_name(y.dtype),
               iz_dtype_name(t->w.dtype));
    iz_by_type(y.dtype, [&](auto zero) {
        using T = decltype(zero);
        bool pieces = iz_pieces_aligned<T>(y.cols, y.p, t->w.p, wpe, kept);
        IZ_LAUNCH((pieces ? embed<T, 16 / sizeof(T)> : embed<T, 1>),
                  iz_blocks(y.rows, WARPS), THREADS, 0, x->stream, (T *)y.p, l,
                  (const T *)t->w.p, (const T *)wpe, (const T *)kept,
                  (const int32_t *)t->begins.p, t->wpe.rows, y.cols);
    });
}

/* Returns where the sorted keys are. */
static uint64_t *sort_keys(struct iz_exec *x, uint64_t *keys, uint64_t *other,
                           const struct lookup &l)
{
    int64_t n = l.rows;
    IZ_LAUNCH(sort_runs, iz_blocks(n, RUN), RUN / 2, 0, x->stream, keys, l);
    for (int64_t len = RUN; len < n; len *= 2) {
        uint64_t *from = keys;
        IZ_LAUNCH(merge_runs, iz_blocks(n, THREADS), THREADS, 0, x->stream,
                  other, (const uint64_t *)from, n, len);
        keys = other;
        other = from;
    }
    return keys;
}

template <class T, int N>
static void launch_tokens(struct iz_exec *x, struct iz_view dwte,
                          struct iz_view dy, const struct lookup &l, char *base)
{
    struct iz_embedding_scratch at =
        iz_embedding_scratch_of(dy.rows, dwte.rows, dy.cols);
    uint64_t *keys = (uint64_t *)(base + at.keys);
    uint64_t *other = (uint64_t *)(base + at.other);
    int32_t *first = (int32_t *)(base + at.first);
    float *sums = (float *)(base + at.sums);
    unsigned chunks = iz_blocks(dy.cols, 32 * N);
    keys = sort_keys(x, keys, other, l);
    IZ_LAUNCH(find_tokens, iz_blocks(dwte.rows + 1, THREADS), THREADS, 0,
              x->stream, first, (const uint64_t *)keys, dy.rows, dwte.rows);

    struct sorted s = {keys, first, dy.rows, dwte.rows, dy.cols};
    IZ_LAUNCH((sum_pieces<T, N>), dim3((unsigned)at.slots, chunks), 32, 0,
              x->stream, sums, (const T *)dy.p, s);
    IZ_LAUNCH((sum_tokens<T, N>), dim3(iz_blocks(dwte.rows, WARPS), chunks),
              THREADS, 0, x->stream, (T *)dwte.p, (const float *)sums,
              (const T *)dy.p, s);
}

template <class T, int N>
static void launch_backward(struct iz_exec *x, struct iz_view dwte,
                            struct iz_view dwpe, struct iz_view dy,
                            const struct lookup &l, const int32_t *begins,
                            char *scratch)
{
    struct lookup of_positions = {begins, dy.rows, 0, dwpe.rows, true};
    dim3 grid(iz_blocks(dwpe.rows, WARPS), iz_blocks(dy.cols, 32 * N));
    if (dwte.p)
        launch_tokens<T, N>(x, dwte, dy, l, scratch);
    if (!dwpe.rows || !dwpe.p)
        return;
    if (begins) /* documents may be many: positions are sorted as tokens are */
        launch_tokens<T, N>(x, dwpe, dy, of_positions, scratch);
    else
        IZ_LAUNCH((sum_positions<T, N>), grid, THREADS, 0, x->stream,
                  (T *)dwpe.p, (const T *)dy.p, dwpe.rows, dy.rows, dy.cols);
}

void iz_table_bwd_cuda(struct iz_exec *x, struct iz_view dy,
                       const struct iz_table *t, struct iz_view scratch)
{
    struct iz_view dw = t->dw, dwpe = t->dwpe;
    struct lookup l = {t->row, dy.rows, t->first, dw.rows, false};
    const int32_t *begins = (const int32_t *)t->begins.p;
    char *base = (char *)scratch.p;
    if (dw.dtype != dy.dtype || (dwpe.rows && dwpe.dtype != dy.dtype))
        iz_die("embedding's gradient of %s from %s", iz_dtype_name(dw.dtype),
               iz_dtype_name(dy.dtype));
    iz_by_type(dy.dtype, [&](auto zero) {
        using T = decltype(zero);
        if (iz_pieces_aligned<T>(dy.cols, dw.p, dwpe.p, dy.p))
            launch_backward<T, 16 / sizeof(T)>(x, dw, dwpe, dy, l, begins,
                                               base);
        else
            launch_backward<T, 1>(x, dw, dwpe, dy, l, begins, base);
    });
}
