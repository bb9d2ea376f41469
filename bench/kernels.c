/* SPDX-License-Identifier: Apache-2.0 */
/* usage: kernels [THREADS [SECONDS [NAME]]]
 * Times the flat-buffer kernels (those whose name begins with NAME) on THREADS
 * threads, each on memory of its own, against a loop that moves the same
 * streams and computes next to nothing.  GB/s count every byte read and every
 * byte written.
 *
 * The machine may be shared, so limit and kernel take turns, piece by piece,
 * and a pair counts only when every thread had its processor all the time: when
 * its CPU time is its wall time.  Printed are medians over these pairs and, of
 * the ratio, the quartiles. */
#define _GNU_SOURCE /* MADV_HUGEPAGE */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "codelets/base/build.h"
#include "codelets/flat/dtype.h"
#include "codelets/flat/flat.h"
#include "codelets/flat/half.h"
#include "codelets/flat/simd.h"
#include "codelets/flat/update.h"

/* PIECE elements of all streams are beyond a core's own cache, N beyond any
 * cache: a piece is out of it again when its turn comes. */
enum { N = 1 << 24, PIECE = 1 << 19, PIECES = N / PIECE, PAIRS_MAX = 1 << 14 };
#define HAD_ITS_PROCESSOR 0.985

/* The streams of one thread. */
struct buffers {
    float *p, *m, *v, *g;
    uint16_t *out, *half; /* written by copies; gradients in 16 bits */
};

