/* SPDX-License-Identifier: Apache-2.0 */
/* The output layer with its cross-entropy on a GPU.  Per chunk of rows: logits
 * in fp32, one pass that turns them into losses and gradients, and both
 * products of the backward. */
#include "codelets/ops/classifier.h"

#include <float.h>

#include "codelets/base/int64.h"
#include "codelets/kernels/cuda_lib.h"
#include "codelets/kernels/launch.cuh"
#include "codelets/ops/gpu_ops.h"

/* Threads of a block, and neighbouring elements that each treats at once. */
enum { THREADS = 1024, WIDTH = 8, STEP = THREADS * WIDTH };

/* The largest number so far, and the sum of exp(number - max).  NaN is not seen
 * by max, but makes the sum NaN; so does infinity. */
struct soft {
    float max, sum;
};

template <int N>
static __device__ __forceinline__ void soft_add(soft &s, const float (&v)[N])
{
    float m = s.max;
#pragma unroll
    for (int i = 0; i < N; i++)
        m = fmaxf(m, v[i]);
    s.sum *= expf(s.max - m);
    s.max = m;
#pragma unroll
    for (int i = 0; i < N; i++)
        s.sum += expf(v[i] - m);
}

/* Of a row of n logits, for all threads of the block.  The largest number
 * starts finite, so that a logit of -infinity counts as probability 0. */
static __device__ __forceinline__ soft row_soft(const float *s, int64_t n)
{
    int64_t whole = n / WIDTH * WIDTH;
    soft mine = {-FLT_MAX, 0}, all;
    for (int64_t j = threadIdx.x * WIDTH; j < whole; j += STEP) {
        float v[WIDTH];
        iz_load_row(v, s + j);
        soft_add(mine, v);
    }
    for (int64_t j = whole + threadIdx.x; j < n; j += THREADS) {
        float v[1] = {s[j]};
        soft_add(mine, v);
    }
    all.max = iz_block_max(mine.max);
    all.sum = iz_block_sum(mine.sum * expf(mine.max - all.max));
    return all;
}

static __device__ __forceinline__ double soft_loss(soft s, float at)
{
    return log((double)s.sum) + ((double)s.max - (double)at);
}

/* loss[i] of the rows of logits s [gridDim.x, ld], n of ld in use; 0 where the
 * target is -1.  Reads 4 bytes per logit, once. */
static __global__ void __launch_bounds__(THREADS)
    rows_fwd(double *loss, const float *s, const int32_t *target, int64_t n,
             int64_t ld, bool even)
{
    int64_t i = blockIdx.x;
    int32_t t = target[i];
    if (t < 0) {
        if (threadIdx.x == 0)
            loss[i] = 0;
        return;
    }
    float at = s[i * ld + t];
    soft all = row_soft(s + i * ld, n);
    double here = soft_loss(all, at);
    if (threadIdx.x == 0)
        loss[i] = even ? iz_classifier_even(here) : here;
}

/* d = scale (softmax - target), by the slope of the cap, of WIDTH logits from j
 * on, or of one. */
template <int N, class T>
static __device__ __forceinline__ void
row_gradient(T *d, const float *s, int64_t j, soft all, int32_t t, float scale,
             float cap)
{
    float v[N], by = scale / all.sum;
    iz_load_row(v, s + j);
#pragma unroll
    for (int i = 0; i < N; i++) {
        float slope = cap != 0 ? 1 - v[i] / cap * (v[i] / cap) : 1;
        v[i] = expf(v[i] - all.max) * by;
        v[i] = j + i == t ? v[i] - scale : v[i];
        v[i] *= slope;
    }
    iz_store_row(d + j, v);
}

/* By what gradients are scaled, row by row; scale NULL: all alike. */
struct of_samples {
    const float *scale;  /* of each sample */
    int64_t rows, first; /* of a sample; of these rows among all */
};

