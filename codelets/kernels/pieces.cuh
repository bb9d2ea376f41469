/* SPDX-License-Identifier: Apache-2.0 */
/* What kernels are written with that needs nothing of CUDA beyond its shuffles,
 * included by launch.cuh and by its twin: the choice of a template by type,
 * rows in pieces of 16 bytes, and sums and maxima over a warp and over a block,
 * in an order that depends on the size of the block alone.  For these all
 * threads of the warp or block must call, and all get the same bits.  Blocks
 * are one-dimensional and whole warps. */
#pragma once

#include <type_traits>

/* f(zero), where zero has the type of t's elements: fp32, bf16 or fp16.  So f
 * is [&](auto zero) { launch<decltype(zero)>(...); }. */
template <class F> static inline auto iz_by_type(enum iz_dtype t, const F &f)
{
    if (t == IZ_BF16)
        return f(iz_bf16());
    if (t == IZ_F16)
        return f(iz_f16());
    return f(0.0f);
}

/* Whether all these addresses are multiples of 16. */
template <class... P> static inline bool iz_aligned(const P *...p)
{
    return ((uintptr_t)0 | ... | (uintptr_t)p) % 16 == 0;
}

/* Whether rows of n elements, one behind the other, consist of whole aligned
 * pieces. */
template <class T, class... P>
static inline bool iz_pieces_aligned(int64_t n, const P *...p)
{
    return iz_aligned(p...) && n * sizeof(T) % 16 == 0;
}

/* A pieces of N elements of a row of c, STEP apart from `at` on.  Loads without
 * branches, so that they go out together: beyond the end, the last piece again.
 */
template <int STEP, int A, int N, class T>
static __device__ void iz_load_ahead(float (&v)[A][N], const T *row, int at,
                                     int c)
{
#pragma unroll
    for (int k = 0; k < A; k++)
        iz_load_row(v[k], row + min(at + k * STEP, c - N));
}

/* Every thread of a block of THREADS has N elements, from i on.  f(i, N) where
 * they may be treated at once, else f(i, 1) for each of them up to n.  The
 * count is a constant: f is [&](int64_t i, auto count), of which N is
 * decltype(count)::value. */
template <int THREADS, int N, class F>
static __device__ __forceinline__ void iz_each(int64_t n, bool at_once,
                                               const F &f)
{
    int64_t thread = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    int64_t i = thread * N;
    if (at_once && i + N <= n)
        f(i, std::integral_constant<int, N>());
    else
        for (; i < n && i < (thread + 1) * N; i++)
            f(i, std::integral_constant<int, 1>());
}

/* Blocks of `per` elements that cover n. */
static inline unsigned iz_blocks(int64_t n, int64_t per)
{
    return (unsigned)((n + per - 1) / per);
}

#define IZ_ALL_LANES 0xffffffffu

/* Over groups of LANES neighbours, a power of two. */
template <int LANES, class T>
static __device__ __forceinline__ T iz_lanes_sum(T v)
{
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2)
        v += __shfl_xor_sync(IZ_ALL_LANES, v, step);
    return v;
}

/* NaN may be skipped. */
template <int LANES>
static __device__ __forceinline__ float iz_lanes_max(float v)
{
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2)
        v = fmaxf(v, __shfl_xor_sync(IZ_ALL_LANES, v, step));
    return v;
}

/* Lane i of every warp gets the v of warp i's first thread, or `none` where
 * there is no warp i. */
template <class T>
static __device__ __forceinline__ T iz_block_gather(T v, T none)
{
    __shared__ T part[32];
    int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    __syncthreads(); /* part may still be read */
    if (lane == 0)
        part[threadIdx.x / 32] = v;
    __syncthreads();
    return lane < warps ? part[lane] : none;
}

template <class T> static __device__ __forceinline__ T iz_block_sum(T v)
{
    return iz_lanes_sum<32>(iz_block_gather(iz_lanes_sum<32>(v), (T)0));
}

static __device__ __forceinline__ float iz_block_max(float v)
{
    return iz_lanes_max<32>(iz_block_gather(iz_lanes_max<32>(v), -INFINITY));
}
