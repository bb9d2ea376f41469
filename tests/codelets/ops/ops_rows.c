/* SPDX-License-Identifier: Apache-2.0 */
/* Both normalisations, and both activation functions. */
#include "tests/codelets/ops/scene.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "tests/codelets/ops/reference.h"
#include "tests/codelets/ops/timed.h"

/* ---- normalisation ------------------------------------------------------ */

enum { A, W, B, Y, R, DY, DX, DW, DB, MEAN, RSTD, NORM_TENSORS };
enum call { FORWARD, AGAIN, BACKWARD };

/* weights are 1 + w, or 1 */
static const struct kind {
    bool centred, plus_one, bare;
} kinds[] = {{true, false, false}, {false, false, false}, {true, true, false},
             {false, true, false}, {true, false, true},   {false, false, true}};

static const struct kind *kind = kinds; /* under test */

struct norm {
    struct scene s;
    enum call call;
    bool no_r;
    enum iz_dtype weights; /* what the op is told that they are */
};

static struct norm norm_new(enum iz_dtype param, int64_t m, int64_t c,
                            double scale)
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
                         .weights = param};
}

static void norm_layer(struct iz_exec *x, const struct iz_view *v,
                       const void *arg)
{
    const struct norm *n = arg;
    struct iz_norm_layer w = {
        .w = v[W], .dw = v[DW], .rstd = v[RSTD], .eps = 1e-5f};
    w.plus_one = kind->plus_one;
    bool again = n->call == AGAIN;
    w.w.dtype = n->weights;
    if (kind->centred) {
        w.b = v[B];
        w.db = v[DB];
        w.mean = v[MEAN];
    }
    if (kind->bare)
        w.w = w.dw = w.b = w.db = IZ_NONE;
    if (n->call == BACKWARD)
        iz_norm_layer_bwd(x, v[DX], n->no_r ? IZ_NONE : v[R], v[DY], v[A], &w);
    else
        iz_norm_layer_fwd(x, v[again ? DX : Y], v[A], &w, again);
}

/* What a row is multiplied by. */
static const double *norm_weights(const struct norm *n)
{
    static double w[8200];
    const struct tensor *t = n->s.t;
    for (int64_t i = 0; i < t[W].v.cols; i++)
        w[i] = kind->bare ? 1 : t[W].d[i] + kind->plus_one;
    return w;
}

/* What is added to it; NULL: no mean is taken off either. */
static const double *norm_biases(const struct norm *n)
{
    static const double zeros[8200];
    return !kind->centred ? NULL : kind->bare ? zeros : n->s.t[B].d;
}

enum { GIVEN = BIT(A) | BIT(W) | BIT(B), KEPT = BIT(MEAN) | BIT(RSTD) };
/* rmsnorm leaves b, db and mean alone. */
static const struct pass norm_pass[] = {
    [FORWARD] = {norm_layer, GIVEN, BIT(Y) | KEPT},
    [AGAIN] = {norm_layer, GIVEN | KEPT, BIT(DX)},
    [BACKWARD] = {norm_layer, GIVEN | KEPT | BIT(R) | BIT(DY),
                  BIT(DX) | BIT(DW) | BIT(DB)}};

static void norm_run(struct norm *n, enum call call)
{
    n->call = call;
    scene_run(&n->s, &norm_pass[call], n);
}

void norm_timed(const struct timed_shape *s, timed_fn *f, void *to)
{
    struct norm n = norm_new(backend.x.act, s->tokens, s->width, 1);
    struct norm again = n, backward = n;
    again.call = AGAIN;
    backward.call = BACKWARD;
    f(to, &n.s,
      (const struct timed[]){
          {"layernorm", norm_layer, .arg = &n},
          {"layernorm again", norm_layer, .arg = &again},
          {"layernorm backward", norm_layer, .arg = &backward}},
      3);
}

