/* SPDX-License-Identifier: Apache-2.0 */
/* Normalisation of heads, rotary positions and the gated unit of the Llama
 * family. */
#include "tests/codelets/ops/scene.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/ops/ops.h"
#include "tests/codelets/ops/reference.h"

#define EPS 1e-5f

/* ---- heads of a row ----------------------------------------------------- */

enum { A, KEPT, W, DW, RSTD, HEAD_TENSORS };

/* m rows of ld columns: `heads` of c from column `first` on. */
struct heads {
    int64_t m, ld, first, heads, c;
};

static void heads_forward(struct iz_exec *x, const struct iz_view *v,
                          const void *arg)
{
    const struct heads *h = arg;
    struct iz_rmsnorm n = {v[W], v[DW], v[RSTD], EPS};

    iz_headnorm_fwd(x, v[A], v[KEPT], &n, h->first);
}

/* A: the gradient. */
static void heads_backward(struct iz_exec *x, const struct iz_view *v,
                           const void *arg)
{
    const struct heads *h = arg;
    struct iz_rmsnorm n = {v[W], v[DW], v[RSTD], EPS};

    iz_headnorm_bwd(x, v[A], v[KEPT], &n, h->first);
}

/* Both passes in double: the result, and its gradients. */
static void heads_double(const struct heads *h, const double *w, double *y,
                         double *da, double *dw)
{
    for (int64_t i = 0; i < h->m * h->heads; i++) {
        int64_t at = i / h->heads * h->ld + h->first + i % h->heads * h->c;
        double *dy = calloc((size_t)h->c, 8);

        memcpy(dy, da + at, (size_t)h->c * 8);
        ref_rmsnorm_gradient(da + at, dw, y + at, dy, w, h->c, (double)EPS);
        ref_rmsnorm(y + at, y + at, w, 1, h->c, (double)EPS);
        free(dy);
    }
}

static void check_heads(enum iz_dtype param, const struct heads *h)
{
    enum iz_dtype act = backend.act(param);
    struct scene s = {.n = HEAD_TENSORS,
                      .t = {[A] = tensor_new(act, h->m, h->ld, 2),
                            [KEPT] = tensor_new(act, h->m, h->heads * h->c, 1),
                            [W] = tensor_new(param, 1, h->c, 1),
                            [DW] = tensor_new(param, 1, h->c, 1),
                            [RSTD] = tensor_new(IZ_F32, h->m, h->heads, 1)}};
    struct tensor dy = tensor_new(act, h->m, h->ld, 1), a = s.t[A];
    struct tensor y = tensor_copy(&a), da = tensor_copy(&dy);
    double *dw = calloc((size_t)h->c, 8);

    heads_double(h, s.t[W].d, y.d, da.d, dw);
    s.t[A] = tensor_copy(&a);
    scene_run(&s, heads_forward, h, bit(A) | bit(W),
              bit(A) | bit(KEPT) | bit(RSTD));
    fixture_close("a", &s.t[A], y.d, 2e-6);
    for (int64_t i = 0; i < h->m; i++)
        assert_memory_equal(iz_view_rows(s.t[KEPT].v, i, 1).p,
                            (char *)iz_view_rows(a.v, i, 1).p +
                                h->first * iz_dtype_bytes(act),
                            (size_t)(h->heads * h->c * iz_dtype_bytes(act)));
    tensor_free(&s.t[A]);
    s.t[A] = dy;
    scene_run(&s, heads_backward, h, bit(A) | bit(KEPT) | bit(W) | bit(RSTD),
              bit(A) | bit(DW));
    fixture_close("da", &s.t[A], da.d, h->c < 64 ? 2e-5 : 2e-6);
    /* a sum of thousands of rows, on a CPU one after the other */
    fixture_close("dw", &s.t[DW], dw,
                  h->c < 64 || h->m * h->heads > 1000 ? 2e-5 : 2e-6);
    scene_free(&s);
    tensor_free(&a);
    tensor_free(&y);
    tensor_free(&da);
    free(dw);
}

