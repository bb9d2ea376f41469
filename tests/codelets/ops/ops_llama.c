/* SPDX-License-Identifier: Apache-2.0 */
/* Root-mean-square normalisation, rotary positions and the gated unit of the
 * Llama family against the reference. */
#include "tests/codelets/ops/args.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/ops/rope.h"
#include "tests/codelets/ops/reference.h"

#define EPS NORM_EPS

/* ---- rmsnorm ------------------------------------------------------------ */

static double norm_objective(void *arg)
{
    struct norm *n = arg;
    int64_t len = iz_view_len(n->a.v);
    double r = n->residual.rows ? fixture_dot(n->a.d, n->r.d, len) : 0;

    ref_rmsnorm(n->out, n->a.d, n->w.d, n->a.v.rows, n->a.v.cols, (double)EPS);
    return r + fixture_dot(n->out, n->dy.d, len);
}

/* df/din against central differences. */
static void check_gradient(const char *what, struct tensor *got,
                           double (*f)(void *), void *arg, double *in)
{
    int64_t len = iz_view_len(got->v);
    double *want = calloc((size_t)len, sizeof *want);

    ref_gradient(want, f, arg, in, len);
    fixture_close(what, got, want, 2e-5);
    free(want);
}

static void check_norm(enum iz_dtype t, int64_t m, int64_t c)
{
    struct norm n = norm_new(IZ_F32, t, m, c, 3);

    norm_objective(&n);
    fixture_run(rmsnorm_forward, &n);
    fixture_close("y", &n.y, n.out, 2e-6);
    fixture_run(rmsnorm_again, &n);
    fixture_same_bits("y again", n.dx.v, n.y.v);
    for (int with = 0; with < 2; with++) {
        n.residual = with ? n.r.v : IZ_NONE;
        fixture_run(rmsnorm_backward, &n);
        check_gradient("dx", &n.dx, norm_objective, &n, n.a.d);
        check_gradient("dw", &n.dw, norm_objective, &n, n.w.d);
    }
    norm_free(&n);
}

static void rmsnorm_agrees_with_reference(void **state)
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
static void rmsnorm_backward_works_in_place(void **state)
{
    struct norm n;

    (void)state;
    fixture_seed();
    n = norm_new(IZ_F32, IZ_F32, 5, 37, 1);
    fixture_run(rmsnorm_forward, &n);
    fixture_run(rmsnorm_backward, &n);
    norm_place(&n, DX_IN_R);
    fixture_run(rmsnorm_backward, &n);
    fixture_same_bits("dx in r", n.r.v, n.dx.v);
    norm_place(&n, DX_NO_R);
    fixture_run(rmsnorm_backward, &n);
    n.into = n.dy.v;
    fixture_run(rmsnorm_backward, &n);
    fixture_same_bits("dx in dy", n.dy.v, n.dx.v);
    norm_free(&n);
}

/* Rows of zeros and of subnormal numbers stay finite, large ones keep their
 * digits; NaN and infinity stay in their row and are not hidden. */
static void rmsnorm_survives_adversarial_values(void **state)
{
    enum { M = 5, C = 19 };
    struct norm n;

    (void)state;
    fixture_seed();
    n = norm_new(IZ_F32, IZ_F32, M, C, 1);
    for (int j = 0; j < C; j++) {
        n.a.d[j] = 0;
        n.a.d[2 * C + j] *= 1e-42;
        n.a.d[3 * C + j] *= 1e15;
    }
    tensor_store(&n.a);
    norm_objective(&n);
    fixture_run(rmsnorm_forward, &n);
    fixture_close("y", &n.y, n.out, 2e-6);
    n.a.d[2 * C + 3] = NAN;
    n.a.d[4 * C + 3] = INFINITY;
    tensor_store(&n.a);
    fixture_run(rmsnorm_forward, &n);
    fixture_run(rmsnorm_backward, &n);
    tensor_load(&n.y);
    tensor_load(&n.dx);
    assert_true(isnan(n.y.d[2 * C]) && isnan(n.dx.d[2 * C]));
    assert_true(isnan(n.y.d[4 * C + 3]) && isfinite(n.y.d[3 * C]));
    assert_true(isfinite(n.dx.d[0]) && isfinite(n.dx.d[3 * C]));
    norm_free(&n);
}

