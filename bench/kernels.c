/* SPDX-License-Identifier: Apache-2.0 */
/* usage: kernels [THREADS [SECONDS [NAME]]]
 * Times the flat-buffer kernels (those whose name begins with NAME) on THREADS
 * threads, each on memory of its own, against a loop that moves the same
 * streams and computes next to nothing.  GB/s count every byte read and every
 * byte written.
 *
 * The machine may be shared, so limit and kernel take turns, extent by extent,
 * and a pair counts only when every thread had its processor all the time: when
 * its CPU time is its wall time.  Printed are medians over these pairs and, of
 * the ratio, the quartiles. */
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/timing.h"
#include "codelets/base/build.h"
#include "codelets/flat/dtype.h"
#include "codelets/flat/flat.h"
#include "codelets/flat/half.h"
#include "codelets/flat/quant.h"
#include "codelets/flat/simd.h"
#include "codelets/flat/update.h"

/* EXTENT elements of all streams are beyond a core's own cache, N beyond any
 * cache: an extent is out of it again when its turn comes. */
enum { N = 1 << 24, EXTENT = 1 << 19, EXTENTS = N / EXTENT };
enum { PAIRS_MAX = 1 << 14 };
#define HAD_ITS_PROCESSOR 0.985

/* The streams of one thread. */
struct buffers {
    float *p, *m, *v, *g;
    uint16_t *out, *half; /* written by copies; gradients in 16 bits */
    uint16_t *lower;      /* of masters in halves, with `out` */
    uint16_t *coded[2];   /* m and v in fewer bytes */
};

struct kernel;
typedef void on_an_extent(const struct buffers *b, const struct kernel *k);

struct kernel {
    const char *name;
    double bytes; /* per element */
    on_an_extent *limit, *run;
    enum iz_dtype in, out; /* of the gradient, of the copy: fp32 for none */
    enum iz_moment_type moments;
    bool halves; /* the master */
    enum iz_quant quant;
};

static struct buffers kernels_at(const struct buffers *b, int64_t i)
{
    return (struct buffers){b->p + i,     b->m + i,
                            b->v + i,     b->g + i,
                            b->out + i,   b->half + i,
                            b->lower + i, {b->coded[0] + i, b->coded[1] + i}};
}

/* ---- limits: the same streams, next to no arithmetic ---- */

static volatile double sink;
#define BY 0.999f

IZ_SIMD static void limit_scale(const struct buffers *b, const struct kernel *k)
{
    float *restrict p = b->p;
    for (int64_t i = 0; i < EXTENT; i++)
        p[i] *= BY;
}

/* Gradients in 16 bits, a copy in 16 bits. */
IZ_INLINE void limit_update(const struct buffers *b, bool half, bool copy)
{
    float *restrict p = b->p, *restrict m = b->m, *restrict v = b->v;
    const float *restrict g = b->g;
    const uint16_t *restrict bf16 = b->half;
    uint16_t *restrict out = b->out;
    for (int64_t i = 0; i < EXTENT; i++) {
        m[i] *= BY;
        v[i] *= BY;
        p[i] += half ? (float)bf16[i] : g[i];
        if (copy)
            out[i] = (uint16_t)(iz_float_bits(p[i]) >> 16);
    }
}

IZ_SIMD static void limit_adam(const struct buffers *b, const struct kernel *k)
{
    if (k->in != IZ_F32)
        limit_update(b, true, true);
    else if (k->out != IZ_F32)
        limit_update(b, false, true);
    else
        limit_update(b, false, false);
}

IZ_SIMD static void limit_to_16(const struct buffers *b, const struct kernel *k)
{
    const float *restrict g = b->g;
    uint16_t *restrict out = b->out;
    for (int64_t i = 0; i < EXTENT; i++)
        out[i] = (uint16_t)(iz_float_bits(g[i]) >> 16);
}

IZ_SIMD static void limit_widen(const struct buffers *b, const struct kernel *k)
{
    float *restrict g = b->g;
    const uint16_t *restrict half = b->half;
    for (int64_t i = 0; i < EXTENT; i++)
        g[i] = (float)half[i];
}

/* Any order of integers is the same sum. */
IZ_SIMD static void limit_read(const struct buffers *b, const struct kernel *k)
{
    const uint32_t *x =
        k->in == IZ_F32 ? (const uint32_t *)b->p : (const uint32_t *)b->half;
    int64_t n = k->in == IZ_F32 ? EXTENT : EXTENT / 2;
    uint32_t sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += x[i];
    sink = sum;
}

