/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients of attention of 16-bit activations on tensor cores.
 *
 * Every tile of the scores is visited twice, once to sum over queries (dk, dv)
 * and once to sum over keys (dq).  That is seven products where five would do,
 * but nothing is added by atomics, so the bits never change. */
#include "codelets/kernels/attention_16.cuh"

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

/* Keys of a block of NW warps that have one role each, or both. */
template <int ROLES, int NW> constexpr int key_rows = 16 * ROLES *NW;

/* Starts the copy of what key_grads reads of BQ queries of a head, from row i0
 * on: queries, gradients of the output, lse and delta. */
template <int DP, int BQ, int NW>
static __device__ __forceinline__ void
load_queries(uint16_t *to, const struct iz_heads &a, int head, int i0)
{
    const uint16_t *q = (const uint16_t *)a.q + iz_head_q(a, head);
    const uint16_t *dy = (const uint16_t *)a.dy + iz_head_o(a, head);
    float *stats = (float *)(to + 2 * BQ * pitch<DP>);
    int i = (int)threadIdx.x, left = a.end - i0;
    int64_t row = i0;
    load_pair<DP, BQ, NW>(to, q + row * a.ld, a.ld, dy + row * a.c, a.c, left,
                          a.d);
    if (i < 2 * BQ) {
        const float *stat = i < BQ ? a.lse : a.delta;
        iz_copy_start<4>(stats + i, stat + iz_head_lse(a, head) + i0 + i % BQ,
                         i % BQ < left);
    }
}

/* Scores, a row per key, become probabilities. */
template <int MT, int N>
static __device__ __forceinline__ void
probabilities(float (&s)[MT][N][4], const float *lse, float scale2)
{
#pragma unroll
    for (int i = 0; i < MT * N * 4; i++) {
        int m = i / (4 * N), j = i / 4 % N, e = i % 4;
        s[m][j][e] = iz_exp2(s[m][j][e] * scale2 - lse[frag_col(j, e)] * LOG2E);
    }
}

/* a *= b, element by element. */
template <int MT, int N>
static __device__ __forceinline__ void multiply(float (&a)[MT][N][4],
                                                const float (&b)[MT][N][4])
{
#pragma unroll
    for (int i = 0; i < MT * N * 4; i++)
        a[i / (4 * N)][i / 4 % N][i % 4] *= b[i / (4 * N)][i / 4 % N][i % 4];
}

/* The slopes of scores that are tanh(..), for hand_over. */
template <int MT, int N>
static __device__ __forceinline__ void hand_slopes(float *to,
                                                   const float (&s)[MT][N][4])
{
#pragma unroll
    for (int i = 0; i < MT * N; i++) {
        float f[4];
#pragma unroll
        for (int e = 0; e < 4; e++)
            f[e] = 1 - s[i / N][i % N][e] * s[i / N][i % N][e];
        iz_store_row<4>(to + (32 * i + threadIdx.x % 32) * 4, f);
    }
}

/* A warp's fragments, for the other one of its pair; `times`: with a cap, those
 * that it has handed over before. */
template <bool times, int MT, int N>
static __device__ __forceinline__ void hand_over(float *to,
                                                 const float (&s)[MT][N][4])
{
#pragma unroll
    for (int i = 0; i < MT * N; i++) {
        float *at = to + (32 * i + threadIdx.x % 32) * 4, f[4] = {1, 1, 1, 1};
        if (times)
            iz_load_row<4>(f, at);
#pragma unroll
        for (int e = 0; e < 4; e++)
            f[e] *= s[i / N][i % N][e];
        iz_store_row<4>(at, f);
    }
}

template <int MT, int N>
static __device__ __forceinline__ void take_over(float (&s)[MT][N][4],
                                                 const float *from)
{
#pragma unroll
    for (int i = 0; i < MT * N; i++)
        iz_load_row<4>(s[i / N][i % N], from + (32 * i + threadIdx.x % 32) * 4);
}

/* Gradients of probabilities p, a row per key, become those of the scores,
 * before `scale`. */
template <int MT, int N>
static __device__ __forceinline__ void grad_by_key(float (&ds)[MT][N][4],
                                                   const float (&p)[MT][N][4],
                                                   const float *delta)
{
#pragma unroll
    for (int i = 0; i < MT * N * 4; i++) {
        int m = i / (4 * N), j = i / 4 % N, e = i % 4;
        ds[m][j][e] = p[m][j][e] * (ds[m][j][e] - delta[frag_col(j, e)]);
    }
}