/* ---- heads of a row ----------------------------------------------------- */

struct heads {
    struct tensor a, before, kept, w, dw, rstd, da, dy;
    struct iz_rmsnorm n;
    int64_t first;
    double *out;
};

static struct tensor copy_of(const struct tensor *from)
{
    struct tensor t = tensor_new(from->v.dtype, from->v.rows, from->v.cols, 1);

    memcpy(t.v.p, from->v.p, (size_t)iz_view_bytes(t.v));
    tensor_load(&t);
    return t;
}

/* `heads` of c columns from `first` on in rows of ld. */
static struct heads heads_new(enum iz_dtype t, int64_t m, int64_t ld,
                              int64_t first, int64_t heads, int64_t c)
{
    struct heads h = {
        .a = tensor_new(IZ_F32, m, ld, 2),
        .kept = tensor_new(IZ_F32, m, heads * c, 1),
        .w = tensor_new(t, 1, c, 1),
        .dw = tensor_new(t, 1, c, 1),
        .rstd = tensor_new(IZ_F32, m, heads, 1),
        .dy = tensor_new(IZ_F32, m, ld, 1),
        .first = first,
    };

    h.before = copy_of(&h.a);
    h.da = copy_of(&h.dy);
    h.n = (struct iz_rmsnorm){h.w.v, h.dw.v, h.rstd.v, EPS};
    h.out = calloc((size_t)(m * ld), sizeof *h.out);
    return h;
}

static void heads_free(struct heads *h)
{
    struct tensor *all[] = {&h->a,  &h->before, &h->kept, &h->w,
                            &h->dw, &h->rstd,   &h->da,   &h->dy};

    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        tensor_free(all[i]);
    free(h->out);
}

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

static double heads_objective(void *arg)
{
    struct heads *h = arg;
    int64_t ld = h->a.v.cols, m = h->a.v.rows, c = h->w.v.cols;

    memcpy(h->out, h->before.d, (size_t)(m * ld) * sizeof *h->out);
    for (int64_t i = 0; i < m; i++) {
        double *row = h->out + i * ld + h->first;

        ref_rmsnorm(row, row, h->w.d, h->kept.v.cols / c, c, (double)EPS);
    }
    return fixture_dot(h->out, h->dy.d, m * ld);
}

static void check_kept(const struct heads *h)
{
    int64_t n = h->kept.v.cols;

    for (int64_t i = 0; i < h->a.v.rows; i++)
        assert_memory_equal((float *)h->kept.v.p + i * n,
                            (float *)h->before.v.p + i * h->a.v.cols + h->first,
                            (size_t)n * sizeof(float));
}

