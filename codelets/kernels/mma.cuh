/* SPDX-License-Identifier: Apache-2.0 */
/* What one warp does with 16-bit matrices: products on tensor cores, fragments
 * from shared memory, and copies to shared memory that run beside arithmetic.
 * Compute capability 8.0 and up.  tests/fake/cuda_on_cpu has the same functions
 * lane by lane.
 *
 * Fragments are those of the PTX ISA, "Matrix Fragments for mma.m16n8k16".
 * With lane = 4 g + t, a register of two elements holds
 *   a[0] (g, 2t)      a[1] (g + 8, 2t)      of a [16,16]
 *   a[2] (g, 2t + 8)  a[3] (g + 8, 2t + 8)
 *   b[0] (2t, g)      b[1] (2t + 8, g)      of b [16,8]
 * and the element after it: the next column of a, the next row of b.
 *   c[0] (g, 2t)  c[1] (g, 2t + 1)  c[2] (g + 8, 2t)  c[3] (g + 8, 2t + 1). */
#pragma once

#include <stdint.h>

#include "codelets/flat/dtype.h"
#include "codelets/kernels/launch.cuh"

/* c[16,8] += a[16,16] b[16,8], sums in fp32; T is IZ_BF16 or IZ_F16. */
template <enum iz_dtype T>
static __device__ __forceinline__ void
iz_mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t *b)
{
    if constexpr (T == IZ_BF16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Two numbers rounded to T in one register; lo has the lower address. */
template <enum iz_dtype T>
static __device__ __forceinline__ uint32_t iz_pack(float lo, float hi)
{
    uint32_t r;
    if constexpr (T == IZ_BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

/* 2^x, error within 2 ulp; results below 2^-126 are zero. */
static __device__ __forceinline__ float iz_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ uint32_t iz_shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Four 8x8 matrices from shared memory.  Lane 8 i + r gives the address of row
 * r of matrix i, 16-byte aligned; the lane gets of matrix i the elements
 * (g, 2t) and (g, 2t + 1). */
static __device__ __forceinline__ void iz_load_matrices(uint32_t (&r)[4],
                                                        const uint16_t *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 "
                 "{%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(iz_shared_address(row))
                 : "memory");
}

/* The same, but the elements (2t, g) and (2t + 1, g). */
static __device__ __forceinline__ void iz_load_transposed(uint32_t (&r)[4],
                                                          const uint16_t *row)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 "
                 "{%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(iz_shared_address(row))
                 : "memory");
}

/* Moves 16 bytes between addresses that are multiples of 16. */
static __device__ __forceinline__ void iz_move16(void *dst, const void *src)
{
    *(uint4 *)dst = *(const uint4 *)src;
}

/* Writes two packed numbers. */
static __device__ __forceinline__ void iz_put_pair(uint16_t *dst, uint32_t pair)
{
    *(uint32_t *)dst = pair;
}

/* Starts a copy of BYTES (16 or 4, aligned) to shared memory; without `valid`
 * zeros are written and src is not read. */
template <int BYTES>
static __device__ __forceinline__ void iz_copy_start(void *dst, const void *src,
                                                     bool valid)
{
    int n = valid ? BYTES : 0;
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                         iz_shared_address(dst)),
                     "l"(src), "r"(n)
                     : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(
                         iz_shared_address(dst)),
                     "l"(src), "r"(n)
                     : "memory");
}

/* Closes a group of the copies that this thread started since the last one. */
static __device__ __forceinline__ void iz_copy_group(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits until all groups of this thread but the last LEFT have arrived. */
template <int LEFT> static __device__ __forceinline__ void iz_copy_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}
