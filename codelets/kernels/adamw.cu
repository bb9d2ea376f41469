/* SPDX-License-Identifier: Apache-2.0 */
/* The Adam and AdamW update on a GPU, with the bits of adamw.c: each operation
 * is an intrinsic that rounds once and is never contracted, and m and v in
 * fewer bytes go through the functions of the CPU's loops (moment_code.h). Only
 * a NaN may have other bits than there: a GPU knows one. */
#include "codelets/kernels/launch.cuh"

#include <float.h>

#include "codelets/flat/moment_code.h"
#include "codelets/kernels/launch.h"

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

    g = __fmul_rn(g, k.scale);
    if (k.l2 != 0)
        g = __fadd_rn(g, __fmul_rn(k.l2, p));
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

/* ---- m and v in fewer bytes ---- */

/* Goes to the kernel by value: less than the 4 KiB that every CUDA takes. */
struct narrow {
    int64_t n, at, first;
    uint64_t key;
    float *p;
    unsigned char *m, *v;             /* codes of the arrays' first elements */
    unsigned char *m_power, *v_power; /* fp8: of their first blocks */
    struct iz_adam_span span[IZ_ADAM_SPANS];
};

/* A thread's elements of m and v as fp32. */
struct elems {
    float m[PER_THREAD], v[PER_THREAD];
};

/* Threads of a block of 64, and where this one's elements begin in it. */
enum { LANES = IZ_MOMENT_BLOCK / PER_THREAD };

static __device__ uint32_t place_in_block()
{
    return threadIdx.x % LANES * PER_THREAD;
}

/* Random bits of the block of element i of m (0) or v (1). */
static __device__ uint32_t bits_of_block(const struct narrow &k, int64_t i,
                                         unsigned which)
{
    return iz_block_bits(k.key + which, k.first + i);
}

struct bf16 {
    static __device__ void load(struct elems &e, const struct narrow &k,
                                int64_t i)
    {
        iz_load_row(e.m, (const iz_bf16 *)k.m + k.at + i);
        iz_load_row(e.v, (const iz_bf16 *)k.v + k.at + i);
    }

    static __device__ void put(unsigned char *to, const float *x, uint32_t h)
    {
        uint32_t c[PER_THREAD];
        uint2 two;

        for (int j = 0; j < PER_THREAD; j++)
            c[j] = iz_bf16_random(x[j], iz_random16(h, place_in_block() + j));
        two.x = c[0] | c[1] << 16;
        two.y = c[2] | c[3] << 16;
        *(uint2 *)to = two;
    }

    static __device__ void store(const struct narrow &k, const struct elems &e,
                                 int64_t i, bool mine)
    {
        int64_t at = 2 * (k.at + i);

        if (mine)
            put(k.m + at, e.m, bits_of_block(k, i, IZ_MOMENT_M));
        if (mine)
            put(k.v + at, e.v, bits_of_block(k, i, IZ_MOMENT_V));
    }
};

/* Four codes, which lie anywhere: v's begin behind the powers of m. */
static __device__ uint32_t load_codes(const unsigned char *p)
{
    if ((uintptr_t)p % 4 == 0)
        return *(const uint32_t *)p;
    return p[0] | p[1] << 8 | p[2] << 16 | (uint32_t)p[3] << 24;
}

static __device__ void store_codes(unsigned char *p, uint32_t c)
{
    if ((uintptr_t)p % 4 == 0) {
        *(uint32_t *)p = c;
        return;
    }
    for (int j = 0; j < PER_THREAD; j++)
        p[j] = (unsigned char)(c >> 8 * j);
}

/* The power of the block that this thread's LANES have; all threads call it. */
static __device__ uint32_t power_of_block(const float *x, uint32_t binades)
{
    uint32_t most = 0;

    for (int j = 0; j < PER_THREAD; j++)
        most = max(most, iz_float_bits(x[j]) & 0x7fffffffu);
    for (int step = LANES / 2; step > 0; step /= 2)
        most = max(most, __shfl_xor_sync(IZ_ALL_LANES, most, step));
    return iz_block_power(most, binades);
}

struct fp8 {
    static __device__ void load(struct elems &e, const struct narrow &k,
                                int64_t i)
    {
        uint32_t m = load_codes(k.m + k.at + i);
        uint32_t v = load_codes(k.v + k.at + i);
        uint32_t m_power = k.m_power[(k.at + i) / IZ_MOMENT_BLOCK];
        uint32_t v_power = k.v_power[(k.at + i) / IZ_MOMENT_BLOCK];

        for (int j = 0; j < PER_THREAD; j++) {
            e.m[j] = iz_m8_load(m >> 8 * j & 0xffu, m_power);
            e.v[j] = iz_v8_load(v >> 8 * j & 0xffu, v_power);
        }
    }

