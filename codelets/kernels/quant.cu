/* SPDX-License-Identifier: Apache-2.0 */
/* Weights of what is quantised, on a GPU, with the bits of quant.c and nf4.c:
 * the same products in fp32, none of them fused, rounded once. */
#include "codelets/kernels/launch.cuh"

#include "codelets/flat/nf4.h"
#include "codelets/ops/gpu_ops.h"

enum { THREADS = IZ_QUANT_SCALES, PER_THREAD = 8 }; /* weights */

static_assert(sizeof(struct iz_nf4_group) % 4 == 0 &&
                  sizeof(struct iz_int8_group) % 4 == 0,
              "codes are read as words");

/* Writes 8 weights, fewer at the end of a matrix. */
template <class T>
static __device__ __forceinline__ void
store_weights(T *out, const float (&w)[PER_THREAD], int left, bool aligned)
{
    if (aligned && left >= PER_THREAD)
        iz_store_row(out, w);
    else
        for (int j = 0; j < PER_THREAD && j < left; j++)
            iz_store(out + j, w[j]);
}

/* Block b makes the weights of group b, whose scales it has in shared memory.
 * Moves 0.52 bytes in per weight, and a weight out. */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    load_nf4(T *out, const struct iz_nf4_group *g, int64_t n,
             struct iz_nf4_tables t, bool aligned)
{
    __shared__ float scale[IZ_QUANT_SCALES], value[16];
    int64_t first = (int64_t)blockIdx.x * IZ_QUANT_GROUP;
    int left = (int)min(n - first, (int64_t)IZ_QUANT_GROUP);
    int k = threadIdx.x;
    g += blockIdx.x;
    out += first;
    scale[k] = __fadd_rn(__fmul_rn(t.scale[g->scale[k]], g->most), g->mean);
    if (k < 16)
        value[k] = t.value[k];
    __syncthreads();
    for (int i = k * PER_THREAD; i < left; i += THREADS * PER_THREAD) {
        uint32_t codes = *(const uint32_t *)(g->code + i / 2);
        float s = scale[i / IZ_QUANT_BLOCK], w[PER_THREAD];
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) /* the upper half comes first */
            w[j] = __fmul_rn(value[codes >> (j ^ 1) * 4 & 15], s);
        store_weights(out + i, w, left - i, aligned);
    }
}

/* The same of 8 bits: 1.06 bytes in per weight. */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    load_int8(T *out, const struct iz_int8_group *g, int64_t n, bool aligned)
{
    int64_t first = (int64_t)blockIdx.x * IZ_QUANT_GROUP;
    int left = (int)min(n - first, (int64_t)IZ_QUANT_GROUP);
    g += blockIdx.x;
    out += first;
    for (int i = threadIdx.x * PER_THREAD; i < left;
         i += THREADS * PER_THREAD) {
        const uint32_t *codes = (const uint32_t *)(g->code + i);
        float s = g->scale[i / IZ_QUANT_BLOCK], w[PER_THREAD];
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) {
            int8_t code = (int8_t)(codes[j / 4] >> j % 4 * 8 & 255);
            w[j] = __fmul_rn((float)code, s);
        }
        store_weights(out + i, w, left - i, aligned);
    }
}

void iz_quant_load_cuda(struct iz_exec *x, enum iz_quant q, void *out,
                        enum iz_dtype type, const void *groups, int64_t n)
{
    struct iz_nf4_tables t;
    int blocks = (int)iz_quant_groups(n);
    if (n == 0)
        return;
    iz_nf4_tables(&t);
    iz_by_type(type, [&](auto zero) {
        using T = decltype(zero);
        bool aligned = iz_aligned((T *)out);
        if (q == IZ_QUANT_NF4)
            IZ_LAUNCH((load_nf4<T>), blocks, THREADS, 0, x->stream, (T *)out,
                      (const struct iz_nf4_group *)groups, n, t, aligned);
        else
            IZ_LAUNCH((load_int8<T>), blocks, THREADS, 0, x->stream, (T *)out,
                      (const struct iz_int8_group *)groups, n, aligned);
    });
}
