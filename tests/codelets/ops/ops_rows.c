/* SPDX-License-Identifier: Apache-2.0 */
/* Exponential, GELU and layer normalisation against the reference. */
#include "tests/codelets/ops/args.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "codelets/ops/row_math.h"
#include "tests/codelets/ops/reference.h"

static void exp_is_within_two_ulp(void **state)
{
    double worst = 0;

    (void)state;
    for (double x = -86.5; x < 88.72; x += 1.7e-4) {
        double want = exp((double)(float)x);
        double ulp = ldexp(1, ilogb(want) - 23);
        worst = fmax(worst, fabs((double)iz_expf((float)x) - want) / ulp);
    }
    print_message("worst error %.2f ulp\n", worst);
    assert_true(worst < 2);
}

static void exp_keeps_special_values(void **state)
{
    (void)state;
    assert_true(iz_expf(0) == 1);
    assert_true(iz_expf(1e-40f) == 1);
    assert_true(iz_expf(-87) == 0 && iz_expf(-3e38f) == 0);
    assert_true(iz_expf(-INFINITY) == 0);
    assert_true(isinf(iz_expf(88.8f)) && isinf(iz_expf(3e38f)));
    assert_true(isinf(iz_expf(INFINITY)));
    assert_true(isnan(iz_expf(NAN)));
}

static void exp2_is_within_two_ulp(void **state)
{
    double worst = 0;

    (void)state;
    for (double x = -125; x < 127; x += 2.3e-4) {
        double want = exp2((double)(float)x);
        double ulp = ldexp(1, ilogb(want) - 23);
        worst = fmax(worst, fabs((double)iz_exp2f((float)x) - want) / ulp);
    }
    print_message("worst error %.2f ulp\n", worst);
    assert_true(worst < 2);
    assert_true(iz_exp2f(0) == 1 && iz_exp2f(1e-40f) == 1);
    assert_true(iz_exp2f(-126) == 0 && iz_exp2f(-3e38f) == 0);
    assert_true(iz_exp2f(-INFINITY) == 0);
    assert_true(isnan(iz_exp2f(NAN)));
}

struct gelu {
    struct tensor a, y, dy, du;
};

static void gelu_forward(struct iz_exec *x, void *arg)
{
    struct gelu *g = arg;

    iz_gelu_fwd(x, g->y.v, g->a.v);
}

static void gelu_backward(struct iz_exec *x, void *arg)
{
    struct gelu *g = arg;

    iz_gelu_bwd(x, g->du.v, g->y.v, g->dy.v, g->a.v);
}

/* Every value against the reference at that value alone, to its own size. */
static void check_gelu(struct gelu *g)
{
    fixture_run(gelu_forward, g);
    tensor_load(&g->y);
    for (int64_t i = 0; i < iz_view_len(g->a.v); i++) {
        double a = g->a.d[i], want = ref_gelu(a);
        /* The argument of the exponential is rounded to fp32; the reference
         * loses 1 + tanh below -8. */
        double tol = 1e-6 * fabs(want) * fmax(1, fabs(a * a * a));
        tol = fmin(tol, 1e-6 * fabs(a)) + 1e-15 * fabs(a) + (double)FLT_MIN;
        if (!(fabs(g->y.d[i] - want) <= tol))
            fail_msg("gelu(%.9g) is %.9g, not %.9g", a, g->y.d[i], want);
    }
    struct tensor again = tensor_new(IZ_F32, g->y.v.rows, g->y.v.cols, 1);
    struct tensor first = g->y;
    g->y = again;
    fixture_run(gelu_backward, g);
    fixture_same_bits("gelu again", g->y.v, first.v);
    tensor_load(&g->du);
    for (int64_t i = 0; i < iz_view_len(g->a.v); i++) {
        double a = g->a.d[i], h = 1e-5 * fmax(1, fabs(a)), dy = g->dy.d[i];
        double want = (ref_gelu(a + h) - ref_gelu(a - h)) / (2 * h) * dy;
        if (!(fabs(g->du.d[i] - want) <= 2e-6 * fabs(dy)))
            fail_msg("gelu'(%.9g) %.9g is %.9g, not %.9g", a, dy, g->du.d[i],
                     want);
    }
    g->y = first;
    tensor_free(&again);
}

static struct gelu gelu_new(int64_t n, double scale)
{
    return (struct gelu){
        tensor_new(IZ_F32, 1, n, scale), tensor_new(IZ_F32, 1, n, 1),
        tensor_new(IZ_F32, 1, n, 1), tensor_new(IZ_F32, 1, n, 1)};
}

static void gelu_free(struct gelu *g)
{
    tensor_free(&g->a);
    tensor_free(&g->y);
    tensor_free(&g->dy);
    tensor_free(&g->du);
}

static void gelu_agrees_with_reference(void **state)
{
    static const int64_t size[] = {1, 3, 7, 17, 33, 1000};

    (void)state;
    fixture_seed();
    for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
        for (double scale = 1e-3; scale < 100; scale *= 10) {
            struct gelu g = gelu_new(size[i], scale);
            check_gelu(&g);
            gelu_free(&g);
        }
}