/* A short row may have elements that nearly agree, which loses digits. */
static void check_forward(struct norm *n)
{
    struct tensor *t = n->s.t;
    double tol = !kind->centred ? 2e-6 : t[A].v.cols < 16 ? 2e-5 : 4e-6;
    ref_norm(tensor_want(&t[Y]), t[A].d, norm_weights(n), norm_biases(n),
             t[A].v.rows, t[A].v.cols, 1e-5);
    norm_run(n, FORWARD);
    fixture_close("y", &t[Y], tol);
}

static void check_backward(struct norm *n)
{
    struct tensor *t = n->s.t;
    int64_t m = t[A].v.rows, c = t[A].v.cols;
    double *dx = tensor_want(&t[DX]), *dw = tensor_want(&t[DW]);
    double *db = tensor_want(&t[DB]), tol = c < 64 ? 2e-5 : 2e-6;
    norm_run(n, BACKWARD);
    for (int64_t i = 0; i < m; i++)
        ref_norm_gradient(dx + i * c, dw, kind->centred ? db : NULL,
                          t[A].d + i * c, t[DY].d + i * c, norm_weights(n), c);
    for (int64_t i = 0; !n->no_r && i < m * c; i++)
        dx[i] += t[R].d[i];
    fixture_close("dx", &t[DX], tol);
    if (kind->bare)
        return;
    if (!(n->s.unwanted & BIT(DW)))
        fixture_close("dw", &t[DW], tol);
    if (kind->centred && !(n->s.unwanted & BIT(DB)))
        fixture_close("db", &t[DB], tol);
}

static void check_norm(enum iz_dtype param, const int64_t *s)
{
    struct norm n = norm_new(param, s[0], s[1], 3);
    check_forward(&n);
    norm_run(&n, AGAIN);
    fixture_same_bits("y again", n.s.t[DX].v, n.s.t[Y].v);
    check_backward(&n);
    /* emulated, many rows or large ones would take long */
    if (!backend.become ||
        (s[0] * s[1] < 50000 && (s[0] < 100 || s[1] == 90))) {
        const struct pass *p = &norm_pass[BACKWARD];
        scene_in_place(&n.s, p, &n, 1, (const int[][2]){{DX, R}});
        scene_in_place(&n.s, p, &n, 1, (const int[][2]){{DX, DY}});
        n.no_r = true;
        check_backward(&n);
    }
    scene_free(&n.s);
}

/* Rows of half a warp, a warp and a block, one to four pieces per thread, rows
 * too long for that, with pieces of one element and of 16 bytes; one part per
 * row and many rows per part.  Then the widths of blocks of 0.5B to 14B.  Last,
 * more rows than a turn of each kind of team has.  Of the first five sizes the
 * other forms, as the same kernels have them. */
static void norm_agrees_with_reference(void **state)
{
    static const int64_t size[][4] = {
        {7, 7},      {33, 64},   {3, 250},   {3, 1537},   {2, 8200},
        {1, 1},      {3, 3},     {2, 16},    {5, 17},     {1, 33},
        {33, 5},     {2, 100},   {33, 8},    {300, 3},    {33, 384},
        {35, 128},   {2, 1000},  {1, 1001},  {33, 4104},  {5, 2048},
        {300, 90},   {3, 2568},  {700, 896}, {700, 1600}, {129, 2048},
        {300, 4096}, {129, 5120}};
    static const int64_t many[][4] = {
        {270, 1028}, {2500, 5}, {2200, 136}, {4300, 8}};
    for (kind = kinds; kind < kinds + COUNT(kinds); kind++) {
        bool plain = !kind->plus_one && !kind->bare;
        scene_each(NULL, size, plain ? COUNT(size) : 5, plain ? 5 : 0,
                   check_norm);
        for (int i = 0; plain && i < COUNT(many); i++)
            check_norm(i ? scene_type(2 * i + 1) : IZ_F32, many[i]);
    }
    kind = kinds;
}

