/* SPDX-License-Identifier: Apache-2.0 */
/* Lion against its formula in double and against a loop whose every operation
 * is rounded by a store, at every SIMD level of the processor; with its state
 * in fp32 and in fewer bytes, and cut into pieces anywhere. */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "codelets/flat/update.h"
#include "tests/codelets/flat/levels.h"
#include "tests/codelets/flat/random.h"

static const enum iz_dtype floats[] = {IZ_F32, IZ_BF16, IZ_F16};

static const struct iz_step cases[] = {
    {{.type = IZ_OPTIMIZER_LION, .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.99},
     .t = 1,
     .grad_scale = 1.0f},
    {{.type = IZ_OPTIMIZER_LION,
      .lr = 3e-3,
      .beta1 = 0.95,
      .beta2 = 0.98,
      .weight_decay = 0.3},
     .t = 1,
     .grad_scale = 1.0f / 4096},
};

enum { CASES = sizeof(cases) / sizeof(cases[0]) };

/* The arrays of an update, and the bytes of m. */
struct arrays {
    int64_t n, room;
    enum iz_moment_type type;
    enum iz_dtype g_type, out_type;
    float *p;
    void *m, *g, *out;
};

static size_t m_bytes(const struct arrays *a)
{
    return (size_t)iz_moment_bytes(a->type, a->room);
}

static struct arrays arrays_new(int64_t n, enum iz_moment_type type,
                                enum iz_dtype g, enum iz_dtype out)
{
    struct arrays a = {.n = n,
                       .room = (n + IZ_MOMENT_BLOCK) / IZ_MOMENT_BLOCK *
                               IZ_MOMENT_BLOCK,
                       .type = type,
                       .g_type = g,
                       .out_type = out};

    a.p = take((size_t)n * 4);
    a.m = take(m_bytes(&a));
    a.g = take((size_t)n * 4);
    a.out = take((size_t)n * 4);
    for (int64_t i = 0; i < n; i++)
        a.p[i] = random_float(2.0);
    memset(a.m, 0, m_bytes(&a));
    memset(a.out, 0, (size_t)n * 4);
    return a;
}

static struct arrays arrays_copy(const struct arrays *a)
{
    struct arrays c = arrays_new(a->n, a->type, a->g_type, a->out_type);

    memcpy(c.p, a->p, (size_t)a->n * 4);
    memcpy(c.m, a->m, m_bytes(a));
    return c;
}

static void arrays_free(struct arrays *a)
{
    free(a->p);
    free(a->m);
    free(a->g);
    free(a->out);
}

/* Gradients of very different sizes, some zero. */
static void new_gradients(struct arrays *a, double scale)
{
    for (int64_t i = 0; i < a->n; i++) {
        float f = i % 7 == 3 ? 0.0f : random_float(scale * (double)(1 + i % 5));
        iz_cast((char *)a->g + i * iz_dtype_bytes(a->g_type), a->g_type, &f,
                IZ_F32, 1);
    }
}

static double gradient(const struct arrays *a, int64_t i)
{
    float f;

    iz_cast(&f, IZ_F32, (char *)a->g + i * iz_dtype_bytes(a->g_type), a->g_type,
            1);
    return f;
}

/* Elements [from, from + n) by iz_update. */
static void update(const struct arrays *a, const struct iz_step *s,
                   int64_t from, int64_t n)
{
    struct iz_alike all = iz_alike_of(s);

    iz_update(&(struct iz_update){
        .optimizer = IZ_OPTIMIZER_LION,
        .type = a->type,
        .g_type = a->g_type,
        .out_type = a->out_type,
        .n = n,
        .at = from,
        .room = a->room,
        .p = a->p + from,
        .state = {a->m},
        .g = (char *)a->g + from * iz_dtype_bytes(a->g_type),
        .out = (char *)a->out + from * iz_dtype_bytes(a->out_type),
        .key = (uint64_t)s->t,
        .first = 6400 + from,
        .span = &all,
        .spans = 1});
}

static double sign(double x)
{
    return x > 0 ? 1 : x < 0 ? -1 : 0;
}

/* arXiv:2302.06675, algorithm 2, in double. */
static void formula(const struct iz_hyper *h, double *p, double *m, double g)
{
    double u = sign(h->beta1 * *m + (1 - h->beta1) * g);

    *p -= h->lr * (u + h->weight_decay * *p);
    *m = h->beta2 * *m + (1 - h->beta2) * g;
}

