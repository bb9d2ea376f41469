/* SPDX-License-Identifier: Apache-2.0 */
/* Times the flat-buffer kernels on one core against an update in place, and,
 * with two or more ranks under mpirun, the collectives.  Best of some
 * repetitions: the machine may be shared.  GB/s count every byte read and every
 * byte written; of the collectives, the bytes of the full buffer. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "codelets/adamw.h"
#include "codelets/build.h"
#include "codelets/dtype.h"
#include "codelets/flat.h"
#include "runtime/coll.h"

enum { N = 1 << 24, REPEAT = 12, COLL_REPEAT = 40 };

struct buffers {
    float *p, *m, *v, *g;
    void *half;       /* written by casts and copies */
    void *bf16, *f16; /* gradients */
};

static double now_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Zeroed, on huge pages if the system has them. */
static void *pages(size_t bytes)
{
    void *p = aligned_alloc((size_t)2 << 20, bytes);

    if (p == NULL)
        exit(1);
#ifdef MADV_HUGEPAGE
    madvise(p, bytes, MADV_HUGEPAGE);
#endif
    memset(p, 0, bytes);
    return p;
}

IZ_SIMD static void scale(float *x, int64_t n, float s)
{
    for (int64_t i = 0; i < n; i++)
        x[i] *= s;
}

static const struct iz_adam options = {1e-3, 0.9,  0.999, 1e-8, 0.1,
                                       true, true, 1,     1.0f};

static void run_scale(const struct buffers *b)
{
    scale(b->p, N, 0.999f);
}

static void run_adam(const struct buffers *b)
{
    iz_adam_chunk(&options, N, b->p, b->m, b->v, b->g, IZ_F32, NULL, IZ_F32);
}

static void run_adam_bf16_out(const struct buffers *b)
{
    iz_adam_chunk(&options, N, b->p, b->m, b->v, b->g, IZ_F32, b->half,
                  IZ_BF16);
}

static void run_adam_bf16(const struct buffers *b)
{
    iz_adam_chunk(&options, N, b->p, b->m, b->v, b->bf16, IZ_BF16, b->half,
                  IZ_BF16);
}

static void run_adam_f16(const struct buffers *b)
{
    iz_adam_chunk(&options, N, b->p, b->m, b->v, b->f16, IZ_F16, b->half,
                  IZ_F16);
}

static void run_to_bf16(const struct buffers *b)
{
    iz_cast(b->half, IZ_BF16, b->g, IZ_F32, N);
}

static void run_from_bf16(const struct buffers *b)
{
    iz_cast(b->g, IZ_F32, b->bf16, IZ_BF16, N);
}

static void run_to_f16(const struct buffers *b)
{
    iz_cast(b->half, IZ_F16, b->g, IZ_F32, N);
}

static void run_from_f16(const struct buffers *b)
{
    iz_cast(b->g, IZ_F32, b->f16, IZ_F16, N);
}

static volatile double sink;

static void run_norm2(const struct buffers *b)
{
    sink = iz_flat_norm2(b->p, IZ_F32, N);
}

static void run_norm2_bf16(const struct buffers *b)
{
    sink = iz_flat_norm2(b->bf16, IZ_BF16, N);
}

static void run_add(const struct buffers *b)
{
    iz_flat_add(b->p, IZ_F32, b->g, IZ_F32, N);
}

static void run_add_bf16(const struct buffers *b)
{
    iz_flat_add(b->p, IZ_F32, b->bf16, IZ_BF16, N);
}

static void run_hash(const struct buffers *b)
{
    sink = (double)iz_flat_hash(0, b->p, N);
}

static void run_normal(const struct buffers *b)
{
    iz_flat_normal(b->g, N, 1, 2, 0, 0.02f);
}

