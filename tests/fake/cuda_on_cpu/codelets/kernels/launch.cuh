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
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
/* fixed.ld puts all of them in one section, which is filled with NaN before
 * each block. */
#define __shared__ static

#define IZ_LAUNCH(kernel, grid, block, shared_bytes, stream, ...)              \
    emu_launch(#kernel, grid, block, shared_bytes, stream, kernel, __VA_ARGS__)

#define IZ_SHARED(type, name) type *name = (type *)emu_shared

#define __syncthreads() emu_block_barrier(__FILE__, __LINE__)

struct __align__(8) uint2
{
    unsigned x, y;
};
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
    const T &at(int lane) const
    {
        return *(const T *)table[lane].byte;
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

template <class T> static inline T __shfl_xor_sync(unsigned mask, T v, int step)
{
    return emu_exchange("shfl_xor", mask, v).at(emu_lane() ^ step);
}

template <class T>
static inline T __shfl_down_sync(unsigned mask, T v, int step)
{
    int from = emu_lane() + step;
    emu_lanes<T> all = emu_exchange("shfl_down", mask, v);
    return from < 32 ? all.at(from) : v;
}

/* A bit for each lane of the mask whose p is not 0. */
static inline unsigned __ballot_sync(unsigned mask, int p)
{
    emu_lanes<int> all = emu_exchange("ballot", mask, p);
    unsigned bits = 0;
    for (int i = 0; i < 32; i++)
        if (mask >> i & 1 && all.at(i))
            bits |= 1u << i;
    return bits;
}

static constexpr auto __popc = [](unsigned v) { return __builtin_popcount(v); };

static inline void __syncwarp(unsigned mask = 0xffffffffu)
{
    emu_warp_exchange("syncwarp", mask, "", 1);
}

/* Operations that the compiler of CUDA does not contract; this one must be told
 * with -ffp-contract=off. */
static constexpr auto __fadd_rn = [](float a, float b) { return a + b; };
static constexpr auto __fsub_rn = [](float a, float b) { return a - b; };
static constexpr auto __fmul_rn = [](float a, float b) { return a * b; };
static constexpr auto __dadd_rn = [](double a, double b) { return a + b; };
static constexpr auto __dmul_rn = [](double a, double b) { return a * b; };
static constexpr auto __fdividef = [](float a, float b) { return a / b; };
static inline float __fmaf_rn(float a, float b, float c)
{
    return fmaf(a, b, c);
}

/* The C library has declared a function of this name. */
#define __expf(a) expf(a)

#include "codelets/kernels/pieces.cuh"
