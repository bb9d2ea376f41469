/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of root-mean-square normalisation, rotary positions and the gated
 * unit against double precision. */
#include "tests/codelets/gpu/emulated.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/codelets/gpu/dies.h"
#include "tests/codelets/gpu/llama_gradients.h"
#include "tests/codelets/ops/args.h"
#include "tests/codelets/ops/reference.h"

#define EPS NORM_EPS

static struct tensor copy_of(const struct tensor *from)
{
    struct tensor t = tensor_new(from->v.dtype, from->v.rows, from->v.cols, 1);

    memcpy(t.v.p, from->v.p, (size_t)iz_view_bytes(t.v));
    tensor_load(&t);
    return t;
}

static void put_back(struct tensor *to, struct tensor *copy)
{
    memcpy(to->v.p, copy->v.p, (size_t)iz_view_bytes(to->v));
    tensor_free(copy);
}

/* ---- rmsnorm ------------------------------------------------------------ */

/* A short row may have elements that nearly agree, which loses digits. */
static void check_backward(struct norm *n, enum norm_place place)
{
    int64_t m = n->a.v.rows, c = n->a.v.cols;
    double *dx = calloc((size_t)(m * c), 8), *dw = calloc((size_t)c, 8);
    double tol = c < 64 ? 2e-5 : 2e-6;

    for (int64_t i = 0; i < m; i++) {
        double *row = dx + i * c;

        rmsnorm_gradient(row, dw, n->a.d + i * c, n->dy.d + i * c, n->w.d, c,
                         (double)EPS);
        for (int64_t j = 0; j < c; j++)
            row[j] += place == DX_NO_R ? 0 : n->r.d[i * c + j];
    }
    norm_place(n, place);
    emulated_run(rmsnorm_backward, n, n->a.v.dtype);
    fixture_close("dx", &n->dx, dx, tol);
    if (n->rms.dw.p)
        fixture_close("dw", &n->dw, dw, tol);
    free(dx);
    free(dw);
}

static void check_norm(enum iz_dtype t, int64_t m, int64_t c)
{
    struct norm n = norm_new(t, t, m, c, 3);
    double *y = calloc((size_t)(m * c), sizeof *y);

    ref_rmsnorm(y, n.a.d, n.w.d, m, c, (double)EPS);
    emulated_run(rmsnorm_forward, &n, t);
    fixture_close("y", &n.y, y, 1e-6);
    emulated_run(rmsnorm_again, &n, t);
    fixture_same_bits("y again", n.dx.v, n.y.v);
    check_backward(&n, DX_FRESH);
    check_backward(&n, DX_NO_R);
    norm_free(&n);
    free(y);
}

/* Teams of half a warp, a warp and a block, one to four parts per thread, rows
 * too long for that, with parts of one element and of 16 bytes; one part per
 * row and many rows per part. */
static void rmsnorm_agrees_with_reference(void **state)
{
    static const int64_t size[][2] = {
        {1, 1},    {2, 3},      {33, 8},     {300, 3},  {33, 384},
        {35, 128}, {2, 1000},   {1, 1001},   {3, 1537}, {1, 4104},
        {33, 64},  {4300, 8},   {2, 8200},   {5, 2048}, {3, 250},
        {300, 40}, {2200, 136}, {540, 1104}, {3, 2568}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
            check_norm(fixture_types[t], size[i][0], size[i][1]);
}

/* The gradients with dx in `into`, which gets its content back. */
static void check_place(struct norm *n, enum norm_place place,
                        struct tensor *into)
{
    struct tensor kept = copy_of(into), dw = copy_of(&n->dw);

    norm_place(n, place);
    emulated_run(rmsnorm_backward, n, n->a.v.dtype);
    fixture_same_bits("dx in place", into->v, n->dx.v);
    fixture_same_bits("dw, dx in place", n->dw.v, dw.v);
    put_back(into, &kept);
    tensor_free(&dw);
}

static void check_in_place(enum iz_dtype t, int64_t m, int64_t c)
{
    struct norm n = norm_new(t, t, m, c, 1);

    emulated_run(rmsnorm_forward, &n, t);
    norm_place(&n, DX_FRESH);
    emulated_run(rmsnorm_backward, &n, t);
    check_place(&n, DX_IN_DY, &n.dy);
    check_place(&n, DX_IN_R, &n.r);
    norm_free(&n);
}

static void rmsnorm_backward_works_in_place(void **state)
{
    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++) {
        check_in_place(fixture_types[t], 33, 384);
        check_in_place(fixture_types[t], 300, 64);
        check_in_place(fixture_types[t], 3, 8200);
        check_in_place(fixture_types[t], 5, 37);
    }
}

