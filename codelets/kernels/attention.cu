/* SPDX-License-Identifier: Apache-2.0 */
/* The entries of attention on the GPU, and what backward does before its
 * products. */
#include "codelets/kernels/attention.cuh"

#include <assert.h>
#include <math.h>

#include "codelets/ops/gpu_ops.h"

/* delta[head, t] = dy . o over the d columns of a head: the part of the softmax
 * gradient that its normalisation takes away.  `lanes` neighbours share a row
 * of a head, N elements at a time.  Moves 2 sizeof(T) bytes per element, 256
 * threads with 2 N of them on their way each. */
template <class T, int N>
static __global__ void __launch_bounds__(256)
    form_delta(struct iz_heads a, int lanes)
{
    int64_t item = ((int64_t)blockIdx.x * 256 + threadIdx.x) / lanes;
    int64_t row = item / a.heads, sample = row / a.seq;
    int lane = (int)threadIdx.x % lanes;
    bool live = sample < a.all / a.heads;
    const T *o = (const T *)a.o + item * a.d;
    const T *dy = (const T *)a.dy + item * a.d;
    float sum = 0;
    for (int i = lane * N; live && i < a.d; i += lanes * N) {
        float u[N], v[N];
        iz_load_row<N>(u, o + i);
        iz_load_row<N>(v, dy + i);
        for (int j = 0; j < N; j++)
            sum += u[j] * v[j];
    }
    for (int step = lanes / 2; step > 0; step /= 2)
        sum += __shfl_xor_sync(IZ_ALL_LANES, sum, step);
    if (live && lane == 0)
        a.delta[(sample * a.heads + item % a.heads) * a.seq + row % a.seq] =
            sum;
}

/* The largest power of two up to 32 with which every lane has work. */
static int lanes_for(int pieces)
{
    int lanes = 1;
    while (lanes < 32 && 2 * lanes <= pieces)
        lanes *= 2;
    return lanes;
}

template <class T, int N>
static void delta_of(const struct iz_heads *a, void *stream)
{
    int lanes = lanes_for(a->d / N);
    int64_t threads = (int64_t)a->all * a->seq * lanes;
    void (*k)(struct iz_heads, int) = form_delta<T, N>;
    IZ_LAUNCH(k, (int)((threads + 255) / 256), 256, 0, stream, *a, lanes);
}

/* As many heads as have their keys and values, or queries and gradients of the
 * output, in 16 MiB: an A100 has 40 MiB of level-2 cache, an H100 50, of which
 * a multiprocessor is near one half. */
static int chunk_of(const struct iz_heads *a, enum iz_dtype t)
{
    int64_t head = 2 * (int64_t)a->seq * a->d * iz_dtype_bytes(t);
    int64_t n = ((int64_t)16 << 20) / head / a->group * a->group;
    n = n > a->group ? n : a->group;
    return n < a->all ? (int)n : a->all;
}

/* Their kernels need compute capability 8.0. */
static bool on_tensor_cores(const struct iz_exec *x, enum iz_dtype t)
{
    return t != IZ_F32 && x->numerics.capability >= 80;
}

static __global__ void __launch_bounds__(256)
    copy_begins(int32_t *to, const int32_t *from, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i < n)
        to[i] = from[i];
}

/* Every block reads them, some several times: from pinned memory once. */
static const int32_t *begins_of(const struct iz_attention *a, void *room,
                                void *stream)
{
    int64_t n = iz_view_len(a->begins);
    int32_t *to = (int32_t *)room;
    if (!n)
        return NULL;
    IZ_LAUNCH(copy_begins, (int)((n + 255) / 256), 256, 0, stream, to,
              (const int32_t *)a->begins.p, n);
    return to;
}

static struct iz_heads heads_of(const struct iz_attention *a)
{
    struct iz_heads h = {};
    assert(a->qkv.dtype == a->o.dtype);
    assert(a->qkv.cols <= INT32_MAX / 128); /* offsets within a tile */
    h.qkv = a->qkv.p;
    h.o = a->o.p;
    h.lse = (float *)a->lse.p;
    h.c = a->o.cols;
    h.ld = a->qkv.cols;
    h.kv = (h.ld - h.c) / 2;
    h.seq = (int)a->seq;
    h.heads = a->heads;
    h.kv_heads = iz_attention_keys(a);
    h.group = h.heads / h.kv_heads;
    h.d = (int)(a->o.cols / a->heads);
    h.all = (int)(a->o.rows / a->seq * a->heads);
    h.chunk = chunk_of(&h, a->o.dtype);
    h.full = a->full;
    h.scale = 1 / sqrtf((float)h.d);
    return h;
}

void iz_attention_fwd_cuda(struct iz_exec *x, const struct iz_attention *a,
                           struct iz_view scratch)
{
    struct iz_heads h = heads_of(a);
    h.begins = begins_of(a, scratch.p, x->stream);
    if (on_tensor_cores(x, a->o.dtype))
        iz_attention_fwd_16(&h, a->o.dtype, x->stream);
    else
        iz_attention_fwd_32(&h, a->o.dtype, x->stream);
}

void iz_attention_bwd_cuda(struct iz_exec *x, struct iz_view dqkv,
                           struct iz_view dy, const struct iz_attention *a,
                           struct iz_view scratch)
{
    struct iz_heads h = heads_of(a);
    assert(dqkv.dtype == a->o.dtype && dy.dtype == a->o.dtype);
    h.dy = dy.p;
    h.dqkv = dqkv.p;
    h.delta = (float *)scratch.p;
    h.begins = begins_of(a, h.delta + iz_view_len(a->lse), x->stream);
    iz_by_type(a->o.dtype, [&](auto zero) {
        delta_of<decltype(zero), sizeof(zero) == 2 ? 8 : 1>(&h, x->stream);
    });
    if (on_tensor_cores(x, a->o.dtype))
        iz_attention_bwd_16(&h, a->o.dtype, x->numerics.capability, x->stream);
    else
        iz_attention_bwd_32(&h, a->o.dtype, x->numerics.capability, x->stream);
}
