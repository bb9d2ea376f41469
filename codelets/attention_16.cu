/* SPDX-License-Identifier: Apache-2.0 */
/* Attention of 16-bit activations on tensor cores, a tile of the scores at a
 * time, by the algorithm of FlashAttention-2 (Dao 2023, arXiv 2307.08691).
 *
 * A warp owns MT times 16 rows of its block's tile for the whole kernel: rows
 * of queries, or in `key_grads` of keys, with the scores transposed.  So a row
 * of scores never leaves its four lanes, and probabilities go from the result
 * of one product into the operand of the next within registers.  They are
 * rounded to the 16-bit type there; all sums are fp32.
 *
 * Backward visits every tile of the scores twice, once to sum over queries (dk,
 * dv) and once to sum over keys (dq).  That is seven products where five would
 * do, but nothing is added by atomics, so the bits never change.
 *
 * Widths are padded to DP columns of zeros in shared memory, where rows are 16
 * bytes longer than that, so that eight of them lie in different banks. */
#include "codelets/attention.cuh"
#include "codelets/launch.cuh"
#include "codelets/mma.cuh"

#define LOG2E 1.44269504088896340736f
#define LN2 0.69314718055994530942f

/* Elements from one row in shared memory to the next. */
template <int DP> constexpr int pitch = DP + 8;

/* Where this lane's element e of fragment j lies in a tile of 16-row pieces. */
static __device__ __forceinline__ int frag_row(int m, int e)
{
    return 16 * m + (int)threadIdx.x % 32 / 4 + e / 2 * 8;
}

static __device__ __forceinline__ int frag_col(int j, int e)
{
    return 8 * j + (int)threadIdx.x % 4 * 2 + e % 2;
}

/* Starts the copy of ROWS rows, zeros after the first `left` of them and after
 * d columns.  LANES neighbours share a row, a power of two, so that a thread's
 * pieces lie at fixed distances and its turns unroll. */
template <int DP, int ROWS, int NW>
static __device__ __forceinline__ void
load_rows(uint16_t *to, const uint16_t *from, int ld, int left, int d)
{
    constexpr int pieces = DP / 8, LANES = pieces & -pieces;
    constexpr int STEP = 32 * NW / LANES;
    int row = (int)threadIdx.x / LANES, col = (int)threadIdx.x % LANES * 8;
    static_assert(ROWS % STEP == 0, "whole turns of all threads");

    to += row * pitch<DP> + col;
    from += row * ld + col;
#pragma unroll
    for (int r = 0; r < ROWS; r += STEP, from += STEP * ld)
#pragma unroll
        for (int c = 0; c < DP; c += 8 * LANES)
            iz_copy_start<16>(to + r * pitch<DP> + c, from + c,
                              r < left - row && c < d - col);
}

/* Columns k to k + 15 of 16 MT rows in shared memory. */
template <int DP, int MT>
static __device__ __forceinline__ void load_columns(uint32_t (&r)[MT][4],
                                                    const uint16_t *rows, int k)
{
    int lane = (int)threadIdx.x % 32;

    rows += lane % 16 * pitch<DP> + lane / 16 * 8 + k;
#pragma unroll
    for (int m = 0; m < MT; m++)
        iz_load_matrices(r[m], rows + 16 * m * pitch<DP>);
}

/* s[16 MT, 8 N] += columns a of some rows times the same columns, from b on,
 * of 8 N rows in shared memory. */
template <enum iz_dtype T, int DP, int MT, int N>
static __device__ __forceinline__ void
add_columns(float (&s)[MT][N][4], const uint32_t (&a)[MT][4], const uint16_t *b)
{
    int lane = (int)threadIdx.x % 32;
    uint32_t r[4];

    b += (lane % 8 + lane / 16 * 8) * pitch<DP> + lane / 8 % 2 * 8;
#pragma unroll
    for (int j = 0; j < N; j += 2) {
        iz_load_matrices(r, b + 8 * j * pitch<DP>);
#pragma unroll
        for (int m = 0; m < MT; m++) {
            iz_mma<T>(s[m][j], a[m], r);
            iz_mma<T>(s[m][j + 1], a[m], r + 2);
        }
    }
}

