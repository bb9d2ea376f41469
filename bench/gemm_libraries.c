/* SPDX-License-Identifier: Apache-2.0 */
/* usage: gemm_libraries [THREADS [SECONDS]]
 * The matrix products of a training step (forward and both gradients) in the
 * libraries that this machine has, on THREADS threads that each call for
 * themselves.  The libraries take turns, and a product's time is the CPU time
 * of its thread, because the machine may be shared.  Prints GFLOP/s of one
 * thread, medians, and the ratio to the first library; and their means. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { SAMPLES = 4096, LIBRARIES = 4, KINDS = 3 };

/* c[m,n] = op(a) op(b), row-major; ta, tb: stored transposed. */
struct product {
    int m, n, k;
    bool ta, tb;
    const void *a, *b; /* fp32 or bf16 */
    float *c;
};

struct library {
    const char *name, *file, *symbol, *threads;    /* sets the number of them */
    int (*call)(void *f, const struct product *p); /* 0: done */
    void *f;
};

static int call_cblas(void *f, const struct product *p)
{
    enum { ROWS = 101, PLAIN = 111, TRANSPOSED = 112 }; /* of cblas.h */
    void (*sgemm)(int, int, int, int, int, int, float, const float *, int,
                  const float *, int, float, float *, int);

    *(void **)&sgemm = f;
    sgemm(ROWS, p->ta ? TRANSPOSED : PLAIN, p->tb ? TRANSPOSED : PLAIN, p->m,
          p->n, p->k, 1, p->a, p->ta ? p->m : p->k, p->b, p->tb ? p->k : p->n,
          0, p->c, p->n);
    return 0;
}

static int call_onednn(void *f, const struct product *p)
{
    int (*gemm)(char, char, int64_t, int64_t, int64_t, float, const void *,
                int64_t, const void *, int64_t, float, float *, int64_t);

    *(void **)&gemm = f;
    return gemm(p->ta ? 'T' : 'N', p->tb ? 'T' : 'N', p->m, p->n, p->k, 1, p->a,
                p->ta ? p->m : p->k, p->b, p->tb ? p->k : p->n, 0, p->c, p->n);
}

static struct library libraries[LIBRARIES] = {
    {"OpenBLAS", "libopenblas.so.0", "cblas_sgemm", "openblas_set_num_threads",
     call_cblas, NULL},
    {"BLIS", "blis-pthread/libblas.so.3", "cblas_sgemm",
     "bli_thread_set_num_threads", call_cblas, NULL},
    {"oneDNN", "libdnnl.so.2", "dnnl_sgemm", NULL, call_onednn, NULL},
    {"oneDNN bf16", "libdnnl.so.2", "dnnl_gemm_bf16bf16f32", NULL, call_onednn,
     NULL},
};

/* Whether the processor has what a library's product needs. */
static bool works(const struct library *l)
{
    enum { N = 64 };
    static const float zero[N * N];
    static float c[N * N];
    struct product p = {N, N, N, false, false, zero, zero, c};

    return l->call(l->f, &p) == 0;
}

/* Not among the linked libraries, or one would call into another. */
static void open_libraries(void)
{
    static const char *const folder[] = {"", "/usr/lib/x86_64-linux-gnu/",
                                         "/usr/lib/aarch64-linux-gnu/"};
    char path[256];

    for (int i = 0; i < LIBRARIES; i++) {
        struct library *l = &libraries[i];
        void (*set)(long) = NULL;
        void *h = NULL;

        for (int j = 0; j < 3 && !h; j++) {
            snprintf(path, sizeof(path), "%s%s", folder[j], l->file);
            h = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        }
        l->f = h ? dlsym(h, l->symbol) : NULL;
        if (!l->f)
            printf("%s: not on this machine\n", l->name);
        else if (l->threads)
            *(void **)&set = dlsym(h, l->threads);
        if (set)
            set(1);
        if (l->f && !works(l)) {
            printf("%s: not on this processor\n", l->name);
            l->f = NULL;
        }
    }
}

static const int shapes[][3] = {/* rows, in, out of a layer */
                                {256, 384, 1536},  {512, 384, 384},
                                {512, 384, 1536},  {512, 1536, 384},
                                {1024, 768, 3072}, {1024, 3072, 768},
                                {128, 384, 50304}};

enum { SHAPES = sizeof(shapes) / sizeof(shapes[0]) };

