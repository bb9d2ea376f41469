/* SPDX-License-Identifier: Apache-2.0 */
#include "codelets/ops/gemm_rate.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

#include "codelets/base/clock.h"
#include "codelets/ops/gemm.h"
#include "codelets/ops/gemm16.h"

/* One product y[m,n] = op(a)[m,k] op(b)[k,n], in fp32 or with bf16 operands;
 * bf16: a, rounded. */
struct sample {
    int m, n, k;
    bool ta, tb;
    float *a, *b, *y;
    uint16_t *bf16;
    void *scratch;
};

static void sample_close(struct sample *s)
{
    free(s->a);
    free(s->bf16);
}

static struct iz_gemm16 product_16(const struct sample *s)
{
    return (struct iz_gemm16){.m = s->m,
                              .n = s->n,
                              .k = s->k,
                              .a = s->bf16,
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
    size_t bytes = na * sizeof(*s->bf16) + (size_t)iz_gemm16_scratch(&g);
    s->a = calloc(na + nb + (size_t)m * (size_t)n, sizeof(*s->a));
    s->bf16 = aligned_alloc(64, (bytes + 127) / 64 * 64);
    if (!s->a || !s->bf16) {
        sample_close(s);
        return -1;
    }
    s->b = s->a + na;
    s->y = s->b + nb;
    /* Small integers, whose sums are exact. */
    for (size_t i = 0; i < na + nb; i++)
        s->a[i] = (float)(i * 7 % 5) - 2;
    s->scratch = (char *)s->bf16 + (na * sizeof(*s->bf16) + 63) / 64 * 64;
    iz_cast(s->bf16, IZ_BF16, s->a, IZ_F32, (int64_t)na);
    return 0;
}

static void sample_32(const struct sample *s)
{
    iz_gemm_cpu(&(struct iz_gemm){.m = s->m,
                                  .n = s->n,
                                  .k = s->k,
                                  .a = s->a,
                                  .lda = s->ta ? s->m : s->k,
                                  .ta = s->ta,
                                  .b = s->b,
                                  .ldb = s->tb ? s->k : s->n,
                                  .tb = s->tb,
                                  .c = s->y,
                                  .ldc = s->n,
                                  .alpha = 1});
}

static void sample_16(const struct sample *s)
{
    struct iz_gemm16 g = product_16(s);
    iz_gemm16(&g);
}

/* Of the fastest one within about `seconds`, but of three at least.  Time of
 * the processor: others may hold it.  The first one is cold. */
static double best_ns(void (*product)(const struct sample *s),
                      const struct sample *s, double seconds)
{
    double best = HUGE_VAL;
    int64_t end = iz_clock_cpu_ns() + (int64_t)(seconds * 1e9);
    for (int i = 0; i < 3 || iz_clock_cpu_ns() < end; i++) {
        int64_t begin = iz_clock_cpu_ns();
        product(s);
        best = fmin(best, (double)(iz_clock_cpu_ns() - begin + 1));
    }
    return best;
}

static double best_rate(void (*product)(const struct sample *s), int m, int n,
                        int k, double seconds)
{
    struct sample s;
    if (sample_open(&s, m, n, k))
        return 0;
    double ns = best_ns(product, &s, seconds);
    sample_close(&s);
    return 2e9 * m * n * k / ns;
}

/* Whether the last product is right, looked at along its diagonal. */
static bool sample_right(const struct sample *s)
{
    for (int i = 0; i < s->m && i < s->n; i++) {
        double sum = 0;
        for (int j = 0; j < s->k; j++)
            sum += (double)s->a[s->ta ? j * s->m + i : i * s->k + j] *
                   s->b[s->tb ? i * s->k + j : j * s->n + i];
        if (sum != s->y[i * s->n + i])
            return false;
    }
    return true;
}

double iz_rate_blas_layer(int rows, int in, int out, double seconds)
{
    /* y = x w, dx = dy w', dw = x' dy */
    const struct sample shape[] = {{.m = rows, .n = out, .k = in},
                                   {.m = rows, .n = in, .k = out, .tb = true},
                                   {.m = in, .n = out, .k = rows, .ta = true}};
    double ns = 0;
    for (int i = 0; i < 3; i++) {
        struct sample s;
        if (sample_open(&s, shape[i].m, shape[i].n, shape[i].k))
            return 0;
        s.ta = shape[i].ta;
        s.tb = shape[i].tb;
        ns += best_ns(sample_32, &s, seconds / 3);
        bool right = sample_right(&s);
        sample_close(&s);
        if (!right)
            return 0;
    }
    return 6e9 * rows * in * out / ns;
}

double iz_rate_blas(int m, int n, int k, double seconds)
{
    return best_rate(sample_32, m, n, k, seconds);
}

double iz_rate_gemm16(int m, int n, int k, double seconds)
{
    return iz_gemm16_missing() ? 0 : best_rate(sample_16, m, n, k, seconds);
}

double iz_rate_gemm16_gain(int m, int n, int k)
{
    struct sample s;
    double fp32_ns = HUGE_VAL, bf16_ns = HUGE_VAL;
    if (iz_gemm16_missing() || sample_open(&s, m, n, k))
        return 0;
    int64_t end = iz_clock_cpu_ns() + 5000000;
    for (int i = 0; i < 3 || (i < 1000 && iz_clock_cpu_ns() < end); i++) {
        int64_t begin = iz_clock_cpu_ns();
        sample_32(&s);
        int64_t between = iz_clock_cpu_ns();
        iz_cast(s.bf16, IZ_BF16, s.a, IZ_F32, (int64_t)s.m * s.k);
        sample_16(&s);
        fp32_ns = fmin(fp32_ns, (double)(between - begin));
        bf16_ns = fmin(bf16_ns, (double)(iz_clock_cpu_ns() - between));
    }
    sample_close(&s);
    return fp32_ns / bf16_ns;
}