template <int MT, int N>
static __device__ __forceinline__ void clear(float (&s)[MT][N][4])
{
#pragma unroll
    for (int i = 0; i < MT * N * 4; i++)
        s[i / (4 * N)][i / 4 % N][i % 4] = 0;
}

/* s[16 MT, 8 N] = a[16 MT, DP] b[8 N, DP]^T: two sets of rows in shared memory.
 * kept has room for all of a or for one piece of 16 columns; where it has for
 * all, a is only read the `first` time. */
template <enum iz_dtype T, int DP, int MT, int N, int K>
static __device__ __forceinline__ void
rows_by_rows(float (&s)[MT][N][4], uint32_t (&kept)[K][MT][4],
             const uint16_t *a, const uint16_t *b, bool first)
{
    clear(s);
#pragma unroll
    for (int k = 0; k < DP / 16; k++) {
        if (first || K < DP / 16)
            load_columns<DP>(kept[k % K], a, 16 * k);
        add_columns<T, DP>(s, kept[k % K], b + 16 * k);
    }
}

template <enum iz_dtype T, int DP, int MT, int N>
static __device__ __forceinline__ void
rows_by_rows(float (&s)[MT][N][4], const uint16_t *a, const uint16_t *b)
{
    uint32_t piece[1][MT][4];

    rows_by_rows<T, DP>(s, piece, a, b, true);
}

/* acc[16 MT, 8 C] += p[16 MT, 8 N] b[8 N, 8 C], b in shared memory. */
template <enum iz_dtype T, int DP, int MT, int N, int C>
static __device__ __forceinline__ void add_product(float (&acc)[MT][C][4],
                                                   const float (&p)[MT][N][4],
                                                   const uint16_t *b)
{
    int lane = (int)threadIdx.x % 32;
    uint32_t rb[4];

    b += lane % 16 * pitch<DP> + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < N; k += 2) {
        uint32_t ra[MT][4];

#pragma unroll
        for (int i = 0; i < MT * 4; i++) {
            const float(&f)[4] = p[i / 4][k + i / 2 % 2];

            ra[i / 4][i % 4] = iz_pack<T>(f[i % 2 * 2], f[i % 2 * 2 + 1]);
        }
#pragma unroll
        for (int j = 0; j < C; j += 2) {
            iz_load_transposed(rb, b + 8 * k * pitch<DP> + 8 * j);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                iz_mma<T>(acc[m][j], ra[m], rb);
                iz_mma<T>(acc[m][j + 1], ra[m], rb + 2);
            }
        }
    }
}

/* Writes acc, times `by`, through the warp's own rows of shared memory, so that
 * lanes write whole sectors; `left` rows and d columns exist. */
template <enum iz_dtype T, int DP, int MT, int C>
static __device__ __forceinline__ void
store_rows(uint16_t *to, int64_t ld, int left, int d, uint16_t *own,
           const float (&acc)[MT][C][4], float by)
{
    int lane = (int)threadIdx.x % 32;

#pragma unroll
    for (int i = 0; i < MT * C * 2; i++) {
        const float *f = &acc[i / (2 * C)][i / 2 % C][i % 2 * 2];

        iz_put_pair(own + frag_row(i / (2 * C), i % 2 * 2) * pitch<DP> +
                        frag_col(i / 2 % C, 0),
                    iz_pack<T>(f[0] * by, f[1] * by));
    }
    __syncwarp();
    for (int i = lane; i < 16 * MT * C; i += 32) {
        int r = i / C, c = i % C * 8;

        if (r < left && c < d)
            iz_move16(to + r * ld + c, own + r * pitch<DP> + c);
    }
}

/* Over the four lanes that share a row. */
static __device__ __forceinline__ float row_max(float v)
{
    v = fmaxf(v, __shfl_xor_sync(IZ_ALL_LANES, v, 1));
    return fmaxf(v, __shfl_xor_sync(IZ_ALL_LANES, v, 2));
}

static __device__ __forceinline__ float row_sum(float v)
{
    v += __shfl_xor_sync(IZ_ALL_LANES, v, 1);
    return v + __shfl_xor_sync(IZ_ALL_LANES, v, 2);
}

