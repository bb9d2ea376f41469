/* SPDX-License-Identifier: Apache-2.0 */
/* usage: ops [--cpu] [--out FILE.json] [--skip N] [--tiny]
 * Times every op in the shapes of a block, on a GPU of a 1.5B, a 7B and a 14B
 * model and on one thread of the CPU of a small GPT, against two references of
 * the same run: a copy and the best matrix product.  Bytes are the compulsory
 * ones and flops those of products, as the op itself counts them.  Medians; the
 * inputs are random and rotate over memory larger than the cache.  Works on the
 * stand-in with --tiny.  --skip leaves out the first N ops. */
#include "bench/ops.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/mix.h"
#include "codelets/base/units.h"
#include "codelets/buffer/flat_buffer.h"
#include "codelets/flat/flat.h"
#include "codelets/gpu/device.h"
#include "codelets/ops/blas.h"
#include "codelets/ops/gemm_rate.h"

static enum iz_dtype act_of(enum iz_dtype param)
{
    return backend.x.backend == IZ_CUDA ? iz_cuda_act(param) : IZ_F32;
}

struct backend backend = {
    .x = {.backend = IZ_CUDA, .numerics.logits_bytes = 256 << 20},
    .act = act_of};

enum { ROUNDS = 5 };
#define ROUND_S 0.02 /* at least */

/* ---- memory and time ---------------------------------------------------- */

char *bench_device(int64_t bytes)
{
    if (backend.x.backend == IZ_CPU)
        return bench_new(bytes);
    char *p = iz_device_take(bytes);
    if (!p)
        exit(1);
    return p;
}

void bench_device_give(char *p)
{
    if (backend.x.backend == IZ_CPU)
        free(p);
    else
        iz_device_give(p);
}

char *bench_pinned(int64_t bytes, const void *from)
{
    int64_t whole = (bytes + 4095) / 4096 * 4096;
    char *p = bench_new(whole);
    const char *why =
        backend.x.backend == IZ_CUDA ? iz_device_pin(p, whole) : NULL;
    if (why) {
        fprintf(stderr, "pinning memory: %s\n", why);
        exit(1);
    }
    memset(p, 0, (size_t)whole);
    return from ? memcpy(p, from, (size_t)bytes) : p;
}

void bench_unpin(char *p)
{
    if (backend.x.backend == IZ_CUDA)
        iz_device_unpin(p);
    free(p);
}

static void copy(char *to, const void *from, int64_t bytes)
{
    if (backend.x.backend == IZ_CUDA)
        iz_device_copy(backend.x.stream, to, from, bytes);
    else
        memcpy(to, from, (size_t)bytes);
}

void bench_fill(char *p, int64_t bytes, const void *pattern)
{
    for (int64_t at = 0; at < bytes; at += PATTERN_BYTES)
        copy(p + at, pattern,
             bytes - at < PATTERN_BYTES ? bytes - at : PATTERN_BYTES);
    bench_wait(backend.x.stream);
}

void bench_wait(void *stream)
{
    while (stream && !iz_device_done(stream))
        ;
}

/* Seconds of n calls. */
static double time_calls(const struct bench *b, void (*run)(void *arg, int i),
                         void *arg, int n)
{
    double begin = bench_now_s();
    for (int i = 0; i < n; i++)
        run(arg, i);
    bench_wait(backend.x.stream);
    return bench_now_s() - begin;
}

double bench_time(const struct bench *b, void (*run)(void *arg, int i),
                  void *arg)
{
    double s[ROUNDS], one, round_s = b->tiny ? 0 : ROUND_S;
    time_calls(b, run, arg, BENCH_SETS); /* warms up and touches every set */
    one = time_calls(b, run, arg, 3) / 3;
    int n = (int)fmin(fmax(ceil(round_s / one), 2), 2000);
    for (int r = 0; r < ROUNDS; r++)
        s[r] = time_calls(b, run, arg, n) / n;
    bench_sort(s, ROUNDS);
    return s[ROUNDS / 2];
}

struct iz_exec bench_exec(char *base, int64_t bytes)
{
    struct iz_exec x = backend.x;
    x.work = (struct iz_arena){.base = base, .size = bytes};
    return x;
}

