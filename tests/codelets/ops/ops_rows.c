/* SPDX-License-Identifier: Apache-2.0 */
/* Both normalisations, and GELU. */
#include "tests/codelets/ops/scene.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/codelets/ops/reference.h"

#define EPS 1e-5f /* of rmsnorm */

/* ---- normalisation ------------------------------------------------------ */

enum { A, W, B, Y, R, DY, DX, DW, DB, MEAN, RSTD, NORM_TENSORS };

/* Where dx goes; r is added but for the last. */
enum place { FRESH, IN_R, IN_DY, NO_R };

/* rmsnorm leaves b, db and mean alone. */
struct kind {
    const char *mixed; /* what it says of weights of another type */
    scene_op *forward, *again, *backward;
    void (*ref)(double *y, const struct scene *s);
    void (*gradient)(double *dx, double *dw, double *db, const double *a,
                     const double *dy, const double *w, int64_t c);
    double tol; /* of y */
    unsigned weights, sums, kept;
};

struct norm {
    struct scene s;
    const struct kind *kind;
    enum place place;
    enum iz_dtype weights; /* what the op is told that they are */
};

static struct norm norm_new(const struct kind *k, enum iz_dtype param,
                            int64_t m, int64_t c, double scale)
{
    enum iz_dtype act = backend.act(param);

    return (struct norm){.s = {.n = NORM_TENSORS,
                               .t = {[A] = tensor_new(act, m, c, scale),
                                     [W] = tensor_new(param, 1, c, 1),
                                     [B] = tensor_new(param, 1, c, 1),
                                     [Y] = tensor_new(act, m, c, 1),
                                     [R] = tensor_new(act, m, c, 1),
                                     [DY] = tensor_new(act, m, c, 1),
                                     [DX] = tensor_new(act, m, c, 1),
                                     [DW] = tensor_new(param, 1, c, 1),
                                     [DB] = tensor_new(param, 1, c, 1),
                                     [MEAN] = tensor_new(IZ_F32, m, 1, 1),
                                     [RSTD] = tensor_new(IZ_F32, m, 1, 1)}},
                         .kind = k,
                         .weights = param};
}

static int place_of(enum place p)
{
    return p == IN_R ? R : p == IN_DY ? DY : DX;
}

static struct iz_norm_layer layernorm_of(const struct iz_view *v,
                                         const void *arg)
{
    const struct norm *n = arg;
    struct iz_norm_layer w = {v[W], v[B], v[DW], v[DB], v[MEAN], v[RSTD]};

    w.w.dtype = n->weights;
    return w;
}

static void layernorm_forward(struct iz_exec *x, const struct iz_view *v,
                              const void *arg)
{
    struct iz_norm_layer w = layernorm_of(v, arg);

    iz_layernorm_fwd(x, v[Y], v[A], &w);
}

static void layernorm_again(struct iz_exec *x, const struct iz_view *v,
                            const void *arg)
{
    struct iz_norm_layer w = layernorm_of(v, arg);

    iz_layernorm_again(x, v[DX], v[A], &w);
}

static void layernorm_backward(struct iz_exec *x, const struct iz_view *v,
                               const void *arg)
{
    const struct norm *n = arg;
    struct iz_norm_layer w = layernorm_of(v, arg);

    iz_layernorm_bwd(x, v[place_of(n->place)],
                     n->place == NO_R ? IZ_NONE : v[R], v[DY], v[A], &w);
}

static void layernorm_ref(double *y, const struct scene *s)
{
    ref_layernorm(y, s->t[A].d, s->t[W].d, s->t[B].d, s->t[A].v.rows,
                  s->t[A].v.cols);
}

static struct iz_rmsnorm rmsnorm_of(const struct iz_view *v, const void *arg)
{
    const struct norm *n = arg;
    struct iz_rmsnorm w = {v[W], v[DW], v[RSTD], EPS};

    w.w.dtype = n->weights;
    return w;
}

static void rmsnorm_forward(struct iz_exec *x, const struct iz_view *v,
                            const void *arg)
{
    struct iz_rmsnorm w = rmsnorm_of(v, arg);

    iz_rmsnorm_fwd(x, v[Y], v[A], &w);
}

static void rmsnorm_again(struct iz_exec *x, const struct iz_view *v,
                          const void *arg)
{
    struct iz_rmsnorm w = rmsnorm_of(v, arg);

    iz_rmsnorm_again(x, v[DX], v[A], &w);
}