/* Sets the elements of keys after the query; row and col are those of the
 * tile's first element, and a row is a key where `by_key`. */
template <bool by_key, int MT, int N>
static __device__ __forceinline__ void mask(float (&s)[MT][N][4], int row,
                                            int col, float to)
{
#pragma unroll
    for (int i = 0; i < MT * N * 4; i++) {
        int m = i / (4 * N), j = i / 4 % N, e = i % 4;
        int after = col + frag_col(j, e) - row - frag_row(m, e);

        if (by_key ? after < 0 : after > 0)
            s[m][j][e] = to;
    }
}

/* Sets the elements of the keys from column `left` on: those after the last. */
template <int MT, int N>
static __device__ __forceinline__ void mask_end(float (&s)[MT][N][4], int left,
                                                float to)
{
#pragma unroll
    for (int i = 0; i < MT * N * 4; i++)
        if (frag_col(i / 4 % N, i % 4) >= left)
            s[i / (4 * N)][i / 4 % N][i % 4] = to;
}

/* One more tile of scores of a 16-row piece, rows g (h = 0) or g + 8 (h = 1):
 * turns them into exponentials relative to the largest score so far, and what
 * was summed before as well.  sum is this lane's part, before rounding; scale2
 * belongs to powers of two. */
template <int N, int C>
static __device__ __forceinline__ void
soften(float (&s)[N][4], float (&acc)[C][4], int h, float *top, float *sum,
       float scale2)
{
    float high = *top, keep, part = 0;

#pragma unroll
    for (int j = 0; j < N; j++)
        high = fmaxf(high, fmaxf(s[j][2 * h], s[j][2 * h + 1]));
    high = row_max(high);
    keep = iz_exp2((*top - high) * scale2);
#pragma unroll
    for (int i = 0; i < 2 * N; i++) {
        float *p = &s[i / 2][2 * h + i % 2];

        *p = iz_exp2(*p * scale2 - high * scale2);
        part += *p;
    }
#pragma unroll
    for (int i = 0; i < 2 * C; i++)
        acc[i / 2][2 * h + i % 2] *= keep;
    *sum = *sum * keep + part;
    *top = high;
}

/* Divides by the sums of exponentials and writes their logarithms. */
template <int MT, int C>
static __device__ __forceinline__ void
finish(float (&acc)[MT][C][4], const float (&top)[MT][2],
       const float (&sum)[MT][2], float *lse, int left, float scale)
{
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
        int m = i / 2, h = i % 2, r = frag_row(m, 2 * h);
        float all = row_sum(sum[m][h]), inv = 1 / all;

#pragma unroll
        for (int j = 0; j < 2 * C; j++)
            acc[m][j / 2][2 * h + j % 2] *= inv;
        if (r < left && threadIdx.x % 4 == 0)
            lse[r] = top[m][h] * scale + logf(all);
    }
}

/* One tile of BM queries of one head against all keys that it sees, BN at a
 * time.  The values of a tile arrive while its scores are formed, the next
 * keys while the values are summed.  Late tiles have most keys: they go first.
 */