static double kernels_clock_s(clockid_t id)
{
    struct timespec t;

    clock_gettime(id, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double kernels_now_s(void)
{
    return kernels_clock_s(CLOCK_MONOTONIC);
}

/* Zeroed by the thread that will use it, on huge pages if the system has them.
 */
static void *pages(size_t bytes)
{
    void *p = aligned_alloc((size_t)2 << 20, bytes);

    if (!p)
        exit(1);
#ifdef MADV_HUGEPAGE
    madvise(p, bytes, MADV_HUGEPAGE);
#endif
    memset(p, 0, bytes);
    return p;
}

static struct buffers kernels_at(const struct buffers *b, int64_t i)
{
    return (struct buffers){b->p + i, b->m + i,   b->v + i,
                            b->g + i, b->out + i, b->half + i};
}

/* ---- limits: the same streams, next to no arithmetic ---- */

static volatile double sink;
#define BY 0.999f

IZ_SIMD static void limit_scale(const struct buffers *b)
{
    float *restrict p = b->p;

    for (int64_t i = 0; i < PIECE; i++)
        p[i] *= BY;
}

IZ_SIMD static void limit_adam(const struct buffers *b)
{
    float *restrict p = b->p, *restrict m = b->m, *restrict v = b->v;
    const float *restrict g = b->g;

    for (int64_t i = 0; i < PIECE; i++) {
        m[i] *= BY;
        v[i] *= BY;
        p[i] += g[i];
    }
}

IZ_SIMD static void limit_adam_out(const struct buffers *b)
{
    float *restrict p = b->p, *restrict m = b->m, *restrict v = b->v;
    const float *restrict g = b->g;
    uint16_t *restrict out = b->out;

    for (int64_t i = 0; i < PIECE; i++) {
        m[i] *= BY;
        v[i] *= BY;
        p[i] += g[i];
        out[i] = (uint16_t)(iz_float_bits(p[i]) >> 16);
    }
}

IZ_SIMD static void limit_adam_half(const struct buffers *b)
{
    float *restrict p = b->p, *restrict m = b->m, *restrict v = b->v;
    const uint16_t *restrict g = b->half;
    uint16_t *restrict out = b->out;

    for (int64_t i = 0; i < PIECE; i++) {
        m[i] *= BY;
        v[i] *= BY;
        p[i] += (float)g[i];
        out[i] = (uint16_t)(iz_float_bits(p[i]) >> 16);
    }
}

IZ_SIMD static void limit_narrow(const struct buffers *b)
{
    const float *restrict g = b->g;
    uint16_t *restrict out = b->out;

    for (int64_t i = 0; i < PIECE; i++)
        out[i] = (uint16_t)(iz_float_bits(g[i]) >> 16);
}

IZ_SIMD static void limit_widen(const struct buffers *b)
{
    float *restrict g = b->g;
    const uint16_t *restrict half = b->half;

    for (int64_t i = 0; i < PIECE; i++)
        g[i] = (float)half[i];
}

/* Any order of integers is the same sum. */
IZ_SIMD static void limit_read(const struct buffers *b)
{
    const uint32_t *x = (const uint32_t *)b->p;
    uint32_t sum = 0;

    for (int64_t i = 0; i < PIECE; i++)
        sum += x[i];
    sink = sum;
}

IZ_SIMD static void limit_read_half(const struct buffers *b)
{
    const uint32_t *x = (const uint32_t *)b->half;
    uint32_t sum = 0;

    for (int64_t i = 0; i < PIECE / 2; i++)
        sum += x[i];
    sink = sum;
}

IZ_SIMD static void limit_add(const struct buffers *b)
{
    float *restrict p = b->p;
    const float *restrict g = b->g;

    for (int64_t i = 0; i < PIECE; i++)
        p[i] += g[i];
}

IZ_SIMD static void limit_add_half(const struct buffers *b)
{
    float *restrict p = b->p;
    const uint16_t *restrict g = b->half;

    for (int64_t i = 0; i < PIECE; i++)
        p[i] += (float)g[i];
}

IZ_SIMD static void limit_write(const struct buffers *b)
{
    float *restrict g = b->g;

    for (int64_t i = 0; i < PIECE; i++)
        g[i] = BY;
}

/* ---- kernels ---- */

static const struct iz_step options = {
    {IZ_OPTIMIZER_ADAMW, 1e-3, 0.9, 0.999, 1e-8, 0.1, true, true}, 1, 1.0f};

static void update(const struct buffers *b, struct iz_update u)
{
    struct iz_alike all = iz_alike_of(&options);

    u.optimizer = options.hyper.type;
    u.n = u.room = PIECE;
    u.p = b->p;
    u.state[0] = b->m;
    u.state[1] = b->v;
    u.span = &all;
    u.spans = 1;
    iz_update(&u);
}

static void run_adam(const struct buffers *b)
{
    update(b, (struct iz_update){.g = b->g});
}

static void run_adam_out(const struct buffers *b)
{
    update(b,
           (struct iz_update){.g = b->g, .out = b->out, .out_type = IZ_BF16});
}

static void run_adam_bf16(const struct buffers *b)
{
    update(b, (struct iz_update){.g = b->half,
                                 .g_type = IZ_BF16,
                                 .out = b->out,
                                 .out_type = IZ_BF16});
}

static void run_adam_f16(const struct buffers *b)
{
    update(b, (struct iz_update){.g = b->half,
                                 .g_type = IZ_F16,
                                 .out = b->out,
                                 .out_type = IZ_F16});
}

static void adam_narrow(const struct buffers *b, enum iz_moment_type type)
{
    update(b, (struct iz_update){.g = b->g, .type = type, .key = 1});
}

static void run_adam_m16(const struct buffers *b)
{
    adam_narrow(b, IZ_MOMENT_BF16);
}

static void run_adam_m8(const struct buffers *b)
{
    adam_narrow(b, IZ_MOMENT_FP8);
}

static void run_to_bf16(const struct buffers *b)
{
    iz_cast(b->out, IZ_BF16, b->g, IZ_F32, PIECE);
}

static void run_from_bf16(const struct buffers *b)
{
    iz_cast(b->g, IZ_F32, b->half, IZ_BF16, PIECE);
}

static void run_to_f16(const struct buffers *b)
{
    iz_cast(b->out, IZ_F16, b->g, IZ_F32, PIECE);
}

static void run_from_f16(const struct buffers *b)
{
    iz_cast(b->g, IZ_F32, b->half, IZ_F16, PIECE);
}

static void run_norm2(const struct buffers *b)
{
    sink = iz_flat_norm2(b->p, IZ_F32, PIECE);
}

static void run_norm2_bf16(const struct buffers *b)
{
    sink = iz_flat_norm2(b->half, IZ_BF16, PIECE);
}

static void run_add(const struct buffers *b)
{
    iz_flat_add(b->p, IZ_F32, b->g, IZ_F32, PIECE);
}

static void run_add_bf16(const struct buffers *b)
{
    iz_flat_add(b->p, IZ_F32, b->half, IZ_BF16, PIECE);
}

static void run_add_then_norm2(const struct buffers *b)
{
    run_add(b);
    run_norm2(b);
}

static void run_add_half_then_norm2(const struct buffers *b)
{
    run_add_bf16(b);
    run_norm2(b);
}

static void add_norm2(const struct buffers *b, const void *in,
                      enum iz_dtype type)
{
    struct iz_norm2 s = {0};

    iz_flat_sum_norm2(&s, b->p, IZ_F32, true, &in, 1, type, PIECE);
    sink = iz_norm2_end(&s);
}

static void run_add_norm2(const struct buffers *b)
{
    add_norm2(b, b->g, IZ_F32);
}

static void run_add_half_norm2(const struct buffers *b)
{
    add_norm2(b, b->half, IZ_BF16);
}

static void run_hash(const struct buffers *b)
{
    sink = (double)iz_flat_hash(0, b->p, PIECE);
}

static void run_normal(const struct buffers *b)
{
    iz_flat_normal(b->g, PIECE, 1, 2, 0, 0.02f);
}

static const struct kernel {
    const char *name;
    int bytes; /* per element */
    enum iz_dtype half;
    void (*limit)(const struct buffers *b), (*run)(const struct buffers *b);
} kernels[] = {
    {"update in place", 8, IZ_BF16, limit_scale, limit_scale},
    {"adam fp32 gradient", 28, IZ_BF16, limit_adam, run_adam},
    {"adam fp32 gradient, bf16 copy", 30, IZ_BF16, limit_adam_out,
     run_adam_out},
    {"adam bf16 gradient and copy", 28, IZ_BF16, limit_adam_half,
     run_adam_bf16},
    {"adam fp16 gradient and copy", 28, IZ_F16, limit_adam_half, run_adam_f16},
    /* Of these the limit is Adam with m and v in fp32. */
    {"m and v bf16 against adam", 20, IZ_BF16, run_adam, run_adam_m16},
    {"m and v fp8 against adam", 16, IZ_BF16, run_adam, run_adam_m8},
    {"fp32 to bf16", 6, IZ_BF16, limit_narrow, run_to_bf16},
    {"bf16 to fp32", 6, IZ_BF16, limit_widen, run_from_bf16},
    {"fp32 to fp16", 6, IZ_F16, limit_narrow, run_to_f16},
    {"fp16 to fp32", 6, IZ_F16, limit_widen, run_from_f16},
    {"norm2 fp32", 4, IZ_BF16, limit_read, run_norm2},
    {"norm2 bf16", 2, IZ_BF16, limit_read_half, run_norm2_bf16},
    {"add fp32 to fp32", 12, IZ_BF16, limit_add, run_add},
    {"add bf16 to fp32", 10, IZ_BF16, limit_add_half, run_add_bf16},
    /* The limit is the sum and a pass for the norm behind it. */
    {"add fp32 with the norm", 12, IZ_BF16, run_add_then_norm2, run_add_norm2},
    {"add bf16 with the norm", 10, IZ_BF16, run_add_half_then_norm2,
     run_add_half_norm2},
    {"hash", 4, IZ_BF16, limit_read, run_hash},
    {"normal", 4, IZ_BF16, limit_write, run_normal},
};

enum { KERNELS = sizeof(kernels) / sizeof(kernels[0]) };

/* ---- measurement ---- */

struct sample {
    double wall_s;
    bool clean;
};

struct team {
    int threads, pairs; /* pairs: taken of the kernel under way */
    double seconds;
    const char *name;
    pthread_barrier_t barrier;
    bool more;
    struct sample *limit, *run; /* [PAIRS_MAX] of each thread */
};

struct worker {
    struct team *team;
    int i;
};

static struct buffers kernels_fill(void)
{
    const size_t bytes = (size_t)N * 4;
    struct buffers b = {pages(bytes), pages(bytes),     pages(bytes),
                        pages(bytes), pages(bytes / 2), pages(bytes / 2)};

    iz_flat_normal(b.p, N, 1, 1, 0, 1.0f);
    iz_flat_normal(b.g, N, 1, 2, 0, 1.0f);
    return b;
}

static struct sample timed(struct team *t, void (*run)(const struct buffers *b),
                           struct buffers b)
{
    double wall, cpu;

    pthread_barrier_wait(&t->barrier);
    cpu = kernels_clock_s(CLOCK_THREAD_CPUTIME_ID);
    wall = kernels_now_s();
    run(&b);
    wall = kernels_now_s() - wall;
    cpu = kernels_clock_s(CLOCK_THREAD_CPUTIME_ID) - cpu;
    return (struct sample){wall, cpu > HAD_ITS_PROCESSOR * wall};
}

static int kernels_by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* The slowest thread's time of pair i, or 0 when one lost its processor. */
static double pair_s(const struct team *t, const struct sample *s, int i)
{
    double most = 0;

    for (int j = 0; j < t->threads; j++) {
        if (!s[j * PAIRS_MAX + i].clean)
            return 0;
        if (s[j * PAIRS_MAX + i].wall_s > most)
            most = s[j * PAIRS_MAX + i].wall_s;
    }
    return most;
}

static void kernels_show(const struct team *t, const struct kernel *k)
{
    static double ratio[PAIRS_MAX], limit[PAIRS_MAX], run[PAIRS_MAX];
    double bytes = (double)k->bytes * PIECE * t->threads;
    int n = 0;

    for (int i = 0; i < t->pairs; i++) {
        double a = pair_s(t, t->limit, i), b = pair_s(t, t->run, i);

        if (a <= 0 || b <= 0)
            continue;
        ratio[n] = a / b;
        limit[n] = bytes / a;
        run[n++] = bytes / b;
    }
    if (n == 0) {
        printf("%-30s no clean pair of %d\n", k->name, t->pairs);
        return;
    }
    qsort(ratio, (size_t)n, sizeof(*ratio), kernels_by_value);
    qsort(limit, (size_t)n, sizeof(*limit), kernels_by_value);
    qsort(run, (size_t)n, sizeof(*run), kernels_by_value);
    printf("%-30s %6.1f GB/s %7.0f M/s, limit %6.1f GB/s, ratio %.3f (%.3f to "
           "%.3f), %d of %d pairs\n",
           k->name, 1e-9 * run[n / 2], 1e-6 * run[n / 2] / k->bytes,
           1e-9 * limit[n / 2], ratio[n / 2], ratio[n / 4], ratio[n * 3 / 4], n,
           t->pairs);
    fflush(stdout);
}

/* Thread 0 decides when a kernel has had its time. */
static void time_kernel(struct worker *w, const struct kernel *k,
                        const struct buffers *b)
{
    struct team *t = w->team;
    struct sample *limit = t->limit + w->i * PAIRS_MAX;
    struct sample *run = t->run + w->i * PAIRS_MAX;
    double end = kernels_now_s() + t->seconds;
    int n = 0;

    iz_cast(b->half, k->half, b->g, IZ_F32, N);
    do {
        int64_t i = n % PIECES, j = (n + PIECES / 2) % PIECES;

        limit[n] = timed(t, k->limit, kernels_at(b, i * PIECE));
        run[n] = timed(t, k->run, kernels_at(b, j * PIECE));
        n++;
        if (w->i == 0)
            t->more = n < PAIRS_MAX && kernels_now_s() < end;
        pthread_barrier_wait(&t->barrier);
    } while (t->more);
    if (w->i == 0) {
        t->pairs = n;
        kernels_show(t, k);
    }
}

static void *kernels_work(void *arg)
{
    struct worker *w = arg;
    struct buffers b = kernels_fill();

    for (int i = 0; i < KERNELS; i++)
        if (!strncmp(kernels[i].name, w->team->name, strlen(w->team->name)))
            time_kernel(w, &kernels[i], &b);
    return NULL;
}

static int time_kernels(int argc, char **argv)
{
    int threads = argc > 1 ? atoi(argv[1]) : 1;
    struct team t = {.threads = threads,
                     .seconds = argc > 2 ? atof(argv[2]) : 2,
                     .name = argc > 3 ? argv[3] : ""};
    pthread_t *id;
    struct worker *w;

    if (threads < 1)
        return 2;
    id = calloc((size_t)threads, sizeof(*id));
    w = calloc((size_t)threads, sizeof(*w));
    t.limit = calloc((size_t)threads * PAIRS_MAX, sizeof(*t.limit));
    t.run = calloc((size_t)threads * PAIRS_MAX, sizeof(*t.run));
    if (!id || !w || !t.limit || !t.run ||
        pthread_barrier_init(&t.barrier, NULL, (unsigned)threads))
        return 1;
    printf("%d threads, SIMD level %s\n", threads, iz_simd_name());
    for (int i = 0; i < threads; i++) {
        w[i] = (struct worker){&t, i};
        if (pthread_create(&id[i], NULL, kernels_work, &w[i]))
            return 1;
    }
    for (int i = 0; i < threads; i++)
        pthread_join(id[i], NULL);
    free(id);
    free(w);
    free(t.limit);
    free(t.run);
    return 0;
}

int main(int argc, char **argv)
{
    return time_kernels(argc, argv);
}
