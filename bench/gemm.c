/* SPDX-License-Identifier: Apache-2.0 */
/* usage: gemm THREADS SECONDS fp32|bf16 ROWS LAYERS WIDTH:VOCAB IN:OUT...
 * The reference of training: the matrix products of one forward and backward of
 * a transformer (ROWS tokens; the linear layers of a block; the classifier) and
 * nothing else, on THREADS threads at the same time, one BLAS thread each.
 * bf16: as a CPU with run.cpu_products bf16 makes them, from operands that are
 * bf16 already.  Prints the GFLOP/s of all threads: median and best of the
 * repetitions. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/timing.h"
#include "codelets/base/int64.h"
#include "codelets/ops/blas.h"
#include "codelets/ops/gemm.h"
#include "codelets/ops/gemm16.h"
#include "codelets/task/task.h"

#define LOGITS (16 << 20) /* at a time, as in codelets/ops/classifier.c */

enum { REPEATS = 4096, LINEARS = 8 };

struct linear {
    int in, out;
};

struct job {
    bool bf16;
    int rows, layers, n; /* n linear layers of a block */
    struct linear head, linear[LINEARS];
    double seconds, flops;
    double rate[REPEATS];
    int rates;
    int64_t scratch_bytes; /* what a product of bf16 works in, at most */
    void *scratch;
};

static void gemm_product(struct job *j, const struct iz_gemm *g)
{
    struct iz_gemm16 n = {.m = g->m,
                          .n = g->n,
                          .k = g->k,
                          .a = g->a,
                          .b = g->b,
                          .ta = g->ta,
                          .tb = g->tb,
                          .c = g->c,
                          .c_type = IZ_F32,
                          .scratch = j->scratch};
    if (!j->scratch)
        j->scratch_bytes = max64(j->scratch_bytes, iz_gemm16_scratch(&n));
    else if (j->bf16)
        iz_gemm16(&n);
    else
        iz_gemm_cpu(g);
    j->flops += 2. * (double)g->m * (double)g->n * (double)g->k;
}

/* y[m,out] = x[m,in] w[in,out] and its two gradients. */
static void three(struct job *j, float *x, float *w, float *y, int m,
                  struct linear l)
{
    int in = l.in, out = l.out;
    struct iz_gemm g[3] = {
        {m, out, in, x, in, false, w, out, false, y, out, 1, 0},
        {m, in, out, y, out, false, w, out, true, x, in, 1, 0},
        {in, out, m, x, in, true, y, out, false, w, out, 1, 0}};
    for (int i = 0; i < 3; i++)
        gemm_product(j, &g[i]);
}

/* Rows that the classifier takes at a time, chunks being as equal as possible.
 */
static int head_rows(const struct job *j)
{
    int most = LOGITS / j->head.out, chunks;
    most = most < 1 ? 1 : most;
    chunks = (j->rows + most - 1) / most;
    return (j->rows + chunks - 1) / chunks;
}

/* Separate weights for each layer, or they would stay in the cache.  Without
 * scratch: only counts. */
static void pass(struct job *j, float *x, float *w, float *y)
{
    int rows = head_rows(j);
    for (int l = 0; l < j->layers; l++)
        for (int i = 0; i < j->n; i++) {
            three(j, x, w, y, j->rows, j->linear[i]);
            w += (size_t)j->linear[i].in * (size_t)j->linear[i].out;
        }
    for (int i = 0; i < j->rows; i += rows)
        three(j, x, w, y, j->rows - i < rows ? j->rows - i : rows, j->head);
}

static void *gemm_work(void *arg)
{
    struct job *j = arg;
    int64_t in = j->head.in, out = j->head.out, weights = in * out, end;
    for (int i = 0; i < j->n; i++) {
        in = max64(in, j->linear[i].in);
        out = max64(out, j->linear[i].out);
        weights += (int64_t)j->layers * j->linear[i].in * j->linear[i].out;
    }
    float *x = bench_zeros(j->rows * in * 4);
    float *y = bench_zeros(j->rows * out * 4);
    float *w = bench_zeros(weights * 4);
    pass(j, x, w, y);
    j->scratch = bench_zeros(max64(j->scratch_bytes, 64));
    end = iz_clock_ns() + (int64_t)(j->seconds * 1e9);
    while (j->rates < 2 || (iz_clock_ns() < end && j->rates < REPEATS)) {
        int64_t begin = iz_clock_ns();
        j->flops = 0;
        pass(j, x, w, y);
        j->rate[j->rates++] = j->flops / (double)(iz_clock_ns() - begin);
    }
    free(x);
    free(y);
    free(w);
    free(j->scratch);
    return NULL;
}

static bool read_linear(const char *text, struct linear *l)
{
    return sscanf(text, "%d:%d", &l->in, &l->out) == 2 && l->in > 0 &&
           l->out > 0;
}

static bool read_job(struct job *j, int argc, char **argv)
{
    if (argc < 8 || argc > 7 + LINEARS)
        return false;
    *j = (struct job){.bf16 = strcmp(argv[3], "bf16") == 0,
                      .rows = atoi(argv[4]),
                      .layers = atoi(argv[5]),
                      .seconds = atof(argv[2]),
                      .n = argc - 7};
    for (int i = 0; i < j->n; i++)
        if (!read_linear(argv[7 + i], &j->linear[i]))
            return false;
    return j->rows > 0 && j->layers > 0 && read_linear(argv[6], &j->head) &&
           (j->bf16 || strcmp(argv[3], "fp32") == 0);
}

int main(int argc, char **argv)
{
    int threads = argc > 1 ? atoi(argv[1]) : 0;
    double median = 0, best = 0;
    struct job like, *j = calloc((size_t)threads + 1, sizeof(*j));
    if (threads < 1 || !j || !read_job(&like, argc, argv)) {
        fprintf(stderr,
                "usage: %s THREADS SECONDS fp32|bf16 ROWS LAYERS WIDTH:VOCAB "
                "IN:OUT...\n",
                argv[0]);
        return 2;
    }
    if (like.bf16 && iz_gemm16_missing()) {
        fprintf(stderr, "gemm: bf16: %s\n", iz_gemm16_missing());
        return 1;
    }
    iz_blas_open();
    iz_blas_take_best(512, 384, 1536);
    for (int i = 0; i < threads; i++)
        j[i] = like;
    bench_threads(threads, gemm_work, j, sizeof(*j));
    for (int i = 0; i < threads; i++) {
        bench_sort(j[i].rate, j[i].rates);
        median += j[i].rate[j[i].rates / 2];
        best += j[i].rate[j[i].rates - 1];
    }
    printf("%.2f %.2f\n", median, best);
    free(j);
    return 0;
}