template <enum iz_dtype T, int DP, int MT, int NW, int BN>
static __global__ void __launch_bounds__(32 * NW) forward(struct iz_heads a)
{
    constexpr int BM = 16 * MT * NW, P = pitch<DP>;
    constexpr int KEPT = DP <= 64 ? DP / 16 : 1; /* what registers have left */
    IZ_SHARED(uint16_t, qs);
    uint16_t *ks = qs + BM * P, *vs = ks + BN * P;
    struct iz_place here = iz_attention_place(a, 1);
    int head = here.head, i0 = here.after * BM;
    int end = !a.full && i0 + BM < a.seq ? i0 + BM : a.seq;
    int own = (int)threadIdx.x / 32 * 16 * MT;
    int64_t ld = a.ld;
    const uint16_t *q = (const uint16_t *)a.qkv + iz_head_q(a, head);
    const uint16_t *k = (const uint16_t *)a.qkv + iz_head_k(a, head / a.group);
    const uint16_t *v = k + a.kv;
    float acc[MT][DP / 8][4] = {}, s[MT][BN / 8][4], top[MT][2], sum[MT][2];
    uint32_t kept[KEPT][MT][4];

#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
        top[i / 2][i % 2] = -INFINITY;
        sum[i / 2][i % 2] = 0;
    }
    load_rows<DP, BM, NW>(qs, q + i0 * ld, ld, a.seq - i0, a.d);
    load_rows<DP, BN, NW>(ks, k, ld, a.seq, a.d);
    iz_copy_group();
    for (int j0 = 0; j0 < end; j0 += BN) {
        bool live = a.full || j0 < i0 + own + 16 * MT;

        iz_copy_wait<0>();
        __syncthreads(); /* keys are there, the last values are used up */
        load_rows<DP, BN, NW>(vs, v + j0 * ld, ld, a.seq - j0, a.d);
        iz_copy_group();
        if (live) {
            rows_by_rows<T, DP>(s, kept, qs + own * P, ks, j0 == 0);
            if (a.full)
                mask_end(s, a.seq - j0, -INFINITY);
            else if (j0 + BN > i0 + own + 1)
                mask<false>(s, i0 + own, j0, -INFINITY);
#pragma unroll
            for (int i = 0; i < 2 * MT; i++)
                soften(s[i / 2], acc[i / 2], i % 2, &top[i / 2][i % 2],
                       &sum[i / 2][i % 2], a.scale * LOG2E);
        }
        iz_copy_wait<0>();
        __syncthreads(); /* values are there, keys are used up */
        if (j0 + BN < end)
            load_rows<DP, BN, NW>(ks, k + (j0 + BN) * ld, ld, a.seq - j0 - BN,
                                  a.d);
        iz_copy_group();
        if (live)
            add_product<T, DP>(acc, s, vs);
    }
    finish(acc, top, sum, a.lse + (int64_t)head * a.seq + i0 + own,
           a.seq - i0 - own, a.scale);
    store_rows<T, DP>((uint16_t *)a.o + iz_head_o(a, head) + (i0 + own) * a.c,
                      a.c, a.seq - i0 - own, a.d, qs + own * P, acc, 1);
}

/* Loads one tile each of two operands, one behind the other. */
template <int DP, int ROWS, int NW>
static __device__ __forceinline__ void
load_pair(uint16_t *to, const uint16_t *a, int lda, const uint16_t *b, int ldb,
          int left, int d)
{
    load_rows<DP, ROWS, NW>(to, a, lda, left, d);
    load_rows<DP, ROWS, NW>(to + ROWS * pitch<DP>, b, ldb, left, d);
}

/* Elements of BQ queries in shared memory: q, dy, then lse and delta. */
template <int DP, int BQ> constexpr int query_tile = 2 * BQ *pitch<DP> + 4 * BQ;

/* Starts the copy of what key_grads reads of BQ queries of a head, from row i0
 * on: queries, gradients of the output, lse and delta. */
template <int DP, int BQ, int NW>
static __device__ __forceinline__ void
load_queries(uint16_t *to, const struct iz_heads &a, int head, int i0)
{
    const uint16_t *q = (const uint16_t *)a.qkv + iz_head_q(a, head);
    const uint16_t *dy = (const uint16_t *)a.dy + iz_head_o(a, head);
    float *stats = (float *)(to + 2 * BQ * pitch<DP>);
    int i = (int)threadIdx.x, left = a.seq - i0;

    load_pair<DP, BQ, NW>(to, q + i0 * a.ld, a.ld, dy + i0 * a.c, a.c, left,
                          a.d);
    if (i < 2 * BQ) {
        const float *stat = i < BQ ? a.lse : a.delta;

        iz_copy_start<4>(stats + i, stat + (int64_t)head * a.seq + i0 + i % BQ,
                         i % BQ < left);
    }
}

/* Scores (a row per key) and the gradients of their probabilities become
 * probabilities and the gradients of the scores, before `scale`. */
