/* SPDX-License-Identifier: Apache-2.0 */
/* The output layer with its cross-entropy on a GPU.  Per chunk of rows: logits
 * in fp32, one pass that turns them into losses and gradients, and both
 * products of the backward. */
#include "codelets/ops/classifier.h"

#include <float.h>

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
             int64_t ld)
{
    int64_t i = blockIdx.x;
    int32_t t = target[i];
    float at;
    soft all;

    if (t < 0) {
        if (threadIdx.x == 0)
            loss[i] = 0;
        return;
    }
    at = s[i * ld + t];
    all = row_soft(s + i * ld, n);
    if (threadIdx.x == 0)
        loss[i] = soft_loss(all, at);
}

/* d = scale (softmax - target) of WIDTH logits from j on, or of one. */
template <int N, class T>
static __device__ __forceinline__ void
row_gradient(T *d, const float *s, int64_t j, soft all, int32_t t, float scale)
{
    float v[N], by = scale / all.sum;

    iz_load_row(v, s + j);
#pragma unroll
    for (int i = 0; i < N; i++) {
        v[i] = expf(v[i] - all.max) * by;
        v[i] = j + i == t ? v[i] - scale : v[i];
    }
    iz_store_row(d + j, v);
}

template <class T>
static __device__ __forceinline__ void row_clear(T *d, int64_t n)
{
    for (int64_t j = threadIdx.x; j < n; j += THREADS)
        iz_store(d + j, 0);
}

/* The same and the gradient of every row, d [gridDim.x, ld], which may be s.
 * Must move 4 + sizeof(T) bytes per logit.  The second reading goes backwards,
 * so that it finds in the L2 cache what the first read last; of two blocks per
 * multiprocessor half a row each is waiting there on average, 27 MB at a
 * vocabulary of 50257 and 132 multiprocessors. */
template <class T>
static __global__ void __launch_bounds__(THREADS)
    rows_bwd(T *d, double *loss, const float *s, const int32_t *target,
             int64_t n, int64_t ld, float scale)
{
    int64_t i = blockIdx.x, whole = n / WIDTH * WIDTH, last = n / STEP * STEP;
    int32_t t = target[i];
    float at;
    soft all;

    d += i * ld;
    s += i * ld;
    if (t < 0) {
        row_clear(d, n);
        if (threadIdx.x == 0)
            loss[i] = 0;
        return;
    }
    at = s[t];
    all = row_soft(s, n); /* all threads have read what is now overwritten */
    if (threadIdx.x == 0)
        loss[i] = soft_loss(all, at);
    for (int64_t j = last + threadIdx.x * WIDTH; j >= 0; j -= STEP)
        if (j < whole)
            row_gradient<WIDTH>(d, s, j, all, t, scale);
    for (int64_t j = whole + threadIdx.x; j < n; j += THREADS)
        row_gradient<1>(d, s, j, all, t, scale);
}

/* *mean = the sum of n losses over `count`, in an order that depends on n
 * alone; one block. */
static __global__ void mean_loss(double *mean, const double *loss, int64_t n,
                                 int64_t count)
{
    double sum = 0;

    for (int64_t i = threadIdx.x; i < n; i += blockDim.x)
        sum += loss[i];
    sum = iz_block_sum(sum);
    if (threadIdx.x == 0)
        *mean = count ? sum / (double)count : 0;
}

/* Targets lie in host memory, which is slow to read: once is enough. */
static __global__ void copy_targets(int32_t *to, const int32_t *from, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;

    if (i < n)
        to[i] = from[i];
}

/* out = the n numbers of `in`, rounded: 4 + sizeof(T) bytes each.  N at once,
 * for which both must be aligned. */
template <int N, class T>
static __global__ void round_sum(T *out, const float *in, int64_t n)
{
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * N;
    float v[N];

    if (i + N <= n) {
        iz_load_row(v, in + i);
        iz_store_row(out + i, v);
        return;
    }
    for (; i < n; i++)
        iz_store(out + i, in[i]);
}

template <class T>
static void round_to(struct iz_exec *x, T *out, struct iz_view in)
{
    int64_t n = iz_view_len(in), per = (uintptr_t)out % 16 ? 1 : WIDTH;
    void (*k)(T *, const float *, int64_t) =
        per == 1 ? round_sum<1, T> : round_sum<WIDTH, T>;
    int64_t blocks = (n + per * THREADS - 1) / (per * THREADS);

    IZ_LAUNCH(k, (unsigned)blocks, THREADS, 0, x->stream, out,
              (const float *)in.p, n);
}

/* What is the same for all chunks of a call. */
struct job {
    struct iz_exec *x;
    const struct iz_classifier *c;
    struct iz_classifier_parts p;
    float scale;
};

/* The rows [at, at + n). */
struct chunk {
    struct iz_view a, da;
    double *loss;
    const int32_t *target;
    int64_t at, n;
};

static struct chunk chunk_at(const struct job *j, int64_t at)
{
    int64_t left = j->c->a.rows - at;
    struct chunk k = {};

