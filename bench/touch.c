/* SPDX-License-Identifier: Apache-2.0 */
/* usage: touch THREADS MIB [ROUNDS]
 * The limits of setting initial weights: new memory of a run's kind is filled
 * by THREADS threads, (1) with a constant, (2) with the numbers that weights
 * start from; and (3) those numbers are made in the cache, without new memory.
 * Prints a JSON object per round: GB/s. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bench/timing.h"
#include "codelets/flat/flat.h"

enum { MOST = 1024, EXTENT = 1 << 20 }; /* threads; elements */

enum what { CONSTANT, NORMAL, IN_CACHE };

struct part {
    enum what what;
    float *p;
    int64_t n, first;
};

static void *touch_work(void *arg)
{
    enum { CACHED = 4096 };
    static _Thread_local float cached[CACHED];
    const struct part *t = arg;
    int64_t most = t->what == IN_CACHE ? CACHED : EXTENT;
    for (int64_t i = 0; i < t->n; i += most) {
        int64_t n = t->n - i < most ? t->n - i : most;
        if (t->what == CONSTANT)
            memset(t->p + i, 1, (size_t)n * sizeof(*t->p));
        else
            iz_flat_normal(t->what == NORMAL ? t->p + i : cached, n, 1, 2,
                           t->first + i, 0.02f);
    }
    return NULL;
}

static double gb_per_s(enum what what, int threads, int64_t n)
{
    static struct part part[MOST];
    float *p = bench_new(n * 4);
    for (int i = 0; i < threads; i++) {
        int64_t from = n / threads * i;
        part[i] = (struct part){what, p + from, n / threads, from};
    }
    double s = bench_now_s();
    bench_threads(threads, touch_work, part, sizeof(*part));
    s = bench_now_s() - s;
    free(p);
    return 4e-9 * (double)n / s;
}

int main(int argc, char **argv)
{
    int threads = argc > 2 ? atoi(argv[1]) : 0;
    int rounds = argc > 3 ? atoi(argv[3]) : 3;
    if (threads < 1 || threads > MOST || rounds < 1) {
        fprintf(stderr, "usage: touch THREADS MIB [ROUNDS]\n");
        return 2;
    }
    for (int r = 0; r < rounds; r++) {
        int64_t n = (atoll(argv[2]) << 20) / 4;
        double constant = gb_per_s(CONSTANT, threads, n);
        double normal = gb_per_s(NORMAL, threads, n);
        printf("{\"constant\": %.3f, \"normal\": %.3f, \"in_cache\": %.3f}\n",
               constant, normal, gb_per_s(IN_CACHE, threads, n));
    }
    return 0;
}