/* PATTERN_BYTES of random numbers from `low` to 1. */
static char *pattern_new(enum iz_dtype t, float low)
{
    char *host = bench_pinned(PATTERN_BYTES, NULL);
    char *p = bench_device(PATTERN_BYTES);
    int64_t wide = iz_dtype_bytes(t);
    for (int64_t i = 0; i < PATTERN_BYTES / wide; i++) {
        float f = (float)(iz_mix((uint64_t)i * IZ_GOLDEN) >> 40) * 0x1p-24f;
        f = low + (1 - low) * f;
        iz_cast(host + i * wide, t, &f, IZ_F32, 1);
    }
    bench_fill(p, PATTERN_BYTES, host);
    bench_unpin(host);
    return p;
}

/* ---- copies ------------------------------------------------------------- */

static void rate_show(const struct bench *b, const char *what, const char *key,
                      double bytes_per_s)
{
    printf("  %-34s %10.1f GB/s\n", what, 1e-9 * bytes_per_s);
    if (b->json)
        fprintf(b->json, "  \"%s\": %.2f,\n", key, 1e-9 * bytes_per_s);
}

struct copy {
    char *to, *from;
    int64_t bytes;
};

static void copy_once(void *arg, int i)
{
    struct copy *c = arg;
    copy(c->to, c->from, c->bytes);
}

static double copy_rate(const struct bench *b, char *to, char *from,
                        int64_t bytes)
{
    struct copy c = {to, from, bytes};
    return (double)bytes / bench_time(b, copy_once, &c);
}

static void copy_reference(struct bench *b)
{
    int64_t bytes = INT64_C(2) << 30;
    if (b->tiny || backend.x.backend == IZ_CPU)
        bytes = b->tiny ? 4 << 20 : 256 << 20;
    char *p = bench_device(2 * bytes);
    bench_fill(p, 2 * bytes, b->pattern);
    b->copy = 2 * copy_rate(b, p + bytes, p, bytes);
    rate_show(b, "copy, read and written", "copy_gb_per_s", b->copy);
    bench_device_give(p);
}

/* Both ways at once: each of two streams copies `times`; the seconds of the
 * slower one. */
static double both_ways(const struct bench *b, void *second, char *device,
                        char *host, int64_t bytes)
{
    enum { TIMES = 6 };
    double begin = bench_now_s();
    for (int i = 0; i < TIMES; i++) {
        iz_device_copy(backend.x.stream, device, host, bytes);
        iz_device_copy(second, host + bytes, device + bytes, bytes);
    }
    bench_wait(backend.x.stream);
    bench_wait(second);
    return (bench_now_s() - begin) / TIMES;
}

static void over_the_link(const struct bench *b)
{
    int64_t bytes = b->tiny ? 4 << 20 : INT64_C(512) << 20;
    char *device = bench_device(2 * bytes);
    char *host = bench_pinned(2 * bytes, NULL);
    void *second = iz_device_stream_open();
    bench_fill(device, 2 * bytes, b->pattern);
    rate_show(b, "host to GPU", "up_gb_per_s",
              copy_rate(b, device, host, bytes));
    rate_show(b, "GPU to host", "down_gb_per_s",
              copy_rate(b, host, device, bytes));
    both_ways(b, second, device, host, bytes);
    rate_show(b, "both at once, each way", "both_gb_per_s",
              (double)bytes / both_ways(b, second, device, host, bytes));
    iz_device_stream_close(second);
    bench_unpin(host);
    bench_device_give(device);
}

/* ---- flat buffers on the GPU -------------------------------------------- */

struct flat {
    struct iz_exec x;
    int64_t n;
    float *p, *m, *v;
    char *g, *out; /* bf16 */
    double *norm2; /* pinned */
};

/* Gradient and copy in bf16. */
static void run_adam(void *arg, int i)
{
    struct flat *f = arg;
    struct iz_update_range all = iz_update_range_of(&bench_adamw);
    iz_buffer_update(&f->x,
                     &(struct iz_update){.optimizer = bench_adamw.hyper.type,
                                         .g_type = IZ_BF16,
                                         .out_type = IZ_BF16,
                                         .n = f->n,
                                         .room = f->n,
                                         .p = f->p,
                                         .state = {f->m, f->v},
                                         .g = f->g,
                                         .out = f->out,
                                         .range = &all,
                                         .ranges = 1});
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
    rate_show(b, name, key, rate);
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
                     .norm2 = (double *)bench_pinned(8, NULL)};
    f.x = bench_exec(mem + 16 * n, scratch);
    bench_fill(mem, 16 * n, b->positive);
    flat_show(&f, b, "Adam, 28 bytes", "adam_gpu_gb_per_s", run_adam, 28);
    flat_show(&f, b, "norm, 2 bytes", "norm_gpu_gb_per_s", run_norm, 2);
    flat_show(&f, b, "sum, 10 bytes", "sum_gpu_gb_per_s", run_sum, 10);
    bench_unpin((char *)f.norm2);
    bench_device_give(mem);
}

