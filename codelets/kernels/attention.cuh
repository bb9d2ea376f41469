/* SPDX-License-Identifier: Apache-2.0 */
/* Between the files of attention on the GPU: what its kernels get, and one
 * entry per family of kernels. */
#pragma once

#include <stdint.h>

#include "codelets/kernels/launch.cuh"
#include "codelets/ops/ops.h"

/* All heads of all samples.  Pointers to rows are to where row 0 of a sample
 * would be, of which `first` is the first that is there.  What forward has not
 * is NULL. */
struct iz_heads {
    const void *q, *k; /* rows of queries; of keys and, behind them, values */
    union {
        void *o; /* rows of c, of forward */
        const void *dy;
    };
    void *dq, *dk;         /* as q and k; dk fp32 where `adds` */
    float *lse, *delta;    /* of each head end - first rows */
    const int32_t *begins; /* of each sample as many, in device memory, or NULL:
                            * the first key that a row sees, by its document and
                            * its window.  It ascends within a sample. */
    const float *sinks;    /* [heads], in device memory, or NULL: as in ops.h */
    int c;                 /* = heads d */
    int ld, ldk;           /* from one row to the next, of q and k */
    int kv;                /* = heads / group d, from keys to values */
    int first, end;        /* rows of a sample */
    int seq;               /* keys, up to the last that a row sees */
    int heads;
    int group; /* heads that share keys */
    int all;   /* heads of all samples */
    int d;
    float scale;    /* of q.k */
    float cap;      /* 0: none; else scores are cap tanh(scale / cap q.k) */
    uint16_t chunk; /* heads that blocks take at a time: whole groups */
    bool full;      /* not causal */
    bool adds;      /* to dk, and to dsinks */
};

/* The compiler keeps up to 128 bytes of an argument in registers, and copies
 * larger ones to where all kernels of this file are slower. */
static_assert(sizeof(struct iz_heads) <= 128, "a kernel's argument");

/* What a score that a tile has is still to be multiplied by. */
template <bool CAP>
static __device__ __forceinline__ float iz_head_unit(const struct iz_heads &a)
{
    return CAP ? a.cap : a.scale;
}

/* The first key that row i of a sample sees; of rows behind the last, what that
 * one sees. */
static __device__ __forceinline__ int iz_head_begins(const struct iz_heads &a,
                                                     int sample, int i)
{
    return a.begins ? a.begins[(int64_t)sample * a.end + min(i, a.end - 1)] : 0;
}

/* The first row of a sample that sees no key before `key`, which is not less;
 * a.end if there is none. */
static __device__ __forceinline__ int iz_head_ends(const struct iz_heads &a,
                                                   int sample, int key)
{
    int from = min(max(key, a.first), a.end), n = a.end - from;
    if (!a.begins)
        return a.end;
    while (n > 0) {
        int half = n / 2;
        bool sees = iz_head_begins(a, sample, from + half) < key;
        from = sees ? from + half + 1 : from;
        n = sees ? n - half - 1 : half;
    }
    return from;
}

static __device__ __forceinline__ float iz_head_sink(const struct iz_heads &a,
                                                     int sample, int head)
{
    return a.sinks ? a.sinks[head - sample * a.heads] : -INFINITY;
}

/* What the sums of a row are to be multiplied by at the end: `all` is that of
 * its exponentials, relative to the score `top`, in units of `unit`.  A sink
 * becomes part of both; without one, -infinity, their bits stay. */
static __device__ __forceinline__ float iz_head_share(float sink, float unit,
                                                      float *top, float *all)
{
    float s = sink / unit, high = s > *top ? s : *top;
    float keep = expf((*top - high) * unit);
    *all = *all * keep + expf((s - high) * unit);
    *top = high;
    return keep / *all;
}

/* First element of a head: its queries in q, its output in o, its keys in k,
 * and its numbers in lse and delta. */
static __device__ __forceinline__ int64_t iz_head_q(const struct iz_heads &a,
                                                    int head)
{
    return head / a.heads * (int64_t)a.end * a.ld + head % a.heads * a.d;
}

static __device__ __forceinline__ int64_t iz_head_o(const struct iz_heads &a,
                                                    int head)
{
    return head / a.heads * (int64_t)a.end * a.c + head % a.heads * a.d;
}

static __device__ __forceinline__ int64_t iz_head_k(const struct iz_heads &a,
                                                    int head)
{
    return head / a.heads * (int64_t)a.seq * a.ldk +
           head % a.heads / a.group * a.d;
}

static __device__ __forceinline__ int64_t iz_head_lse(const struct iz_heads &a,
                                                      int head)
{
    return (int64_t)head * (a.end - a.first);
}

/* The tile of one head or group that a block has; `after`: tiles behind it. */
struct iz_attention_place {
    int head, tile, after;
};

/* A chunk of heads or groups after the other, and in it the first tiles of all,
 * then the second ones: blocks that run at the same time read the same keys, or
 * the same queries, while the level-2 cache has them, and the longest tiles of
 * a chunk start first.  `group` heads to a block, 1 or a.group. */
static __device__ __forceinline__ struct iz_attention_place
iz_attention_place(const struct iz_heads &a, int group)
{
    unsigned all = (unsigned)(a.all / group), tiles = gridDim.x / all;
    unsigned chunk = (unsigned)(a.chunk / group);
    unsigned first = blockIdx.x / (chunk * tiles) * chunk;
    unsigned n = min(chunk, all - first), i = blockIdx.x - first * tiles;
    int tile = (int)(i / n);
    return {(int)(first + i % n), tile, (int)tiles - 1 - tile};
}

/* Blocks for all tiles of so many rows, or keys, of `all` heads or groups, in
 * one dimension. */
static inline int iz_attention_blocks(int rows, int tile, int all)
{
    int64_t n = (rows + (int64_t)tile - 1) / tile * all;
    if (n > INT32_MAX)
        iz_die("attention: %lld tiles are too many", (long long)n);
    return (int)n;
}

/* f(integral_constant) with the least of these widths that heads of d columns
 * fit into: 32, 64, 96, 128 or 256. */
template <class F> static inline void iz_by_width(int d, const F &f)
{
    if (d <= 32)
        f(std::integral_constant<int, 32>());
    else if (d <= 64)
        f(std::integral_constant<int, 64>());
    else if (d <= 96)
        f(std::integral_constant<int, 96>());
    else if (d <= 128)
        f(std::integral_constant<int, 128>());
    else
        f(std::integral_constant<int, 256>());
}

/* f(integral_constant): whether scores are capped. */
template <class F>
static inline void iz_by_cap(const struct iz_heads *a, const F &f)
{
    if (a->cap != 0)
        f(std::true_type());
    else
        f(std::false_type());
}

/* Forward, and dqkv once delta is there: 16-bit types on tensor cores, from
 * compute capability 8.0 on; fp32 and fp16 without. */
void iz_attention_fwd_16(const struct iz_heads *a, enum iz_dtype t,
                         void *stream);
void iz_attention_bwd_16(const struct iz_heads *a, enum iz_dtype t,
                         int capability, void *stream);
void iz_attention_fwd_32(const struct iz_heads *a, enum iz_dtype t,
                         void *stream);
void iz_attention_bwd_32(const struct iz_heads *a, enum iz_dtype t,
                         int capability, void *stream);