/* The heads of Qwen 3, and pieces that begin between 16 bytes. */
static void headnorm_agrees_with_reference(void **state)
{
    static const struct heads size[] = {
        {1, 2, 0, 1, 2},         {3, 30, 0, 3, 7},
        {5, 60, 17, 2, 17},      {2, 64, 32, 1, 32},
        {1, 64, 0, 1, 64},       {5, 1024, 512, 2, 128},
        {19, 1024, 0, 4, 128},   {3, 303, 101, 2, 100},
        {300, 48, 16, 1, 32},    {2, 2001, 3, 2, 999},
        {300, 4096, 0, 16, 128}, {300, 4096, 2048, 8, 128}};
    enum { LARGE = 2 };
    int n = sizeof(size) / sizeof(size[0]) - (backend.large ? 0 : LARGE);

    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (int i = 0; i < n; i++)
            check_heads(fixture_types[t], &size[i]);
}

/* ---- rope --------------------------------------------------------------- */

struct turn {
    struct iz_rope r;
    bool back;
};

static void rope_run(struct iz_exec *x, const struct iz_view *v,
                     const void *arg)
{
    const struct turn *t = arg;

    iz_rope(x, v[0], &t->r, t->back);
}

/* A cosine errs by the rounding of its angle and its own, 3e-7 together, 4e-7
 * on a GPU.  Turned back are numbers that have been rounded. */
static void check_rope(enum iz_dtype act, struct iz_rope r, int64_t samples,
                       int64_t more)
{
    int64_t m = samples * r.seq, ld = (int64_t)r.heads * r.d + more;
    struct scene s = {.n = 1, .t = {tensor_new(act, m, ld, 1)}};

    for (int back = 0; back < 2; back++) {
        struct turn t = {r, back};
        struct tensor want = tensor_copy(&s.t[0]);

        tensor_load(&want);
        ref_rope(want.d, m, ld, &r, back);
        scene_run(&s, rope_run, &t, 1, 1);
        fixture_close("turned", &s.t[0], want.d, backend.device ? 8e-7 : 6e-7);
        tensor_free(&want);
    }
    scene_free(&s);
}

static const struct iz_rope llama3 = {37, 3, 64, 5e5, 32, 1, 4, 8192};

static void rope_agrees_with_reference(void **state)
{
    static const struct iz_rope r[] = {
        {5, 1, 2, 1e4, 1, 0, 0, 0},      {19, 3, 6, 10, 1, 0, 0, 0},
        {1, 2, 256, 1e6, 1, 0, 0, 0},    {37, 5, 64, 5e5, 32, 1, 4, 8192},
        {11, 2, 80, 1e4, 1, 0, 0, 0},    {300, 1, 128, 1e4, 8, 1, 4, 64},
        {37, 3, 64, 5e5, 32, 1, 4, 8192}};

    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0;
             backend_acts(fixture_types[t]) && i < sizeof(r) / sizeof(r[0]);
             i++) {
            check_rope(fixture_types[t], r[i], 1 + (int64_t)i % 3, 0);
            check_rope(fixture_types[t], r[i], 2, i % 2 ? 7 : 8);
            check_rope(fixture_types[t], r[i], 1, i % 2 ? 64 : 1);
        }
    if (backend.large)
        check_rope(backend.act(IZ_BF16),
                   (struct iz_rope){300, 40, 128, 5e5, 32, 1, 4, 8192}, 2, 8);
}

/* The last positions of a long context are as exact as the first. */
static void rope_is_exact_far_away(void **state)
{
    struct iz_rope far = {131072, 1, backend.large ? 4 : 2, 5e5, 1, 0, 0, 0};

    fixture_seed();
    check_rope(IZ_F32, far, 1, 0);
    if (backend.x.backend == IZ_CPU) {
        far = llama3;
        far.seq = 131072;
        far.heads = 1;
        far.d = 8;
        check_rope(IZ_F32, far, 1, 0);
    }
}

