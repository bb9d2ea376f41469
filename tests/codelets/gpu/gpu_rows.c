/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of layer normalisation and GELU against formulas in double. */
#include "tests/codelets/gpu/emulated.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/codelets/gpu/dies.h"
#include "tests/codelets/ops/args.h"
#include "tests/codelets/ops/reference.h"

/* Gradients in double: sums of the columns into dw and db, rows into dx. */
struct gradients {
    double *dx, *dw, *db;
};

static void row_gradient(struct gradients *g, const struct norm *n, int64_t i)
{
    int64_t c = n->a.v.cols;
    const double *a = n->a.d + i * c, *dy = n->dy.d + i * c, *w = n->w.d;
    double mean = 0, var = 0, sum = 0, sum_hat = 0;

    for (int64_t j = 0; j < c; j++)
        mean += a[j] / (double)c;
    for (int64_t j = 0; j < c; j++)
        var += (a[j] - mean) * (a[j] - mean) / (double)c;
    double s = 1 / sqrt(var + 1e-5);
    for (int64_t j = 0; j < c; j++) {
        double hat = (a[j] - mean) * s;

        sum += dy[j] * w[j] / (double)c;
        sum_hat += dy[j] * w[j] * hat / (double)c;
        g->dw[j] += dy[j] * hat;
        g->db[j] += dy[j];
    }
    for (int64_t j = 0; j < c; j++) {
        double hat = (a[j] - mean) * s;
        double r = n->residual.rows ? n->r.d[i * c + j] : 0;

        g->dx[i * c + j] = r + s * (dy[j] * w[j] - sum - hat * sum_hat);
    }
}

static struct gradients gradients_of(const struct norm *n)
{
    size_t c = (size_t)n->a.v.cols, m = (size_t)n->a.v.rows;
    struct gradients g = {calloc(m * c, 8), calloc(c, 8), calloc(c, 8)};

    for (size_t i = 0; i < m; i++)
        row_gradient(&g, n, (int64_t)i);
    return g;
}

static void gradients_free(struct gradients *g)
{
    free(g->dx);
    free(g->dw);
    free(g->db);
}

/* A short row may have elements that nearly agree, which loses digits. */
static void check_backward(struct norm *n, enum norm_place place)
{
    struct gradients g;
    double tol = n->a.v.cols < 64 ? 2e-5 : 2e-6;

    norm_place(n, place);
    g = gradients_of(n);
    emulated_run(layernorm_backward, n, n->a.v.dtype);
    fixture_close("dx", &n->dx, g.dx, tol);
    fixture_close("dw", &n->dw, g.dw, tol);
    fixture_close("db", &n->db, g.db, tol);
    gradients_free(&g);
}

static void check_norm(enum iz_dtype t, int64_t m, int64_t c)
{
    struct norm n = norm_new(t, t, m, c, 3);
    double *y = calloc((size_t)(m * c), sizeof *y);

    ref_layernorm(y, n.a.d, n.w.d, n.b.d, m, c);
    emulated_run(layernorm_forward, &n, t);
    fixture_close("y", &n.y, y, 4e-6);
    emulated_run(layernorm_again, &n, t);
    fixture_same_bits("y again", n.dx.v, n.y.v);
    check_backward(&n, DX_FRESH);
    check_backward(&n, DX_NO_R);
    norm_free(&n);
    free(y);
}

/* Rows of a warp and of a block, one to four pieces per thread, rows too long
 * for that, with pieces of one element and of 16 bytes; one part per row and
 * many rows per part. */
static void layernorm_agrees_with_reference(void **state)
{
    static const int64_t size[][2] = {
        {1, 1},    {2, 3},    {33, 8},     {300, 3},    {33, 384}, {2, 1000},
        {1, 1001}, {3, 1537}, {1, 4104},   {33, 4104},  {2500, 8}, {2, 8200},
        {5, 2048}, {3, 250},  {300, 1000}, {540, 1104}, {3, 2568}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
            check_norm(fixture_types[t], size[i][0], size[i][1]);
}

static struct tensor copy_of(const struct tensor *from)
{
    struct tensor t = tensor_new(from->v.dtype, from->v.rows, from->v.cols, 1);

    memcpy(t.v.p, from->v.p, (size_t)iz_view_bytes(t.v));
    return t;
}

/* The gradients with dx in `into`, which gets its content back. */
static void check_place(struct norm *n, enum norm_place place,
                        struct tensor *into)
{
    struct tensor kept = copy_of(into), dw = copy_of(&n->dw);
    struct tensor db = copy_of(&n->db);

    norm_place(n, place);
    emulated_run(layernorm_backward, n, n->a.v.dtype);
    fixture_same_bits("dx in place", into->v, n->dx.v);
    fixture_same_bits("dw, dx in place", n->dw.v, dw.v);
    fixture_same_bits("db, dx in place", n->db.v, db.v);
    memcpy(into->v.p, kept.v.p, (size_t)iz_view_bytes(kept.v));
    tensor_free(&kept);
    tensor_free(&dw);
    tensor_free(&db);
}

static void check_in_place(enum iz_dtype t, int64_t m, int64_t c)
{
    struct norm n = norm_new(t, t, m, c, 1);

    emulated_run(layernorm_forward, &n, t);
    norm_place(&n, DX_FRESH);
    emulated_run(layernorm_backward, &n, t);
    check_place(&n, DX_IN_DY, &n.dy);
    check_place(&n, DX_IN_R, &n.r);
    norm_free(&n);
}

static void layernorm_backward_works_in_place(void **state)
{
    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++) {
        check_in_place(fixture_types[t], 33, 384);
        check_in_place(fixture_types[t], 300, 1000);
        check_in_place(fixture_types[t], 3, 8200);
        check_in_place(fixture_types[t], 5, 37);
    }
}

