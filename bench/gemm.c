/* SPDX-License-Identifier: Apache-2.0 */
/* usage: gemm THREADS LAYERS WIDTH ROWS VOCAB [SECONDS]
 * The yardstick of training: the matrix products of one forward and
 * backward of a GPT (ROWS tokens), and nothing else, on THREADS threads at the
 * same time, one BLAS thread each.  Prints the GFLOP/s of all threads: median
 * and best of the repetitions. */
#include <cblas.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "codelets/gemm.h"
#include "codelets/task.h"

#define HEAD_ROWS 128 /* the classifier takes tokens in chunks */
#define REPEATS 4096

struct job {
    int layers, width, rows, vocab;
    double seconds, flops;
    double rate[REPEATS];
    int n;
};

/* y[m,n] = x[m,k] w[k,n] and its two gradients. */
static void product(struct job *j, const float *x, const float *w, float *y,
                    int m, int n, int k)
{
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, m, n, k, 1, x, k, w,
                n, 0, y, n);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, k, n, 1, y, n, w, n,
                0, (float *)x, k);
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, k, n, m, 1, x, k, y, n,
                0, (float *)w, n);
    j->flops += 6.0 * m * n * k;
}

/* Separate weights for each layer, or they would stay in the cache. */
static void pass(struct job *j, float *x, float *w, float *y)
{
    int c = j->width, m = j->rows;
    for (int l = 0; l < j->layers; l++) {
        float *p = w + (size_t)l * 12 * (size_t)c * (size_t)c;
        size_t cc = (size_t)c * (size_t)c;
        product(j, x, p, y, m, 3 * c, c);
        product(j, x, p + 3 * cc, y, m, c, c);
        product(j, x, p + 4 * cc, y, m, 4 * c, c);
        product(j, x, p + 8 * cc, y, m, c, 4 * c);
    }
    float *head = w + (size_t)j->layers * 12 * (size_t)c * (size_t)c;
    for (int i = 0; i < m; i += HEAD_ROWS)
        product(j, x, head, y, m - i < HEAD_ROWS ? m - i : HEAD_ROWS, j->vocab,
                c);
}

static void *work(void *arg)
{
    struct job *j = arg;
    size_t c = (size_t)j->width, m = (size_t)j->rows, v = (size_t)j->vocab;
    size_t wide = 4 * c > v ? 4 * c : v;
    float *x = calloc(m * 4 * c, sizeof(*x)), *y = calloc(m * wide, sizeof(*y));
    float *w = calloc((size_t)j->layers * 12 * c * c + c * v, sizeof(*w));
    if (!x || !y || !w)
        abort();
    int64_t end = iz_now_ns() + (int64_t)(j->seconds * 1e9);
    while (j->n < 2 || (iz_now_ns() < end && j->n < REPEATS)) {
        int64_t begin = iz_now_ns();
        j->flops = 0;
        pass(j, x, w, y);
        j->rate[j->n++] = j->flops / (double)(iz_now_ns() - begin);
    }
    free(x);
    free(y);
    free(w);
    return NULL;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    int threads = argc > 5 ? atoi(argv[1]) : 0;
    double median = 0, best = 0;
    if (threads < 1) {
        fprintf(stderr, "usage: %s THREADS LAYERS WIDTH ROWS VOCAB [SECONDS]\n",
                argv[0]);
        return 2;
    }
    struct job *j = calloc((size_t)threads, sizeof(*j));
    pthread_t *t = calloc((size_t)threads, sizeof(*t));
    if (!j || !t)
        return 1;
    iz_gemm_open();
    for (int i = 0; i < threads; i++) {
        j[i] = (struct job){.layers = atoi(argv[2]),
                            .width = atoi(argv[3]),
                            .rows = atoi(argv[4]),
                            .vocab = atoi(argv[5]),
                            .seconds = argc > 6 ? atof(argv[6]) : 3};
        if (pthread_create(&t[i], NULL, work, &j[i]))
            return 1;
    }
    for (int i = 0; i < threads; i++) {
        pthread_join(t[i], NULL);
        qsort(j[i].rate, (size_t)j[i].n, sizeof(double), by_value);
        median += j[i].rate[j[i].n / 2];
        best += j[i].rate[j[i].n - 1];
    }
    printf("%.2f %.2f\n", median, best);
    free(j);
    free(t);
    return 0;
}
