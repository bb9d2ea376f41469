/* SPDX-License-Identifier: Apache-2.0 */
/* The interface of codelets/kernels/launch.cuh on a CPU, for files compiled as
 * C++ with this folder before the root.  It has what our kernels use of CUDA
 * and no more.
 */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "codelets/base/build.h"
#include "codelets/flat/dtype.h"
#include "codelets/flat/half.h"
#include "tests/fake/cuda_on_cpu/emulate.h"

#include "codelets/base/die.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
/* All fixed shared arrays in one section, which is filled with NaN before each
 * block.  Functions that have such arrays must be static. */
#define __shared__ static __attribute__((section("emu_fixed")))

#define IZ_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)              \
    emu_launch(#kernel, grid, block, shared_bytes, stream, kernel, __VA_ARGS__)

#define IZ_SHARED(type, name) type *name = (type *)emu_shared

#define __syncthreads() emu_block_barrier(__FILE__, __LINE__)

struct __align__(8) uint2
{
    unsigned x, y;
};
struct __align__(16) uint4
{
    unsigned x, y, z, w;
};
struct __align__(8) float2
{
    float x, y;
};
struct __align__(16) float4
{
    float x, y, z, w;
};
struct __align__(8) int2
{
    int x, y;
};
struct __align__(16) int4
{
    int x, y, z, w;
};

static inline uint2 make_uint2(unsigned x, unsigned y)
{
    return {x, y};
}

static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w)
{
    return {x, y, z, w};
}

static inline float2 make_float2(float x, float y)
{
    return {x, y};
}

static inline float4 make_float4(float x, float y, float z, float w)
{
    return {x, y, z, w};
}

template <class T> static inline T min(T a, T b)
{
    return b < a ? b : a;
}

template <class T> static inline T max(T a, T b)
{
    return a < b ? b : a;
}

struct iz_bf16 {
    uint16_t bits;
};
struct iz_f16 {
    uint16_t bits;
};

static inline float iz_load(const float *p)
{
    return *p;
}

static inline float iz_load(const iz_bf16 *p)
{
    return iz_bf16_load(p->bits);
}

static inline float iz_load(const iz_f16 *p)
{
    return iz_f16_load(p->bits);
}

static inline void iz_store(float *p, float v)
{
    *p = v;
}

static inline void iz_store(iz_bf16 *p, float v)
{
    p->bits = iz_bf16_round(v);
}

static inline void iz_store(iz_f16 *p, float v)
{
    p->bits = iz_f16_round(v);
}

template <class T> static inline void iz_store_pair(T *p, float a, float b)
{
    iz_store(p, a);
    iz_store(p + 1, b);
}

/* A GPU cannot read or write 16 bytes at an address that is no multiple. */
static inline void emu_aligned(const void *p, size_t bytes)
{
    if ((uintptr_t)p % bytes)
        emu_fail("access of %zu bytes at %p", bytes, p);
}

/* What a row of this many bytes is moved by. */
static constexpr size_t emu_piece(size_t bytes)
{
    return bytes % 16 == 0 ? 16 : bytes == 8 ? 8 : 1;
}

template <int N, class T>
static inline void iz_load_row(float (&to)[N], const T *p)
{
    emu_aligned(p, emu_piece(N * sizeof(T)));
    for (int i = 0; i < N; i++)
        to[i] = iz_load(p + i);
}

template <int N, class T>
static inline void iz_store_row(T *p, const float (&from)[N])
{
    emu_aligned(p, emu_piece(N * sizeof(T)));
    for (int i = 0; i < N; i++)
        iz_store(p + i, from[i]);
}

/* The table of a warp's values of type T. */
template <class T> struct emu_lanes {
    const emu_value *table;
    T at(int lane) const
    {
        T v;

        memcpy(&v, table[lane].byte, sizeof(v));
        return v;
    }
};

template <class T>
static inline emu_lanes<T> emu_exchange(const char *what, unsigned mask, T v)
{
    return {emu_warp_exchange(what, mask, &v, sizeof(v))};
}