/* Without dw, without db, without both: the other results do not change. */
static void layernorm_leaves_out_unwanted_gradients(void **state)
{
    (void)state;
    fixture_seed();
    for (int without = 1; without < 4; without++) {
        struct norm n = norm_new(IZ_BF16, IZ_BF16, 40, 104, 1);
        struct gradients g = gradients_of(&n);

        emulated_run(layernorm_forward, &n, IZ_BF16);
        n.n.dw.p = without & 1 ? NULL : n.n.dw.p;
        n.n.db.p = without & 2 ? NULL : n.n.db.p;
        emulated_run(layernorm_backward, &n, IZ_BF16);
        fixture_close("dx", &n.dx, g.dx, 2e-6);
        if (n.n.dw.p)
            fixture_close("dw", &n.dw, g.dw, 4e-6);
        if (n.n.db.p)
            fixture_close("db", &n.db, g.db, 4e-6);
        gradients_free(&g);
        norm_free(&n);
    }
}

/* The emulation runs blocks and threads in another order each time. */
static void layernorm_does_not_depend_on_order(void **state)
{
    struct norm n;
    struct tensor dw, db;

    (void)state;
    fixture_seed();
    n = norm_new(IZ_F32, IZ_F32, 300, 90, 1);
    emulated_run(layernorm_forward, &n, IZ_F32);
    emulated_run(layernorm_backward, &n, IZ_F32);
    dw = n.dw;
    db = n.db;
    n.dw = tensor_new(IZ_F32, 1, 90, 1);
    n.db = tensor_new(IZ_F32, 1, 90, 1);
    n.n.dw = n.dw.v;
    n.n.db = n.db.v;
    emulated_run(layernorm_backward, &n, IZ_F32);
    fixture_same_bits("dw", n.dw.v, dw.v);
    fixture_same_bits("db", n.db.v, db.v);
    tensor_free(&dw);
    tensor_free(&db);
    norm_free(&n);
}

/* NaN stays in its row, constant rows give b, a huge mean loses no more digits
 * than fp32 has. */
static void check_norm_specials(int64_t c)
{
    enum { M = 5 };
    struct norm n = norm_new(IZ_F32, IZ_F32, M, c, 1);
    double *y = calloc((size_t)(M * c), sizeof *y);

    for (int64_t j = 0; j < c; j++) {
        n.a.d[j] = 7;
        n.a.d[c + j] *= 1e-42;
        n.a.d[3 * c + j] *= 1e15;
    }
    tensor_store(&n.a);
    ref_layernorm(y, n.a.d, n.w.d, n.b.d, M, c);
    emulated_run(layernorm_forward, &n, IZ_F32);
    fixture_close("y", &n.y, y, 4e-6);
    n.a.d[2 * c + c / 2] = NAN;
    n.a.d[4 * c + c - 1] = INFINITY;
    tensor_store(&n.a);
    emulated_run(layernorm_forward, &n, IZ_F32);
    emulated_run(layernorm_backward, &n, IZ_F32);
    tensor_load(&n.y);
    tensor_load(&n.dx);
    for (int64_t j = 0; j < c; j++) {
        assert_true(isnan(n.y.d[2 * c + j]) && isnan(n.dx.d[2 * c + j]));
        assert_true(isnan(n.y.d[4 * c + j]) && isfinite(n.y.d[3 * c + j]));
        assert_true(isfinite(n.dx.d[3 * c + j]) && isfinite(n.dx.d[j]));
    }
    free(y);
    norm_free(&n);
}

static void layernorm_survives_adversarial_values(void **state)
{
    (void)state;
    fixture_seed();
    check_norm_specials(19);
    check_norm_specials(64);
    check_norm_specials(1200);
}

static void mix_types(void)
{
    struct norm n = norm_new(IZ_BF16, IZ_BF16, 2, 8, 1);

    n.n.w.dtype = IZ_F32;
    emulated_run(layernorm_forward, &n, IZ_BF16);
}