static const struct kernel {
    const char *name;
    int bytes; /* per element */
    void (*run)(const struct buffers *b);
} kernels[] = {
    {"update in place", 8, run_scale},
    {"adam, fp32 gradient", 28, run_adam},
    {"adam, fp32 gradient, bf16 copy", 30, run_adam_bf16_out},
    {"adam, bf16 gradient and copy", 28, run_adam_bf16},
    {"adam, fp16 gradient and copy", 28, run_adam_f16},
    {"fp32 to bf16", 6, run_to_bf16},
    {"bf16 to fp32", 6, run_from_bf16},
    {"fp32 to fp16", 6, run_to_f16},
    {"fp16 to fp32", 6, run_from_f16},
    {"norm2 fp32", 4, run_norm2},
    {"norm2 bf16", 2, run_norm2_bf16},
    {"add fp32 to fp32", 12, run_add},
    {"add bf16 to fp32", 10, run_add_bf16},
    {"hash", 4, run_hash},
    {"normal", 4, run_normal},
};

enum { KERNELS = sizeof kernels / sizeof kernels[0] };

/* Rounds over all kernels, so that a slow moment of the machine hits them all.
 */
static void time_kernels(void)
{
    const size_t bytes = (size_t)N * 4;
    struct buffers b = {pages(bytes),    pages(bytes),     pages(bytes),
                        pages(bytes),    pages(bytes / 2), pages(bytes / 2),
                        pages(bytes / 2)};
    double best[KERNELS];

    for (int r = 0; r < REPEAT; r++) {
        iz_flat_normal(b.p, N, 1, 1, 0, 1.0f);
        iz_flat_normal(b.g, N, 1, 2, 0, 1.0f);
        iz_cast(b.bf16, IZ_BF16, b.g, IZ_F32, N);
        iz_cast(b.f16, IZ_F16, b.g, IZ_F32, N);
        for (int k = 0; k < KERNELS; k++) {
            double t = now_s();

            kernels[k].run(&b);
            t = now_s() - t;
            best[k] = r == 0 || t < best[k] ? t : best[k];
        }
    }
    for (int k = 0; k < KERNELS; k++)
        printf("%-32s %7.1f GB/s %8.0f M/s\n", kernels[k].name,
               (double)kernels[k].bytes * N / best[k] * 1e-9,
               N / best[k] * 1e-6);
}

static void gather(struct iz_coll *c, char *full, float *out, int64_t shard)
{
    (void)out;
    iz_coll_all_gather(c, full, shard * 4, "gather");
}

static void reduce(struct iz_coll *c, char *full, float *out, int64_t shard)
{
    iz_coll_reduce_scatter(c, out, IZ_F32, true, full, IZ_F32, shard, "reduce");
}

static void reduce_bf16(struct iz_coll *c, char *full, float *out,
                        int64_t shard)
{
    iz_coll_reduce_scatter(c, out, IZ_F32, true, full, IZ_BF16, shard * 2,
                           "reduce");
}

static void time_collective(struct iz_coll *c, const char *name, int64_t mib,
                            void (*run)(struct iz_coll *c, char *full,
                                        float *out, int64_t shard))
{
    int64_t shard = (mib << 20) / 4 / c->size;
    char *full = pages((size_t)mib << 21);
    float *out = pages((size_t)mib << 21);
    double best = 1e9, sum = 0;

    for (int r = 0; r < COLL_REPEAT; r++) {
        double t;

        iz_coll_barrier(c, "start");
        t = now_s();
        run(c, full, out, shard);
        t = now_s() - t;
        best = t < best ? t : best;
        sum += t;
    }
    if (c->rank == 0)
        printf("%-20s %3d MiB, %d ranks: best %6.1f, mean %6.1f GB/s\n", name,
               (int)mib, c->size, (double)(mib << 20) / best * 1e-9,
               (double)(mib << 20) / (sum / COLL_REPEAT) * 1e-9);
    free(full);
    free(out);
}

int main(int argc, char **argv)
{
    struct iz_coll *c;

    if (iz_coll_open(&c, &argc, &argv) != 0)
        return 1;
    if (c->size == 1)
        time_kernels();
    for (int64_t mib = 1; c->size > 1 && mib <= 64; mib *= 4) {
        time_collective(c, "all-gather", mib, gather);
        time_collective(c, "reduce-scatter", mib, reduce);
        time_collective(c, "reduce-scatter bf16", mib, reduce_bf16);
    }
    iz_coll_close(&c);
    return 0;
}
