/* SPDX-License-Identifier: Apache-2.0 */
/* Casts against the definition of every 16-bit value; Adam against a closed
 * form in double, and bit by bit against a scalar loop whose every operation is
 * rounded; at every SIMD level of the processor. */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "codelets/flat/dtype.h"
#include "codelets/flat/half.h"
#include "codelets/flat/simd.h"
#include "codelets/flat/update.h"
#include "tests/codelets/flat/levels.h"
#include "tests/codelets/flat/random.h"

static const enum iz_dtype floats[] = {IZ_F32, IZ_BF16, IZ_F16};

/* The value of a 16-bit float from its definition. */
static double half_value(uint16_t h, int exponent_bits)
{
    int mant_bits = 15 - exponent_bits;
    int bias = (1 << (exponent_bits - 1)) - 1;
    int e = (h & 0x7fff) >> mant_bits, m = h & ((1 << mant_bits) - 1);
    double x;

    if (e == (1 << exponent_bits) - 1)
        x = m == 0 ? INFINITY : NAN;
    else if (e == 0)
        x = ldexp(m, 1 - bias - mant_bits);
    else
        x = ldexp(m + (1 << mant_bits), e - bias - mant_bits);
    return h & 0x8000 ? -x : x;
}

static int exponent_bits(enum iz_dtype t)
{
    return t == IZ_BF16 ? 8 : 5;
}

static void check_all_patterns(enum iz_dtype t)
{
    static uint16_t h[65536], back[65536];
    static float x[65536];

    for (int i = 0; i < 65536; i++)
        h[i] = (uint16_t)i;
    iz_cast(x, IZ_F32, h, t, 65536);
    iz_cast(back, t, x, IZ_F32, 65536);
    for (int i = 0; i < 65536; i++) {
        double want = half_value(h[i], exponent_bits(t));

        if (isnan(want)) {
            float again;

            iz_cast(&again, IZ_F32, &back[i], t, 1);
            assert_true(isnan(x[i]) && isnan(again));
            assert_int_equal(back[i] & 0x8000, h[i] & 0x8000);
        } else {
            assert_true((double)x[i] == want);
            assert_true((signbit(x[i]) != 0) == (i >= 0x8000));
            assert_int_equal(back[i], h[i]);
        }
    }
}

static void cast_of_every_pattern(void **state)
{
    check_all_patterns(IZ_BF16);
    check_all_patterns(IZ_F16);
}

static uint16_t rounded(float x, enum iz_dtype t)
{
    uint16_t h;

    iz_cast(&h, t, &x, IZ_F32, 1);
    return h;
}

/* Between each pair of neighbours: a quarter, the half, its two fp32
 * neighbours. */
static void check_halfway(enum iz_dtype t)
{
    int infinity = t == IZ_BF16 ? 0x7f80 : 0x7c00;

    for (int h = 0; h + 1 < infinity; h++) {
        double lo = half_value((uint16_t)h, exponent_bits(t));
        double hi = half_value((uint16_t)(h + 1), exponent_bits(t));
        float mid = (float)(lo + (hi - lo) / 2);
        float quarter = (float)(lo + (hi - lo) / 4);
        int even = h + (h & 1);

        assert_int_equal(rounded(mid, t), even);
        assert_int_equal(rounded(-mid, t), even | 0x8000);
        assert_int_equal(rounded(nextafterf(mid, -INFINITY), t), h);
        assert_int_equal(rounded(nextafterf(mid, INFINITY), t), h + 1);
        assert_int_equal(rounded(quarter, t), h);
    }
}

static void cast_rounds_to_nearest_even(void **state)
{
    check_halfway(IZ_BF16);
    check_halfway(IZ_F16);
}