/* Without dw, without db, without both: the other results do not change. */
static void norm_leaves_out_unwanted_gradients(void **state)
{
    static const int64_t width[] = {40, 104, 200, 1000};
    for (int i = 0; i < 2 * 3 * 4; i++) {
        kind = &kinds[i / 12];
        struct norm n = norm_new(IZ_BF16, 40, width[i / 3 % 4], 1);
        norm_run(&n, FORWARD);
        n.s.unwanted = (i % 3 != 1 ? BIT(DW) : 0) | (i % 3 ? BIT(DB) : 0);
        check_backward(&n);
        scene_free(&n.s);
    }
}

/* Constant, tiny and subnormal rows give b; a huge mean loses no more digits
 * than fp32 has; NaN and infinity stay in their row and are not hidden. */
static void norm_survives_adversarial_values(void **state)
{
    static const int64_t width[] = {19, 64, 1200};
    enum { M = 6 };
    for (int k = 0; k < 2 * 3; k++) {
        kind = &kinds[k / 3];
        int64_t c = width[k % 3];
        struct norm n = norm_new(IZ_F32, M, c, 1);
        struct tensor *t = n.s.t;
        for (int64_t j = 0; j < c; j++) {
            t[A].d[j] = 0;
            t[A].d[c + j] = 7;
            t[A].d[2 * c + j] *= 1e-42;
            t[A].d[3 * c + j] *= 1e15;
        }
        tensor_store(&t[A]);
        check_forward(&n);
        t[A].d[4 * c + c / 2] = NAN;
        t[A].d[5 * c + c - 1] = INFINITY;
        tensor_store(&t[A]);
        n.no_r = true;
        norm_run(&n, FORWARD);
        norm_run(&n, BACKWARD);
        tensor_load(&t[Y]);
        tensor_load(&t[DX]);
        for (int64_t i = 0; i < 5 * c; i++) {
            assert_true(isnan(t[Y].d[i]) == (i / c == 4));
            assert_true(i / c == 4 ? isnan(t[DX].d[i]) : isfinite(t[DX].d[i]));
        }
        assert_true(isnan(t[Y].d[6 * c - 1]));
        for (int64_t j = 5 * c; kind->centred && j < 6 * c; j++)
            assert_true(isnan(t[Y].d[j]));
        scene_free(&n.s);
    }
}

static void mix_types(const void *arg)
{
    kind = arg;
    struct norm n = norm_new(IZ_BF16, 2, 8, 1);
    n.weights = IZ_F32;
    norm_run(&n, FORWARD);
}

static void norm_refuses_weights_of_another_type(void **state)
{
    if (backend.x.backend == IZ_CPU)
        skip();
    scene_dies(mix_types, &kinds[0], "layernorm of bf16 with weights of fp32");
    scene_dies(mix_types, &kinds[1], "rmsnorm of bf16 with weights of fp32");
}

/* ---- activation functions ----------------------------------------------- */

enum { G_A, G_DY, G_Y, G_DA, GATE_TENSORS };

/* Of one input, or gated: a row of a has all first ones, then all second ones.
 */
static const struct gate {
    enum iz_activation act;
    int in;
} gates[] = {{IZ_GELU_TANH, 1}, {IZ_SILU, 2},     {IZ_GELU_ERF, 1},
             {IZ_RELU, 1},      {IZ_RELU2, 1},    {IZ_SILU, 1},
             {IZ_GELU_TANH, 2}, {IZ_GELU_ERF, 2}, {IZ_SWISH_7, 2}};

static const struct gate *gate = gates; /* under test */
static unsigned late;                   /* begin between pieces of 16 bytes */

static void gate_forward(struct iz_exec *x, const struct iz_view *v,
                         const void *arg)
{
    iz_activation_apply(x, IZ_NONE, v[G_Y], IZ_NONE, v[G_A], gate->act);
}

