/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* madvise */
#include "bench/timing.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

const struct iz_hyper_at bench_adamw = {.hyper = {.type = IZ_OPTIMIZER_ADAMW,
                                                  .lr = 1e-3,
                                                  .beta1 = 0.9,
                                                  .beta2 = 0.95,
                                                  .eps = 1e-8,
                                                  .weight_decay = 0.1,
                                                  .adamw = true,
                                                  .bias_correction = true},
                                        .t = 1,
                                        .grad_scale = 1.0f};

static double clock_s(clockid_t id)
{
    struct timespec t;
    clock_gettime(id, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

double bench_now_s(void)
{
    return clock_s(CLOCK_MONOTONIC);
}

double bench_cpu_s(void)
{
    return clock_s(CLOCK_THREAD_CPUTIME_ID);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

void bench_sort(double *v, int n)
{
    qsort(v, (size_t)n, sizeof(*v), by_value);
}

void *bench_new(int64_t bytes)
{
    size_t huge = (size_t)2 << 20, n = ((size_t)bytes + huge - 1) / huge * huge;
    void *p = aligned_alloc(huge, n);
    if (!p) {
        perror("memory to measure with");
        exit(1);
    }
    madvise(p, n, MADV_HUGEPAGE);
    return p;
}

void *bench_zeros(int64_t bytes)
{
    return memset(bench_new(bytes), 0, (size_t)bytes);
}

void bench_threads(int n, void *(*work)(void *), void *each, size_t bytes)
{
    pthread_t *id = calloc((size_t)n, sizeof(*id));
    for (int i = 0; i < n; i++)
        if (!id || pthread_create(&id[i], NULL, work,
                                  (char *)each + (size_t)i * bytes)) {
            fprintf(stderr, "no thread %d to measure with\n", i);
            exit(1);
        }
    for (int i = 0; i < n; i++)
        pthread_join(id[i], NULL);
    free(id);
}