/* The same and the gradient of every row, d [gridDim.x, ld], which may be s.
 * Columns of d from n on become zeros: products run over them.  Must move 4 +
 * sizeof(T) bytes per logit.  The second reading goes backwards,
 * so that it finds in the L2 cache what the first read last; of two blocks per
 * multiprocessor half a row each is waiting there on average, 27 MB at a
 * vocabulary of 50257 and 132 multiprocessors. */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    rows_bwd(T *d, double *loss, const float *s, const int32_t *target,
             int64_t n, int64_t ld, float scale, float cap,
             struct of_samples by)
{
    int64_t i = blockIdx.x, whole = n / WIDTH * WIDTH, last = n / STEP * STEP;
    int32_t t = target[i];
    soft all;
    d += i * ld;
    s += i * ld;
    if (by.scale)
        scale = by.scale[(by.first + i) / by.rows];
    if (t < 0) {
        for (int64_t j = threadIdx.x; j < ld; j += THREADS)
            iz_store(d + j, 0);
        if (threadIdx.x == 0)
            loss[i] = 0;
        return;
    }
    float at = s[t];
    all = row_soft(s, n); /* all threads have read what is now overwritten */
    if (threadIdx.x == 0)
        loss[i] = soft_loss(all, at);
    for (int64_t j = last + threadIdx.x * WIDTH; j >= 0; j -= STEP)
        if (j < whole)
            row_gradient<WIDTH>(d, s, j, all, t, scale, cap);
    for (int64_t j = whole + threadIdx.x; j < n; j += THREADS)
        row_gradient<1>(d, s, j, all, t, scale, cap);
    for (int64_t j = n + threadIdx.x; j < ld; j += THREADS)
        iz_store(d + j, 0);
}

/* *mean = the sum of n losses over `count`, or has it added, in an order that
 * depends on n alone; one block. */
static __global__ void __launch_bounds__(THREADS)
    mean_loss(double *mean, const double *loss, int64_t n, int64_t count,
              bool adds)
{
    double sum = 0;
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x)
        sum += loss[i];
    sum = iz_block_sum(sum);
    if (threadIdx.x == 0)
        *mean = (adds ? *mean : 0) + (count ? sum / (double)count : 0);
}

/* The sum of each sample's losses and the number of its targets, `rows` of
 * each; a block has a sample. */
static __global__ void __launch_bounds__(THREADS)
    sample_losses(struct iz_sample_loss *each, const double *loss,
                  const int32_t *target, int64_t rows)
{
    double sum = 0, n = 0;
    loss += blockIdx.x * rows;
    target += blockIdx.x * rows;
    for (int64_t i = threadIdx.x; i < rows; i += blockDim.x) {
        sum += loss[i];
        n += target[i] >= 0;
    }
    sum = iz_block_sum(sum);
    n = iz_block_sum(n);
    if (threadIdx.x == 0)
        each[blockIdx.x] = {sum, n};
}

/* Targets lie in host memory, which is slow to read: once is enough. */
static __global__ void __launch_bounds__(THREADS)
    copy_targets(int32_t *to, const int32_t *from, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        to[i] = from[i];
}

static void classifier_product(struct iz_exec *x,
                               const struct iz_classifier_parts &p,
                               const struct iz_product &q)
{
    iz_product_cuda(x, &q, p.product);
}

/* The n logits of a chunk. */
static void chunk_logits(struct iz_exec *x, const struct iz_classifier_parts &p,
                         struct iz_view logits, struct iz_view a)
{
    struct iz_product q = iz_classifier_logits(logits, a, p.w);
    if (p.b.rows) {
        iz_matmul_bias_rows_cuda(x, logits, {}, p.b);
        q.c = q.d;
    }
    classifier_product(x, p, q);
}

/* The first columns of `from`, as many as there are of `to`, rounded; or
 * added. */
static void copy_row(struct iz_exec *x, struct iz_view to, struct iz_view from,
                     bool adds)
{
    const void *in = from.p;
    iz_flat_sum_cuda(x, to.p, to.dtype, adds, &in, 1, from.dtype,
                     min64(to.cols, from.cols));
}

/* db of all chunks. */
static void sum_db(struct iz_exec *x, const struct iz_classifier *c,
                   const struct iz_classifier_parts &p)
{
    struct iz_view sum = iz_view_rows(p.db, 0, 1);
    iz_matmul_column_sum_cuda(x, sum, iz_view_rows(p.db, 1, p.db.rows - 1),
                              p.product);
    copy_row(x, c->db, sum, c->adds);
}