/* ---- the program -------------------------------------------------------- */

static void gemm_reference(struct bench *b)
{
    struct iz_exec x = bench_exec(NULL, 0);
    double s = b->tiny ? 0.01 : 0.5;
    int n = backend.x.backend == IZ_CPU ? 1024 : 8192;
    if (b->tiny)
        n = 64;
    b->gemm = backend.x.backend == IZ_CPU ? iz_rate_blas(n, n, n, s)
                                          : iz_gemm_rate_cuda(&x, n, n, n, s);
    printf("  product [%d,%d,%d] %27.3f TFLOP/s in %s\n", n, n, n,
           1e-12 * b->gemm, iz_dtype_name(backend.x.act));
    if (b->json)
        fprintf(b->json, "  \"gemm_tflop_per_s\": %.3f,\n  \"act\": \"%s\",\n",
                1e-12 * b->gemm, iz_dtype_name(backend.x.act));
}

static void measure(struct bench *b, const char *device)
{
    b->pattern = pattern_new(backend.x.act, -1);
    b->positive = pattern_new(IZ_F32, 0);
    if (b->json)
        fprintf(b->json, "{\n  \"device\": \"%s\",\n", device);
    gemm_reference(b);
    copy_reference(b);
    if (backend.x.backend == IZ_CUDA) {
        over_the_link(b);
        flat_on_device(b);
    }
    if (b->json)
        fprintf(b->json, "  \"ops\": [");
    bench_models(b);
    if (b->json)
        fprintf(b->json, "\n  ]\n}\n");
    bench_device_give(b->pattern);
    bench_device_give(b->positive);
}

static int measure_cpu(struct bench *b)
{
    char name[128];
    iz_blas_name(name, sizeof(name));
    printf("one thread of the CPU, %s\n", name);
    backend.x.act = IZ_F32;
    measure(b, name);
    return 0;
}

static int measure_gpu(struct bench *b)
{
    struct iz_device_info info;
    if (!iz_device_count()) {
        fprintf(stderr, "ops: no GPU: %s\n", iz_device_why_none());
        return 77;
    }
    if (iz_device_use(0, &info))
        return 1;
    backend.x.numerics.capability = info.capability;
    backend.x.act =
        iz_cuda_act(backend.x.numerics.capability < 80 ? IZ_F16 : IZ_BF16);
    backend.x.stream = iz_device_stream_open();
    if (!backend.x.stream || iz_cuda_open(&backend.x.cuda))
        return 1;
    printf("%s, compute capability %d.%d, %.1f MiB\n", info.name,
           info.capability / 10, info.capability % 10,
           iz_units_mib(info.total_bytes));
    measure(b, info.name);
    iz_cuda_close(&backend.x.cuda);
    iz_device_stream_close(backend.x.stream);
    return 0;
}

int main(int argc, char **argv)
{
    struct bench b = {0};
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--tiny")) {
            b.tiny = true;
        } else if (!strcmp(argv[i], "--cpu")) {
            backend.x.backend = IZ_CPU;
        } else if (!strcmp(argv[i], "--out") && i + 1 < argc) {
            b.json = fopen(argv[++i], "w");
        } else if (!strcmp(argv[i], "--skip") && i + 1 < argc) {
            b.skip = atoi(argv[++i]);
        } else {
            fprintf(stderr, "usage: ops [--cpu] [--out FILE.json] [--skip N] "
                            "[--tiny]\n");
            return 2;
        }
    }
    iz_blas_open(); /* the stand-in computes with the BLAS of the host */
    iz_blas_take_best(512, 384, 1536);
    int failed = (backend.x.backend == IZ_CPU ? measure_cpu : measure_gpu)(&b);
    if (b.json && fclose(b.json))
        failed = 1;
    return failed;
}