/* With a cap: the same but for the probabilities, from scores that are
 * tanh(..). */
template <int MT, int N>
static __device__ __forceinline__ void grad_by_slope(float (&ds)[MT][N][4],
                                                     const float (&s)[MT][N][4],
                                                     const float *delta)
{
#pragma unroll
    for (int i = 0; i < MT * N * 4; i++) {
        int m = i / (4 * N), j = i / 4 % N, e = i % 4;
        float t = s[m][j][e];
        ds[m][j][e] = (ds[m][j][e] - delta[frag_col(j, e)]) * (1 - t * t);
    }
}

/* Scores, a row per query, and the gradients of their probabilities become
 * probabilities and the gradients of the scores, before cap and `scale`. */
template <bool CAP, int MT, int N>
static __device__ __forceinline__ void
grad_by_query(float (&s)[MT][N][4], float (&ds)[MT][N][4],
              const float (&lse2)[MT][2], const float (&delta)[MT][2],
              float scale2)
{
#pragma unroll
    for (int i = 0; i < MT * N * 4; i++) {
        int m = i / (4 * N), j = i / 4 % N, e = i % 4, h = e / 2;
        float t = s[m][j][e];
        s[m][j][e] = iz_exp2(t * scale2 - lse2[m][h]);
        ds[m][j][e] = s[m][j][e] * (ds[m][j][e] - delta[m][h]);
        if (CAP)
            ds[m][j][e] *= 1 - t * t;
    }
}

/* The first row of the tiles of BQ that sees the key. */
template <int BQ>
static __device__ __forceinline__ int first_row(const struct iz_heads &a,
                                                int key)
{
    int row = key - a.first;
    return a.full || row < 0 ? a.first : key - row % BQ;
}

/* dk and dv of one tile of BK keys of a group of heads, over all queries of
 * these that see the first of its keys, head by head and BQ at a time; the next
 * queries arrive meanwhile.  There are two roles: one forms the probabilities
 * and sums dv, the other takes them, forms the gradients of the scores and sums
 * dk.  A warp has 32 keys and both ROLES where registers hold both sums, else a
 * pair of warps has the keys and each warp one role: what it loads of the
 * queries then still serves two products.  The tile's columns may be shared out
 * over blockIdx.y, 8 C each, so that a sum fits into registers; the scores are
 * then formed by each.  Early tiles have most queries: they go first. */
