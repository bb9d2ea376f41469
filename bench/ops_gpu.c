/* SPDX-License-Identifier: Apache-2.0 */
/* usage: ops_gpu [--out FILE.json] [--tiny]
 * Times every op on a GPU in the shapes of a block of a 1.5B, a 7B and a 14B
 * model, against two yardsticks of the same run: a copy on the GPU and the best
 * matrix product.  Bytes are the compulsory ones and flops those of products,
 * as the op itself counts them.  Medians; the inputs are random and rotate over
 * memory larger than the cache.  Works on the stand-in with --tiny. */
#include "bench/ops_gpu.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/mix.h"
#include "codelets/base/units.h"
#include "codelets/gpu/device.h"
#include "codelets/ops/gemm.h"

enum { ROUNDS = 5 };
#define ROUND_S 0.02 /* at least */

/* ---- memory and time ---------------------------------------------------- */

char *bench_device(int64_t bytes)
{
    char *p = iz_device_take(bytes);

    if (!p)
        exit(1);
    return p;
}

char *bench_pinned(int64_t bytes)
{
    size_t whole = ((size_t)bytes + 4095) / 4096 * 4096;
    char *p = aligned_alloc(4096, whole);

    const char *why = p ? iz_device_pin(p, (int64_t)whole) : "no memory";

    if (why) {
        fprintf(stderr, "pinning memory: %s\n", why);
        exit(1);
    }
    memset(p, 0, whole);
    return p;
}

void bench_unpin(char *p)
{
    iz_device_unpin(p);
    free(p);
}

void bench_fill(const struct bench *b, char *p, int64_t bytes,
                const void *pattern)
{
    for (int64_t at = 0; at < bytes; at += PATTERN_BYTES)
        iz_device_copy(b->stream, p + at, pattern,
                       bytes - at < PATTERN_BYTES ? bytes - at : PATTERN_BYTES);
    bench_wait(b->stream);
}

void bench_wait(void *stream)
{
    while (!iz_device_done(stream))
        ;
}

/* Seconds of n calls. */
static double time_calls(const struct bench *b, void (*run)(void *arg, int i),
                         void *arg, int n)
{
    double begin = bench_now_s();

    for (int i = 0; i < n; i++)
        run(arg, i);
    bench_wait(b->stream);
    return bench_now_s() - begin;
}

double bench_time(const struct bench *b, void (*run)(void *arg, int i),
                  void *arg)
{
    double s[ROUNDS], one, round_s = b->tiny ? 0 : ROUND_S;
    int n;

    time_calls(b, run, arg, BENCH_SETS); /* warms up and touches every set */
    one = time_calls(b, run, arg, 3) / 3;
    n = (int)fmin(fmax(ceil(round_s / one), 2), 2000);
    for (int r = 0; r < ROUNDS; r++)
        s[r] = time_calls(b, run, arg, n) / n;
    bench_sort(s, ROUNDS);
    return s[ROUNDS / 2];
}

struct iz_exec bench_exec(const struct bench *b, char *base, int64_t bytes)
{
    return (struct iz_exec){.backend = IZ_CUDA,
                            .act = b->act,
                            .capability = b->capability,
                            .stream = b->stream,
                            .cuda = b->cuda,
                            .work = {.base = base, .size = bytes}};
}

/* PATTERN_BYTES of random numbers on the GPU, from `low` to 1. */
static char *pattern_new(const struct bench *b, enum iz_dtype t, float low)
{
    char *host = bench_pinned(PATTERN_BYTES);
    char *p = bench_device(PATTERN_BYTES);
    int64_t wide = iz_dtype_bytes(t);

    for (int64_t i = 0; i < PATTERN_BYTES / wide; i++) {
        float f = (float)(iz_mix((uint64_t)i * IZ_GOLDEN) >> 40) * 0x1p-24f;

        f = low + (1 - low) * f;
        iz_cast(host + i * wide, t, &f, IZ_F32, 1);
    }
    bench_fill(b, p, PATTERN_BYTES, host);
    bench_unpin(host);
    return p;
}

/* ---- the program -------------------------------------------------------- */

static void measure_gemm(struct bench *b)
{
    struct iz_exec x = bench_exec(b, NULL, 0);
    int64_t n = b->tiny ? 64 : 8192;

    b->gemm = iz_gemm_rate_cuda(&x, n, n, n, b->tiny ? 0.01 : 0.5);
    printf("  %-34s %10.1f TFLOP/s in %s\n", "product [8192,8192,8192]",
           1e-12 * b->gemm, iz_dtype_name(b->act));
    if (b->json)
        fprintf(b->json, "  \"gemm_tflop_per_s\": %.3f,\n  \"act\": \"%s\",\n",
                1e-12 * b->gemm, iz_dtype_name(b->act));
}

static int ops_gpu_run_all(struct bench *b, const struct iz_device_info *info)
{
    b->capability = info->capability;
    b->act = iz_cuda_act(b->capability < 80 ? IZ_F16 : IZ_BF16);
    b->stream = iz_device_stream_open();
    if (!b->stream || iz_cuda_open(&b->cuda))
        return 1;
    b->pattern = pattern_new(b, b->act, -1);
    b->positive = pattern_new(b, IZ_F32, 0);
    printf("%s, compute capability %d.%d, %.1f MiB\n", info->name,
           info->capability / 10, info->capability % 10,
           iz_mib(info->total_bytes));
    if (b->json)
        fprintf(b->json, "{\n  \"device\": \"%s\",\n", info->name);
    measure_gemm(b);
    bench_memory(b);
    if (b->json)
        fprintf(b->json, "  \"ops\": [");
    bench_models(b);
    if (b->json)
        fprintf(b->json, "\n  ]\n}\n");
    iz_device_give(b->pattern);
    iz_device_give(b->positive);
    iz_cuda_close(&b->cuda);
    iz_device_stream_close(b->stream);
    return 0;
}

int main(int argc, char **argv)
{
    struct bench b = {0};
    struct iz_device_info info;
    int failed;

    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--tiny")) {
            b.tiny = true;
        } else if (!strcmp(argv[i], "--out") && i + 1 < argc) {
            b.json = fopen(argv[++i], "w");
        } else {
            fprintf(stderr, "usage: ops_gpu [--out FILE.json] [--tiny]\n");
            return 2;
        }
    }
    if (!iz_device_count()) {
        fprintf(stderr, "ops_gpu: no GPU: %s\n", iz_device_why_none());
        return 77;
    }
    if (iz_device_use(0, &info))
        return 1;
    iz_gemm_open(); /* the stand-in computes with the BLAS of the host */
    failed = ops_gpu_run_all(&b, &info);
    if (b.json && fclose(b.json))
        failed = 1;
    return failed;
}
