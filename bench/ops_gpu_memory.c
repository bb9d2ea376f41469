/* SPDX-License-Identifier: Apache-2.0 */
/* Bandwidth: of copies on the GPU, of the link in both directions, of the
 * kernels on flat buffers, and of Adam on all cores of the host. */
#include "bench/ops_gpu.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "codelets/flat/flat.h"
#include "codelets/gpu/device.h"
#include "codelets/gpu/flat_buffer.h"

enum { THREADS = 256, ROUNDS = 5 };

static void ops_gpu_memory_show(const struct bench *b, const char *what,
                                const char *key, double bytes_per_s)
{
    printf("  %-34s %10.1f GB/s\n", what, 1e-9 * bytes_per_s);
    if (b->json)
        fprintf(b->json, "  \"%s\": %.2f,\n", key, 1e-9 * bytes_per_s);
}

/* ---- copies ------------------------------------------------------------- */

struct copy {
    const struct bench *b;
    char *to, *from;
    int64_t bytes;
};

static void ops_gpu_memory_copy(void *arg, int i)
{
    struct copy *c = arg;

    iz_device_copy(c->b->stream, c->to, c->from, c->bytes);
}

static double copy_rate(const struct bench *b, char *to, char *from,
                        int64_t bytes)
{
    struct copy c = {b, to, from, bytes};

    return (double)bytes / bench_time(b, ops_gpu_memory_copy, &c);
}

static void on_device(struct bench *b)
{
    int64_t bytes = b->tiny ? 4 << 20 : INT64_C(2) << 30;
    char *p = bench_device(2 * bytes);

    bench_fill(b, p, bytes, b->pattern);
    b->copy = 2 * copy_rate(b, p + bytes, p, bytes);
    ops_gpu_memory_show(b, "copy on the GPU, read and written", "copy_gb_per_s",
                        b->copy);
    iz_device_give(p);
}

/* Both ways at once: each of two streams copies `times`; the seconds of the
 * slower one. */
static double both_ways(const struct bench *b, void *second, char *device,
                        char *host, int64_t bytes)
{
    enum { TIMES = 6 };
    double begin = bench_now_s();

    for (int i = 0; i < TIMES; i++) {
        iz_device_copy(b->stream, device, host, bytes);
        iz_device_copy(second, host + bytes, device + bytes, bytes);
    }
    bench_wait(b->stream);
    bench_wait(second);
    return (bench_now_s() - begin) / TIMES;
}

static void over_the_link(const struct bench *b)
{
    int64_t bytes = b->tiny ? 4 << 20 : INT64_C(512) << 20;
    char *device = bench_device(2 * bytes), *host = bench_pinned(2 * bytes);
    void *second = iz_device_stream_open();

    bench_fill(b, device, 2 * bytes, b->pattern);
    ops_gpu_memory_show(b, "host to GPU", "up_gb_per_s",
                        copy_rate(b, device, host, bytes));
    ops_gpu_memory_show(b, "GPU to host", "down_gb_per_s",
                        copy_rate(b, host, device, bytes));
    both_ways(b, second, device, host, bytes);
    ops_gpu_memory_show(b, "both at once, each way", "both_gb_per_s",
                        (double)bytes /
                            both_ways(b, second, device, host, bytes));
    iz_device_stream_close(second);
    bench_unpin(host);
    iz_device_give(device);
}

/* ---- flat buffers on the GPU -------------------------------------------- */

struct flat {
    struct iz_exec x;
    int64_t n;
    float *p, *m, *v;
    char *g, *out; /* bf16 */
    double *norm2; /* pinned */
};

static const struct iz_step options = {
    {IZ_OPTIMIZER_ADAMW, 1e-3, 0.9, 0.95, 1e-8, 0.1, true, true}, 1, 1.0f};

/* Gradient and copy in bf16. */
static void ops_gpu_memory_adam(struct iz_exec *x, int64_t n, float *p,
                                float *m, float *v, const void *g, void *out)
{
    struct iz_alike all = iz_alike_of(&options);

    iz_buffer_update(x, &(struct iz_update){.optimizer = options.hyper.type,
                                            .g_type = IZ_BF16,
                                            .out_type = IZ_BF16,
                                            .n = n,
                                            .room = n,
                                            .p = p,
                                            .state = {m, v},
                                            .g = g,
                                            .out = out,
                                            .span = &all,
                                            .spans = 1});
}

