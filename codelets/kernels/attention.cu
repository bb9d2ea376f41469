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

/* The first keys of n rows, by documents (NULL: none) and window. */
static __global__ void __launch_bounds__(256)
    first_keys(int32_t *to, const int32_t *begins, int64_t n, int seq,
               int window)
{
    int64_t i = (int64_t)blockIdx.x * 256 + threadIdx.x;
    if (i >= n)
        return;
    int first = (int)(i % seq) + 1 - window;
    to[i] = max(first, begins ? begins[i] : 0);
}

template <class T>
static __global__ void __launch_bounds__(256)
    widen_sinks(float *to, const T *from, int n)
{
    for (int i = (int)threadIdx.x; i < n; i += 256)
        to[i] = iz_load(from + i);
}

/* What blocks read several times, with room for it: first keys, from pinned
 * memory once, and sinks. */
static void aside_bring(struct iz_heads *h, const struct iz_attention *a,
                        float *room, void *stream)
{
    int64_t n = iz_attention_hides(a) ? a->o.rows : 0;
    int32_t *first = (int32_t *)room;
    if (n) {
        IZ_LAUNCH(first_keys, (int)((n + 255) / 256), 256, 0, stream, first,
                  (const int32_t *)a->begins.p, n, h->seq,
                  a->window ? a->window : h->seq);
        h->begins = first;
    }
    if (a->sinks.rows) {
        h->sinks = room + n;
        iz_by_type(a->sinks.dtype, [&](auto zero) {
            void (*k)(float *, const decltype(zero) *, int) =
                widen_sinks<decltype(zero)>;
            IZ_LAUNCH(k, 1, 256, 0, stream, room + n,
                      (const decltype(zero) *)a->sinks.p, h->heads);
        });
    }
}

/* A block has a head, of all samples.  A sink's value is 0, so is the gradient
 * of its probability; what it has of a row is above 1 only where lse was
 * rounded. */
template <class T>
static __global__ void __launch_bounds__(256)
    sink_grads(T *dsinks, struct iz_heads a)
{
    int head = (int)blockIdx.x;
    int64_t rows = (int64_t)a.all / a.heads * a.seq;
    float sum = 0, sink = a.sinks[head];
    for (int64_t i = threadIdx.x; i < rows; i += 256) {
        int64_t at = (i / a.seq * a.heads + head) * a.seq + i % a.seq;
        float x = sink - a.lse[at];
        sum += expf(x > 0 ? 0 : x) * a.delta[at];
    }
    sum = iz_block_sum(sum);
    if (threadIdx.x == 0)
        iz_store(dsinks + head, -sum);
}

static void dsinks_of(const struct iz_heads *h, struct iz_view dsinks,
                      void *stream)
{
    iz_by_type(dsinks.dtype, [&](auto zero) {
        void (*k)(decltype(zero) *, struct iz_heads) =
            sink_grads<decltype(zero)>;
        IZ_LAUNCH(k, h->heads, 256, 0, stream, (decltype(zero) *)dsinks.p, *h);
    });
}

static struct iz_heads heads_of(const struct iz_attention *a)
{
    struct iz_heads h = {};
    assert(a->qkv.dtype == a->o.dtype && !a->kv.rows);
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
    h.scale = iz_attention_scale(a);
    h.cap = a->cap;
    return h;
}

void iz_attention_fwd_cuda(struct iz_exec *x, const struct iz_attention *a,
                           struct iz_view scratch)
{
    struct iz_heads h = heads_of(a);
    aside_bring(&h, a, (float *)scratch.p, x->stream);
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
    aside_bring(&h, a, h.delta + iz_view_len(a->lse), x->stream);
    iz_by_type(a->o.dtype, [&](auto zero) {
        delta_of<decltype(zero), sizeof(zero) == 2 ? 8 : 1>(&h, x->stream);
    });
    if (a->sinks.rows && a->dsinks.p)
        dsinks_of(&h, a->dsinks, x->stream);
    if (on_tensor_cores(x, a->o.dtype))
        iz_attention_bwd_16(&h, a->o.dtype, x->numerics.capability, x->stream);
    else
        iz_attention_bwd_32(&h, a->o.dtype, x->numerics.capability, x->stream);
}