static void rmsnorm_backward(struct iz_exec *x, const struct iz_view *v,
                             const void *arg)
{
    const struct norm *n = arg;
    struct iz_rmsnorm w = rmsnorm_of(v, arg);

    iz_rmsnorm_bwd(x, v[place_of(n->place)], n->place == NO_R ? IZ_NONE : v[R],
                   v[DY], v[A], &w);
}

static void rmsnorm_ref(double *y, const struct scene *s)
{
    ref_rmsnorm(y, s->t[A].d, s->t[W].d, s->t[A].v.rows, s->t[A].v.cols,
                (double)EPS);
}

static void rmsnorm_gradient(double *dx, double *dw, double *db,
                             const double *a, const double *dy, const double *w,
                             int64_t c)
{
    ref_rmsnorm_gradient(dx, dw, a, dy, w, c, (double)EPS);
}

static struct kind layernorm = {
    "layernorm of bf16 with weights of fp32",
    layernorm_forward,
    layernorm_again,
    layernorm_backward,
    layernorm_ref,
    ref_layernorm_gradient,
    4e-6,
    1u << W | 1u << B,
    1u << DW | 1u << DB,
    1u << MEAN | 1u << RSTD,
};
static struct kind rmsnorm = {"rmsnorm of bf16 with weights of fp32",
                              rmsnorm_forward,
                              rmsnorm_again,
                              rmsnorm_backward,
                              rmsnorm_ref,
                              rmsnorm_gradient,
                              2e-6,
                              1u << W,
                              1u << DW,
                              1u << RSTD};

static void run_forward(struct norm *n)
{
    scene_run(&n->s, n->kind->forward, n, bit(A) | n->kind->weights,
              bit(Y) | n->kind->kept);
}

static void run_backward(struct norm *n, enum place place)
{
    n->place = place;
    scene_run(&n->s, n->kind->backward, n,
              bit(A) | bit(W) | bit(R) | bit(DY) | n->kind->kept,
              bit(place_of(place)) | n->kind->sums);
}

/* Writes dx, whether or not with r; adds to dw and db. */
static void gradients(const struct norm *n, bool with_r, double *dx, double *dw,
                      double *db)
{
    const struct tensor *t = n->s.t;
    int64_t m = t[A].v.rows, c = t[A].v.cols;

    for (int64_t i = 0; i < m; i++)
        n->kind->gradient(dx + i * c, dw, db, t[A].d + i * c, t[DY].d + i * c,
                          t[W].d, c);
    for (int64_t i = 0; with_r && i < m * c; i++)
        dx[i] += t[R].d[i];
}

/* A short row may have elements that nearly agree, which loses digits. */
static void check_backward(struct norm *n, enum place place)
{
    struct tensor *t = n->s.t;
    size_t m = (size_t)t[A].v.rows, c = (size_t)t[A].v.cols;
    double *dx = calloc(m * c, 8), *dw = calloc(c, 8), *db = calloc(c, 8);
    double tol = c < 64 ? 2e-5 : 2e-6;

    run_backward(n, place);
    gradients(n, place != NO_R, dx, dw, db);
    fixture_close("dx", &t[DX], dx, tol);
    if (!(n->s.unwanted & bit(DW)))
        fixture_close("dw", &t[DW], dw, tol);
    if (n->kind->sums & ~n->s.unwanted & bit(DB))
        fixture_close("db", &t[DB], db, tol);
    free(dx);
    free(dw);
    free(db);
}

/* After a run with dx in memory of its own: the same bits, of dw and db too. */
static void check_in_place(struct norm *n, enum place place)
{
    struct tensor *t = n->s.t, dw = tensor_copy(&t[DW]);
    struct tensor db = tensor_copy(&t[DB]);

    run_backward(n, place);
    fixture_same_bits("dx in place", t[place_of(place)].v, t[DX].v);
    fixture_same_bits("dw, dx in place", t[DW].v, dw.v);
    fixture_same_bits("db, dx in place", t[DB].v, db.v);
    tensor_store(&t[place_of(place)]);
    tensor_free(&dw);
    tensor_free(&db);
}