static struct of_samples by(const struct iz_classifier *c, int64_t first)
{
    return {c->scales, c->scales ? c->a.rows / c->samples : 1, first};
}

/* A chunk of rows after the other.  T: type of the activations and of the
 * gradients of the logits. */
template <class T>
static void run_chunks(struct iz_exec *x, const struct iz_classifier *c,
                       const struct iz_classifier_parts &p, float scale)
{
    bool grad = c->da.rows > 0;
    int64_t vocab = c->w.rows, ld = p.logits.cols;
    for (int64_t at = 0; at < c->a.rows; at += p.rows) {
        int64_t n = min64(p.rows, c->a.rows - at);
        struct iz_view a = iz_view_rows(c->a, at, n);
        struct iz_view logits = iz_view_rows(p.logits, 0, n);
        struct iz_view d = iz_view_rows(p.grad, 0, n);
        const float *s = (const float *)logits.p;
        chunk_logits(x, p, logits, a);
        if (c->cap != 0)
            iz_op_scale_cuda(x, logits, logits, 1, c->cap);
        if (!grad) {
            IZ_LAUNCH(rows_fwd, (unsigned)n, THREADS, 0, x->stream, p.loss + at,
                      s, p.target + at, vocab, ld, !c->each);
            continue;
        }
        IZ_LAUNCH(rows_bwd<T>, (unsigned)n, THREADS, 0, x->stream, (T *)d.p,
                  p.loss + at, s, p.target + at, vocab, ld, scale, c->cap,
                  by(c, at));
        if (p.db.rows)
            iz_matmul_column_sum_cuda(x, iz_view_rows(p.db, 1 + at / p.rows, 1),
                                      d, p.product);
        if (p.dw.rows) /* reads a, which da may replace */
            classifier_product(x, p,
                               iz_classifier_dw(p.dw, d, a, at > 0 || c->adds));
        classifier_product(
            x, p, iz_classifier_da(iz_view_rows(c->da, at, n), d, p.w));
    }
    if (p.db.rows)
        sum_db(x, c, p);
    const void *dw = p.dw.p;
    if (!grad || !p.dw.rows || dw == c->dw.p)
        return;
    if (p.dw.dtype == c->dw.dtype)
        iz_op_copy_cuda(x, c->dw, iz_view_rows(p.dw, 0, vocab));
    else
        iz_flat_sum_cuda(x, c->dw.p, c->dw.dtype, false, &dw, 1, p.dw.dtype,
                         iz_view_len(c->dw));
}

void iz_classifier_cuda(struct iz_exec *x, const struct iz_classifier *c,
                        int64_t count, struct iz_view scratch)
{
    struct iz_classifier_parts p = iz_classifier_parts(x, c, scratch.p);
    float scale = count ? c->loss_scale / (float)count : 0;
    if (p.w.p != c->w.p) {
        int64_t vocab = c->w.rows;
        iz_op_copy_cuda(x, p.w, c->w);
        iz_op_clear_cuda(x, iz_view_rows(p.w, vocab, p.w.rows - vocab));
    }
    if (p.b.rows) {
        iz_op_clear_cuda(x, p.b);
        copy_row(x, p.b, c->b, false);
    }
    IZ_LAUNCH(copy_targets, (unsigned)((c->a.rows + THREADS - 1) / THREADS),
              THREADS, 0, x->stream, p.target, c->target, c->a.rows);
    iz_by_type(x->act,
               [&](auto zero) { run_chunks<decltype(zero)>(x, c, p, scale); });
    if (c->each)
        IZ_LAUNCH(sample_losses, (unsigned)c->samples, THREADS, 0, x->stream,
                  c->each, (const double *)p.loss, (const int32_t *)p.target,
                  c->a.rows / c->samples);
    if (c->loss)
        IZ_LAUNCH(mean_loss, 1, THREADS, 0, x->stream, c->loss,
                  (const double *)p.loss, c->a.rows, count, c->adds);
}
