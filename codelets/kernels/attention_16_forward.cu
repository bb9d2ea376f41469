/* SPDX-License-Identifier: Apache-2.0 */
/* Forward of attention of 16-bit activations on tensor cores: the output and
 * the logarithms of its sums of exponentials, which gradients start from. */
#include "codelets/kernels/attention_16.cuh"

/* Over the four lanes that share a row. */
static __device__ __forceinline__ float attention_16_forward_row_sum(float v)
{
    v += __shfl_xor_sync(IZ_ALL_LANES, v, 1);
    return v + __shfl_xor_sync(IZ_ALL_LANES, v, 2);
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
    high = iz_lanes_max<4>(high);
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

/* No score is less, and its power is a number, as those of differences are. */
#define LOWEST -1e30f

/* Divides by the sums of exponentials and writes their logarithms. */
template <int MT, int C>
static __device__ __forceinline__ void
finish(float (&acc)[MT][C][4], float (&top)[MT][2], const float (&sum)[MT][2],
       float *lse, int left, float sink, float unit)
{
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
        int m = i / 2, h = i % 2, r = frag_row(m, 2 * h);
        float all = attention_16_forward_row_sum(sum[m][h]);
        float share = iz_head_share(sink, unit, &top[m][h], &all);
#pragma unroll
        for (int j = 0; j < 2 * C; j++)
            acc[m][j / 2][2 * h + j % 2] *= share;
        if (r < left && threadIdx.x % 4 == 0)
            lse[r] = top[m][h] * unit + logf(all);
    }
}

/* One tile of BM queries of one head against all keys that it sees, BN at a
 * time.  The values of a tile arrive while its scores are formed, the next
 * keys while the values are summed.  Late tiles have most keys: they go first.
 */
template <enum iz_dtype T, int DP, int MT, int NW, int BN, bool CAP>
static __global__ void __launch_bounds__(32 * NW) attend_16(struct iz_heads a)
{
    constexpr int BM = 16 * MT * NW, P = pitch<DP>;
    constexpr int KEPT = DP <= 64 ? DP / 16 : 1; /* what registers have left */
    IZ_SHARED(uint16_t, qs);
    uint16_t *ks = qs + BM * P, *vs = ks + BN * P;
    struct iz_attention_place here = iz_attention_place(a, 1);
    int head = here.head, i0 = a.first + here.after * BM;
    int end = !a.full && i0 + BM < a.seq ? i0 + BM : a.seq;
    int own = (int)threadIdx.x / 32 * 16 * MT, sample = head / a.heads;
    int start = iz_head_begins(a, sample, i0) / BN * BN;
    /* The first key that all queries of the warp see. */
    int clear = iz_head_begins(a, sample, i0 + own + 16 * MT - 1);
    int64_t ld = a.ldk, row = i0;
    const uint16_t *q = (const uint16_t *)a.q + iz_head_q(a, head);
    const uint16_t *k = (const uint16_t *)a.k + iz_head_k(a, head);
    const uint16_t *v = k + a.kv;
    float acc[MT][DP / 8][4] = {}, s[MT][BN / 8][4], top[MT][2], sum[MT][2];
    uint32_t kept[KEPT][MT][4];
#pragma unroll
    for (int i = 0; i < 2 * MT; i++) {
        top[i / 2][i % 2] = LOWEST;
        sum[i / 2][i % 2] = 0;
    }
    load_rows<DP, BM, NW>(qs, q + row * a.ld, a.ld, a.end - i0, a.d);
    load_rows<DP, BN, NW>(ks, k + start * ld, ld, a.seq - start, a.d);
    iz_copy_group();
    if (KEPT > 1) {
        iz_copy_wait<0>();
        __syncthreads();
        keep_rows<DP>(kept, qs + own * P);
    }
    for (int j0 = start; j0 < end; j0 += BN) {
        bool live = a.full || j0 < i0 + own + 16 * MT;
        iz_copy_wait<0>();
        __syncthreads(); /* keys are there, the last values are used up */
        load_rows<DP, BN, NW>(vs, v + j0 * ld, ld, a.seq - j0, a.d);
        iz_copy_group();
        if (live) {
            rows_by_rows<T, DP>(s, kept, qs + own * P, ks);
            if (CAP)
                squash(s, a.scale / a.cap);
            if (a.full)
                mask_end(s, a.seq - j0, -INFINITY);
            else if (j0 + BN > i0 + own + 1)
                mask<false>(s, i0 + own, j0, -INFINITY);
            if (j0 < clear)
                mask_documents<false>(s, a, sample, i0 + own, j0, -INFINITY);
#pragma unroll
            for (int i = 0; i < 2 * MT; i++)
                soften(s[i / 2], acc[i / 2], i % 2, &top[i / 2][i % 2],
                       &sum[i / 2][i % 2], iz_head_unit<CAP>(a) * LOG2E);
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
    finish(acc, top, sum, a.lse + iz_head_lse(a, head) + i0 + own,
           a.end - i0 - own, iz_head_sink(a, sample, head),
           iz_head_unit<CAP>(a));
    store_rows<T, DP>((uint16_t *)a.o + iz_head_o(a, head) + (row + own) * a.c,
                      a.c, a.end - i0 - own, a.d, qs + own * P, acc, 1);
}

/* Tiles are as large as registers allow without spills. */
void iz_attention_fwd_16(const struct iz_heads *a, enum iz_dtype t,
                         void *stream)
{
    by_kind(a, t, [&](auto type, auto width, auto capped) {
        constexpr int DP = decltype(width)::value, NW = 4;
        constexpr int MT = DP <= 128 ? 2 : 1, BN = DP <= 96 ? 64 : 32;
        constexpr int BM = 16 * MT * NW;
        void (*k)(struct iz_heads) = attend_16<decltype(type)::value, DP, MT,
                                               NW, BN, decltype(capped)::value>;
        IZ_LAUNCH(k, iz_attention_blocks(a->end - a->first, BM, a->all),
                  32 * NW, bytes_of<DP>(BM + 2 * BN), stream, *a);
    });
}