template <enum iz_dtype T, int DP, int ROLES, int NW, int BQ, int C, bool CAP>
static __global__ void __launch_bounds__(32 * NW, 2)
    key_grads(struct iz_heads a)
{
    constexpr int MT = 2, P = pitch<DP>, TILE = query_tile<DP, BQ>;
    constexpr int BK = key_rows<ROLES, NW>;
    IZ_SHARED(uint16_t, ks);
    uint16_t *tiles = ks + 2 * BK * P;
    struct iz_attention_place here = iz_attention_place(a, a.group);
    int group = here.head, k0 = here.tile * BK, half = 0;
    int own = (int)threadIdx.x / (64 / ROLES) * 16 * MT;
    int first = ROLES == 1 ? (int)threadIdx.x / 32 % 2 : 0; /* its role */
    int part = 8 * C < DP ? (int)blockIdx.y * 8 * C : 0;
    int head = group * a.group, sample = head / a.heads;
    int i0 = first_row<BQ>(a, k0), stop = iz_head_ends(a, sample, k0 + BK);
    int64_t ld = a.ldk;
    const uint16_t *k = (const uint16_t *)a.k + iz_head_k(a, head) + k0 * ld;
    uint16_t *mine = ks + (first * BK + own) * P; /* keys, or values */
    float *handed = (float *)(tiles + 2 * TILE) + own * BQ;
    float s[ROLES][MT][BQ / 8][4], acc[ROLES][MT][C][4] = {};
    if (stop <= i0)
        return; /* no row sees them */
    load_pair<DP, BK, NW>(ks, k, ld, k + a.kv, ld, a.seq - k0, a.d);
    load_queries<DP, BQ, NW>(tiles, a, head, i0);
    iz_copy_group();
    while (head < (group + 1) * a.group) {
        const uint16_t *tile = tiles + half;
        const float *stats = (const float *)(tile + 2 * BQ * P);
        bool more = i0 + BQ < stop, live = a.full || i0 + BQ > k0 + own;
        int next = more ? i0 + BQ : first_row<BQ>(a, k0);
        int next_head = head + !more;
        iz_copy_wait<0>();
        __syncthreads(); /* these queries are there, the last are used up */
        if (next_head < (group + 1) * a.group)
            load_queries<DP, BQ, NW>(tiles + TILE - half, a, next_head, next);
        iz_copy_group();
        if (live) {
#pragma unroll
            for (int r = 0; r < ROLES; r++)
                rows_by_rows<T, DP>(s[r], mine + r * BK * P,
                                    tile + (first + r) * BQ * P);
            if (first == 0) {
                if (CAP) {
                    squash(s[0], a.scale / a.cap);
                    if (ROLES == 2)
                        grad_by_slope(s[ROLES - 1], s[0], stats + BQ);
                    else
                        hand_slopes(handed, s[0]);
                }
                probabilities(s[0], stats, iz_head_unit<CAP>(a) * LOG2E);
                if (!a.full && i0 < k0 + own + 16 * MT - 1)
                    mask<true>(s[0], k0 + own, i0, 0);
                if (k0 + own < iz_head_begins(a, sample, i0 + BQ - 1))
                    mask_documents<true>(s[0], a, sample, k0 + own, i0, 0);
            }
        }
        if (ROLES == 1) {
            if (live && first == 0)
                hand_over<CAP>(handed, s[0]);
            __syncthreads(); /* probabilities are there */
        }
        if (live) {
            if (ROLES == 2 && CAP) {
                multiply(s[ROLES - 1], s[0]);
            } else if (ROLES == 2) {
                grad_by_key(s[ROLES - 1], s[0], stats + BQ);
            } else if (first == 1) {
                float p[MT][BQ / 8][4];
                take_over(p, handed);
                grad_by_key(s[0], p, stats + BQ);
            }
#pragma unroll
            for (int r = 0; r < ROLES; r++)
                add_product<T, DP>(acc[r], s[r],
                                   tile + (1 - first - r) * BQ * P + part);
        }
        i0 = next;
        head = next_head;
        half = TILE - half;
    }
    /* From what the loop has left, so that no register has waited for it. */
    int64_t at = iz_head_k(a, head - 1) + (k0 + own) * ld + part;
#pragma unroll
    for (int r = 0; r < ROLES; r++) {
        int64_t to = first + r ? at : at + a.kv;
        float by = first + r ? a.scale : 1;
        if (a.adds)
            sum_rows((float *)a.dk + to, ld, a.seq - k0 - own, a.d - part,
                     acc[r], by);
        else
            store_rows<T, DP>((uint16_t *)a.dk + to, ld, a.seq - k0 - own,
                              a.d - part, mine + r * BK * P, acc[r], by);
    }
}

/* dq of one tile of BM queries of one head, over all keys that it sees, BN at a
 * time; the next keys arrive meanwhile.  Registers keep K pieces of 16 columns
 * of queries and gradients: all, or one. */