template <int MT, int N>
static __device__ __forceinline__ void
grad_by_key(float (&s)[MT][N][4], float (&ds)[MT][N][4], const float *stats,
            float scale2)
{
#pragma unroll
    for (int i = 0; i < MT * N * 4; i++) {
        int m = i / (4 * N), j = i / 4 % N, e = i % 4, c = frag_col(j, e);

        s[m][j][e] = iz_exp2(s[m][j][e] * scale2 - stats[c] * LOG2E);
        ds[m][j][e] = s[m][j][e] * (ds[m][j][e] - stats[8 * N + c]);
    }
}

/* The same with a row per query. */
template <int MT, int N>
static __device__ __forceinline__ void
grad_by_query(float (&s)[MT][N][4], float (&ds)[MT][N][4],
              const float (&lse2)[MT][2], const float (&delta)[MT][2],
              float scale2)
{
#pragma unroll
    for (int i = 0; i < MT * N * 4; i++) {
        int m = i / (4 * N), j = i / 4 % N, e = i % 4, h = e / 2;

        s[m][j][e] = iz_exp2(s[m][j][e] * scale2 - lse2[m][h]);
        ds[m][j][e] = s[m][j][e] * (ds[m][j][e] - delta[m][h]);
    }
}

/* dk and dv of one tile of BK keys of a group of heads, over all queries of
 * these that see the first of its keys, head by head and BQ at a time; the next
 * queries arrive meanwhile.  The tile's
 * columns may be shared out over blockIdx.y, 8 C each, so that the sums fit
 * into registers; the scores are then formed by each.  Early tiles have most
 * queries: they go first. */
template <enum iz_dtype T, int DP, int MT, int NW, int BQ, int C>
static __global__ void __launch_bounds__(32 * NW, 2)
    key_grads(struct iz_heads a)
{
    constexpr int BK = 16 * MT * NW, P = pitch<DP>, TILE = query_tile<DP, BQ>;
    IZ_SHARED(uint16_t, ks);
    uint16_t *vs = ks + BK * P, *tiles = vs + BK * P;
    struct iz_place here = iz_attention_place(a, a.group);
    int group = here.head, k0 = here.tile * BK, stage = 0;
    int own = (int)threadIdx.x / 32 * 16 * MT, left = a.seq - k0 - own;
    int part = 8 * C < DP ? (int)blockIdx.y * 8 * C : 0;
    int head = group * a.group, i0 = a.full ? 0 : k0 / BQ * BQ;
    int64_t ld = a.ld;
    const uint16_t *k = (const uint16_t *)a.qkv + iz_head_k(a, group) + k0 * ld;
    uint16_t *dk;
    float s[MT][BQ / 8][4], ds[MT][BQ / 8][4];
    float acc_k[MT][C][4] = {}, acc_v[MT][C][4] = {};

    load_pair<DP, BK, NW>(ks, k, ld, k + a.kv, ld, a.seq - k0, a.d);
    load_queries<DP, BQ, NW>(tiles, a, head, i0);
    iz_copy_group();
    while (head < (group + 1) * a.group) {
        const uint16_t *qs = tiles + stage, *ys = qs + BQ * P;
        bool more = i0 + BQ < a.seq;
        int start = a.full ? 0 : k0 / BQ * BQ;
        int next = more ? i0 + BQ : start, next_head = head + !more;

        if (next_head < (group + 1) * a.group)
            load_queries<DP, BQ, NW>(tiles + TILE - stage, a, next_head, next);
        iz_copy_group();
        iz_copy_wait<1>();
        __syncthreads(); /* these queries are there */
        if (a.full || i0 + BQ > k0 + own) {
            rows_by_rows<T, DP>(s, ks + own * P, qs);
            rows_by_rows<T, DP>(ds, vs + own * P, ys);
            grad_by_key(s, ds, (const float *)(ys + BQ * P), a.scale * LOG2E);
            if (!a.full && i0 < k0 + own + 16 * MT - 1) {
                mask<true>(s, k0 + own, i0, 0);
                mask<true>(ds, k0 + own, i0, 0);
            }
            add_product<T, DP>(acc_v, s, ys + part);
            add_product<T, DP>(acc_k, ds, qs + part);
        }
        __syncthreads(); /* and used up */
        i0 = next;
        head = next_head;
        stage = TILE - stage;
    }
    /* From what the loop has left, so that no register has waited for it. */
    dk = (uint16_t *)a.dqkv + iz_head_k(a, head / a.group - 1) +
         (k0 + own) * ld + part;
    store_rows<T, DP>(dk, ld, left, a.d - part, ks + own * P, acc_k, a.scale);
    store_rows<T, DP>(dk + a.kv, ld, left, a.d - part, vs + own * P, acc_v, 1);
}