IZ_SIMD static void limit_add(const struct buffers *b, const struct kernel *k)
{
    float *restrict p = b->p;
    const float *restrict wide = b->g;
    const uint16_t *restrict bf16 = b->half;
    if (k->in == IZ_F32)
        for (int64_t i = 0; i < EXTENT; i++)
            p[i] += wide[i];
    else
        for (int64_t i = 0; i < EXTENT; i++)
            p[i] += (float)bf16[i];
}

IZ_SIMD static void limit_write(const struct buffers *b, const struct kernel *k)
{
    float *restrict g = b->g;
    for (int64_t i = 0; i < EXTENT; i++)
        g[i] = BY;
}

/* Bytes of codes, and a weight of 16 bits for each. */
IZ_SIMD static void limit_codes(const struct buffers *b, const struct kernel *k)
{
    const uint8_t *restrict x = (const uint8_t *)b->g;
    uint16_t *restrict out = b->out;
    if (k->quant == IZ_QUANT_NF4)
        for (int64_t i = 0; i < EXTENT / 2; i++) {
            out[2 * i] = x[i];
            out[2 * i + 1] = x[i];
        }
    else
        for (int64_t i = 0; i < EXTENT; i++)
            out[i] = x[i];
}

/* ---- kernels ---- */

static const void *gradient(const struct buffers *b, const struct kernel *k)
{
    return k->in == IZ_F32 ? (const void *)b->g : b->half;
}

static void run_adam(const struct buffers *b, const struct kernel *k)
{
    struct iz_update_range all = iz_update_range_of(&bench_adamw);
    bool coded = k->moments != IZ_MOMENT_F32;
    iz_update(&(struct iz_update){.optimizer = bench_adamw.hyper.type,
                                  .type = k->moments,
                                  .key = 1,
                                  .g_type = k->in,
                                  .out_type = k->out,
                                  .n = EXTENT,
                                  .room = EXTENT,
                                  .p = k->halves ? NULL : b->p,
                                  .lower = k->halves ? b->lower : NULL,
                                  .state = {coded ? (void *)b->coded[0] : b->m,
                                            coded ? (void *)b->coded[1] : b->v},
                                  .g = gradient(b, k),
                                  .out = k->out == IZ_F32 ? NULL : b->out,
                                  .range = &all,
                                  .ranges = 1});
}

/* With m and v in fp32, whatever those of the kernel are. */
static void run_adam_wide(const struct buffers *b, const struct kernel *k)
{
    struct kernel wide = *k;
    wide.moments = IZ_MOMENT_F32;
    wide.halves = false;
    run_adam(b, &wide);
}

static void run_to_16(const struct buffers *b, const struct kernel *k)
{
    iz_cast(b->out, k->out, b->g, IZ_F32, EXTENT);
}

static void run_widen(const struct buffers *b, const struct kernel *k)
{
    iz_cast(b->g, IZ_F32, b->half, k->in, EXTENT);
}

/* Any numbers are groups. */
static void run_quant(const struct buffers *b, const struct kernel *k)
{
    const char *group = (const char *)b->g;
    for (int64_t i = 0; i < EXTENT; i += IZ_QUANT_GROUP)
        iz_quant_load(k->quant, b->out + i, k->out,
                      group + i / IZ_QUANT_GROUP * iz_quant_bytes(k->quant),
                      IZ_QUANT_GROUP);
}

static void run_norm2(const struct buffers *b, const struct kernel *k)
{
    const void *x = k->in == IZ_F32 ? (const void *)b->p : b->half;
    sink = iz_flat_norm2(x, k->in, EXTENT);
}

static void run_add(const struct buffers *b, const struct kernel *k)
{
    const void *in = gradient(b, k);
    iz_flat_sum(b->p, IZ_F32, true, &in, 1, k->in, EXTENT);
}

static void run_add_then_norm2(const struct buffers *b, const struct kernel *k)
{
    run_add(b, k);
    sink = iz_flat_norm2(b->p, IZ_F32, EXTENT);
}

static void run_add_norm2(const struct buffers *b, const struct kernel *k)
{
    const void *in = gradient(b, k);
    struct iz_norm2 s = {0};
    iz_flat_sum_norm2(&s, b->p, IZ_F32, true, &in, 1, k->in, EXTENT);
    sink = iz_norm2_end(&s);
}