template <enum iz_dtype T, int DP, int MT, int NW, int BN, int K, bool CAP>
static __global__ void __launch_bounds__(32 * NW) query_grads(struct iz_heads a)
{
    constexpr int BM = 16 * MT * NW, P = pitch<DP>, TILE = 2 * BN * P;
    IZ_SHARED(uint16_t, qs);
    uint16_t *ys = qs + BM * P, *tiles = ys + BM * P;
    struct iz_attention_place here = iz_attention_place(a, 1);
    int head = here.head, i0 = a.first + here.after * BM;
    int end = !a.full && i0 + BM < a.seq ? i0 + BM : a.seq;
    int own = (int)threadIdx.x / 32 * 16 * MT, left = a.end - i0 - own;
    int half = 0, sample = head / a.heads;
    int start = iz_head_begins(a, sample, i0) / BN * BN;
    /* The first key that all queries of the warp see. */
    int clear = iz_head_begins(a, sample, i0 + own + 16 * MT - 1);
    int64_t ld = a.ldk, row = i0, stat = iz_head_lse(a, head) + i0 + own;
    const uint16_t *q = (const uint16_t *)a.q + iz_head_q(a, head);
    const uint16_t *k = (const uint16_t *)a.k + iz_head_k(a, head);
    const uint16_t *dy = (const uint16_t *)a.dy + iz_head_o(a, head);
    float acc[MT][DP / 8][4] = {}, s[MT][BN / 8][4], ds[MT][BN / 8][4];
    float lse2[MT][2], delta[MT][2];
    uint32_t q_kept[K][MT][4], y_kept[K][MT][4];
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
        int r = frag_row(i / 2, i % 2 * 2);
        lse2[i / 2][i % 2] = r < left ? a.lse[stat + r] * LOG2E : 0;
        delta[i / 2][i % 2] = r < left ? a.delta[stat + r] : 0;
    }
    load_pair<DP, BM, NW>(qs, q + row * a.ld, a.ld, dy + row * a.c, a.c,
                          a.end - i0, a.d);
    iz_copy_group();
    load_pair<DP, BN, NW>(tiles, k + start * ld, ld, k + a.kv + start * ld, ld,
                          a.seq - start, a.d);
    iz_copy_group();
    if (K > 1) {
        iz_copy_wait<1>();
        __syncthreads();
        keep_rows<DP>(q_kept, qs + own * P);
        keep_rows<DP>(y_kept, ys + own * P);
    }
    for (int j0 = start; j0 < end; j0 += BN, half = TILE - half) {
        int next = j0 + BN;
        const uint16_t *ks = tiles + half, *vs = ks + BN * P;
        if (next < end)
            load_pair<DP, BN, NW>(tiles + TILE - half, k + next * ld, ld,
                                  k + a.kv + next * ld, ld, a.seq - next, a.d);
        iz_copy_group();
        iz_copy_wait<1>();
        __syncthreads(); /* these keys are there */
        if (a.full || j0 < i0 + own + 16 * MT) {
            rows_by_rows<T, DP>(s, q_kept, qs + own * P, ks);
            rows_by_rows<T, DP>(ds, y_kept, ys + own * P, vs);
            if (CAP)
                squash(s, a.scale / a.cap);
            grad_by_query<CAP>(s, ds, lse2, delta,
                               iz_head_unit<CAP>(a) * LOG2E);
            if (a.full)
                mask_end(ds, a.seq - j0, 0);
            else if (j0 + BN > i0 + own + 1)
                mask<false>(ds, i0 + own, j0, 0);
            if (j0 < clear)
                mask_documents<false>(ds, a, sample, i0 + own, j0, 0);
            add_product<T, DP>(acc, ds, ks);
        }
        __syncthreads(); /* and used up */
    }
    store_rows<T, DP>((uint16_t *)a.dq + iz_head_q(a, head) +
                          (row + own) * a.ld,
                      a.ld, left, a.d, qs + own * P, acc, a.scale);
}

/* Tiles are as large as registers allow without spills.  More than 128 columns
 * take up to 141 KiB of shared memory, which not every GPU has: attention.c
 * refuses it there. */
template <enum iz_dtype T, int DP, int MQ, int KQ, bool CAP>
static void run_gradients(const struct iz_heads *a, void *stream)
{
    constexpr int NW = 4, BQ = 32, BN = 32, C = DP <= 128 ? DP / 8 : 16;
    constexpr int ROLES = DP <= 64 ? 2 : 1, BK = key_rows<ROLES, NW>;
    constexpr int BM = 16 * MQ * NW;
    void (*keys)(struct iz_heads) = key_grads<T, DP, ROLES, NW, BQ, C, CAP>;
    void (*queries)(struct iz_heads) = query_grads<T, DP, MQ, NW, BN, KQ, CAP>;
    dim3 grid((unsigned)iz_attention_blocks(a->seq, BK, a->all / a->group),
              DP / (8 * C));
    int bytes = bytes_of<DP>(2 * BK) +
                2 * query_tile<DP, BQ> * (int)sizeof(uint16_t) +
                (2 - ROLES) * BK * BQ * (int)sizeof(float);
    IZ_LAUNCH(keys, grid, 32 * NW, bytes, stream, *a);
    IZ_LAUNCH(queries, iz_attention_blocks(a->end - a->first, BM, a->all),
              32 * NW, bytes_of<DP>(2 * BM + 4 * BN), stream, *a);
}

/* A multiprocessor of 9.0 and 10.0 has room for two blocks of the larger tile
 * of 128 columns, one of 8.0 for one, and others have not. */
void iz_attention_bwd_16(const struct iz_heads *a, enum iz_dtype t,
                         int capability, void *stream)
{
    by_kind(a, t, [&](auto type, auto width, auto capped) {
        constexpr enum iz_dtype T = decltype(type)::value;
        constexpr bool CAP = decltype(capped)::value;
        constexpr int DP = decltype(width)::value;
        if constexpr (DP != 128)
            run_gradients<T, DP, DP <= 96 ? 2 : 1, DP <= 64 ? DP / 16 : 1, CAP>(
                a, stream);
        else if (capability >= 90 && capability < 120)
            run_gradients<T, DP, 2, 1, CAP>(a, stream);
        else
            run_gradients<T, DP, 1, DP / 16, CAP>(a, stream);
    });
}