static void gate_backward(struct iz_exec *x, const struct iz_view *v,
                          const void *arg)
{
    iz_activation_apply(x, v[G_DA], v[G_Y], v[G_DY], v[G_A], gate->act);
}

static const struct pass forward = {gate_forward, BIT(G_A), BIT(G_Y)},
                         backward = {gate_backward, BIT(G_A) | BIT(G_DY),
                                     BIT(G_Y) | BIT(G_DA)};

/* How far y may be from its value on the CPU, and gradients to their size.  The
 * argument of the tanh form's exponential is rounded to fp32; its reference
 * loses 1 + tanh below -8. */
static double gate_off(double g, double u)
{
    double y = fabs(ref_activation(gate->act, g));
    if (gate->act == IZ_GELU_TANH)
        return (fmin(1e-6 * y * fmax(1, fabs(g * g * g)), 1e-6 * fabs(g)) +
                1e-15 * fabs(g)) *
                   fmax(1, fabs(u)) +
               (double)FLT_MIN;
    return 1e-6 * y * fabs(u) * fmax(1, fabs(g)) + 1e-25;
}

static struct scene gate_new(enum iz_dtype act, int64_t m, int64_t f,
                             double scale)
{
    int64_t in = gate->in * f;
    return (struct scene){
        .n = GATE_TENSORS,
        .late = late,
        .late_by = 1,
        .t = {tensor_new(act, m, in, scale), tensor_new(act, m, f, 1),
              tensor_new(act, m, f, 1), tensor_new(act, m, in, 1)}};
}

/* The gradient overwrites the one that it comes from. */
void gelu_timed(const struct timed_shape *s, timed_fn *f, void *to)
{
    static const int into[][2] = {{G_DA, G_DY}, {G_Y, G_A}};
    struct scene t =
        gate_new(backend.act(backend.x.act), s->tokens, 4 * s->width, 1);
    f(to, &t, &(const struct timed){"gelu", .op = gate_forward}, 1);
    t.into = into;
    t.n_into = COUNT(into);
    f(to, &t, &(const struct timed){"gelu backward", .op = gate_backward}, 1);
}

/* What is expected of a backward; on the CPU of every value. */
static void check_gradients(struct scene *s)
{
    struct tensor *t = s->t;
    int64_t f = t[G_Y].v.cols, second = (gate->in - 1) * f, step = 1;
    if (gate->act == IZ_SWISH_7) { /* in turns */
        second = 1;
        step = 2;
    }
    double *y = tensor_want(&t[G_Y]), *da = tensor_want(&t[G_DA]);
    for (int64_t i = 0; i < iz_view_len(t[G_Y].v); i++) {
        int64_t at = i / f * gate->in * f + i % f * step, to = at + second;
        double g = t[G_A].d[at], u = second ? t[G_A].d[to] : 1;
        double dy = t[G_DY].d[i], v = ref_activation(gate->act, g);
        bool flat = gate->act == IZ_SWISH_7 && fabs(u) > 7;
        u = ref_up(gate->act, u);
        y[i] = v * u;
        da[to] = flat ? 0 : dy * v;
        da[at] = dy * u * ref_activation_gradient(gate->act, g);
        if (backend.x.backend != IZ_CPU)
            continue;
        double of_u = 1e-6 * fabs(dy) * fmax(1, fabs(g));
        double of_g = 1e-6 * (1 + gate->in) *
                      fmax(fabs(da[at]), fabs(dy) * fmax(1, fabs(u)));
        fixture_element("y", t[G_Y].v, i, (struct near){y[i], gate_off(g, u)});
        fixture_element("da", t[G_DA].v, at, (struct near){da[at], of_g});
        if (second)
            fixture_element("da", t[G_DA].v, to, (struct near){da[to], of_u});
    }
}