static void run_hash(const struct buffers *b, const struct kernel *k)
{
    sink = (double)iz_flat_hash(0, b->p, EXTENT);
}

static void run_normal(const struct buffers *b, const struct kernel *k)
{
    iz_flat_normal(b->g, EXTENT, 1, 2, 0, 0.02f);
}

static const struct kernel kernels[] = {
    {"update in place", 8, limit_scale, limit_scale, .in = IZ_F32},
    {"adam fp32 gradient", 28, limit_adam, run_adam, .in = IZ_F32},
    {"adam fp32 gradient, bf16 copy", 30, limit_adam, run_adam, .out = IZ_BF16},
    {"adam bf16 gradient and copy", 28, limit_adam, run_adam, .in = IZ_BF16,
     .out = IZ_BF16},
    {"adam fp16 gradient and copy", 28, limit_adam, run_adam, .in = IZ_F16,
     .out = IZ_F16},
    /* Of these the limit is Adam with m and v in fp32. */
    {"m, v bf16 against adam", 20, run_adam_wide, run_adam,
     .moments = IZ_MOMENT_BF16},
    {"m, v fp8 against adam", 16, run_adam_wide, run_adam,
     .moments = IZ_MOMENT_FP8},
    {"m, v bf16, master in halves", 18, run_adam_wide, run_adam, .in = IZ_BF16,
     .out = IZ_BF16, .moments = IZ_MOMENT_BF16, .halves = true},
    {"m, v fp8, master in halves", 14, run_adam_wide, run_adam, .in = IZ_BF16,
     .out = IZ_BF16, .moments = IZ_MOMENT_FP8, .halves = true},
    {"fp32 to bf16", 6, limit_to_16, run_to_16, .out = IZ_BF16},
    {"bf16 to fp32", 6, limit_widen, run_widen, .in = IZ_BF16},
    {"fp32 to fp16", 6, limit_to_16, run_to_16, .out = IZ_F16},
    {"fp16 to fp32", 6, limit_widen, run_widen, .in = IZ_F16},
    {"nf4 to bf16", 2.52, limit_codes, run_quant, .out = IZ_BF16,
     .quant = IZ_QUANT_NF4},
    {"int8 to bf16", 3.06, limit_codes, run_quant, .out = IZ_BF16,
     .quant = IZ_QUANT_INT8},
    {"norm2 fp32", 4, limit_read, run_norm2, .in = IZ_F32},
    {"norm2 bf16", 2, limit_read, run_norm2, .in = IZ_BF16},
    {"add fp32 to fp32", 12, limit_add, run_add, .in = IZ_F32},
    {"add bf16 to fp32", 10, limit_add, run_add, .in = IZ_BF16},
    /* The limit is the sum and a pass for the norm behind it. */
    {"add fp32 with the norm", 12, run_add_then_norm2, run_add_norm2,
     .in = IZ_F32},
    {"add bf16 with the norm", 10, run_add_then_norm2, run_add_norm2,
     .in = IZ_BF16},
    {"hash", 4, limit_read, run_hash, .in = IZ_F32},
    {"normal", 4, limit_write, run_normal, .in = IZ_F32},
};

enum { KERNELS = sizeof(kernels) / sizeof(kernels[0]) };

/* ---- measurement ---- */

struct group {
    int threads, pairs; /* pairs: taken of the kernel under way */
    double seconds;
    const char *name;
    pthread_barrier_t barrier;
    bool more;
    double *limit, *run; /* [PAIRS_MAX] of each thread: seconds, or 0 where it
                          * lost its processor */
};

struct worker {
    struct group *group;
    int i;
};

/* Zeroed by the thread that will use it. */
static struct buffers kernels_fill(void)
{
    const int64_t half = 2 * N, wide = 4 * N;
    struct buffers b = {
        bench_zeros(wide), bench_zeros(wide),
        bench_zeros(wide), bench_zeros(wide),
        bench_zeros(half), bench_zeros(half),
        bench_zeros(half), {bench_zeros(half), bench_zeros(half)}};
    iz_flat_normal(b.p, N, 1, 1, 0, 1.0f);
    iz_flat_normal(b.g, N, 1, 2, 0, 1.0f);
    return b;
}

static double timed(struct group *g, on_an_extent *run, const struct kernel *k,
                    struct buffers b)
{
    pthread_barrier_wait(&g->barrier);
    double cpu = bench_cpu_s();
    double wall = bench_now_s();
    run(&b, k);
    wall = bench_now_s() - wall;
    cpu = bench_cpu_s() - cpu;
    return cpu > HAD_ITS_PROCESSOR * wall ? wall : 0;
}

