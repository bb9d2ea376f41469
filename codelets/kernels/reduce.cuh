/* SPDX-License-Identifier: Apache-2.0 */
/* Sums and maxima over a warp and over a block, in an order that depends on
 * the size of the block alone.  Included by launch.cuh and by its twin.  All
 * threads of the warp or block must call; all get the same bits.  Blocks are
 * one-dimensional and whole warps. */
#pragma once

#define IZ_ALL_LANES 0xffffffffu

template <class T> static __device__ __forceinline__ T iz_warp_sum(T v)
{
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
        v += __shfl_xor_sync(IZ_ALL_LANES, v, step);
    return v;
}

/* NaN may be skipped. */
static __device__ __forceinline__ float iz_warp_max(float v)
{
#pragma unroll
    for (int step = 16; step > 0; step /= 2)
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
    return iz_warp_sum(iz_block_gather(iz_warp_sum(v), (T)0));
}

static __device__ __forceinline__ float iz_block_max(float v)
{
    return iz_warp_max(iz_block_gather(iz_warp_max(v), -INFINITY));
}