static void rmsnorm_leaves_out_an_unwanted_gradient(void **state)
{
    (void)state;
    fixture_seed();
    for (int64_t c = 40; c < 3000; c *= 5) {
        struct norm n = norm_new(IZ_BF16, IZ_BF16, 40, c, 1);

        emulated_run(rmsnorm_forward, &n, IZ_BF16);
        n.rms.dw.p = NULL;
        check_backward(&n, DX_FRESH);
        norm_free(&n);
    }
}

/* The emulation runs blocks and threads in another order each time. */
static void rmsnorm_does_not_depend_on_order(void **state)
{
    (void)state;
    fixture_seed();
    for (int64_t c = 30; c < 3000; c *= 9) {
        struct norm n = norm_new(IZ_F32, IZ_F32, 300, c, 1);
        struct tensor dw;

        emulated_run(rmsnorm_forward, &n, IZ_F32);
        emulated_run(rmsnorm_backward, &n, IZ_F32);
        dw = copy_of(&n.dw);
        emulated_run(rmsnorm_backward, &n, IZ_F32);
        fixture_same_bits("dw", n.dw.v, dw.v);
        tensor_free(&dw);
        norm_free(&n);
    }
}

/* NaN and infinity stay in their row and are not hidden; zeros stay zeros. */
static void check_norm_specials(int64_t c)
{
    enum { M = 5 };
    struct norm n = norm_new(IZ_F32, IZ_F32, M, c, 1);

    for (int64_t j = 0; j < c; j++)
        n.a.d[j] = 0;
    n.a.d[2 * c + c / 2] = NAN;
    n.a.d[4 * c + c - 1] = INFINITY;
    tensor_store(&n.a);
    emulated_run(rmsnorm_forward, &n, IZ_F32);
    emulated_run(rmsnorm_backward, &n, IZ_F32);
    tensor_load(&n.y);
    tensor_load(&n.dx);
    for (int64_t j = 0; j < c; j++) {
        assert_true(n.y.d[j] == 0 && isfinite(n.dx.d[j]));
        assert_true(isnan(n.y.d[2 * c + j]) && isnan(n.dx.d[2 * c + j]));
        assert_true(isfinite(n.y.d[3 * c + j]) && isfinite(n.dx.d[3 * c + j]));
    }
    assert_true(isnan(n.y.d[5 * c - 1]));
    norm_free(&n);
}

static void rmsnorm_survives_adversarial_values(void **state)
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

    n.rms.w.dtype = IZ_F32;
    emulated_run(rmsnorm_forward, &n, IZ_BF16);
}

static void rmsnorm_refuses_weights_of_another_type(void **state)
{
    (void)state;
    dies(mix_types, "rmsnorm of bf16 with weights of fp32");
}

/* ---- heads of a row ----------------------------------------------------- */

struct heads {
    struct tensor a, kept, w, dw, rstd, da;
    struct iz_rmsnorm n;
    int64_t first;
};

static void heads_forward(struct iz_exec *x, void *arg)
{
    struct heads *h = arg;

    iz_headnorm_fwd(x, h->a.v, h->kept.v, &h->n, h->first);
}

static void heads_backward(struct iz_exec *x, void *arg)
{
    struct heads *h = arg;

    iz_headnorm_bwd(x, h->da.v, h->kept.v, &h->n, h->first);
}

static struct heads heads_new(enum iz_dtype t, int64_t m, int64_t ld,
                              int64_t first, int64_t heads, int64_t c)
{
    struct heads h = {
        .a = tensor_new(t, m, ld, 2),
        .kept = tensor_new(t, m, heads * c, 1),
        .w = tensor_new(t, 1, c, 1),
        .dw = tensor_new(t, 1, c, 1),
        .rstd = tensor_new(IZ_F32, m, heads, 1),
        .da = tensor_new(t, m, ld, 1),
        .first = first,
    };

    h.n = (struct iz_rmsnorm){h.w.v, h.dw.v, h.rstd.v, EPS};
    return h;
}

static void heads_free(struct heads *h)
{
    tensor_free(&h->a);
    tensor_free(&h->kept);
    tensor_free(&h->w);
    tensor_free(&h->dw);
    tensor_free(&h->rstd);
    tensor_free(&h->da);
}

