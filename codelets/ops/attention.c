/* SPDX-License-Identifier: Apache-2.0 */
/* Multi-head attention, one head of one sample after the other: the CPU's
 * arithmetic is in attention_loops.c. */
#include "codelets/ops/ops.h"

#include <assert.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "codelets/base/die.h"
#include "codelets/base/int64.h"
#include "codelets/flat/simd.h"
#include "codelets/ops/attention.h"
#include "codelets/ops/gpu_ops.h"

/* Keys that a row sees at most. */
static int64_t window_of(const struct iz_attention *a)
{
    return a->window ? min64(a->window, a->seq) : a->seq;
}

/* Keys from the first that a row may see, or up to a panel before it. */
static int64_t keys_most(const struct iz_attention *a)
{
    return min64(iz_attention_end(a),
                 iz_attention_rows(a) + window_of(a) + IZ_HEAD_PANEL - 2);
}

/* Head i of all samples; dqkv and dy are NULL in forward. */
static struct iz_head head_at(const struct iz_attention *a, int64_t i,
                              float *dqkv, const float *dy)
{
    int64_t c = a->o.cols, ld = a->qkv.cols, d = c / a->heads;
    int64_t rows = iz_attention_rows(a);
    int64_t row = i / a->heads * rows, head = i % a->heads;
    int64_t keys = iz_attention_keys(a), group = a->heads / keys;
    bool apart = a->kv.rows;
    /* From the keys of a row to those of this head. */
    int64_t to_k = head / group * d, to_v = to_k + keys * d;
    const float *q = (float *)a->qkv.p + row * ld;
    const float *kv = apart ? a->kv.p : q + c;
    float *o = (float *)a->o.p + row * c + head * d;
    struct iz_head h = {.q = q + head * d,
                        .k = kv + to_k,
                        .v = kv + to_v,
                        .o = o,
                        .out = o,
                        .lse = (float *)a->lse.p + i * rows,
                        .d = d,
                        .ld = ld,
                        .ldk = apart ? a->kv.cols : ld,
                        .ldo = c,
                        .i0 = a->first,
                        .rows = rows,
                        .keys = iz_attention_end(a),
                        .first = head % group == 0,
                        .last = head % group == group - 1,
                        .adds = apart,
                        .full = a->full,
                        .window = window_of(a),
                        .scale = a->scale,
                        .cap = a->cap};
    if (a->begins.p)
        h.begins = (int32_t *)a->begins.p + row;
    if (dqkv) {
        float *dkv = apart ? a->dkv.p : dqkv + row * ld + c;
        h.dy = dy + row * c + head * d;
        h.dq = dqkv + row * ld + head * d;
        h.dk = dkv + to_k;
        h.dv = dkv + to_v;
    }
    return h;
}

/* Twice the keys that the first n rows of a sample see. */
static double pairs(const struct iz_attention *a, int64_t n)
{
    double w = (double)min64(window_of(a), n), rows = (double)n;
    return a->full ? 2 * rows * (double)a->seq : w * (2 * rows - w + 1);
}

/* Flops of one product of all heads, of the keys that are seen. */
static double flops(const struct iz_attention *a)
{
    int64_t rows = iz_attention_rows(a), samples = a->o.rows / rows;
    return (double)(samples * a->o.cols) *
           (pairs(a, a->first + rows) - pairs(a, a->first));
}

/* Elements of the keys and values that are seen, where they are apart. */
static double kv_elements(const struct iz_attention *a)
{
    return a->kv.rows ? (double)(keys_most(a) * a->kv.cols) : 0;
}

/* Those of qkv that are read, and of o. */
static double bytes_of(const struct iz_attention *a)
{
    double of_qkv = a->kv.rows ? kv_elements(a) + (double)iz_view_len(a->o)
                               : (double)iz_view_len(a->qkv);
    return (double)iz_dtype_bytes(a->qkv.dtype) * of_qkv +
           (double)iz_view_bytes(a->o);
}

/* What the graph that cuDNN is given cannot say; NULL: it can say all. */
static const char *why_own(const struct iz_attention *a)
{
    return a->kv.rows ? "chunks of a sample add gradients of keys in fp32, "
                        "which cuDNN has not"
           : a->begins.rows ? "cuDNN's attention does not keep documents "
                              "apart, as data.document_end asks"
           : window_of(a) < a->seq ? "cuDNN's attention has no window"
           : a->cap != 0           ? "cuDNN's attention caps no scores"
           : a->sinks.rows         ? "cuDNN's attention has no sinks"
                                   : NULL;
}

