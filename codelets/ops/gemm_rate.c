/* SPDX-License-Identifier: Apache-2.0 */
/* Rate of the BLAS library; see gemm_rate.h. */
#include "codelets/ops/gemm_rate.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/clock.h"
#include "codelets/ops/gemm.h"
#include "codelets/ops/gemm16.h"

/* One product y[m,n] = a[m,k] b[k,n], in fp32 or with bf16 operands; narrow is
 * a rounded. */
struct sample {
    int m, n, k;
    float *a, *b, *y;
    uint16_t *narrow;
    void *scratch;
};

static void sample_close(struct sample *s)
{
    free(s->a);
    free(s->narrow);
}

static struct iz_gemm16 product_16(const struct sample *s)
{
    return (struct iz_gemm16){.m = s->m,
                              .n = s->n,
                              .k = s->k,
                              .a = s->narrow,
                              .b = s->b,
                              .c = s->y,
                              .c_type = IZ_F32,
                              .scratch = s->scratch};
}

static int sample_open(struct sample *s, int m, int n, int k)
{
    size_t na = (size_t)m * (size_t)k, nb = (size_t)k * (size_t)n;
    *s = (struct sample){.m = m, .n = n, .k = k};
    struct iz_gemm16 g = product_16(s);
    size_t bytes = na * sizeof(*s->narrow) + (size_t)iz_gemm16_scratch(&g);
    s->a = calloc(na + nb + (size_t)m * (size_t)n, sizeof(*s->a));
    s->narrow = aligned_alloc(64, (bytes + 127) / 64 * 64);
    if (!s->a || !s->narrow) {
        sample_close(s);
        return -1;
    }
    s->b = s->a + na;
    s->y = s->b + nb;
    s->scratch = (char *)s->narrow + (na * sizeof(*s->narrow) + 63) / 64 * 64;
    iz_cast(s->narrow, IZ_BF16, s->a, IZ_F32, (int64_t)na);
    return 0;
}

static void sample_32(const struct sample *s)
{
    iz_gemm_cpu(&(struct iz_gemm){.m = s->m,
                                  .n = s->n,
                                  .k = s->k,
                                  .a = s->a,
                                  .lda = s->k,
                                  .b = s->b,
                                  .ldb = s->n,
                                  .c = s->y,
                                  .ldc = s->n,
                                  .alpha = 1});
}

static void sample_16(const struct sample *s)
{
    struct iz_gemm16 g = product_16(s);
    iz_gemm16(&g);
}

static double best_rate(void (*product)(const struct sample *s), int m, int n,
                        int k, double seconds)
{
    struct sample s;
    double best = 0;
    if (sample_open(&s, m, n, k))
        return 0;
    int64_t end = iz_now_ns() + (int64_t)(seconds * 1e9);
    do {
        int64_t begin = iz_now_ns();
        product(&s);
        double rate = 2.0 * m * n * k * 1e9 / (double)(iz_now_ns() - begin + 1);
        if (rate > best)
            best = rate;
    } while (iz_now_ns() < end);
    sample_close(&s);
    return best;
}

double iz_blas_rate(int m, int n, int k, double seconds)
{
    return best_rate(sample_32, m, n, k, seconds);
}

double iz_gemm16_rate(int m, int n, int k, double seconds)
{
    return iz_gemm16_missing() ? 0 : best_rate(sample_16, m, n, k, seconds);
}

double iz_gemm16_gain(int m, int n, int k)
{
    struct sample s;
    double wide = HUGE_VAL, narrow = HUGE_VAL;
    if (iz_gemm16_missing() || sample_open(&s, m, n, k))
        return 0;
    int64_t end = iz_cpu_ns() + 5000000;
    for (int i = 0; i < 3 || (i < 1000 && iz_cpu_ns() < end); i++) {
        int64_t begin = iz_cpu_ns();
        sample_32(&s);
        int64_t between = iz_cpu_ns();
        iz_cast(s.narrow, IZ_BF16, s.a, IZ_F32, (int64_t)s.m * s.k);
        sample_16(&s);
        wide = fmin(wide, (double)(between - begin));
        narrow = fmin(narrow, (double)(iz_cpu_ns() - between));
    }
    sample_close(&s);
    return wide / narrow;
}