static void cast_overflows_to_infinity(void **state)
{
    assert_int_equal(rounded(65519.996f, IZ_F16), 0x7bff);
    assert_int_equal(rounded(65520.0f, IZ_F16), 0x7c00);
    assert_int_equal(rounded(-65536.0f, IZ_F16), 0xfc00);
    assert_int_equal(rounded(FLT_MAX, IZ_F16), 0x7c00);
    assert_int_equal(rounded(FLT_MAX, IZ_BF16), 0x7f80);
    assert_int_equal(rounded(-INFINITY, IZ_BF16), 0xff80);
    assert_int_equal(rounded(FLT_MIN / 4, IZ_F16), 0);
}

/* A NaN whose payload is in the low bits only must not become infinity. */
static void cast_keeps_nan(void **state)
{
    for (uint32_t low = 1; low < 0x800000u; low += low) {
        float x = iz_bits_float(0xff800000u | low);

        assert_true((rounded(x, IZ_F16) & 0x7fff) > 0x7c00);
        assert_true((rounded(x, IZ_BF16) & 0x7fff) > 0x7f80);
    }
}

/* One NaN among numbers, wherever it is in a vector. */
static void cast_finds_every_nan(void **state)
{
    enum { N = 67 };

    for (int at = 0; at < N; at++) {
        float x[N];
        uint16_t y[N];

        for (int i = 0; i < N; i++)
            x[i] = i == at ? iz_bits_float(0x7f800001u) : 1.0f / (float)(i + 3);
        for (int k = 0; k < 2; k++) {
            enum iz_dtype type = k ? IZ_F16 : IZ_BF16;

            iz_cast(y, type, x, IZ_F32, N);
            for (int i = 0; i < N; i++)
                assert_int_equal(y[i], rounded(x[i], type));
        }
    }
}

/* Every pattern of one 16-bit type to the other, at odd lengths and places. */
static void cast_between_halves_rounds_once(void **state)
{
    static uint16_t h[65536], y[65536];

    for (int i = 0; i < 65536; i++)
        h[i] = (uint16_t)i;
    iz_cast(y + 1, IZ_F16, h + 1, IZ_BF16, 65535);
    for (int i = 1; i < 65536; i++) {
        float x = (float)half_value(h[i], 8);

        assert_int_equal(isnan(x) ? y[i] & 0x7e00 : y[i],
                         isnan(x) ? 0x7e00 : rounded(x, IZ_F16));
    }
    iz_cast(y + 1, IZ_BF16, h + 1, IZ_F16, 65535);
    for (int i = 1; i < 65536; i++) {
        float x = (float)half_value(h[i], 5);

        assert_int_equal(isnan(x) ? y[i] & 0x7fc0 : y[i],
                         isnan(x) ? 0x7fc0 : rounded(x, IZ_BF16));
    }
}

static void cast_touches_n_elements_only(void **state)
{
    for (int64_t n = 0; n < 70; n++) {
        float x[72];
        uint16_t y[72];

        for (int i = 0; i < 72; i++)
            x[i] = 1.0f;
        memset(y, 0xee, sizeof(y));
        iz_cast(y, IZ_BF16, x, IZ_F32, n);
        for (int64_t i = 0; i < 72; i++)
            assert_int_equal(y[i], i < n ? 0x3f80 : 0xeeee);
        iz_cast(x, IZ_F32, y, IZ_F16, n);
        assert_true(x[n] == 1.0f);
    }
}

static void names_and_sizes(void **state)
{
    assert_int_equal(iz_dtype_bytes(IZ_F32), 4);
    assert_int_equal(iz_dtype_bytes(IZ_BF16), 2);
    assert_int_equal(iz_dtype_bytes(IZ_U8), 1);
    assert_string_equal(iz_dtype_name(IZ_F16), "fp16");
    assert_string_equal(iz_dtype_name(IZ_I32), "int32");
}