static void check_heads(enum iz_dtype t, const int64_t s[5])
{
    int64_t m = s[0], ld = s[1], first = s[2], heads = s[3], c = s[4];
    struct heads h = heads_new(t, m, ld, first, heads, c);
    struct tensor a = copy_of(&h.a), dy = copy_of(&h.da);
    double *y = calloc((size_t)(m * ld), 8), *da = calloc((size_t)(m * ld), 8);
    double *dw = calloc((size_t)c, 8);

    memcpy(y, a.d, (size_t)(m * ld) * 8);
    memcpy(da, dy.d, (size_t)(m * ld) * 8);
    for (int64_t i = 0; i < m * heads; i++) {
        int64_t at = i / heads * ld + first + i % heads * c;

        ref_rmsnorm(y + at, a.d + at, h.w.d, 1, c, (double)EPS);
        rmsnorm_gradient(da + at, dw, a.d + at, dy.d + at, h.w.d, c,
                         (double)EPS);
    }
    emulated_run(heads_forward, &h, t);
    fixture_close("a", &h.a, y, 1e-6);
    for (int64_t i = 0; i < m; i++)
        fixture_same_bits(
            "kept", iz_view_rows(h.kept.v, i, 1),
            (struct iz_view){.p = (char *)a.v.p +
                                  (i * ld + first) * iz_dtype_bytes(t),
                             .dtype = t,
                             .rows = 1,
                             .cols = heads * c});
    emulated_run(heads_backward, &h, t);
    fixture_close("da", &h.da, da, 2e-6);
    fixture_close("dw", &h.dw, dw, 2e-6);
    heads_free(&h);
    tensor_free(&a);
    tensor_free(&dy);
    free(y);
    free(da);
    free(dw);
}

