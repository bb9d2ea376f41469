/* SPDX-License-Identifier: Apache-2.0 */
/* The Adam and AdamW update on a GPU, with the bits of adamw.c: each operation
 * is an intrinsic that rounds once and is never contracted. */
#include "codelets/launch.cuh"

#include <float.h>

#include "codelets/cuda_launch.h"

/* Elements of a thread: 16 bytes of fp32, so that a warp's accesses have no
 * gaps. */
enum { THREADS = 256, PER_THREAD = 4 };

static __device__ float flush(float x)
{
    return fabsf(x) < FLT_MIN ? 0.0f : x;
}

static __device__ void update(const struct iz_adam_consts &k, float &p,
                              float &m, float &v, float g)
{
    float quotient;

    g = __fadd_rn(__fmul_rn(g, k.scale), __fmul_rn(k.l2, p));
    m = flush(__fadd_rn(__fmul_rn(k.beta1, m), __fmul_rn(k.rest1, g)));
    v = flush(
        __fadd_rn(__fmul_rn(k.beta2, v), __fmul_rn(k.rest2, __fmul_rn(g, g))));
    quotient = __fdiv_rn(m, __fadd_rn(__fsqrt_rn(v), k.eps));
    p = __fsub_rn(__fmul_rn(p, k.keep), __fmul_rn(k.step, quotient));
}

/* N elements from i on. */
template <class G, class O, int N>
static __device__ void update_row(const struct iz_adam_consts &k, float *p,
                                  float *m, float *v, const G *g, O *out,
                                  int64_t i)
{
    float pi[N], mi[N], vi[N], gi[N];

    iz_load_row(gi, g + i);
    iz_load_row(pi, p + i);
    iz_load_row(mi, m + i);
    iz_load_row(vi, v + i);
    for (int j = 0; j < N; j++)
        update(k, pi[j], mi[j], vi[j], gi[j]);
    iz_store_row(p + i, pi);
    iz_store_row(m + i, mi);
    iz_store_row(v + i, vi);
    if (out)
        iz_store_row(out + i, pi);
}

/* Moves per element 24 bytes, the gradient and the copy: 28 with both in 16
 * bits.  No two buffers overlap. */
template <class G, class O>
static __global__ void __launch_bounds__(THREADS)
    adam(struct iz_adam_consts k, int64_t n, float *p, float *m, float *v,
         const G *g, O *out, bool aligned)
{
    int64_t thread = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    int64_t i = thread * PER_THREAD;

    if (aligned && i + PER_THREAD <= n)
        update_row<G, O, PER_THREAD>(k, p, m, v, g, out, i);
    else
        for (; i < n && i < (thread + 1) * PER_THREAD; i++)
            update_row<G, O, 1>(k, p, m, v, g, out, i);
}

template <class G, class O>
static void launch(struct iz_exec *x, const struct iz_adam *a, int64_t n,
                   float *p, float *m, float *v, const void *g, void *out)
{
    uintptr_t bits = (uintptr_t)p | (uintptr_t)m | (uintptr_t)v;
    int64_t blocks = (n + THREADS * PER_THREAD - 1) / (THREADS * PER_THREAD);

    bits |= (uintptr_t)g | (uintptr_t)out;
    IZ_LAUNCH((adam<G, O>), (int)blocks, THREADS, 0, x->stream,
              iz_adam_consts_of(a), n, p, m, v, (const G *)g, (O *)out,
              bits % 16 == 0);
}

template <class G>
static void update_to(struct iz_exec *x, const struct iz_adam *a, int64_t n,
                      float *p, float *m, float *v, const void *g, void *out,
                      enum iz_dtype out_type)
{
    if (out_type == IZ_BF16)
        launch<G, iz_bf16>(x, a, n, p, m, v, g, out);
    else if (out_type == IZ_F16)
        launch<G, iz_f16>(x, a, n, p, m, v, g, out);
    else
        launch<G, float>(x, a, n, p, m, v, g, out);
}

void iz_adam_chunk_cuda(struct iz_exec *x, const struct iz_adam *a, int64_t n,
                        float *p, float *m, float *v, const void *g,
                        enum iz_dtype g_type, void *out, enum iz_dtype out_type)
{
    if (n == 0)
        return;
    if (g_type == IZ_BF16)
        update_to<iz_bf16>(x, a, n, p, m, v, g, out, out_type);
    else if (g_type == IZ_F16)
        update_to<iz_f16>(x, a, n, p, m, v, g, out, out_type);
    else
        update_to<float>(x, a, n, p, m, v, g, out, out_type);
}