static const struct iz_step adam_cases[] = {
    {{IZ_OPTIMIZER_ADAM, 1e-3, 0.9, 0.999, 1e-8, 0.0, true, true}, 1, 1.0f},
    {{IZ_OPTIMIZER_ADAM, 1e-3, 0.9, 0.999, 1e-8, 0.1, true, true}, 1, 1.0f},
    {{IZ_OPTIMIZER_ADAM, 1e-2, 0.9, 0.95, 1e-6, 0.1, false, true}, 1, 1.0f},
    {{IZ_OPTIMIZER_ADAM, 3e-4, 0.8, 0.99, 1e-8, 0.01, true, false}, 1, 1.0f},
    {{IZ_OPTIMIZER_ADAM, 3e-4, 0.8, 0.99, 1e-8, 0.01, false, false}, 1, 1.0f},
    {{IZ_OPTIMIZER_ADAM, 1e-3, 0.9, 0.999, 1e-8, 0.1, true, true},
     1,
     1.0f / 4096},
};

enum { CASES = sizeof(adam_cases) / sizeof(adam_cases[0]) };

/* One update of one element in double. */
static void adam_double(const struct iz_step *a, double *p, double *m,
                        double *v, double g)
{
    double c1 =
        a->hyper.bias_correction ? 1 - pow(a->hyper.beta1, (double)a->t) : 1;
    double c2 =
        a->hyper.bias_correction ? 1 - pow(a->hyper.beta2, (double)a->t) : 1;

    g *= a->grad_scale;
    if (a->hyper.adamw)
        *p -= a->hyper.lr * a->hyper.weight_decay * *p;
    else
        g += a->hyper.weight_decay * *p;
    *m = a->hyper.beta1 * *m + (1 - a->hyper.beta1) * g;
    *v = a->hyper.beta2 * *v + (1 - a->hyper.beta2) * g * g;
    *p -= a->hyper.lr * (*m / c1) / (sqrt(*v / c2) + a->hyper.eps);
}

/* The contract of adam.h in fp32, every operation rounded by a store. */
static void adam_scalar(const struct iz_step *a, float *p, float *m, float *v,
                        float g)
{
    double t = (double)a->t, wd = a->hyper.weight_decay;
    double c1 = a->hyper.bias_correction ? 1 - pow(a->hyper.beta1, t) : 1;
    double c2 = a->hyper.bias_correction ? 1 - pow(a->hyper.beta2, t) : 1;
    volatile float b1 = (float)a->hyper.beta1, r1 = (float)(1 - a->hyper.beta1);
    volatile float b2 = (float)a->hyper.beta2, r2 = (float)(1 - a->hyper.beta2);
    volatile float l2 = a->hyper.adamw ? 0.0f : (float)wd;
    volatile float keep = a->hyper.adamw ? (float)(1 - a->hyper.lr * wd) : 1.0f;
    volatile float step = (float)(a->hyper.lr / c1 * sqrt(c2));
    volatile float eps = (float)(a->hyper.eps * sqrt(c2));
    volatile float x, y, gi, mi, vi;

    x = g * a->grad_scale;
    y = l2 * *p;
    gi = x + y;
    x = b1 * *m;
    y = r1 * gi;
    mi = x + y;
    if (fabsf(mi) < FLT_MIN)
        mi = 0;
    x = b2 * *v;
    y = gi * gi;
    y = r2 * y;
    vi = x + y;
    if (vi < FLT_MIN)
        vi = 0;
    x = sqrtf(vi);
    x = x + eps;
    x = mi / x;
    x = step * x;
    y = *p * keep;
    *p = y - x;
    *m = mi;
    *v = vi;
}

struct state {
    int64_t n;
    float *p, *m, *v;
    void *g, *out;
    enum iz_dtype g_type, out_type;
};

static struct state state_new(int64_t n, enum iz_dtype g, enum iz_dtype out)
{
    size_t bytes = (size_t)n * 4;
    struct state s = {n,           take(bytes), take(bytes), take(bytes),
                      take(bytes), take(bytes), g,           out};

    for (int64_t i = 0; i < n; i++)
        s.p[i] = random_float(2.0);
    memset(s.m, 0, bytes);
    memset(s.v, 0, bytes);
    memset(s.g, 0, bytes);
    memset(s.out, 0, bytes);
    return s;
}

static struct state state_copy(const struct state *s)
{
    struct state c = state_new(s->n, s->g_type, s->out_type);
    size_t bytes = (size_t)s->n * 4;