/* Also in place, as their callers do it. */
static void check_gate(enum iz_dtype act, int64_t m, int64_t f, double scale)
{
    struct scene s = gate_new(act, m, f, scale);
    struct tensor *t = s.t;
    bool one = gate->in == 1;
    const int into[][2] = {{G_DA, one ? G_DY : G_A}, {G_Y, one ? G_A : G_DY}};
    scene_run(&s, &backward, NULL);
    check_gradients(&s);
    fixture_close("y again", &t[G_Y], 1e-6);
    fixture_close("da", &t[G_DA], 2e-6);
    scene_in_place(&s, &backward, NULL, 2, into);
    struct tensor again = tensor_copy(&t[G_Y]);
    scene_run(&s, &forward, NULL);
    fixture_close("y", &t[G_Y], 1e-6);
    if (backend.x.backend == IZ_CPU)
        fixture_same_bits("y again", again.v, t[G_Y].v);
    tensor_free(&again);
    scene_free(&s);
}

/* Small ones also with numbers of all sizes. */
static void check_scales(enum iz_dtype act, const int64_t *s)
{
    for (double x = s[0] * s[1] < 1000 ? 6e-3 : 6; x < 100; x *= 10)
        check_gate(act, s[0], s[1], x);
}

static void gate_agrees_with_reference(void **state)
{
    static const int64_t size[][4] = {
        {1, 1},    {1, 3},    {1, 7},    {1, 8},     {1, 17},     {3, 3},
        {1, 33},   {5, 9},    {7, 17},   {2, 300},   {2, 344},    {1, 1000},
        {2, 1024}, {3, 2056}, {2, 4864}, {33, 1001}, {301, 6400}, {101, 14336}};
    for (gate = gates; gate < gates + COUNT(gates); gate++)
        scene_each(backend_acts, size, COUNT(size), 2, check_scales);
    gate = gates;
}

/* The first three also become NaN, infinity, and of two inputs the second NaN.
 */
static void check_adversarial_values(void)
{
    static const double value[] = {
        0,  -0.,  1e-45,  -1e-40, 1e-30, 11.99, 12.01, -12, -9.5,
        50, -50,  1e15,   -1e15,  3e38,  -3e38, 5,     -5,  -1e30,
        12, 1e30, -1e-42, 88.7,   -88.7, 120,   -120,  -69, 16};
    enum { N = COUNT(value) };
    struct scene s = gate_new(IZ_F32, 1, N, 1);
    double *a = s.t[G_A].d, *y = s.t[G_Y].d, *da = s.t[G_DA].d;
    memcpy(a, value, sizeof(value));
    tensor_store(&s.t[G_A]);
    scene_run(&s, &backward, NULL);
    check_gradients(&s);
    for (int i = 0; i < N; i++) {
        double want = s.t[G_Y].want[i];
        fixture_element("y", s.t[G_Y].v, i,
                        (struct near){want, 1e-6 * fabs(want) + 1e-7});
    }
    tensor_load(&s.t[G_DA]);
    for (int i = 0; i < gate->in * N; i++)
        assert_true(isfinite(da[i]));
    a[0] = NAN;
    a[1] = INFINITY;
    a[gate->in > 1 ? N + 2 : 0] = NAN;
    tensor_store(&s.t[G_A]);
    scene_run(&s, &backward, NULL);
    tensor_load(&s.t[G_Y]);
    tensor_load(&s.t[G_DA]);
    assert_true(isnan(y[0]) && isnan(da[0]) && isinf(y[1]));
    if (gate->in > 1)
        assert_true(isnan(da[N]) && isfinite(da[1]) && isnan(da[2]));
    assert_true(isnan(y[2]) == (gate->in > 1));
    for (int i = 3; i < N; i++) {
        assert_true(isfinite(y[i]) && isfinite(da[i]));
        assert_true(gate->in == 1 || isfinite(da[N + i]));
        assert_true(value[i] > -100 || y[i] == 0);
    }
    scene_free(&s);
}

static void gate_survives_adversarial_values(void **state)
{
    for (gate = gates; gate < gates + 4; gate++)
        check_adversarial_values();
    gate = gates;
}