    k.at = at;
    k.n = left < j->p.rows ? left : j->p.rows;
    k.a = iz_view_rows(j->c->a, at, k.n);
    k.da = iz_view_rows(j->c->da, at, k.n);
    k.loss = j->p.loss + at;
    k.target = j->p.target + at;
    return k;
}

/* logits [n,V] = a [n,C] w^T. */
static void chunk_logits(const struct job *j, const struct chunk *k)
{
    struct iz_product q = {};

    q.m = k->n;
    q.n = j->c->w.rows;
    q.k = j->c->w.cols;
    q.a = k->a.p;
    q.lda = k->a.cols;
    q.b = j->c->w.p;
    q.ldb = j->c->w.cols;
    q.tb = true;
    q.d = j->p.logits.p;
    q.ldd = j->p.logits.cols;
    q.in = k->a.dtype;
    q.out = IZ_F32;
    iz_product_cuda(j->x, &q, j->p.product);
}

/* dw [V,C] (+)= grad^T a. */
static void chunk_dw(const struct job *j, const struct chunk *k)
{
    struct iz_product q = {};

    q.m = j->p.dw.rows;
    q.n = j->p.dw.cols;
    q.k = k->n;
    q.a = j->p.grad.p;
    q.lda = j->p.grad.cols;
    q.ta = true;
    q.b = k->a.p;
    q.ldb = k->a.cols;
    q.c = k->at ? j->p.dw.p : NULL;
    q.d = j->p.dw.p;
    q.ldd = j->p.dw.cols;
    q.in = k->a.dtype;
    q.out = j->p.dw.dtype;
    iz_product_cuda(j->x, &q, j->p.product);
}

/* da [n,C] = grad w. */
static void chunk_da(const struct job *j, const struct chunk *k)
{
    struct iz_product q = {};

    q.m = k->n;
    q.n = k->da.cols;
    q.k = j->c->w.rows;
    q.a = j->p.grad.p;
    q.lda = j->p.grad.cols;
    q.b = j->c->w.p;
    q.ldb = j->c->w.cols;
    q.d = k->da.p;
    q.ldd = k->da.cols;
    q.in = k->a.dtype;
    q.out = k->da.dtype;
    iz_product_cuda(j->x, &q, j->p.product);
}

static void chunk_losses(const struct job *j, const struct chunk *k)
{
    IZ_LAUNCH(rows_fwd, (unsigned)k->n, THREADS, 0, j->x->stream, k->loss,
              (const float *)j->p.logits.p, k->target, j->c->w.rows,
              j->p.logits.cols);
}

template <class T>
static void chunk_gradients(const struct job *j, const struct chunk *k)
{
    IZ_LAUNCH(rows_bwd<T>, (unsigned)k->n, THREADS, 0, j->x->stream,
              (T *)j->p.grad.p, k->loss, (const float *)j->p.logits.p,
              k->target, j->c->w.rows, j->p.logits.cols, j->scale);
}

static struct job job_new(struct iz_exec *x, const struct iz_classifier *c,
                          int64_t count, struct iz_view scratch, bool grad)
{
    struct job j = {};

    j.x = x;
    j.c = c;
    j.p = iz_classifier_parts(x, c, grad, scratch.p);
    j.scale = count ? c->loss_scale / (float)count : 0;
    IZ_LAUNCH(copy_targets, (unsigned)((c->a.rows + THREADS - 1) / THREADS),
              THREADS, 0, x->stream, j.p.target, c->target, c->a.rows);
    return j;
}

static void job_end(const struct job *j, int64_t count)
{
    IZ_LAUNCH(mean_loss, 1, THREADS, 0, j->x->stream, j->c->loss,
              (const double *)j->p.loss, j->c->a.rows, count);
}

void iz_classifier_fwd_cuda(struct iz_exec *x, const struct iz_classifier *c,
                            int64_t count, struct iz_view scratch)
{
    struct job j = job_new(x, c, count, scratch, false);

    for (int64_t at = 0; at < c->a.rows; at += j.p.rows) {
        struct chunk k = chunk_at(&j, at);

        chunk_logits(&j, &k);
        chunk_losses(&j, &k);
    }
    job_end(&j, count);
}

/* T: type of the activations, of the gradients of the logits, and of dw where
 * it has to be rounded. */
template <class T> static void backward(const struct job *j)
{
    for (int64_t at = 0; at < j->c->a.rows; at += j->p.rows) {
        struct chunk k = chunk_at(j, at);

        chunk_logits(j, &k);
        chunk_gradients<T>(j, &k);
        if (j->p.dw.rows)
            chunk_dw(j, &k); /* reads a, which da may replace */
        chunk_da(j, &k);
    }
    if (j->p.dw.rows && j->p.dw.p != j->c->dw.p)
        round_to(j->x, (T *)j->c->dw.p, j->p.dw);
}

void iz_classifier_bwd_cuda(struct iz_exec *x, const struct iz_classifier *c,
                            int64_t count, struct iz_view scratch)
{
    struct job j = job_new(x, c, count, scratch, true);

    iz_by_type(x->act, [&](auto zero) { backward<decltype(zero)>(&j); });
    job_end(&j, count);
}
