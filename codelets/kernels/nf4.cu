/* SPDX-License-Identifier: Apache-2.0 */
/* Weights of what is in 4 bits, on a GPU, with the bits of nf4.c: the same
 * products in fp32, none of them fused, rounded once. */
#include "codelets/kernels/launch.cuh"

#include "codelets/flat/nf4.h"
#include "codelets/ops/gpu_ops.h"

enum { THREADS = IZ_NF4_SCALES, PER_THREAD = 8 }; /* 4 bytes of codes */

static_assert(sizeof(struct iz_nf4_group) % 4 == 0, "codes are read as words");

/* Block b makes the weights of group b, whose scales it has in shared memory.
 * Moves 0.52 bytes in per weight, and a weight out. */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    load_groups(T *out, const struct iz_nf4_group *g, int64_t n,
                struct iz_nf4_tables t, bool aligned)
{
    __shared__ float scale[IZ_NF4_SCALES], value[16];
    int64_t first = (int64_t)blockIdx.x * IZ_NF4_GROUP;
    int left = (int)min(n - first, (int64_t)IZ_NF4_GROUP);
    int k = threadIdx.x;
    g += blockIdx.x;
    out += first;
    scale[k] = __fadd_rn(__fmul_rn(t.scale[g->scale[k]], g->most), g->mean);
    if (k < 16)
        value[k] = t.value[k];
    __syncthreads();
    for (int i = k * PER_THREAD; i < left; i += THREADS * PER_THREAD) {
        uint32_t codes = *(const uint32_t *)(g->code + i / 2);
        float s = scale[i / IZ_NF4_BLOCK], w[PER_THREAD];
#pragma unroll
        for (int j = 0; j < PER_THREAD; j++) /* the upper half comes first */
            w[j] = __fmul_rn(value[codes >> (j ^ 1) * 4 & 15], s);
        if (aligned && i + PER_THREAD <= left)
            iz_store_row(out + i, w);
        else
            for (int j = 0; j < PER_THREAD && i + j < left; j++)
                iz_store(out + i + j, w[j]);
    }
}

void iz_nf4_load_cuda(struct iz_exec *x, void *out, enum iz_dtype type,
                      const struct iz_nf4_group *g, int64_t n)
{
    struct iz_nf4_tables t;
    if (n == 0)
        return;
    iz_nf4_tables(&t);
    iz_by_type(type, [&](auto zero) {
        using T = decltype(zero);
        IZ_LAUNCH((load_groups<T>), (int)iz_nf4_groups(n), THREADS, 0,
                  x->stream, (T *)out, g, n, t, iz_aligned((T *)out));
    });
}