    memcpy(c.p, s->p, bytes);
    memcpy(c.m, s->m, bytes);
    memcpy(c.v, s->v, bytes);
    memcpy(c.g, s->g, bytes);
    return c;
}

static void state_free(struct state *s)
{
    free(s->p);
    free(s->m);
    free(s->v);
    free(s->g);
    free(s->out);
}

/* Gradients of very different sizes, some zero. */
static void state_grads(struct state *s, double scale)
{
    float *g = take((size_t)s->n * 4);

    for (int64_t i = 0; i < s->n; i++)
        g[i] = i % 7 == 3 ? 0.0f : random_float(scale * (double)(1 + i % 5));
    iz_cast(s->g, s->g_type, g, IZ_F32, s->n);
    free(g);
}

static void state_step(struct state *s, const struct iz_step *a, int64_t from,
                       int64_t n)
{
    struct iz_alike all = iz_alike_of(a);
    char *out = s->out;

    if (out)
        out += from * iz_dtype_bytes(s->out_type);
    iz_update(&(struct iz_update){.optimizer = a->hyper.type,
                                  .g_type = s->g_type,
                                  .out_type = s->out_type,
                                  .n = n,
                                  .at = from,
                                  .p = s->p + from,
                                  .state = {s->m, s->v},
                                  .g = (char *)s->g +
                                       from * iz_dtype_bytes(s->g_type),
                                  .out = out,
                                  .span = &all,
                                  .spans = 1});
}

static double grad_value(const struct state *s, int64_t i)
{
    float x;

    iz_cast(&x, IZ_F32, (char *)s->g + i * iz_dtype_bytes(s->g_type), s->g_type,
            1);
    return x;
}

static void check_closed_form(const struct iz_step *cs, enum iz_dtype g_type,
                              enum iz_dtype out_type, int64_t n)
{
    struct state s = state_new(n, g_type, out_type);
    double *ref = take((size_t)(3 * n) * sizeof(*ref));
    struct iz_step a = *cs;

    for (int64_t i = 0; i < n; i++) {
        ref[3 * i] = s.p[i];
        ref[3 * i + 1] = ref[3 * i + 2] = 0;
    }
    for (a.t = 1; a.t <= 50; a.t++) {
        state_grads(&s, 0.1 / a.grad_scale);
        for (int64_t i = 0; i < n; i++)
            adam_double(&a, &ref[3 * i], &ref[3 * i + 1], &ref[3 * i + 2],
                        grad_value(&s, i));
        state_step(&s, &a, 0, n);
    }
    for (int64_t i = 0; i < n; i++) {
        assert_true(fabs(s.p[i] - ref[3 * i]) < 2e-6 + 2e-6 * fabs(ref[3 * i]));
        assert_true(fabs(s.m[i] - ref[3 * i + 1]) < 1e-6);
        assert_true(fabs(s.v[i] - ref[3 * i + 2]) <
                    1e-12 + 1e-5 * ref[3 * i + 2]);
    }
    free(ref);
    state_free(&s);
}

static void adam_follows_closed_form(void **state)
{
    static const int64_t sizes[] = {0, 1, 7, 33, 1025};

    for (int k = 0; k < CASES; k++)
        for (int i = 0; i < 3; i++)
            for (int j = 0; j < 5; j++)
                check_closed_form(&adam_cases[k], floats[i],
                                  floats[(i + j) % 3], sizes[j]);
}

static void check_scalar_bits(const struct iz_step *cs, enum iz_dtype g_type,
                              enum iz_dtype out_type, int64_t n)
{
    struct state s = state_new(n, g_type, out_type), r = state_copy(&s);
    struct iz_step a = *cs;