static void attention_begin(struct iz_exec *x, const struct iz_attention *a)
{
    int keys = iz_attention_keys(a);
    int64_t rows = iz_attention_rows(a);
    assert(a->o.rows % rows == 0 && a->o.cols % a->heads == 0);
    assert(a->first >= 0 && a->first + rows <= a->seq);
    assert(!a->kv.rows ||
           (a->kv.cols == a->qkv.cols - a->o.cols &&
            a->kv.dtype == a->qkv.dtype && a->kv.rows >= iz_attention_end(a)));
    assert(a->heads % keys == 0 && a->qkv.rows == a->o.rows);
    assert(a->qkv.cols == a->o.cols / a->heads * (a->heads + 2 * keys));
    assert(iz_view_len(a->lse) == a->o.rows * a->heads);
    assert(!a->begins.rows ||
           (!a->full && iz_view_len(a->begins) == a->o.rows / rows * a->seq));
    assert(a->window >= 0 && !(a->window && a->full));
    assert(!a->sinks.rows || iz_view_len(a->sinks) == a->heads);
    x->attends = true;
    x->why_own = x->why_own ? x->why_own : why_own(a);
}

static void on_cpu(struct iz_exec *x, const struct iz_attention *a, bool bwd,
                   float *dqkv, const float *dy)
{
    const struct iz_attention_loops *loops = iz_attention_loops();
    int64_t d = a->o.cols / a->heads;
    int64_t heads = a->o.rows / iz_attention_rows(a) * a->heads;
    struct iz_view work = iz_exec_work(
        x, IZ_F32, 1, iz_attention_head_floats(keys_most(a), d, bwd));
    /* In fp32, and the sums of their gradients. */
    struct iz_view sinks = iz_exec_work(x, IZ_F32, 2 * a->sinks.rows, a->heads);
    float *sink = sinks.p, *dsink = sink + a->heads;
    if (x->dry)
        return;
    if (sinks.rows) {
        iz_cast(sink, IZ_F32, a->sinks.p, a->sinks.dtype, a->heads);
        memset(dsink, 0, (size_t)a->heads * sizeof(*dsink));
        if (bwd && a->kv.rows && a->dsinks.p)
            memcpy(dsink, a->dsinks.p, (size_t)iz_view_bytes(a->dsinks));
    }
    for (int64_t i = 0; i < heads; i++) {
        struct iz_head h = head_at(a, i, dqkv, dy);
        h.work = work.p;
        if (sinks.rows) {
            h.sink = sink + i % a->heads;
            h.dsink = dsink + i % a->heads;
        }
        (bwd ? loops->attention_bwd : loops->attention_fwd)(&h);
    }
    if (bwd && iz_view_wanted(x, a->dsinks))
        iz_cast(a->dsinks.p, a->dsinks.dtype, dsink, IZ_F32, a->heads);
}

/* Of the widest heads whose backward fits into the shared memory of a block, by
 * CUDA's programming guide ("Technical Specifications per Compute Capability")
 * 64 KiB at 7.5, 99 KiB at 8.6, 8.9 and 12. */
static int columns_most(const struct iz_exec *x)
{
    switch (x->numerics.capability) {
    case 75:
        return 128;
    case 86:
    case 89:
    case 120:
    case 121:
        return x->act == IZ_F32 ? 256 : 128;
    default:
        return 256;
    }
}

/* The kernels' registers, shared memory and 16-byte pieces set the limits. */
static void check_cuda(const struct iz_exec *x, const struct iz_attention *a)
{
    int64_t d = a->o.cols / a->heads;
    assert(x->numerics.capability >= (x->act == IZ_BF16 ? 80 : 70));
    if (d > columns_most(x) || (x->act != IZ_F32 && d % 8))
        iz_die("attention in %s on a GPU of compute capability %d.%d: heads of "
               "%lld columns; possible are %s up to %d",
               iz_dtype_name(x->act), x->numerics.capability / 10,
               x->numerics.capability % 10, (long long)d,
               x->act == IZ_F32 ? "all" : "multiples of 8", columns_most(x));
}

/* Whether the library can, where that is asked; one refusal is enough. */
static void cudnn_ask(struct iz_exec *x, const struct iz_attention *a,
                      bool back, struct iz_view scratch)
{
    const char *own = why_own(a);
    if (x->ask && !x->ask->why[0] && own)
        snprintf(x->ask->why, sizeof(x->ask->why), "%s", own);
    else if (x->ask && !x->ask->why[0])
        iz_attention_ask_cudnn(x, a, back, iz_view_bytes(scratch));
}