static void run_adam(void *arg, int i)
{
    struct flat *f = arg;

    ops_gpu_memory_adam(&f->x, f->n, f->p, f->m, f->v, f->g, f->out);
}

static void run_norm(void *arg, int i)
{
    struct flat *f = arg;

    iz_buffer_norm2(&f->x, f->norm2, f->g, IZ_BF16, f->n);
}

static void run_sum(void *arg, int i)
{
    struct flat *f = arg;
    const void *in[] = {f->g};

    iz_buffer_sum(&f->x, f->p, IZ_F32, true, in, 1, IZ_BF16, f->n);
}

static void flat_show(struct flat *f, const struct bench *b, const char *what,
                      const char *key, void (*run)(void *, int),
                      int64_t bytes_each)
{
    double rate = (double)(f->n * bytes_each) / bench_time(b, run, f);
    char name[64];

    snprintf(name, sizeof(name), "%s, %.0f %% of a copy", what,
             100 * rate / b->copy);
    ops_gpu_memory_show(b, name, key, rate);
}

static void flat_on_device(const struct bench *b)
{
    int64_t n = b->tiny ? 1 << 18 : INT64_C(1) << 27;
    int64_t scratch = iz_flat_norm2_scratch_bytes(n) + 4096;
    char *mem = bench_device(16 * n + scratch);
    struct flat f = {.n = n,
                     .p = (float *)mem,
                     .m = (float *)(mem + 4 * n),
                     .v = (float *)(mem + 8 * n),
                     .g = mem + 12 * n,
                     .out = mem + 14 * n,
                     .norm2 = (double *)bench_pinned(8)};

    f.x = bench_exec(b, mem + 16 * n, scratch);
    bench_fill(b, mem, 16 * n, b->positive);
    flat_show(&f, b, "Adam, 28 bytes", "adam_gpu_gb_per_s", run_adam, 28);
    flat_show(&f, b, "norm, 2 bytes", "norm_gpu_gb_per_s", run_norm, 2);
    flat_show(&f, b, "sum, 10 bytes", "sum_gpu_gb_per_s", run_sum, 10);
    bench_unpin((char *)f.norm2);
    iz_device_give(mem);
}

/* ---- Adam on the host --------------------------------------------------- */

struct part {
    pthread_barrier_t *barrier;
    int64_t n;
    double best_s; /* of one update of all parts */
};

/* Memory is touched first by the thread that uses it. */
static void *update(void *arg)
{
    struct part *t = arg;
    char *mem = bench_new(t->n * 16);
    float *p = (float *)mem, *m = p + t->n, *v = m + t->n;
    struct iz_exec cpu = {.backend = IZ_CPU};

    memset(mem, 0, (size_t)t->n * 16);
    for (int64_t i = 0; i < t->n; i++)
        p[i] = m[i] = v[i] = (float)(i % 1000 + 1) * 1e-3f;
    t->best_s = 1e30;
    for (int r = 0; r < ROUNDS; r++) {
        double s;

        pthread_barrier_wait(t->barrier);
        s = bench_now_s();
        ops_gpu_memory_adam(&cpu, t->n, p, m, v, mem + 12 * t->n,
                            mem + 14 * t->n);
        pthread_barrier_wait(t->barrier);
        s = bench_now_s() - s;
        t->best_s = s < t->best_s ? s : t->best_s;
    }
    free(mem);
    return NULL;
}

static void adam_on_host(const struct bench *b)
{
    struct part t[THREADS];
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    int threads = cores > THREADS ? THREADS : (int)cores;
    int64_t n = b->tiny ? 1 << 16 : 1 << 25;
    pthread_barrier_t barrier;
    char name[64];

    pthread_barrier_init(&barrier, NULL, (unsigned)threads);
    for (int i = 0; i < threads; i++)
        t[i] = (struct part){.barrier = &barrier, .n = n};
    bench_threads(threads, update, t, sizeof(*t));
    pthread_barrier_destroy(&barrier);
    snprintf(name, sizeof(name), "Adam on %d cores of the host", threads);
    ops_gpu_memory_show(b, name, "adam_cpu_gb_per_s",
                        28. * (double)(n * threads) / t[0].best_s);
    if (b->json)
        fprintf(b->json, "  \"adam_cpu_threads\": %d,\n", threads);
}

void bench_memory(struct bench *b)
{
    on_device(b);
    over_the_link(b);
    flat_on_device(b);
    adam_on_host(b);
}
