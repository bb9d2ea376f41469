/* SPDX-License-Identifier: Apache-2.0 */
/* Between the files of attention on the GPU: what its kernels get, and one
 * entry per family of kernels. */
#ifndef IZ_CODELETS_ATTENTION_CUH
#define IZ_CODELETS_ATTENTION_CUH

#include <stdint.h>

#include "codelets/launch.cuh"
#include "codelets/ops.h"

/* All heads of all samples; in forward dy, dqkv and delta are NULL. */
struct iz_heads {
    const void *qkv, *dy; /* [M,3C], [M,C] */
    void *o, *dqkv;       /* [M,C], [M,3C] */
    float *lse, *delta;   /* [all,seq] */
    int64_t c;            /* = heads d */
    int seq, heads, d;
    int all; /* heads of all samples */
    float scale;
};

/* First element of a head: its queries in a [M,3C], its output in a [M,C]. */
static __device__ __forceinline__ int64_t iz_head_qkv(const struct iz_heads &a,
                                                      int head)
{
    return head / a.heads * (int64_t)a.seq * 3 * a.c + head % a.heads * a.d;
}

static __device__ __forceinline__ int64_t iz_head_o(const struct iz_heads &a,
                                                    int head)
{
    return head / a.heads * (int64_t)a.seq * a.c + head % a.heads * a.d;
}

/* Blocks for all tiles of all heads, in one dimension: block i has head i mod
 * all. */
static inline int iz_attention_blocks(const struct iz_heads *a, int tile)
{
    int64_t n = (a->seq + tile - 1) / tile * (int64_t)a->all;

    if (n > INT32_MAX)
        iz_die("attention: %lld tiles are too many", (long long)n);
    return (int)n;
}

/* Forward, and dqkv once delta is there. */
void iz_attention_fwd_16(const struct iz_heads *a, enum iz_dtype t,
                         void *stream);
void iz_attention_bwd_16(const struct iz_heads *a, enum iz_dtype t,
                         void *stream);
void iz_attention_fwd_32(const struct iz_heads *a, void *stream);
void iz_attention_bwd_32(const struct iz_heads *a, void *stream);

#endif