    for (a.t = 1; a.t <= 20; a.t++) {
        state_grads(&s, 0.1 / a.grad_scale);
        for (int64_t i = 0; i < n; i++)
            adam_scalar(&a, &r.p[i], &r.m[i], &r.v[i],
                        (float)grad_value(&s, i));
        iz_cast(r.out, out_type, r.p, IZ_F32, n);
        state_step(&s, &a, 0, n);
    }
    assert_memory_equal(s.p, r.p, (size_t)n * 4);
    assert_memory_equal(s.m, r.m, (size_t)n * 4);
    assert_memory_equal(s.v, r.v, (size_t)n * 4);
    assert_memory_equal(s.out, r.out, (size_t)(n * iz_dtype_bytes(out_type)));
    state_free(&s);
    state_free(&r);
}

static void adam_bits_are_those_of_the_scalar_loop(void **state)
{
    for (int k = 0; k < CASES; k++)
        for (int i = 0; i < 3; i++)
            check_scalar_bits(&adam_cases[k], floats[i], floats[(i + k) % 3],
                              2077);
}

/* The same buffers in one piece and cut at random places. */
static void adam_bits_do_not_depend_on_chunks(void **state)
{
    const int64_t n = 5003;
    struct state s = state_new(n, IZ_BF16, IZ_F16), r = state_copy(&s);
    struct iz_step a = adam_cases[1];

    for (a.t = 1; a.t <= 5; a.t++) {
        state_grads(&s, 1.0);
        memcpy(r.g, s.g, (size_t)n * 2);
        state_step(&s, &a, 0, n);
        for (int64_t at = 0, k; at < n; at += k) {
            k = 1 + (int64_t)(random_bits() % 700);
            k = k < n - at ? k : n - at;
            state_step(&r, &a, at, k);
        }
    }
    assert_memory_equal(s.p, r.p, (size_t)n * 4);
    assert_memory_equal(s.m, r.m, (size_t)n * 4);
    assert_memory_equal(s.v, r.v, (size_t)n * 4);
    assert_memory_equal(s.out, r.out, (size_t)n * 2);
    state_free(&s);
    state_free(&r);
}

/* Up to a few tiles of the loop, whole ones and begun ones. */
static void adam_without_copy_touches_n_elements_only(void **state)
{
    enum { MOST = 520 };
    static float p[MOST], m[MOST], v[MOST], g[MOST];
    struct state s = {.p = p, .m = m, .v = v, .g = g};

    for (int64_t n = 0; n < MOST; n++) {
        for (int i = 0; i < MOST; i++) {
            p[i] = g[i] = 1.0f;
            m[i] = v[i] = 0.0f;
        }
        state_step(&s, &adam_cases[0], 0, n);
        for (int i = 0; i < MOST; i++)
            if (i < n)
                assert_true(p[i] < 1.0f && m[i] > 0.0f && v[i] > 0.0f);
            else
                assert_true(p[i] == 1.0f && m[i] == 0.0f && v[i] == 0.0f);
    }
}

/* Without gradients m decays to zero instead of staying subnormal. */
static void adam_state_does_not_stay_subnormal(void **state)
{
    float p = 1.0f, m = 1.0f, v = 1.0f, g = 0.0f;
    struct state s = {.p = &p, .m = &m, .v = &v, .g = &g};
    struct iz_step a = adam_cases[0];

    for (a.t = 1; a.t <= 2000; a.t++)
        state_step(&s, &a, 0, 1);
    assert_true(m == 0.0f && v > 0.1f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_and_sizes),
        cmocka_unit_test(cast_of_every_pattern),
        cmocka_unit_test(cast_rounds_to_nearest_even),
        cmocka_unit_test(cast_overflows_to_infinity),
        cmocka_unit_test(cast_keeps_nan),
        cmocka_unit_test(cast_finds_every_nan),
        cmocka_unit_test(cast_between_halves_rounds_once),
        cmocka_unit_test(cast_touches_n_elements_only),
        cmocka_unit_test(adam_follows_closed_form),
        cmocka_unit_test(adam_bits_are_those_of_the_scalar_loop),
        cmocka_unit_test(adam_bits_do_not_depend_on_chunks),
        cmocka_unit_test(adam_without_copy_touches_n_elements_only),
        cmocka_unit_test(adam_state_does_not_stay_subnormal),
    };

    return levels_run(tests, sizeof(tests) / sizeof(tests[0]));
}