/* The slowest thread's time of pair i, or 0 when one lost its processor. */
static double pair_s(const struct group *g, const double *s, int i)
{
    double most = s[i];
    for (int j = 0; j < g->threads && most > 0; j++) {
        double one = s[j * PAIRS_MAX + i];
        most = one > most || one <= 0 ? one : most;
    }
    return most;
}

static void kernels_show(const struct group *g, const struct kernel *k)
{
    static double ratio[PAIRS_MAX], limit[PAIRS_MAX], run[PAIRS_MAX];
    double bytes = k->bytes * EXTENT * g->threads;
    int n = 0;
    for (int i = 0; i < g->pairs; i++) {
        double a = pair_s(g, g->limit, i), b = pair_s(g, g->run, i);
        if (a <= 0 || b <= 0)
            continue;
        ratio[n] = a / b;
        limit[n] = bytes / a;
        run[n++] = bytes / b;
    }
    if (n == 0) {
        printf("%-30s no clean pair of %d\n", k->name, g->pairs);
        return;
    }
    bench_sort(ratio, n);
    bench_sort(limit, n);
    bench_sort(run, n);
    printf("%-30s %6.1f GB/s %7.0f M/s, limit %6.1f GB/s, ratio %.3f (%.3f to "
           "%.3f), %d of %d pairs\n",
           k->name, 1e-9 * run[n / 2], 1e-6 * run[n / 2] / k->bytes,
           1e-9 * limit[n / 2], ratio[n / 2], ratio[n / 4], ratio[n * 3 / 4], n,
           g->pairs);
    fflush(stdout);
}

/* Thread 0 decides when a kernel has had its time. */
static void time_kernel(struct worker *w, const struct kernel *k,
                        const struct buffers *b)
{
    struct group *g = w->group;
    double *limit = g->limit + w->i * PAIRS_MAX;
    double *run = g->run + w->i * PAIRS_MAX;
    double end = bench_now_s() + g->seconds;
    int n = 0;
    iz_cast(b->half, k->in == IZ_F32 ? IZ_BF16 : k->in, b->g, IZ_F32, N);
    for (int i = 0; i < 2; i++)
        memset(b->coded[i], 0, (size_t)N * 2);
    iz_cast_split(b->out, b->lower, b->p, N);
    do {
        int64_t i = n % EXTENTS, j = (n + EXTENTS / 2) % EXTENTS;
        limit[n] = timed(g, k->limit, k, kernels_at(b, i * EXTENT));
        run[n] = timed(g, k->run, k, kernels_at(b, j * EXTENT));
        n++;
        if (w->i == 0)
            g->more = n < PAIRS_MAX && bench_now_s() < end;
        pthread_barrier_wait(&g->barrier);
    } while (g->more);
    if (w->i == 0) {
        g->pairs = n;
        kernels_show(g, k);
    }
}

static void *kernels_work(void *arg)
{
    struct worker *w = arg;
    struct buffers b = kernels_fill();
    for (int i = 0; i < KERNELS; i++)
        if (!strncmp(kernels[i].name, w->group->name, strlen(w->group->name)))
            time_kernel(w, &kernels[i], &b);
    return NULL;
}

int main(int argc, char **argv)
{
    int threads = argc > 1 ? atoi(argv[1]) : 1;
    struct group g = {.threads = threads,
                      .seconds = argc > 2 ? atof(argv[2]) : 2,
                      .name = argc > 3 ? argv[3] : ""};
    struct worker *w;
    if (threads < 1)
        return 2;
    w = calloc((size_t)threads, sizeof(*w));
    g.limit = calloc((size_t)threads * PAIRS_MAX, sizeof(*g.limit));
    g.run = calloc((size_t)threads * PAIRS_MAX, sizeof(*g.run));
    if (!w || !g.limit || !g.run ||
        pthread_barrier_init(&g.barrier, NULL, (unsigned)threads))
        return 1;
    printf("%d threads, SIMD level %s\n", threads, iz_simd_name());
    for (int i = 0; i < threads; i++)
        w[i] = (struct worker){&g, i};
    bench_threads(threads, kernels_work, w, sizeof(*w));
    free(w);
    free(g.limit);
    free(g.run);
    return 0;
}