/* dq of one tile of BM queries of one head, over all keys that it sees, BN at a
 * time; the next keys arrive meanwhile. */
template <enum iz_dtype T, int DP, int MT, int NW, int BN>
static __global__ void __launch_bounds__(32 * NW) query_grads(struct iz_heads a)
{
    constexpr int BM = 16 * MT * NW, P = pitch<DP>, TILE = 2 * BN * P;
    IZ_SHARED(uint16_t, qs);
    uint16_t *ys = qs + BM * P, *tiles = ys + BM * P;
    struct iz_place here = iz_attention_place(a, 1);
    int head = here.head, i0 = here.after * BM;
    int end = !a.full && i0 + BM < a.seq ? i0 + BM : a.seq;
    int own = (int)threadIdx.x / 32 * 16 * MT, left = a.seq - i0 - own;
    int stage = 0;
    int64_t ld = a.ld, row = (int64_t)head * a.seq + i0 + own;
    const uint16_t *q = (const uint16_t *)a.qkv + iz_head_q(a, head);
    const uint16_t *k = (const uint16_t *)a.qkv + iz_head_k(a, head / a.group);
    const uint16_t *dy = (const uint16_t *)a.dy + iz_head_o(a, head);
    float acc[MT][DP / 8][4] = {}, s[MT][BN / 8][4], ds[MT][BN / 8][4];
    float lse2[MT][2], delta[MT][2];

#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
        int r = frag_row(i / 2, i % 2 * 2);

        lse2[i / 2][i % 2] = r < left ? a.lse[row + r] * LOG2E : 0;
        delta[i / 2][i % 2] = r < left ? a.delta[row + r] : 0;
    }
    load_pair<DP, BM, NW>(qs, q + i0 * ld, ld, dy + i0 * a.c, a.c, a.seq - i0,
                          a.d);
    load_pair<DP, BN, NW>(tiles, k, ld, k + a.kv, ld, a.seq, a.d);
    iz_copy_group();
    for (int j0 = 0; j0 < end; j0 += BN, stage = TILE - stage) {
        int next = j0 + BN;
        const uint16_t *ks = tiles + stage, *vs = ks + BN * P;

        if (next < end)
            load_pair<DP, BN, NW>(tiles + TILE - stage, k + next * ld, ld,
                                  k + a.kv + next * ld, ld, a.seq - next, a.d);
        iz_copy_group();
        iz_copy_wait<1>();
        __syncthreads(); /* these keys are there */
        if (a.full || j0 < i0 + own + 16 * MT) {
            rows_by_rows<T, DP>(s, qs + own * P, ks);
            rows_by_rows<T, DP>(ds, ys + own * P, vs);
            grad_by_query(s, ds, lse2, delta, a.scale * LOG2E);
            if (a.full)
                mask_end(ds, a.seq - j0, 0);
            else if (j0 + BN > i0 + own + 1)
                mask<false>(ds, i0 + own, j0, 0);
            add_product<T, DP>(acc, ds, ks);
        }
        __syncthreads(); /* and used up */
    }
    store_rows<T, DP>((uint16_t *)a.dqkv + iz_head_q(a, head) + (i0 + own) * ld,
                      ld, left, a.d, qs + own * P, acc, a.scale);
}

/* Bytes of `rows` rows in shared memory. */
template <int DP> static int bytes_of(int rows)
{
    return rows * pitch<DP> * (int)sizeof(uint16_t);
}

