/* SPDX-License-Identifier: Apache-2.0 */
/* What forward and gradients of attention of 16-bit activations share: tiles in
 * shared memory, their products on tensor cores, and masks of the scores.  Both
 * take a tile of the scores at a time, by the algorithm of FlashAttention-2
 * (Dao 2023, arXiv 2307.08691).
 *
 * A warp owns MT times 16 rows of its block's tile for the whole kernel: rows
 * of queries, or in `key_grads` of keys, with the scores transposed.  So a row
 * of scores never leaves its four lanes, and probabilities go from the result
 * of one product into the operand of the next within registers.  They are
 * rounded to the 16-bit type there; all sums are fp32.
 *
 * Widths are padded to DP columns of zeros in shared memory, where rows are 16
 * bytes longer than that, so that eight of them lie in different banks. */
#pragma once

#include "codelets/kernels/attention.cuh"
#include "codelets/kernels/launch.cuh"
#include "codelets/kernels/mma.cuh"

#define LOG2E 1.44269504088896340736f

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

/* 16 MT rows in shared memory into registers, where `kept` has room for all
 * pieces of 16 columns. */
template <int DP, int MT, int K>
static __device__ __forceinline__ void keep_rows(uint32_t (&kept)[K][MT][4],
                                                 const uint16_t *rows)
{
#pragma unroll
    for (int k = 0; K == DP / 16 && k < K; k++)
        load_columns<DP>(kept[k], rows, 16 * k);
}

/* s[16 MT, 8 N] = a[16 MT, DP] b[8 N, DP]^T: two sets of rows in shared memory.
 * Where kept has room for all of a, it has them already. */
template <enum iz_dtype T, int DP, int MT, int N, int K>
static __device__ __forceinline__ void
rows_by_rows(float (&s)[MT][N][4], uint32_t (&kept)[K][MT][4],
             const uint16_t *a, const uint16_t *b)
{
    clear(s);
#pragma unroll
    for (int k = 0; k < DP / 16; k++) {
        if (K < DP / 16)
            load_columns<DP>(kept[0], a, 16 * k);
        add_columns<T, DP>(s, kept[k % K], b + 16 * k);
    }
}

template <enum iz_dtype T, int DP, int MT, int N>
static __device__ __forceinline__ void
rows_by_rows(float (&s)[MT][N][4], const uint16_t *a, const uint16_t *b)
{
    uint32_t piece[1][MT][4];
    rows_by_rows<T, DP>(s, piece, a, b);
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

/* Adds acc, times `by`, to sums in fp32; `left` rows and d columns exist. */
template <int MT, int C>
static __device__ __forceinline__ void
sum_rows(float *to, int64_t ld, int left, int d, const float (&acc)[MT][C][4],
         float by)
{
    to += frag_row(0, 0) * ld + frag_col(0, 0);
#pragma unroll
    for (int i = 0; i < MT * 2 * C; i++) {
        int m = i / (2 * C), h = i / C % 2, j = i % C;
        float *at = to + (16 * m + 8 * h) * ld + 8 * j, f[2];
        if (frag_row(m, 2 * h) < left && frag_col(j, 0) < d) {
            iz_load_row<2>(f, at);
            f[0] += acc[m][j][2 * h] * by;
            f[1] += acc[m][j][2 * h + 1] * by;
            iz_store_row<2>(at, f);
        }
    }
}

/* Scores of queries and keys become tanh(by s). */
template <int MT, int N>
static __device__ __forceinline__ void squash(float (&s)[MT][N][4], float by)
{
#pragma unroll
    for (int i = 0; i < MT * N * 4; i++) {
        float *p = &s[i / (4 * N)][i / 4 % N][i % 4];
        *p = tanhf(*p * by);
    }
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

/* Sets the elements of keys before the query's first; row and col as
 * above, in a sample. */
template <bool by_key, int MT, int N>
static __device__ __forceinline__ void
mask_documents(float (&s)[MT][N][4], const struct iz_heads &a, int sample,
               int row, int col, float to)
{
#pragma unroll
    for (int i = 0; i < MT * N * 4; i++) {
        int m = i / (4 * N), j = i / 4 % N, e = i % 4;
        int r = row + frag_row(m, e), c = col + frag_col(j, e);
        if ((by_key ? r : c) < iz_head_begins(a, sample, by_key ? c : r))
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

/* Bytes of `rows` rows in shared memory. */
template <int DP> static int bytes_of(int rows)
{
    return rows * pitch<DP> * (int)sizeof(uint16_t);
}

/* f(type, width, capped) for these heads, all as integral_constant. */
template <class F>
static void by_kind(const struct iz_heads *a, enum iz_dtype t, const F &f)
{
    iz_by_width(a->d, [&](auto width) {
        iz_by_cap(a, [&](auto capped) {
            if (t == IZ_BF16)
                f(std::integral_constant<enum iz_dtype, IZ_BF16>(), width,
                  capped);
            else
                f(std::integral_constant<enum iz_dtype, IZ_F16>(), width,
                  capped);
        });
    });
}