/* The factor and the cap of a scaling, if there is one. */
static const float scalings[][2] = {{0.3f, 0}, {1, 2}, {3, 30}};

static void scale(struct iz_exec *x, const struct iz_view *v, const void *arg)
{
    const float *by = arg;
    iz_op_scale(x, v[G_Y], v[G_A], by[0], by[1]);
}

static void scaling_agrees_with_reference(void **state)
{
    for (int k = 0; k < 3 * COUNT(scalings); k++) {
        const float *by = scalings[k / 3];
        enum iz_dtype act = backend.act(fixture_types[k % 3]);
        struct scene s = gate_new(act, 3, 700 + k, 4);
        double *want = tensor_want(&s.t[G_Y]);
        for (int64_t i = 0; i < iz_view_len(s.t[G_Y].v); i++) {
            want[i] = (double)by[0] * s.t[G_A].d[i];
            if (by[1] != 0)
                want[i] = (double)by[1] * tanh(want[i] / (double)by[1]);
        }
        scene_run(&s, &(struct pass){scale, BIT(G_A), BIT(G_Y)}, by);
        fixture_close("y", &s.t[G_Y], 1e-6);
        scene_free(&s);
    }
}

struct columns {
    int64_t rows, in, from, out, to, n;
    bool widened; /* what comes in is fp32 */
};

static void move_columns(struct iz_exec *x, const struct iz_view *v,
                         const void *arg)
{
    const struct columns *c = arg;
    iz_op_columns(x, v[1], c->to, v[0], c->from, c->n);
}

static void columns_go_where_they_shall(void **state)
{
    static const struct columns cases[] = {{3, 24, 8, 16, 0, 16, false},
                                           {5, 16, 0, 24, 8, 16, true},
                                           {4, 7, 3, 5, 1, 4, false},
                                           {300, 64, 32, 48, 16, 32, true},
                                           {1, 9, 0, 9, 0, 9, true}};
    for (int k = 0; k < 3 * COUNT(cases); k++) {
        const struct columns *c = &cases[k / 3];
        enum iz_dtype act = backend.act(fixture_types[k % 3]);
        struct scene s = {
            .n = 2,
            .t = {tensor_new(c->widened ? IZ_F32 : act, c->rows, c->in, 1),
                  tensor_new(act, c->rows, c->out, 1)}};
        double *want = tensor_want(&s.t[1]);
        tensor_load(&s.t[0]);
        tensor_load(&s.t[1]);
        for (int64_t i = 0; i < c->rows * c->out; i++) {
            int64_t col = i % c->out - c->to;
            want[i] = col < 0 || col >= c->n
                          ? s.t[1].d[i]
                          : s.t[0].d[i / c->out * c->in + c->from + col];
        }
        scene_run(&s, &(struct pass){move_columns, 3, 2}, c);
        fixture_close("y", &s.t[1], 0);
        scene_free(&s);
    }
}

static void gates_work_unaligned(void **state)
{
    for (int i = 0; i < 6 * GATE_TENSORS; i++) {
        gate = &gates[i % 2];
        late = BIT(i / 6);
        check_gate(backend.act(fixture_types[i / 2 % 3]), 2, 57, 6);
    }
    gate = gates;
    late = 0;
}

int ops_rows(void)
{
    const struct CMUnitTest tests[] = {
        SEEDED(norm_agrees_with_reference),
        SEEDED(norm_leaves_out_unwanted_gradients),
        SEEDED(norm_survives_adversarial_values),
        SEEDED(norm_refuses_weights_of_another_type),
        SEEDED(scaling_agrees_with_reference),
        SEEDED(columns_go_where_they_shall),
        SEEDED(gates_work_unaligned),
        SEEDED(gate_survives_adversarial_values),
        SEEDED(gate_agrees_with_reference),
    };
    return cmocka_run_group_tests_name("rows", tests, NULL, NULL);
}