/* Each of the three cases of the scaling occurs, and the frequencies are those
 * that are usually written by wavelengths. */
static void rope_scaling_is_that_of_llama_3(void **state)
{
    struct iz_rope_turns turns;
    int kept = 0, divided = 0;

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

enum { S_A, S_DY, S_Y, S_DA, S_TENSORS };

static void swiglu_forward(struct iz_exec *x, const struct iz_view *v,
                           const void *arg)
{
    iz_swiglu_fwd(x, v[S_Y], v[S_A]);
}

static void swiglu_backward(struct iz_exec *x, const struct iz_view *v,
                            const void *arg)
{
    iz_swiglu_bwd(x, v[S_DA], v[S_Y], v[S_DY], v[S_A]);
}

static void swiglu_in_place(struct iz_exec *x, const struct iz_view *v,
                            const void *arg)
{
    iz_swiglu_bwd(x, v[S_A], v[S_DY], v[S_DY], v[S_A]);
}

static struct scene swiglu_new(enum iz_dtype act, int64_t m, int64_t f,
                               double scale)
{
    return (struct scene){
        .n = S_TENSORS,
        .t = {tensor_new(act, m, 2 * f, scale), tensor_new(act, m, f, 1),
              tensor_new(act, m, f, 1), tensor_new(act, m, 2 * f, 1)}};
}

/* Element j of row i of the CPU: y to its own size, gradients to that of dy. */
static void check_swiglu_at(const struct scene *s, int64_t i, int64_t j)
{
    int64_t f = s->t[S_Y].v.cols, at = i * 2 * f + j;
    const double *da = s->t[S_DA].d + at;
    double g = s->t[S_A].d[at], u = s->t[S_A].d[at + f];
    double dy = s->t[S_DY].d[i * f + j], h = 1e-5 * fmax(1, fabs(g));
    double y = ref_swiglu(g, u), got = s->t[S_Y].d[i * f + j];
    double dg = (ref_swiglu(g + h, u) - ref_swiglu(g - h, u)) / (2 * h) * dy;

    if (!(fabs(got - y) <= 1e-6 * fabs(y) * fmax(1, fabs(g)) + 1e-25))
        fail_msg("swiglu(%.9g, %.9g) is %.9g, not %.9g", g, u, got, y);
    if (!(fabs(da[0] - dg) <= 2e-6 * fabs(dy) * fmax(1, fabs(u))))
        fail_msg("d/dg swiglu(%.9g, %.9g) is %.9g, not %.9g", g, u, da[0], dg);
    if (!(fabs(da[f] - ref_swiglu(g, dy)) <=
          1e-6 * fabs(dy) * fmax(1, fabs(g))))
        fail_msg("d/du swiglu(%.9g, %.9g) is %.9g", g, u, da[f]);
}

static void check_swiglu_each(struct scene *s)
{
    int64_t f = s->t[S_Y].v.cols;

    tensor_load(&s->t[S_Y]);
    tensor_load(&s->t[S_DA]);
    for (int64_t i = 0; i < iz_view_len(s->t[S_Y].v); i++)
        check_swiglu_at(s, i / f, i % f);
}

static void check_swiglu(struct scene *s)
{
    struct tensor *t = s->t, first;
    unsigned in = bit(S_A) | bit(S_DY);
    int64_t n = iz_view_len(t[S_Y].v), f = t[S_Y].v.cols;
    double *y = calloc((size_t)n, 8), *da = calloc((size_t)(2 * n), 8);

    for (int64_t i = 0; i < n; i++) {
        int64_t at = i / f * 2 * f + i % f;

        y[i] = ref_swiglu(t[S_A].d[at], t[S_A].d[at + f]);
        ref_swiglu_gradient(&da[at], &da[at + f], t[S_A].d[at],
                            t[S_A].d[at + f], t[S_DY].d[i]);
    }
    scene_run(s, swiglu_forward, NULL, bit(S_A), bit(S_Y));
    fixture_close("swiglu", &t[S_Y], y, 1e-6);
    first = tensor_copy(&t[S_Y]);
    scene_run(s, swiglu_backward, NULL, in, bit(S_Y) | bit(S_DA));
    fixture_close("swiglu again", &t[S_Y], y, 1e-6);
    if (backend.x.backend == IZ_CPU)
        fixture_same_bits("swiglu again", t[S_Y].v, first.v);
    fixture_close("da", &t[S_DA], da, backend.device ? 2e-6 : 1e-6);
    if (backend.x.backend == IZ_CPU)
        check_swiglu_each(s);
    scene_run(s, swiglu_in_place, NULL, in, in);
    fixture_same_bits("y in place", t[S_DY].v, t[S_Y].v);
    fixture_same_bits("da in place", t[S_A].v, t[S_DA].v);
    tensor_free(&first);
    free(y);
    free(da);
}

static void swiglu_agrees_with_reference(void **state)
{
    static const int64_t size[][2] = {
        {1, 1},   {3, 3},    {5, 9},     {7, 17},   {2, 300},
        {2, 344}, {3, 2056}, {33, 1001}, {2, 4864}, {101, 14336}};
    enum { LARGE = 2 };
    int n = sizeof(size) / sizeof(size[0]) - (backend.large ? 0 : LARGE);

    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (int i = 0; backend_acts(fixture_types[t]) && i < n; i++)
            for (double scale = i < 5 ? 6e-3 : 6; scale < 100; scale *= 10) {
                struct scene s =
                    swiglu_new(fixture_types[t], size[i][0], size[i][1], scale);

                check_swiglu(&s);
                scene_free(&s);
            }
}

static void swiglu_survives_adversarial_values(void **state)
{
    static const double gate[] = {0,    -0.,  1e-45, -1e-40, 88.7,  -88.7, 120,
                                  -120, 1e30, -1e30, 3e38,   -3e38, -69,   16};
    enum { N = sizeof(gate) / sizeof(gate[0]) };
    unsigned in = bit(S_A) | bit(S_DY), out = bit(S_Y) | bit(S_DA);
    struct scene s;

    fixture_seed();
    s = swiglu_new(IZ_F32, 1, N, 1);
    double *a = s.t[S_A].d, *y = s.t[S_Y].d, *da = s.t[S_DA].d;
    memcpy(a, gate, sizeof(gate));
    tensor_store(&s.t[S_A]);
    scene_run(&s, swiglu_backward, NULL, in, out);
    if (backend.x.backend == IZ_CPU)
        check_swiglu_each(&s);
    a[0] = NAN;
    a[1] = INFINITY;
    a[N + 2] = NAN;
    tensor_store(&s.t[S_A]);
    scene_run(&s, swiglu_backward, NULL, in, out);
    tensor_load(&s.t[S_Y]);
    tensor_load(&s.t[S_DA]);
    assert_true(isnan(y[0]) && isnan(da[0]) && isnan(da[N]));
    assert_true(isinf(y[1]) && isnan(y[2]) && isnan(da[2]));
    assert_true(y[7] == 0 && y[9] == 0 && y[11] == 0);
    for (int i = 3; i < N; i++)
        assert_true(isfinite(y[i]) && isfinite(da[i]) && isfinite(da[N + i]));
    assert_true(isfinite(da[1]));
    scene_free(&s);
}

int ops_llama(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(headnorm_agrees_with_reference),
        cmocka_unit_test(rope_agrees_with_reference),
        cmocka_unit_test(rope_is_exact_far_away),
        cmocka_unit_test(rope_scaling_is_that_of_llama_3),
        cmocka_unit_test(swiglu_agrees_with_reference),
        cmocka_unit_test(swiglu_survives_adversarial_values),
    };

    return cmocka_run_group_tests_name("llama", tests, NULL, NULL);
}