/* The heads of Qwen 3, and pieces that begin between 16 bytes. */
static void headnorm_agrees_with_reference(void **state)
{
    /* m, ld, first, heads, c */
    static const int64_t size[][5] = {
        {1, 64, 0, 1, 64},     {5, 1024, 512, 2, 128}, {19, 1024, 0, 4, 128},
        {3, 303, 101, 2, 100}, {300, 48, 16, 1, 32},   {2, 2001, 3, 2, 999}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
            check_heads(fixture_types[t], size[i]);
}

/* ---- rope --------------------------------------------------------------- */

struct rope {
    struct tensor a;
    struct iz_rope r;
    bool back;
};

static void rope_run(struct iz_exec *x, void *arg)
{
    struct rope *r = arg;

    iz_rope(x, r->a.v, &r->r, r->back);
}

/* A cosine errs by the rounding of its angle and its own, 3e-7 together. */
static void check_rope(enum iz_dtype type, struct iz_rope r, int64_t samples,
                       int64_t more)
{
    int64_t m = samples * r.seq, ld = (int64_t)r.heads * r.d + more;
    struct rope t = {.a = tensor_new(type, m, ld, 1), .r = r};

    for (int back = 0; back < 2; back++) {
        struct tensor want = copy_of(&t.a);

        ref_rope(want.d, m, ld, &r, back);
        t.back = back;
        emulated_run(rope_run, &t, type);
        fixture_close("turned", &t.a, want.d, 6e-7);
        tensor_free(&want);
    }
    tensor_free(&t.a);
}

static void rope_agrees_with_reference(void **state)
{
    static const struct iz_rope plain[] = {
        {5, 1, 2, 1e4, 1, 0, 0, 0},   {19, 3, 6, 10, 1, 0, 0, 0},
        {1, 2, 256, 1e6, 1, 0, 0, 0}, {37, 5, 64, 5e5, 32, 1, 4, 8192},
        {11, 2, 80, 1e4, 1, 0, 0, 0}, {300, 1, 128, 1e4, 8, 1, 4, 64}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < sizeof plain / sizeof plain[0]; i++) {
            check_rope(fixture_types[t], plain[i], 1 + (int64_t)i % 3, 0);
            check_rope(fixture_types[t], plain[i], 2, 8);
            check_rope(fixture_types[t], plain[i], 1, 1);
        }
}

static void rope_is_exact_far_away(void **state)
{
    struct iz_rope r = {131072, 1, 2, 5e5, 1, 0, 0, 0};

    (void)state;
    fixture_seed();
    check_rope(IZ_F32, r, 1, 0);
}

/* ---- swiglu ------------------------------------------------------------- */

static void swiglu_all_in_place(struct iz_exec *x, void *arg)
{
    struct swiglu *s = arg;

    iz_swiglu_bwd(x, s->a.v, s->dy.v, s->dy.v, s->a.v);
}

static void check_swiglu(enum iz_dtype t, int64_t m, int64_t f)
{
    struct swiglu s = swiglu_new(t, m, f, 6);
    double *y = calloc((size_t)(m * f), 8),
           *da = calloc((size_t)(2 * m * f), 8);

    for (int64_t i = 0; i < m * f; i++) {
        int64_t at = i / f * 2 * f + i % f;

        y[i] = ref_swiglu(s.a.d[at], s.a.d[at + f]);
        swiglu_gradient(&da[at], &da[at + f], s.a.d[at], s.a.d[at + f],
                        s.dy.d[i]);
    }
    emulated_run(swiglu_forward, &s, t);
    fixture_close("swiglu", &s.y, y, 1e-6);
    emulated_run(swiglu_backward, &s, t);
    fixture_close("swiglu again", &s.y, y, 1e-6);
    fixture_close("da", &s.da, da, 1e-6);
    emulated_run(swiglu_all_in_place, &s, t);
    fixture_same_bits("y in place", s.dy.v, s.y.v);
    fixture_same_bits("da in place", s.a.v, s.da.v);
    swiglu_free(&s);
    free(y);
    free(da);
}

static void swiglu_agrees_with_reference(void **state)
{
    static const int64_t size[][2] = {{1, 1},   {3, 3},    {5, 9},
                                      {2, 344}, {3, 2056}, {33, 1001}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
            check_swiglu(fixture_types[t], size[i][0], size[i][1]);
}

static void swiglu_survives_adversarial_values(void **state)
{
    enum { F = 8 };
    static const double gate[F] = {NAN, INFINITY, -1e30, 1e30,
                                   -90, 90,       -3e38, 0};
    struct swiglu s;

    (void)state;
    fixture_seed();
    s = swiglu_new(IZ_F32, 1, F, 6);
    memcpy(s.a.d, gate, sizeof gate);
    s.a.d[2 * F - 1] = NAN;
    tensor_store(&s.a);
    emulated_run(swiglu_backward, &s, IZ_F32);
    tensor_load(&s.y);
    tensor_load(&s.da);
    assert_true(isnan(s.y.d[0]) && isnan(s.da.d[0]) && isnan(s.da.d[F]));
    assert_true(isinf(s.y.d[1]) && s.y.d[2] == 0 && s.y.d[6] == 0);
    assert_true(isnan(s.y.d[7]) && isnan(s.da.d[7]));
    for (int i = 2; i < 7; i++)
        assert_true(isfinite(s.y.d[i]) && isfinite(s.da.d[i]));
    swiglu_free(&s);
}

/* ---- the formulas themselves -------------------------------------------- */

enum { C = 7 };

struct row {
    double a[C], w[C], dy[C], y[C];
};

static double row_objective(void *arg)
{
    struct row *r = arg;

    ref_rmsnorm(r->y, r->a, r->w, 1, C, (double)EPS);
    return fixture_dot(r->y, r->dy, C);
}

static double swiglu_objective(void *arg)
{
    const double *gu = arg;

    return ref_swiglu(gu[0], gu[1]);
}

static void formulas_agree_with_differences(void **state)
{
    struct row r;
    double dx[C], dw[C] = {0}, want[C], gu[2] = {-1.3, 0.7}, got[2];

    (void)state;
    fixture_seed();
    for (int i = 0; i < C; i++) {
        r.a[i] = fixture_uniform();
        r.w[i] = fixture_uniform();
        r.dy[i] = fixture_uniform();
    }
    rmsnorm_gradient(dx, dw, r.a, r.dy, r.w, C, (double)EPS);
    ref_gradient(want, row_objective, &r, r.a, C);
    for (int i = 0; i < C; i++)
        assert_true(fabs(dx[i] - want[i]) < 1e-8);
    ref_gradient(want, row_objective, &r, r.w, C);
    for (int i = 0; i < C; i++)
        assert_true(fabs(dw[i] - want[i]) < 1e-8);
    ref_gradient(want, swiglu_objective, gu, gu, 2);
    swiglu_gradient(&got[0], &got[1], gu[0], gu[1], 1);
    for (int i = 0; i < 2; i++)
        assert_true(fabs(got[i] - want[i]) < 1e-8);
}

int gpu_llama(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(formulas_agree_with_differences),
        cmocka_unit_test(rmsnorm_agrees_with_reference),
        cmocka_unit_test(rmsnorm_backward_works_in_place),
        cmocka_unit_test(rmsnorm_leaves_out_an_unwanted_gradient),
        cmocka_unit_test(rmsnorm_does_not_depend_on_order),
        cmocka_unit_test(rmsnorm_survives_adversarial_values),
        cmocka_unit_test(rmsnorm_refuses_weights_of_another_type),
        cmocka_unit_test(headnorm_agrees_with_reference),
        cmocka_unit_test(rope_agrees_with_reference),
        cmocka_unit_test(rope_is_exact_far_away),
        cmocka_unit_test(swiglu_agrees_with_reference),
        cmocka_unit_test(swiglu_survives_adversarial_values),
    };

    return cmocka_run_group_tests_name("llama", tests, NULL, NULL);
}
