/* SPDX-License-Identifier: Apache-2.0 */
/* What every kernel is written with: the launch, shared memory, 16-bit types,
 * 16-byte loads and stores, sums over warps and blocks.  A twin of this header
 * in tests/fake/cuda_on_cpu has the same interface and runs kernels on a CPU.
 */
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "codelets/base/build.h"
#include "codelets/flat/dtype.h"
#include "codelets/kernels/launch_check.h"

typedef __nv_bfloat16 iz_bf16;
typedef __half iz_f16;

/* Launches kernel(...) on a stream (void *).  grid and block are dim3 or int
 * and not zero; no top-level comma of a template in the arguments.  What fails
 * at the launch ends the job. */
#define IZ_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)              \
    do {                                                                       \
        iz_launch_forget();                                                    \
        iz_launch_allow((const void *)(kernel), (shared_bytes), __FILE__);     \
        (kernel)<<<(grid), (block), (shared_bytes), (cudaStream_t)(stream)>>>( \
            __VA_ARGS__);                                                      \
        iz_launch_check(cudaGetLastError(), #kernel, __FILE__);                \
    } while (0)

/* Declares `type *name`, the dynamic shared memory of the block, aligned to 128
 * bytes.  Fixed arrays are plain __shared__ in a static function. */
#define IZ_SHARED(type, name)                                                  \
    extern __shared__ __align__(128) unsigned char iz_shared_bytes[];          \
    type *name = reinterpret_cast<type *>(iz_shared_bytes)

/* More than 48 KiB of dynamic shared memory has to be asked for. */
static inline void iz_launch_allow(const void *kernel, size_t shared_bytes,
                                   const char *where)
{
    if (shared_bytes > 48 * 1024)
        iz_launch_check(cudaFuncSetAttribute(
                            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                            (int)shared_bytes),
                        "a kernel with much shared memory", where);
}

/* One element as fp32.  Stores round to nearest even; NaN stays NaN. */
static __device__ __forceinline__ float iz_load(const float *p)
{
    return *p;
}

static __device__ __forceinline__ float iz_load(const iz_bf16 *p)
{
    return __bfloat162float(*p);
}

static __device__ __forceinline__ float iz_load(const iz_f16 *p)
{
    return __half2float(*p);
}

static __device__ __forceinline__ void iz_store(float *p, float v)
{
    *p = v;
}

static __device__ __forceinline__ void iz_store(iz_bf16 *p, float v)
{
    *p = __float2bfloat16_rn(v);
}

static __device__ __forceinline__ void iz_store(iz_f16 *p, float v)
{
    *p = __float2half_rn(v);
}

/* Two neighbours at once, one instruction for 16-bit types. */
static __device__ __forceinline__ void iz_store_pair(float *p, float a, float b)
{
    p[0] = a;
    p[1] = b;
}

static __device__ __forceinline__ void iz_store_pair(iz_bf16 *p, float a,
                                                     float b)
{
    *(__nv_bfloat162 *)p = __floats2bfloat162_rn(a, b);
}

static __device__ __forceinline__ void iz_store_pair(iz_f16 *p, float a,
                                                     float b)
{
    *(__half2 *)p = __floats2half2_rn(a, b);
}

/* N elements from p as fp32.  Where N elements are whole pieces of 16 bytes, or
 * 8 bytes, they are read so, and p must be aligned to that; else one by one. */
template <int N, class T>
static __device__ __forceinline__ void iz_load_row(float (&to)[N], const T *p)
{
    constexpr int per = 16 / sizeof(T);
    if constexpr (N % per == 0) {
#pragma unroll
        for (int i = 0; i < N; i += per) {
            uint4 piece = *(const uint4 *)(p + i);
#pragma unroll
            for (int j = 0; j < per; j++)
                to[i + j] = iz_load((const T *)&piece + j);
        }
    } else if constexpr (N * sizeof(T) == 8) {
        uint2 piece = *(const uint2 *)p;
#pragma unroll
        for (int j = 0; j < N; j++)
            to[j] = iz_load((const T *)&piece + j);
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            to[i] = iz_load(p + i);
    }
}

/* The reverse. */
template <int N, class T>
static __device__ __forceinline__ void iz_store_row(T *p,
                                                    const float (&from)[N])
{
    constexpr int per = 16 / sizeof(T);
    if constexpr (N % per == 0) {
#pragma unroll
        for (int i = 0; i < N; i += per) {
            uint4 piece;
#pragma unroll
            for (int j = 0; j < per; j += 2)
                iz_store_pair((T *)&piece + j, from[i + j], from[i + j + 1]);
            *(uint4 *)(p + i) = piece;
        }
    } else if constexpr (N * sizeof(T) == 8) {
        uint2 piece;
#pragma unroll
        for (int j = 0; j < N; j += 2)
            iz_store_pair((T *)&piece + j, from[j], from[j + 1]);
        *(uint2 *)p = piece;
    } else {
#pragma unroll
        for (int i = 0; i < N; i++)
            iz_store(p + i, from[i]);
    }
}

#include "codelets/kernels/pieces.cuh"