static void cudnn_fwd(struct iz_exec *x, const struct iz_attention *a)
{
    struct iz_view scratch = iz_exec_work(x, IZ_U8, 1, IZ_CUDNN_SCRATCH);
    cudnn_ask(x, a, false, scratch);
    if (iz_exec_runs(x, IZ_CUDA))
        iz_attention_fwd_cudnn(x, a, scratch);
}

/* Of the first keys of rows and of sinks. */
static int64_t scratch_floats(const struct iz_attention *a)
{
    return (iz_attention_hides(a) ? a->o.rows : 0) + iz_view_len(a->sinks);
}

static void cuda_fwd(struct iz_exec *x, const struct iz_attention *a)
{
    check_cuda(x, a);
    if (x->numerics.cudnn)
        cudnn_fwd(x, a);
    else {
        struct iz_view scratch = iz_exec_work(x, IZ_F32, 1, scratch_floats(a));
        if (iz_exec_runs(x, IZ_CUDA))
            iz_attention_fwd_cuda(x, a, scratch);
    }
}

/* Counts scratch of one sample, or it would grow with them, but takes what
 * other ops have left unused.  delta is as large as ours, so that a run which
 * planned with cuDNN's has room for ours. */
static void cudnn_bwd(struct iz_exec *x, struct iz_view dqkv, struct iz_view dy,
                      const struct iz_attention *a)
{
    struct iz_view delta = iz_exec_work(x, IZ_F32, 1, iz_view_len(a->lse));
    int64_t keys = iz_attention_keys(a), d = a->o.cols / a->heads;
    int64_t samples = a->o.rows / a->seq, unused = x->work.size - x->work.used;
    int64_t one = iz_gpu_cudnn_bwd_bytes(1, a->seq, a->heads, keys, d);
    int64_t all = iz_gpu_cudnn_bwd_bytes(samples, a->seq, a->heads, keys, d);
    int64_t most = min64(all, IZ_CUDNN_SCORES + IZ_CUDNN_SCRATCH);
    bool counts = x->work.size == INT64_MAX; /* and does not ask */
    struct iz_view scratch = iz_exec_work(
        x, IZ_U8, 1, counts ? one : max64(one, min64(most, unused / 64 * 64)));
    cudnn_ask(x, a, true, scratch);
    if (iz_exec_runs(x, IZ_CUDA))
        iz_attention_bwd_cudnn(x, dqkv, dy, a, delta, scratch);
}

/* The scratch begins with the dy . o of every row of every head. */
static void cuda_bwd(struct iz_exec *x, struct iz_view dqkv, struct iz_view dy,
                     const struct iz_attention *a)
{
    check_cuda(x, a);
    if (x->numerics.cudnn_bwd) {
        cudnn_bwd(x, dqkv, dy, a);
        return;
    }
    struct iz_view delta =
        iz_exec_work(x, IZ_F32, 1, iz_view_len(a->lse) + scratch_floats(a));
    if (iz_exec_runs(x, IZ_CUDA))
        iz_attention_bwd_cuda(x, dqkv, dy, a, delta);
}

void iz_attention_fwd(struct iz_exec *x, const struct iz_attention *a)
{
    int64_t mark = iz_exec_mark(x);
    attention_begin(x, a);
    iz_exec_count_attention(x, x->numerics.cudnn, false, 2 * flops(a),
                            bytes_of(a));
    if (x->backend == IZ_CPU)
        on_cpu(x, a, false, NULL, NULL);
    else
        cuda_fwd(x, a);
    iz_exec_release(x, mark);
}

/* The scores are formed again, which is not counted: it is no work of the
 * model. */
void iz_attention_bwd(struct iz_exec *x, struct iz_view dqkv, struct iz_view dy,
                      const struct iz_attention *a)
{
    int64_t mark = iz_exec_mark(x);
    attention_begin(x, a);
    assert(!a->kv.rows ||
           (a->dkv.dtype == IZ_F32 && a->dkv.rows >= iz_attention_end(a) &&
            a->dkv.cols == a->kv.cols &&
            (!a->dsinks.rows || a->dsinks.dtype == IZ_F32)));
    iz_exec_count_attention(
        x, x->numerics.cudnn_bwd, true, 4 * flops(a),
        bytes_of(a) + (double)iz_view_bytes(dy) +
            (double)iz_view_bytes(a->kv.rows ? a->o : dqkv) +
            2 * kv_elements(a) * (double)sizeof(float));
    if (x->backend == IZ_CPU)
        on_cpu(x, a, true, dqkv.p, dy.p);
    else
        cuda_bwd(x, dqkv, dy, a);
    iz_exec_release(x, mark);
}