static double gemm_libraries_clock_s(clockid_t id)
{
    struct timespec t;

    clock_gettime(id, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* GFLOP per second of CPU time. */
static double timed(const struct library *l, const struct product *p)
{
    double cpu = gemm_libraries_clock_s(CLOCK_THREAD_CPUTIME_ID);

    l->call(l->f, p);
    cpu = gemm_libraries_clock_s(CLOCK_THREAD_CPUTIME_ID) - cpu;
    return 2e-9 * p->m * p->n * p->k / cpu;
}

static int gemm_libraries_by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

struct worker {
    pthread_t id;
    double seconds;
    double rate[SHAPES][KINDS][LIBRARIES]; /* medians */
};

/* y = x w, dx = dy w^T, dw = x^T dy. */
static struct product product_of(const int *s, int kind, const void *a,
                                 const void *b, float *c)
{
    int m = s[0], in = s[1], out = s[2];

    if (kind == 0)
        return (struct product){m, out, in, false, false, a, b, c};
    if (kind == 1)
        return (struct product){m, in, out, false, true, a, b, c};
    return (struct product){in, out, m, true, false, a, b, c};
}

static void gemm_libraries_measure(struct worker *w, int shape, int kind)
{
    static _Thread_local double rate[LIBRARIES][SAMPLES];
    const int *s = shapes[shape];
    size_t most = (size_t)(s[0] > s[1] ? s[0] : s[1]) *
                  (size_t)(s[1] > s[2] ? s[1] : s[2]);
    float *a = calloc(3 * most, sizeof(*a));
    struct product p = product_of(s, kind, a, a + most, a + 2 * most);
    double end = gemm_libraries_clock_s(CLOCK_MONOTONIC) + w->seconds;
    int n[LIBRARIES] = {0};

    for (int i = 0; i < SAMPLES &&
                    (i < 3 || gemm_libraries_clock_s(CLOCK_MONOTONIC) < end);
         i++)
        for (int l = 0; l < LIBRARIES; l++) {
            double r = libraries[l].f ? timed(&libraries[l], &p) : 0;

            if (i > 0 && libraries[l].f)
                rate[l][n[l]++] = r;
        }
    for (int l = 0; l < LIBRARIES; l++) {
        qsort(rate[l], (size_t)n[l], sizeof(double), gemm_libraries_by_value);
        w->rate[shape][kind][l] = n[l] ? rate[l][n[l] / 2] : 0;
    }
    free(a);
}

static void *gemm_libraries_work(void *arg)
{
    for (int i = 0; i < SHAPES; i++)
        for (int k = 0; k < KINDS; k++)
            gemm_libraries_measure(arg, i, k);
    return NULL;
}

static void print_rates(const double *rate)
{
    for (int l = 0; l < LIBRARIES; l++)
        if (libraries[l].f)
            printf("  %s %.0f (%.2f)", libraries[l].name, rate[l],
                   rate[l] / rate[0]);
    printf("\n");
}

static void print(const struct worker *w)
{
    static const char *const kind[] = {"y", "dx", "dw"};
    double mean[LIBRARIES] = {0};

    for (int s = 0; s < SHAPES; s++)
        for (int k = 0; k < KINDS; k++) {
            printf("[%d,%d,%d] %-2s", shapes[s][0], shapes[s][1], shapes[s][2],
                   kind[k]);
            print_rates(w->rate[s][k]);
            for (int l = 0; l < LIBRARIES; l++)
                mean[l] += log(w->rate[s][k][l]) / (SHAPES * KINDS);
        }
    for (int l = 0; l < LIBRARIES; l++)
        mean[l] = exp(mean[l]);
    printf("geometric mean");
    print_rates(mean);
}

int main(int argc, char **argv)
{
    int threads = argc > 1 ? atoi(argv[1]) : 1;
    struct worker *w;

    if (threads < 1)
        return 2;
    setenv("OMP_NUM_THREADS", "1", 1);
    setenv("BLIS_NUM_THREADS", "1", 1);
    w = calloc((size_t)threads, sizeof(*w));
    open_libraries();
    for (int i = 0; w && i < threads; i++) {
        w[i].seconds = argc > 2 ? atof(argv[2]) : 0.5;
        if (pthread_create(&w[i].id, NULL, gemm_libraries_work, &w[i]))
            return 1;
    }
    for (int i = 0; w && i < threads; i++)
        pthread_join(w[i].id, NULL);
    if (w)
        print(w);
    free(w);
    return 0;
}