/* The contract of lion.h in fp32, every operation rounded by a store. */
static void scalar(const struct iz_step *s, float *p, float *m, float g)
{
    const struct iz_hyper *h = &s->hyper;
    volatile float b1 = (float)h->beta1, r1 = (float)(1 - h->beta1);
    volatile float b2 = (float)h->beta2, r2 = (float)(1 - h->beta2);
    volatile float keep = (float)(1 - h->lr * h->weight_decay);
    volatile float lr = (float)h->lr, x, y, gi, u;

    gi = g * s->grad_scale;
    x = b1 * *m;
    y = r1 * gi;
    u = x + y;
    x = b2 * *m;
    y = r2 * gi;
    x = x + y;
    *m = fabsf(x) < FLT_MIN ? 0 : x;
    x = *p * keep;
    y = lr * (float)sign(u);
    *p = x - y;
}

/* The sign of a sum that rounds to about 0 is anybody's: none of these does. */
static void lion_follows_its_formula(void **state)
{
    enum { N = 1025, STEPS = 40 };
    double p[N], m[N];

    for (int c = 0; c < CASES; c++) {
        struct arrays a = arrays_new(N, IZ_MOMENT_F32, IZ_F32, IZ_F32);
        struct iz_step s = cases[c];

        for (int i = 0; i < N; i++) {
            p[i] = a.p[i];
            m[i] = 0;
        }
        for (s.t = 1; s.t <= STEPS; s.t++) {
            new_gradients(&a, 0.1 / s.grad_scale);
            for (int i = 0; i < N; i++)
                formula(&s.hyper, &p[i], &m[i], gradient(&a, i) * s.grad_scale);
            update(&a, &s, 0, N);
        }
        for (int i = 0; i < N; i++) {
            assert_true(fabs(a.p[i] - p[i]) < 2e-6 + 2e-6 * fabs(p[i]));
            assert_true(fabs(((float *)a.m)[i] - m[i]) < 1e-6);
        }
        arrays_free(&a);
    }
}

static void lion_bits_are_those_of_the_scalar_loop(void **state)
{
    for (int k = 0; k < CASES * 9; k++) {
        enum iz_dtype g = floats[k % 3], out = floats[k / 3 % 3];
        struct arrays a = arrays_new(2077, IZ_MOMENT_F32, g, out);
        struct arrays r = arrays_copy(&a);
        struct iz_step s = cases[k / 9];

        for (s.t = 1; s.t <= 20; s.t++) {
            new_gradients(&a, 0.1 / s.grad_scale);
            for (int64_t i = 0; i < a.n; i++)
                scalar(&s, &r.p[i], (float *)r.m + i, (float)gradient(&a, i));
            iz_cast(r.out, out, r.p, IZ_F32, a.n);
            update(&a, &s, 0, a.n);
        }
        assert_memory_equal(a.p, r.p, (size_t)a.n * 4);
        assert_memory_equal(a.m, r.m, (size_t)a.n * 4);
        assert_memory_equal(a.out, r.out, (size_t)(a.n * iz_dtype_bytes(out)));
        arrays_free(&a);
        arrays_free(&r);
    }
}

/* Up to a few tiles of the loop, whole ones and begun ones; what lies behind
 * stays. */
static void lion_touches_n_elements_only(void **state)
{
    enum { MOST = 520 };

    for (int64_t n = 0; n < MOST; n++) {
        struct arrays a = arrays_new(MOST, IZ_MOMENT_F32, IZ_F32, IZ_F32);
        float *g = a.g, *m = a.m, *out = a.out;

        for (int i = 0; i < MOST; i++)
            a.p[i] = g[i] = 1.0f;
        update(&a, &cases[0], 0, n);
        for (int i = 0; i < MOST; i++)
            if (i < n)
                assert_true(a.p[i] < 1 && m[i] > 0 && out[i] == a.p[i]);
            else
                assert_true(a.p[i] == 1 && m[i] == 0 && out[i] == 0);
        arrays_free(&a);
    }
}

/* In one piece and cut at random places, also within a block of m in fewer
 * bytes, whose other elements stay. */