static void check_norm(const struct kind *k, enum iz_dtype param, int64_t m,
                       int64_t c)
{
    struct norm n = norm_new(k, param, m, c, 3);
    double *y = calloc((size_t)(m * c), sizeof(*y));

    k->ref(y, &n.s);
    run_forward(&n);
    fixture_close("y", &n.s.t[Y], y, k->tol);
    scene_run(&n.s, k->again, &n, bit(A) | k->weights | k->kept, bit(DX));
    fixture_same_bits("y again", n.s.t[DX].v, n.s.t[Y].v);
    check_backward(&n, FRESH);
    /* emulated, large ones would take long */
    if (!backend.become || m * c < 50000 || m == 300) {
        check_in_place(&n, IN_R);
        check_in_place(&n, IN_DY);
        check_backward(&n, NO_R);
    }
    scene_free(&n.s);
    free(y);
}

/* Rows of half a warp, a warp and a block, one to four pieces per thread, rows
 * too long for that, with pieces of one element and of 16 bytes; one part per
 * row and many rows per part.  Then the widths of blocks of 0.5B to 14B. */
static void norm_agrees_with_reference(void **state)
{
    static const int64_t size[][2] = {
        {1, 1},     {3, 3},      {7, 7},      {2, 16},     {5, 17},
        {1, 33},    {33, 5},     {2, 100},    {33, 8},     {300, 3},
        {33, 384},  {35, 128},   {2, 1000},   {1, 1001},   {3, 1537},
        {1, 4104},  {33, 4104},  {33, 64},    {2500, 8},   {4300, 8},
        {2500, 5},  {2, 8200},   {5, 2048},   {3, 250},    {300, 90},
        {300, 40},  {300, 1000}, {2200, 136}, {540, 1104}, {3, 2568},
        {700, 896}, {700, 1600}, {129, 2048}, {300, 4096}, {129, 5120}};
    enum { LARGE = 5 };
    int n = sizeof(size) / sizeof(size[0]) - (backend.large ? 0 : LARGE);

    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (int i = 0; i < n; i++)
            check_norm(*state, fixture_types[t], size[i][0], size[i][1]);
}

/* Without dw, without db, without both: the other results do not change. */
static void norm_leaves_out_unwanted_gradients(void **state)
{
    static const int64_t width[] = {40, 104, 200, 1000};
    const struct kind *k = *state;

    fixture_seed();
    for (int i = 0; i < 3 * 4; i++) {
        struct norm n = norm_new(k, IZ_BF16, 40, width[i / 3], 1);

        run_forward(&n);
        n.s.unwanted = (i % 3 != 1 ? bit(DW) : 0) | (i % 3 ? bit(DB) : 0);
        check_backward(&n, FRESH);
        scene_free(&n.s);
    }
}

/* Constant, tiny and subnormal rows give b; a huge mean loses no more digits
 * than fp32 has; NaN and infinity stay in their row and are not hidden. */
static void check_specials(const struct kind *k, int64_t c)
{
    enum { M = 6 };
    struct norm n = norm_new(k, IZ_F32, M, c, 1);
    struct tensor *t = n.s.t;
    double *y = calloc((size_t)(M * c), sizeof(*y));

    for (int64_t j = 0; j < c; j++) {
        t[A].d[j] = 0;
        t[A].d[c + j] = 7;
        t[A].d[2 * c + j] *= 1e-42;
        t[A].d[3 * c + j] *= 1e15;
    }
    tensor_store(&t[A]);
    k->ref(y, &n.s);
    run_forward(&n);
    fixture_close("y", &t[Y], y, k->tol);
    t[A].d[4 * c + c / 2] = NAN;
    t[A].d[5 * c + c - 1] = INFINITY;
    tensor_store(&t[A]);
    run_forward(&n);
    run_backward(&n, NO_R);
    tensor_load(&t[Y]);
    tensor_load(&t[DX]);
    for (int64_t i = 0; i < M * c; i++)
        assert_true(i / c == 5 || isnan(t[Y].d[i]) == (i / c == 4));
    for (int64_t i = 0; i < 5 * c; i++)
        assert_true(i / c == 4 ? isnan(t[DX].d[i]) : isfinite(t[DX].d[i]));
    assert_true(isnan(t[Y].d[6 * c - 1]));
    for (int64_t j = 0; k == &layernorm && j < c; j++)
        assert_true(isnan(t[Y].d[5 * c + j]));
    free(y);
    scene_free(&n.s);
}

static void norm_survives_adversarial_values(void **state)
{
    fixture_seed();
    check_specials(*state, 19);
    check_specials(*state, 64);
    check_specials(*state, 1200);
}