template <enum iz_dtype T, int DP, int MT, int NW, int BN>
static void run_forward(const struct iz_heads *a, void *stream)
{
    constexpr int BM = 16 * MT * NW;
    void (*k)(struct iz_heads) = forward<T, DP, MT, NW, BN>;

    IZ_LAUNCH(k, iz_attention_blocks(a, BM, a->all), 32 * NW,
              bytes_of<DP>(BM + 2 * BN), stream, *a);
}

template <enum iz_dtype T, int DP, int MT, int NW, int BQ, int C>
static void run_key_grads(const struct iz_heads *a, void *stream)
{
    constexpr int BK = 16 * MT * NW;
    void (*k)(struct iz_heads) = key_grads<T, DP, MT, NW, BQ, C>;
    dim3 grid((unsigned)iz_attention_blocks(a, BK, a->all / a->group),
              DP / (8 * C));
    int bytes =
        bytes_of<DP>(2 * BK) + 2 * query_tile<DP, BQ> * (int)sizeof(uint16_t);

    IZ_LAUNCH(k, grid, 32 * NW, bytes, stream, *a);
}

template <enum iz_dtype T, int DP, int MT, int NW, int BN>
static void run_query_grads(const struct iz_heads *a, void *stream)
{
    constexpr int BM = 16 * MT * NW;
    void (*k)(struct iz_heads) = query_grads<T, DP, MT, NW, BN>;
    int bytes = bytes_of<DP>(2 * BM + 4 * BN);

    IZ_LAUNCH(k, iz_attention_blocks(a, BM, a->all), 32 * NW, bytes, stream,
              *a);
}

/* Tiles are as large as registers allow without spills.  Backward of more than
 * 128 columns takes up to 133 KiB of shared memory, which not every GPU has:
 * attention.c refuses it there. */
template <enum iz_dtype T>
static void forward_by_width(const struct iz_heads *a, void *stream)
{
    if (a->d <= 32)
        run_forward<T, 32, 2, 4, 64>(a, stream);
    else if (a->d <= 64)
        run_forward<T, 64, 2, 4, 64>(a, stream);
    else if (a->d <= 96)
        run_forward<T, 96, 2, 4, 64>(a, stream);
    else if (a->d <= 128)
        run_forward<T, 128, 2, 4, 32>(a, stream);
    else
        run_forward<T, 256, 1, 4, 32>(a, stream);
}

template <enum iz_dtype T>
static void key_grads_by_width(const struct iz_heads *a, void *stream)
{
    if (a->d <= 32)
        run_key_grads<T, 32, 2, 4, 32, 4>(a, stream);
    else if (a->d <= 64)
        run_key_grads<T, 64, 2, 4, 32, 8>(a, stream);
    else if (a->d <= 96)
        run_key_grads<T, 96, 1, 4, 32, 12>(a, stream);
    else if (a->d <= 128)
        run_key_grads<T, 128, 1, 4, 32, 16>(a, stream);
    else
        run_key_grads<T, 256, 1, 4, 32, 16>(a, stream);
}

template <enum iz_dtype T>
static void query_grads_by_width(const struct iz_heads *a, void *stream)
{
    if (a->d <= 32)
        run_query_grads<T, 32, 2, 4, 32>(a, stream);
    else if (a->d <= 64)
        run_query_grads<T, 64, 2, 4, 32>(a, stream);
    else if (a->d <= 96)
        run_query_grads<T, 96, 2, 4, 32>(a, stream);
    else if (a->d <= 128)
        run_query_grads<T, 128, 1, 4, 32>(a, stream);
    else
        run_query_grads<T, 256, 1, 4, 32>(a, stream);
}

void iz_attention_fwd_16(const struct iz_heads *a, enum iz_dtype t,
                         void *stream)
{
    if (t == IZ_BF16)
        forward_by_width<IZ_BF16>(a, stream);
    else
        forward_by_width<IZ_F16>(a, stream);
}

void iz_attention_bwd_16(const struct iz_heads *a, enum iz_dtype t,
                         void *stream)
{
    if (t == IZ_BF16) {
        key_grads_by_width<IZ_BF16>(a, stream);
        query_grads_by_width<IZ_BF16>(a, stream);
    } else {
        key_grads_by_width<IZ_F16>(a, stream);
        query_grads_by_width<IZ_F16>(a, stream);
    }
}