static void lion_bits_do_not_depend_on_pieces(void **state)
{
    for (int t = IZ_MOMENT_F32; t <= IZ_MOMENT_FP8; t++) {
        enum iz_moment_type type = (enum iz_moment_type)t;
        bool blocks = type == IZ_MOMENT_FP8; /* share a power: cut nowhere */
        struct arrays a = arrays_new(5003, type, IZ_BF16, IZ_F16);
        struct arrays b = arrays_copy(&a);
        struct iz_step s = cases[1];

        for (s.t = 1; s.t <= 5; s.t++) {
            new_gradients(&a, 4096);
            memcpy(b.g, a.g, (size_t)a.n * 2);
            update(&a, &s, 0, a.n);
            for (int64_t at = 0, k; at < a.n; at += k) {
                k = 1 + (int64_t)(random_bits() % 700);
                k = blocks ? k * IZ_MOMENT_BLOCK : k;
                k = k < a.n - at ? k : a.n - at;
                update(&b, &s, at, k);
            }
        }
        assert_memory_equal(a.p, b.p, (size_t)a.n * 4);
        assert_memory_equal(a.m, b.m, m_bytes(&a));
        assert_memory_equal(a.out, b.out, (size_t)a.n * 2);
        arrays_free(&a);
        arrays_free(&b);
    }
}

/* m in fewer bytes: widened, updated, rounded by the step's key. */
static void lion_rounds_its_state(void **state)
{
    for (int t = IZ_MOMENT_BF16; t <= IZ_MOMENT_FP8; t++) {
        enum { N = 10 * IZ_MOMENT_BLOCK };
        struct arrays a = arrays_new(N, (enum iz_moment_type)t, IZ_F32, IZ_F32);
        struct arrays b = arrays_copy(&a);
        struct iz_moments m = {b.m, b.type, IZ_MOMENT_M, b.room};
        struct iz_step s = cases[1];
        float wide[N];

        for (s.t = 1; s.t <= 5; s.t++) {
            new_gradients(&a, 4096);
            iz_moment_load(wide, &m, 0, N);
            for (int i = 0; i < N; i++)
                scalar(&s, &b.p[i], &wide[i], (float)gradient(&a, i));
            iz_moment_store(&m, 0, wide, N, (uint64_t)s.t, 6400);
            update(&a, &s, 0, N);
        }
        assert_memory_equal(a.p, b.p, (size_t)N * 4);
        assert_memory_equal(a.m, b.m, m_bytes(&a));
        arrays_free(&a);
        arrays_free(&b);
    }
}

/* Without gradients m decays to zero instead of staying subnormal, and an
 * element whose m is 0 stays where it is. */
static void lion_comes_to_rest(void **state)
{
    struct arrays a = arrays_new(1, IZ_MOMENT_F32, IZ_F32, IZ_F32);
    struct iz_step s = cases[0];
    float *m = a.m, before;

    memset(a.g, 0, 4);
    *m = 1;
    for (s.t = 1; s.t <= 9000; s.t++)
        update(&a, &s, 0, 1);
    assert_true(*m == 0);
    before = *a.p;
    update(&a, &s, 0, 1);
    assert_true(*a.p == before);
    arrays_free(&a);
}

static void nan_is_not_hidden_by_the_sign(void **state)
{
    struct arrays a = arrays_new(64, IZ_MOMENT_F32, IZ_F32, IZ_F32);

    new_gradients(&a, 1);
    ((float *)a.g)[5] = NAN;
    ((float *)a.g)[6] = INFINITY;
    update(&a, &cases[0], 0, 64);
    for (int i = 0; i < 64; i++) {
        assert_true(isnan(a.p[i]) == (i == 5));
        assert_true(isfinite(((float *)a.m)[i]) == (i != 5 && i != 6));
    }
    arrays_free(&a);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(lion_follows_its_formula),
        cmocka_unit_test(lion_bits_are_those_of_the_scalar_loop),
        cmocka_unit_test(lion_touches_n_elements_only),
        cmocka_unit_test(lion_bits_do_not_depend_on_pieces),
        cmocka_unit_test(lion_rounds_its_state),
        cmocka_unit_test(lion_comes_to_rest),
        cmocka_unit_test(nan_is_not_hidden_by_the_sign),
    };

    return levels_run(tests, sizeof(tests) / sizeof(tests[0]));
}