static void gelu_survives_adversarial_values(void **state)
{
    static const double value[] = {0,     -0.,  1e-45, -1e-40, 1e-30, 11.99,
                                   12.01, -12,  -9.5,  50,     -50,   1e15,
                                   -1e15, 3e38, -3e38, 5,      -5};
    int n = sizeof value / sizeof value[0];
    struct gelu g;

    (void)state;
    fixture_seed();
    g = gelu_new(n, 1);
    for (int i = 0; i < n; i++)
        g.a.d[i] = value[i];
    tensor_store(&g.a);
    check_gelu(&g);
    g.a.d[0] = NAN;
    g.a.d[1] = INFINITY;
    tensor_store(&g.a);
    fixture_run(gelu_backward, &g);
    tensor_load(&g.y);
    tensor_load(&g.du);
    assert_true(isnan(g.y.d[0]) && isnan(g.du.d[0]));
    assert_true(isinf(g.y.d[1]) && isfinite(g.y.d[2]));
    gelu_free(&g);
}

static double norm_objective(void *arg)
{
    struct norm *n = arg;
    int64_t len = iz_view_len(n->a.v);
    double r = n->residual.rows ? fixture_dot(n->a.d, n->r.d, len) : 0;

    ref_layernorm(n->out, n->a.d, n->w.d, n->b.d, n->a.v.rows, n->a.v.cols);
    return r + fixture_dot(n->out, n->dy.d, len);
}

static void check_norm_gradient(const char *what, struct norm *n,
                                struct tensor *got, double *in)
{
    int64_t len = iz_view_len(got->v);
    double *want = calloc((size_t)len, sizeof *want);

    ref_gradient(want, norm_objective, n, in, len);
    fixture_close(what, got, want, 2e-5);
    free(want);
}

static void check_norm(enum iz_dtype t, int64_t m, int64_t c)
{
    struct norm n = norm_new(IZ_F32, t, m, c, 3);

    norm_objective(&n);
    fixture_run(layernorm_forward, &n);
    fixture_close("y", &n.y, n.out, 4e-6);
    fixture_run(layernorm_again, &n);
    fixture_same_bits("y again", n.dx.v, n.y.v);
    for (int with = 0; with < 2; with++) {
        n.residual = with ? n.r.v : IZ_NONE;
        fixture_run(layernorm_backward, &n);
        check_norm_gradient("dx", &n, &n.dx, n.a.d);
        check_norm_gradient("dw", &n, &n.dw, n.w.d);
        check_norm_gradient("db", &n, &n.db, n.b.d);
    }
    norm_free(&n);
}

static void layernorm_agrees_with_reference(void **state)
{
    static const int64_t size[][2] = {{1, 1},  {3, 3},  {7, 7},  {2, 16},
                                      {5, 17}, {1, 33}, {33, 5}, {2, 100}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
            check_norm(fixture_types[t], size[i][0], size[i][1]);
}

/* dx = r, then dx = dy: the same bits as with memory of its own. */
static void layernorm_backward_works_in_place(void **state)
{
    struct norm n;

    (void)state;
    fixture_seed();
    n = norm_new(IZ_F32, IZ_F32, 5, 37, 1);
    fixture_run(layernorm_forward, &n);
    fixture_run(layernorm_backward, &n);
    norm_place(&n, DX_IN_R);
    fixture_run(layernorm_backward, &n);
    fixture_same_bits("dx in r", n.r.v, n.dx.v);
    norm_place(&n, DX_NO_R);
    fixture_run(layernorm_backward, &n);
    n.into = n.dy.v;
    fixture_run(layernorm_backward, &n);
    fixture_same_bits("dx in dy", n.dy.v, n.dx.v);
    norm_free(&n);
}

/* Constant, tiny and subnormal rows give b; a huge mean loses no more digits
 * than fp32 has; NaN stays in its row. */
static void layernorm_survives_adversarial_values(void **state)
{
    enum { M = 5, C = 19 };
    struct norm n;

    (void)state;
    fixture_seed();
    n = norm_new(IZ_F32, IZ_F32, M, C, 1);
    for (int j = 0; j < C; j++) {
        n.a.d[j] = 0;
        n.a.d[C + j] = 7;
        n.a.d[2 * C + j] *= 1e-42;
        n.a.d[3 * C + j] *= 1e15;
    }
    tensor_store(&n.a);
    norm_objective(&n);
    fixture_run(layernorm_forward, &n);
    fixture_close("y", &n.y, n.out, 4e-6);
    n.a.d[2 * C + 3] = NAN;
    n.a.d[4 * C + 3] = INFINITY;
    tensor_store(&n.a);
    fixture_run(layernorm_forward, &n);
    fixture_run(layernorm_backward, &n);
    tensor_load(&n.y);
    tensor_load(&n.dx);
    assert_true(isnan(n.y.d[2 * C]) && isnan(n.dx.d[2 * C]));
    assert_true(isnan(n.y.d[4 * C]) && isfinite(n.y.d[3 * C]));
    norm_free(&n);
}

int ops_rows(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(exp_is_within_two_ulp),
        cmocka_unit_test(exp_keeps_special_values),
        cmocka_unit_test(exp2_is_within_two_ulp),
        cmocka_unit_test(gelu_agrees_with_reference),
        cmocka_unit_test(gelu_survives_adversarial_values),
        cmocka_unit_test(layernorm_agrees_with_reference),
        cmocka_unit_test(layernorm_backward_works_in_place),
        cmocka_unit_test(layernorm_survives_adversarial_values),
    };

    return cmocka_run_group_tests_name("rows", tests, NULL, NULL);
}