static void layernorm_refuses_weights_of_another_type(void **state)
{
    (void)state;
    dies(mix_types, "layernorm of bf16 with weights of fp32");
}

struct gelu {
    struct tensor a, dy, y, du;
};

static struct gelu gelu_new(enum iz_dtype t, int64_t m, int64_t c, double scale)
{
    return (struct gelu){tensor_new(t, m, c, scale), tensor_new(t, m, c, 1),
                         tensor_new(t, m, c, 1), tensor_new(t, m, c, 1)};
}

static void gelu_free(struct gelu *g)
{
    tensor_free(&g->a);
    tensor_free(&g->dy);
    tensor_free(&g->y);
    tensor_free(&g->du);
}

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

static void gelu_all_in_place(struct iz_exec *x, void *arg)
{
    struct gelu *g = arg;

    iz_gelu_bwd(x, g->dy.v, g->a.v, g->dy.v, g->a.v);
}

/* tanh' = 1 - tanh^2. */
static double gelu_slope(double a)
{
    double k = sqrt(2 / acos(-1.0)), u = k * (a + 0.044715 * a * a * a);
    double t = tanh(u);

    return (1 + t) / 2 + a / 2 * (1 - t * t) * k * (1 + 3 * 0.044715 * a * a);
}

static void check_gelu(enum iz_dtype t, int64_t m, int64_t c)
{
    struct gelu g = gelu_new(t, m, c, 6);
    int64_t n = m * c;
    double *y = calloc((size_t)n, sizeof *y), *du = calloc((size_t)n, 8);

    for (int64_t i = 0; i < n; i++) {
        y[i] = ref_gelu(g.a.d[i]);
        du[i] = g.dy.d[i] * gelu_slope(g.a.d[i]);
    }
    emulated_run(gelu_forward, &g, t);
    fixture_close("gelu", &g.y, y, 5e-7);
    emulated_run(gelu_backward, &g, t);
    fixture_close("gelu again", &g.y, y, 5e-7);
    fixture_close("du", &g.du, du, 2e-6);
    emulated_run(gelu_all_in_place, &g, t);
    fixture_same_bits("gelu in place", g.a.v, g.y.v);
    fixture_same_bits("du in place", g.dy.v, g.du.v);
    gelu_free(&g);
    free(y);
    free(du);
}

static void gelu_agrees_with_reference(void **state)
{
    static const int64_t size[][2] = {{1, 1}, {3, 3},    {1, 8},
                                      {5, 9}, {2, 1024}, {33, 1001}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
            check_gelu(fixture_types[t], size[i][0], size[i][1]);
}

/* Views that begin between pieces of 16 bytes. */
static void gelu_works_unaligned(void **state)
{
    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++) {
        struct gelu g = gelu_new(fixture_types[t], 100, 1, 6), odd = g;

        odd.a.v = iz_view_rows(g.a.v, 1, 99);
        odd.y.v = iz_view_rows(g.y.v, 0, 99);
        emulated_run(gelu_forward, &odd, fixture_types[t]);
        tensor_load(&odd.y);
        for (int i = 0; i < 99; i++)
            assert_true(fabs(odd.y.d[i] - ref_gelu(g.a.d[i + 1])) < 0x1p-7 * 6);
        gelu_free(&g);
    }
}

static void gelu_survives_adversarial_values(void **state)
{
    struct gelu g;

    (void)state;
    fixture_seed();
    g = gelu_new(IZ_F32, 1, 9, 1);
    double a[9] = {NAN, INFINITY, -1e30, 1e30, -1e-42, 0, -12, 12, -3e38};
    memcpy(g.a.d, a, sizeof a);
    tensor_store(&g.a);
    emulated_run(gelu_backward, &g, IZ_F32);
    tensor_load(&g.y);
    tensor_load(&g.du);
    assert_true(isnan(g.y.d[0]) && isnan(g.du.d[0]) && isinf(g.y.d[1]));
    assert_true(g.y.d[2] == 0 && g.y.d[3] == (double)1e30f && g.y.d[5] == 0);
    for (int i = 1; i < 9; i++)
        assert_true(isfinite(g.du.d[i]) && (i == 1 || isfinite(g.y.d[i])));
    gelu_free(&g);
}

int gpu_rows(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gelu_agrees_with_reference),
        cmocka_unit_test(gelu_works_unaligned),
        cmocka_unit_test(gelu_survives_adversarial_values),
        cmocka_unit_test(layernorm_agrees_with_reference),
        cmocka_unit_test(layernorm_backward_works_in_place),
        cmocka_unit_test(layernorm_leaves_out_unwanted_gradients),
        cmocka_unit_test(layernorm_does_not_depend_on_order),
        cmocka_unit_test(layernorm_survives_adversarial_values),
        cmocka_unit_test(layernorm_refuses_weights_of_another_type),
    };

    return cmocka_run_group_tests_name("rows", tests, NULL, NULL);
}