static void headnorm_agrees_with_reference(void **state)
{
    /* m, ld, first, heads, c */
    static const int64_t size[][5] = {{1, 2, 0, 1, 2},
                                      {3, 30, 0, 3, 7},
                                      {5, 60, 17, 2, 17},
                                      {2, 64, 32, 1, 32}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < sizeof size / sizeof size[0]; i++) {
            const int64_t *s = size[i];
            struct heads h =
                heads_new(fixture_types[t], s[0], s[1], s[2], s[3], s[4]);

            heads_objective(&h);
            fixture_run(heads_forward, &h);
            /* The dry run is followed by one run. */
            fixture_close("a", &h.a, h.out, 2e-6);
            check_kept(&h);
            fixture_run(heads_backward, &h);
            check_gradient("da", &h.da, heads_objective, &h, h.before.d);
            check_gradient("dw", &h.dw, heads_objective, &h, h.w.d);
            heads_free(&h);
        }
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
static void check_rope(struct iz_rope r, int64_t samples, int64_t more)
{
    struct rope t = {.r = r};
    int64_t m = samples * r.seq, ld = (int64_t)r.heads * r.d + more;
    double *want = calloc((size_t)(m * ld), sizeof *want);
    struct tensor before;

    t.a = tensor_new(IZ_F32, m, ld, 1);
    before = copy_of(&t.a);
    memcpy(want, before.d, (size_t)(m * ld) * sizeof *want);
    ref_rope(want, m, ld, &r, false);
    fixture_run(rope_run, &t);
    fixture_close("turned", &t.a, want, 6e-7);
    t.back = true;
    fixture_run(rope_run, &t);
    fixture_close("turned back", &t.a, before.d, 6e-7);
    free(want);
    tensor_free(&t.a);
    tensor_free(&before);
}

static const struct iz_rope llama3 = {.seq = 37,
                                      .heads = 3,
                                      .d = 64,
                                      .theta = 500000,
                                      .factor = 32,
                                      .low_freq_factor = 1,
                                      .high_freq_factor = 4,
                                      .original_seq = 8192};

static void rope_agrees_with_reference(void **state)
{
    struct iz_rope r = {
        .seq = 5, .heads = 1, .d = 2, .theta = 1e4, .factor = 1};

    (void)state;
    fixture_seed();
    check_rope(r, 3, 0);
    r = (struct iz_rope){
        .seq = 19, .heads = 3, .d = 6, .theta = 10, .factor = 1};
    check_rope(r, 2, 7);
    r = (struct iz_rope){
        .seq = 1, .heads = 2, .d = 256, .theta = 1e6, .factor = 1};
    check_rope(r, 4, 1);
    check_rope(llama3, 2, 64);
}

/* The last positions of a long context are as exact as the first. */
static void rope_is_exact_far_away(void **state)
{
    struct iz_rope r = llama3;

    (void)state;
    fixture_seed();
    r.seq = 131072;
    r.heads = 1;
    r.d = 8;
    check_rope(r, 1, 0);
}

/* Each of the three cases of the scaling occurs, and the frequencies are those
 * that are usually written by wavelengths. */
static void rope_scaling_is_that_of_llama_3(void **state)
{
    struct iz_rope_turns turns;
    int kept = 0, divided = 0;

    (void)state;
    iz_rope_turns_of(&turns, &llama3);
    for (int i = 0; i < llama3.d / 2; i++) {
        double want = ref_rope_frequency(&llama3, i) / (2 * M_PI);
        double plain = pow(llama3.theta, -2. * i / llama3.d) / (2 * M_PI);

        assert_true(fabs(turns.f[i] - want) < 1e-13 * want);
        kept += fabs(turns.f[i] - plain) < 1e-13 * plain;
        divided += fabs(turns.f[i] - plain / 32) < 1e-13 * plain;
    }
    assert_true(kept > 0 && divided > 0 && kept + divided < llama3.d / 2);
}

/* ---- swiglu ------------------------------------------------------------- */

/* Element j of row i: y to its own size, gradients to that of dy. */
static void check_swiglu_at(const struct swiglu *s, int64_t i, int64_t j)
{
    int64_t f = s->y.v.cols;
    double g = s->a.d[i * 2 * f + j], u = s->a.d[i * 2 * f + f + j];
    double dy = s->dy.d[i * f + j], h = 1e-5 * fmax(1, fabs(g));
    double y = ref_swiglu(g, u);
    double dg = (ref_swiglu(g + h, u) - ref_swiglu(g - h, u)) / (2 * h) * dy;
    double size = fabs(dy) * fmax(1, fabs(u));

    if (!(fabs(s->y.d[i * f + j] - y) <=
          1e-6 * fabs(y) * fmax(1, fabs(g)) + 1e-25))
        fail_msg("swiglu(%.9g, %.9g) is %.9g, not %.9g", g, u,
                 s->y.d[i * f + j], y);
    if (!(fabs(s->da.d[i * 2 * f + j] - dg) <= 2e-6 * size))
        fail_msg("d/dg swiglu(%.9g, %.9g) is %.9g, not %.9g", g, u,
                 s->da.d[i * 2 * f + j], dg);
    if (!(fabs(s->da.d[i * 2 * f + f + j] - ref_swiglu(g, dy)) <=
          1e-6 * fabs(dy) * fmax(1, fabs(g))))
        fail_msg("d/du swiglu(%.9g, %.9g) is %.9g", g, u,
                 s->da.d[i * 2 * f + f + j]);
}

static void check_swiglu(struct swiglu *s)
{
    struct tensor first = s->y;

    fixture_run(swiglu_forward, s);
    s->y = tensor_new(IZ_F32, first.v.rows, first.v.cols, 1);
    fixture_run(swiglu_backward, s);
    fixture_same_bits("swiglu again", s->y.v, first.v);
    tensor_load(&s->y);
    tensor_load(&s->da);
    for (int64_t i = 0; i < s->y.v.rows; i++)
        for (int64_t j = 0; j < s->y.v.cols; j++)
            check_swiglu_at(s, i, j);
    tensor_free(&first);
}

static void swiglu_agrees_with_reference(void **state)
{
    static const int64_t size[][2] = {{1, 1}, {3, 3}, {7, 17}, {2, 300}};

    (void)state;
    fixture_seed();
    for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
        for (double scale = 1e-3; scale < 100; scale *= 10) {
            struct swiglu s = swiglu_new(IZ_F32, size[i][0], size[i][1], scale);

            check_swiglu(&s);
            swiglu_free(&s);
        }
}

/* da in a and y in dy: the same bits. */
static void swiglu_backward_works_in_place(void **state)
{
    struct swiglu s, in;

    (void)state;
    fixture_seed();
    s = swiglu_new(IZ_F32, 5, 301, 4);
    fixture_run(swiglu_backward, &s);
    in = s;
    in.da = in.a;
    in.y = in.dy;
    fixture_run(swiglu_backward, &in);
    fixture_same_bits("da in a", s.a.v, s.da.v);
    fixture_same_bits("y in dy", s.dy.v, s.y.v);
    swiglu_free(&s);
}

static void swiglu_survives_adversarial_values(void **state)
{
    static const double gate[] = {0,    -0.,  1e-45, -1e-40, 88.7,  -88.7, 120,
                                  -120, 1e30, -1e30, 3e38,   -3e38, -69,   16};
    enum { N = sizeof gate / sizeof gate[0] };
    struct swiglu s;

    (void)state;
    fixture_seed();
    s = swiglu_new(IZ_F32, 1, N, 1);
    memcpy(s.a.d, gate, sizeof gate);
    tensor_store(&s.a);
    check_swiglu(&s);
    s.a.d[0] = NAN;
    s.a.d[1] = INFINITY;
    s.a.d[N + 2] = NAN;
    tensor_store(&s.a);
    fixture_run(swiglu_backward, &s);
    tensor_load(&s.y);
    tensor_load(&s.da);
    assert_true(isnan(s.y.d[0]) && isnan(s.da.d[0]) && isnan(s.da.d[N]));
    assert_true(isinf(s.y.d[1]) && isnan(s.y.d[2]) && isnan(s.da.d[2]));
    assert_true(isfinite(s.y.d[3]) && isfinite(s.da.d[1]));
    swiglu_free(&s);
}

int ops_llama(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rmsnorm_agrees_with_reference),
        cmocka_unit_test(rmsnorm_backward_works_in_place),
        cmocka_unit_test(rmsnorm_survives_adversarial_values),
        cmocka_unit_test(headnorm_agrees_with_reference),
        cmocka_unit_test(rope_agrees_with_reference),
        cmocka_unit_test(rope_is_exact_far_away),
        cmocka_unit_test(rope_scaling_is_that_of_llama_3),
        cmocka_unit_test(swiglu_agrees_with_reference),
        cmocka_unit_test(swiglu_backward_works_in_place),
        cmocka_unit_test(swiglu_survives_adversarial_values),
    };

    return cmocka_run_group_tests_name("llama", tests, NULL, NULL);
}