static inline int emu_lane(void)
{
    return (int)((threadIdx.x +
                  blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) %
                 32);
}

template <class T>
static inline T __shfl_xor_sync(unsigned mask, T v, int step, int width = 32)
{
    int lane = emu_lane(), from = lane ^ step;
    emu_lanes<T> all = emu_exchange("shfl_xor", mask, v);

    return from / width > lane / width ? v : all.at(from);
}

template <class T>
static inline T __shfl_down_sync(unsigned mask, T v, unsigned step,
                                 int width = 32)
{
    int lane = emu_lane(), from = lane + (int)step;
    emu_lanes<T> all = emu_exchange("shfl_down", mask, v);

    return from / width > lane / width ? v : all.at(from);
}

template <class T>
static inline T __shfl_up_sync(unsigned mask, T v, unsigned step,
                               int width = 32)
{
    int lane = emu_lane(), from = lane % width - (int)step;
    emu_lanes<T> all = emu_exchange("shfl_up", mask, v);

    return from < 0 ? v : all.at(lane - (int)step);
}

template <class T>
static inline T __shfl_sync(unsigned mask, T v, int from, int width = 32)
{
    int base = emu_lane() / width * width;
    emu_lanes<T> all = emu_exchange("shfl", mask, v);

    return all.at(base + (from & (width - 1)));
}

static inline unsigned __ballot_sync(unsigned mask, int predicate)
{
    emu_lanes<int> all = emu_exchange("ballot", mask, (int)(predicate != 0));
    unsigned votes = 0;

    for (int i = 0; i < 32; i++)
        votes |= all.at(i) == 1 ? 1u << i : 0; /* not of a lane that left */
    return votes;
}

static inline int __any_sync(unsigned mask, int predicate)
{
    return __ballot_sync(mask, predicate) != 0;
}

static inline int __all_sync(unsigned mask, int predicate)
{
    return __ballot_sync(mask, !predicate) == 0;
}

static inline void __syncwarp(unsigned mask = 0xffffffffu)
{
    emu_warp_exchange("syncwarp", mask, "", 1);
}

static inline void __threadfence(void)
{
}

static inline int __popc(unsigned v)
{
    return __builtin_popcount(v);
}

static inline int __ffs(int v)
{
    return __builtin_ffs(v);
}

template <class T> static inline T atomicAdd(T *p, T v)
{
    static_assert(!(T(0.5) > T(0)), "sums of floats by atomics have no order");
    T old = *p;

    *p = old + v;
    return old;
}

template <class T> static inline T atomicMax(T *p, T v)
{
    T old = *p;

    *p = old > v ? old : v;
    return old;
}

template <class T> static inline T atomicExch(T *p, T v)
{
    T old = *p;

    *p = v;
    return old;
}

template <class T> static inline T atomicCAS(T *p, T expected, T v)
{
    T old = *p;

    *p = old == expected ? v : old;
    return old;
}

template <class T> static inline T __ldg(const T *p)
{
    return *p;
}

/* Operations that the compiler of CUDA does not contract; this one must be told
 * with -ffp-contract=off. */
static inline float __fadd_rn(float a, float b)
{
    return a + b;
}

static inline float __fsub_rn(float a, float b)
{
    return a - b;
}

static inline float __fmul_rn(float a, float b)
{
    return a * b;
}

static inline float __fdiv_rn(float a, float b)
{
    return a / b;
}

static inline float __fsqrt_rn(float a)
{
    return sqrtf(a);
}

static inline float __fmaf_rn(float a, float b, float c)
{
    return fmaf(a, b, c);
}

static inline double __dadd_rn(double a, double b)
{
    return a + b;
}

static inline double __dmul_rn(double a, double b)
{
    return a * b;
}

static inline float __fdividef(float a, float b)
{
    return a / b;
}

/* The C library has declared functions of these names. */
#define __expf(a) expf(a)
#define __logf(a) logf(a)

static inline float rsqrtf(float a)
{
    return 1 / sqrtf(a);
}

#include "codelets/kernels/pieces.cuh"