    static __device__ void store(const struct narrow &k, const struct elems &e,
                                 int64_t i, bool mine)
    {
        uint32_t m_power = power_of_block(e.m, IZ_M_BINADES);
        uint32_t v_power = power_of_block(e.v, IZ_V_BINADES);
        uint32_t mh = bits_of_block(k, i, IZ_MOMENT_M), m = 0;
        uint32_t vh = bits_of_block(k, i, IZ_MOMENT_V), v = 0;
        int64_t at = k.at + i;

        if (!mine)
            return;
        for (int j = 0; j < PER_THREAD; j++) {
            uint32_t place = place_in_block() + j;

            m |= (uint32_t)iz_m8_random(e.m[j], m_power, iz_random16(mh, place))
                 << 8 * j;
            v |= (uint32_t)iz_v8_random(e.v[j], v_power, iz_random16(vh, place))
                 << 8 * j;
        }
        store_codes(k.m + at, m);
        store_codes(k.v + at, v);
        if (threadIdx.x % LANES == 0) {
            k.m_power[at / IZ_MOMENT_BLOCK] = (unsigned char)m_power;
            k.v_power[at / IZ_MOMENT_BLOCK] = (unsigned char)v_power;
        }
    }
};

/* A thread's elements, from i on; a span may end between them. */
template <class G, class O>
static __device__ void update_spans(const struct narrow &k, struct elems &e,
                                    const G *g, O *out, int64_t i)
{
    float p[PER_THREAD], grad[PER_THREAD];
    int s = 0;

    iz_load_row(grad, g + i);
    iz_load_row(p, k.p + i);
    for (int j = 0; j < PER_THREAD; j++) {
        while (k.span[s].end <= i + j)
            s++;
        update(k.span[s].consts, p[j], e.m[j], e.v[j], grad[j]);
    }
    iz_store_row(k.p + i, p);
    if (out)
        iz_store_row(out + i, p);
}

/* Moves per element the gradient, the copy, 8 bytes of p, and of m and v 8 in
 * bf16, 4.06 in fp8: with gradient and copy in 16 bits 20 and 16.06. */
template <class T, class G, class O>
static __global__ void __launch_bounds__(THREADS)
    adam_narrow(struct narrow k, const G *g, O *out)
{
    int64_t thread = (int64_t)blockIdx.x * THREADS + threadIdx.x;
    int64_t i = thread * PER_THREAD;
    bool mine = i < k.n; /* with all of its block */
    struct elems e = {};

    if (mine) {
        T::load(e, k, i);
        update_spans(k, e, g, out, i);
    }
    T::store(k, e, i, mine);
}

template <class T, class G, class O>
static void launch_narrow(struct iz_exec *x, const struct iz_adam_narrow *a)
{
    int64_t blocks = (a->n + THREADS * PER_THREAD - 1) / (THREADS * PER_THREAD);
    uintptr_t bits = (uintptr_t)a->p | (uintptr_t)a->g | (uintptr_t)a->out;
    struct narrow k = {a->n,
                       a->at,
                       a->first,
                       a->key,
                       a->p,
                       (unsigned char *)a->m.p,
                       (unsigned char *)a->v.p,
                       (unsigned char *)a->m.p + a->m.n,
                       (unsigned char *)a->v.p + a->v.n,
                       {}};

    if (bits % 16 || a->n % IZ_MOMENT_BLOCK || a->spans > IZ_ADAM_SPANS)
        iz_die("Adam with narrow m and v: %lld elements, %d spans, or an "
               "address that is no multiple of 16",
               (long long)a->n, a->spans);
    for (int s = 0; s < a->spans; s++)
        k.span[s] = a->span[s];
    IZ_LAUNCH((adam_narrow<T, G, O>), (int)blocks, THREADS, 0, x->stream, k,
              (const G *)a->g, (O *)a->out);
}

template <class T, class G>
static void narrow_to(struct iz_exec *x, const struct iz_adam_narrow *a)
{
    if (a->out_type == IZ_BF16)
        launch_narrow<T, G, iz_bf16>(x, a);
    else if (a->out_type == IZ_F16)
        launch_narrow<T, G, iz_f16>(x, a);
    else
        launch_narrow<T, G, float>(x, a);
}

template <class T>
static void narrow_from(struct iz_exec *x, const struct iz_adam_narrow *a)
{
    if (a->g_type == IZ_BF16)
        narrow_to<T, iz_bf16>(x, a);
    else if (a->g_type == IZ_F16)
        narrow_to<T, iz_f16>(x, a);
    else
        narrow_to<T, float>(x, a);
}

void iz_adam_narrow_cuda(struct iz_exec *x, const struct iz_adam_narrow *a)
{
    if (a->n == 0)
        return;
    if (a->m.type == IZ_MOMENT_FP8)
        narrow_from<fp8>(x, a);
    else
        narrow_from<bf16>(x, a);
}