static const struct kind *mixed;

static void mix_types(void)
{
    struct norm n = norm_new(mixed, IZ_BF16, 2, 8, 1);

    n.weights = IZ_F32;
    run_forward(&n);
}

static void norm_refuses_weights_of_another_type(void **state)
{
    if (backend.x.backend == IZ_CPU)
        skip();
    mixed = *state;
    scene_dies(mix_types, mixed->mixed);
}

/* ---- GELU --------------------------------------------------------------- */

enum { G_A, G_DY, G_Y, G_DU, GELU_TENSORS };

static void gelu_forward(struct iz_exec *x, const struct iz_view *v,
                         const void *arg)
{
    iz_gelu_fwd(x, v[G_Y], v[G_A]);
}

static void gelu_backward(struct iz_exec *x, const struct iz_view *v,
                          const void *arg)
{
    iz_gelu_bwd(x, v[G_DU], v[G_Y], v[G_DY], v[G_A]);
}

static void gelu_in_place(struct iz_exec *x, const struct iz_view *v,
                          const void *arg)
{
    iz_gelu_bwd(x, v[G_DY], v[G_A], v[G_DY], v[G_A]);
}

/* Views that begin between pieces of 16 bytes. */
static void gelu_odd(struct iz_exec *x, const struct iz_view *v,
                     const void *arg)
{
    int64_t n = v[G_A].rows - 1;

    iz_gelu_fwd(x, iz_view_rows(v[G_Y], 0, n), iz_view_rows(v[G_A], 1, n));
}

static struct scene gelu_new(enum iz_dtype act, int64_t m, int64_t c,
                             double scale)
{
    return (struct scene){
        .n = GELU_TENSORS,
        .t = {tensor_new(act, m, c, scale), tensor_new(act, m, c, 1),
              tensor_new(act, m, c, 1), tensor_new(act, m, c, 1)}};
}

/* Every value of the CPU to its own size.  The argument of the exponential is
 * rounded to fp32; the reference loses 1 + tanh below -8. */
static void check_gelu_each(const struct scene *s)
{
    const struct tensor *t = s->t;

    for (int64_t i = 0; i < iz_view_len(t[G_A].v); i++) {
        double a = t[G_A].d[i], want = ref_gelu(a), dy = t[G_DY].d[i];
        double tol = 1e-6 * fabs(want) * fmax(1, fabs(a * a * a));
        double slope = fabs(a) > 1e5 ? a > 0 : ref_gelu_gradient(a);

        tol = fmin(tol, 1e-6 * fabs(a)) + 1e-15 * fabs(a) + (double)FLT_MIN;
        if (!(fabs(t[G_Y].d[i] - want) <= tol))
            fail_msg("gelu(%.9g) is %.9g, not %.9g", a, t[G_Y].d[i], want);
        if (!(fabs(t[G_DU].d[i] - slope * dy) <= 2e-6 * fabs(dy)))
            fail_msg("gelu'(%.9g) %.9g is %.9g, not %.9g", a, dy, t[G_DU].d[i],
                     slope * dy);
    }
}

static void check_gelu(struct scene *s)
{
    struct tensor *t = s->t;
    int64_t n = iz_view_len(t[G_A].v);
    unsigned in = bit(G_A) | bit(G_DY);
    double *y = calloc((size_t)n, 8), *du = calloc((size_t)n, 8);
    double tol = backend.device ? 1e-6 : 5e-7;

    for (int64_t i = 0; i < n; i++) {
        y[i] = ref_gelu(t[G_A].d[i]);
        du[i] = t[G_DY].d[i] * ref_gelu_gradient(t[G_A].d[i]);
    }
    scene_run(s, gelu_forward, NULL, bit(G_A), bit(G_Y));
    fixture_close("gelu", &t[G_Y], y, tol);
    struct tensor first = tensor_copy(&t[G_Y]);
    scene_run(s, gelu_backward, NULL, in, bit(G_Y) | bit(G_DU));
    fixture_close("gelu again", &t[G_Y], y, tol);
    fixture_close("du", &t[G_DU], du, 2e-6);
    if (backend.x.backend == IZ_CPU) {
        fixture_same_bits("gelu again", t[G_Y].v, first.v);
        check_gelu_each(s);
    }
    scene_run(s, gelu_in_place, NULL, in, in);
    fixture_same_bits("gelu in place", t[G_A].v, t[G_Y].v);
    fixture_same_bits("du in place", t[G_DY].v, t[G_DU].v);
    tensor_free(&first);
    free(y);
    free(du);
}

static void gelu_agrees_with_reference(void **state)
{
    static const int64_t size[][2] = {
        {1, 1},  {1, 3}, {1, 7},    {1, 8},     {1, 17},   {3, 3},
        {1, 33}, {5, 9}, {1, 1000}, {33, 1001}, {2, 1024}, {301, 6400}};
    enum { LARGE = 1 };
    int n = sizeof(size) / sizeof(size[0]) - (backend.large ? 0 : LARGE);

    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (int i = 0; backend_acts(fixture_types[t]) && i < n; i++)
            for (double scale = i < 9 ? 6e-3 : 6; scale < 100; scale *= 10) {
                struct scene s =
                    gelu_new(fixture_types[t], size[i][0], size[i][1], scale);

                check_gelu(&s);
                scene_free(&s);
            }
}

static void gelu_works_unaligned(void **state)
{
    fixture_seed();
    for (int t = 0; t < 3; t++) {
        struct scene s = gelu_new(backend.act(fixture_types[t]), 100, 1, 6);

        scene_run(&s, gelu_odd, NULL, bit(G_A), bit(G_Y));
        tensor_load(&s.t[G_Y]);
        for (int i = 0; i < 99; i++)
            assert_true(fabs(s.t[G_Y].d[i] - ref_gelu(s.t[G_A].d[i + 1])) <
                        0x1p-7 * 6);
        scene_free(&s);
    }
}

static void gelu_survives_adversarial_values(void **state)
{
    static const double value[] = {
        0,    -0.,   1e-45, -1e-40, 1e-30, 11.99, 12.01, -12, -9.5, 50,    -50,
        1e15, -1e15, 3e38,  -3e38,  5,     -5,    -1e30, 12,  1e30, -1e-42};
    enum { N = sizeof(value) / sizeof(value[0]) };
    struct scene s;

    fixture_seed();
    s = gelu_new(IZ_F32, 1, N, 1);
    memcpy(s.t[G_A].d, value, sizeof(value));
    tensor_store(&s.t[G_A]);
    scene_run(&s, gelu_backward, NULL, bit(G_A) | bit(G_DY),
              bit(G_Y) | bit(G_DU));
    tensor_load(&s.t[G_Y]);
    tensor_load(&s.t[G_DU]);
    if (backend.x.backend == IZ_CPU)
        check_gelu_each(&s);
    for (int i = 0; i < N; i++) {
        double a = s.t[G_A].d[i], y = fabs(a) < 20 ? ref_gelu(a) : fmax(a, 0);

        assert_true(isfinite(s.t[G_DU].d[i]));
        assert_true(fabs(s.t[G_Y].d[i] - y) <= 1e-6 * fabs(y) + 1e-7);
    }
    s.t[G_A].d[0] = NAN;
    s.t[G_A].d[1] = INFINITY;
    tensor_store(&s.t[G_A]);
    scene_run(&s, gelu_backward, NULL, bit(G_A) | bit(G_DY),
              bit(G_Y) | bit(G_DU));
    tensor_load(&s.t[G_Y]);
    tensor_load(&s.t[G_DU]);
    assert_true(isnan(s.t[G_Y].d[0]) && isnan(s.t[G_DU].d[0]));
    assert_true(isinf(s.t[G_Y].d[1]) && isfinite(s.t[G_Y].d[2]));
    scene_free(&s);
}

static int norm_cases(const char *name, struct kind *k)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_prestate(norm_agrees_with_reference, k),
        cmocka_unit_test_prestate(norm_leaves_out_unwanted_gradients, k),
        cmocka_unit_test_prestate(norm_survives_adversarial_values, k),
        cmocka_unit_test_prestate(norm_refuses_weights_of_another_type, k),
    };

    return cmocka_run_group_tests_name(name, tests, NULL, NULL);
}

int ops_rows(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gelu_agrees_with_reference),
        cmocka_unit_test(gelu_works_unaligned),
        cmocka_unit_test(gelu_survives_adversarial_values),
    };

    return norm_cases("layernorm", &layernorm) +
           norm_cases("rmsnorm", &rmsnorm) +
           cmocka_run_group_tests_name("gelu", tests, NULL, NULL);
}
