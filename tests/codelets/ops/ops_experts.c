/* SPDX-License-Identifier: Apache-2.0 */
/* The ops of experts against double precision: rows to experts and back, and
 * the products of each expert with its rows. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/codelets/ops/mixture.h"
#include "tests/codelets/ops/product.h"

/* Rows and by expert, an expert's hidden channels, and then what its products
 * have (product.h). */
enum { ROWS = ROUTED, BY, G, DU, DG, DS, OWN, EXPERT_TENSORS = OWN + 8 };
enum { E_W = OWN, E_DW, E_B, E_DB, E_LA, E_LB, E_DLA, E_DLB };
/* What a product reads that has adapters, and then a bias. */
enum { RANK = 2, LOW = BIT(E_LA) | BIT(E_LB) | BIT(E_B) };
#define SCALE 0.75F

/* m rows choose k of e experts, of which `here` are here from `first` on, with
 * weights [out,in]. */
struct size {
    int64_t m, e, k, in, out, first, here;
};

/* So many outputs have the adapter, all but the first ones. */
static int64_t adapted(int64_t out)
{
    return out - out / 3;
}

static struct mixture experts_new(enum iz_dtype type, const struct size *n)
{
    struct mixture a = mixture_new(n->m, n->e, n->k);
    struct tensor *t = a.s.t;
    enum iz_dtype act = backend.act(type);
    int64_t rows = n->m * n->k;
    a.first = n->first;
    a.here = n->here;
    a.s.n = EXPERT_TENSORS;
    a.s.act = ROWS;
    t[ROWS] = tensor_new(act, n->m, n->in, 1);
    t[BY] = tensor_new(act, rows, n->in, 1);
    t[G] = tensor_new(act, rows, n->out, 1);
    t[DU] = tensor_new(act, rows, 2 * n->out, 1);
    t[DG] = tensor_new(act, rows, n->out, 1);
    t[DS] = tensor_new(IZ_F32, n->m, n->k, 1);
    for (int i = 0; i < 2; i++) { /* numbers, gradients */
        t[E_W + i] = tensor_new(type, n->here * n->out, n->in, 1);
        t[E_B + i] = tensor_new(type, 1, n->here * n->out, 1);
        t[E_LA + 2 * i] = tensor_new(type, n->here * RANK, n->in, 1);
        t[E_LB + 2 * i] = tensor_new(type, n->here * adapted(n->out), RANK, 1);
    }
    return a;
}

enum op {
    DISPATCH,
    COMBINE,
    SET,
    FWD,
    BWD_A,
    BWD_W,
    WEIGH,
    WEIGH_BIAS,
    GATE,
    GATE_ALL
};

static void experts_op(struct iz_exec *x, const struct iz_view *v,
                       const void *arg)
{
    const struct mixture *a = arg;
    struct iz_routes r = mixture_routes(a, v);
    struct iz_linear l = {.w = v[E_W], .dw = v[E_DW], .out_in = true};
    struct iz_adapter f = {.a = v[E_LA],
                           .b = v[E_LB],
                           .da = v[E_DLA],
                           .db = v[E_DLB],
                           .scale = SCALE,
                           .first = v[G].cols / 3};
    struct iz_view du = a->back ? v[DU] : IZ_NONE; /* of gates */
    struct iz_view dy = a->back ? v[DG] : IZ_NONE;
    if (a->adapted) {
        l.w.adapter = &f;
        l.b = v[E_B];
        l.db = v[E_DB];
    }
    switch ((enum op)a->op) {
    case DISPATCH:
        iz_experts_dispatch(x, v[BY], v[ROWS], &r);
        break;
    case COMBINE:
    case SET:
        iz_experts_combine(x, v[ROWS], a->op == SET ? IZ_NONE : v[ROWS], v[BY],
                           &r, a->back);
        break;
    case FWD:
        iz_experts_fwd(x, v[G], v[BY], &l, &r);
        break;
    case BWD_A:
        iz_experts_da(x, v[BY], v[G], &l, &r);
        break;
    case BWD_W:
        iz_experts_dw(x, v[G], v[BY], &l, &r);
        break;
    case WEIGH:
        iz_experts_weigh_bwd(x, v[DS], v[G], v[DU], v[DG], &r);
        break;
    case WEIGH_BIAS:
        iz_experts_bias_bwd(x, v[DS], v[G], v[E_B], &r);
        break;
    case GATE:
        iz_experts_gated(x, du, v[G], dy, v[DU], a->act, &r);
        break;
    case GATE_ALL:
        iz_activation_apply(x, du, v[G], dy, v[DU], a->act);
    }
}

static void run(struct mixture *a, enum op op, unsigned reads, unsigned writes)
{
    a->op = op;
    scene_run(&a->s, &(struct pass){experts_op, ROUTES | reads, writes}, a);
}

/* Of the experts here, that of a row by expert; -1: it is none of them. */
static int64_t expert_of(const struct mixture *a, int64_t row)
{
    const int32_t *end = a->s.t[END].v.p;
    int64_t i = 0;
    while (end[i] <= row)
        i++;
    i -= a->first;
    return i < a->here ? i : -1;
}

/* What is expected of a tensor that keeps what is not written. */
static double *want_kept(struct tensor *t)
{
    double *want = tensor_want(t);
    memcpy(want, t->d, (size_t)iz_view_len(t->v) * sizeof(*want));
    return want;
}

static void check_sums(struct mixture *a, bool back, bool none)
{
    struct tensor *t = a->s.t;
    int64_t n = t[ROWS].v.cols;
    const int32_t *place = t[PLACE].v.p;
    double *y = none ? tensor_want(&t[ROWS]) : want_kept(&t[ROWS]);
    for (int64_t i = 0; i < a->m * a->k * n; i++)
        if (expert_of(a, place[i / n]) >= 0)
            y[i / n / a->k * n + i % n] +=
                t[BY].d[place[i / n] * n + i % n] *
                (back ? 1 : (double)((float *)t[WEIGHT].v.p)[i / n]);
    a->back = back;
    run(a, none ? SET : COMBINE, BIT(BY) | (none ? 0 : BIT(ROWS)), BIT(ROWS));
    fixture_close("sums of rows", &t[ROWS], 1e-6);
    tensor_load(&t[ROWS]);
}

static void check_rows(struct mixture *a)
{
    struct tensor *t = a->s.t;
    int64_t n = t[ROWS].v.cols;
    const int32_t *place = t[PLACE].v.p;
    double *by = want_kept(&t[BY]);
    for (int64_t i = 0; i < a->m * a->k; i++)
        if (expert_of(a, place[i]) >= 0)
            memcpy(by + place[i] * n, t[ROWS].d + i / a->k * n, (size_t)n * 8);
    run(a, DISPATCH, BIT(ROWS) | BIT(BY), BIT(BY));
    fixture_close("rows by expert", &t[BY], 0);
    tensor_load(&t[BY]);
    for (int how = 0; how < 4; how++)
        check_sums(a, how & 1, how & 2);
}

/* What an op wrote as an input: none of it above 1. */
static void load_small(struct tensor *t)
{
    double most = 1;
    tensor_load(t);
    for (int64_t i = 0; i < iz_view_len(t->v); i++)
        most = fmax(most, fabs(t->d[i]));
    for (int64_t i = 0; i < iz_view_len(t->v); i++)
        t->d[i] /= most;
    tensor_store(t);
}

/* Rows of c columns from row `at` on. */
static struct tensor part_of(const struct tensor *t, int64_t at, int64_t rows,
                             int64_t c)
{
    struct iz_view v = {.p = fixture_at(t->v.p, t->v.dtype, at * c),
                        .dtype = t->v.dtype,
                        .rows = rows,
                        .cols = c};
    return (struct tensor){.v = v, .d = t->d + at * c};
}

/* That of expert e, of those here, with its rows.  Where activations have 16
 * bits, the adapter's first product has, too. */
static struct product product_of(const struct mixture *a, int64_t e)
{
    const struct tensor *t = a->s.t;
    const int32_t *end = (int32_t *)t[END].v.p + a->first + e;
    int64_t at = a->first + e ? end[-1] : 0, m = *end - at;
    int64_t in = t[BY].v.cols, out = t[G].v.cols, some = adapted(out);
    enum iz_dtype act = t[BY].v.dtype;
    struct product p = {.m = m, .in = in, .out = out, .out_in = true};
    p.slack = p.slack_dw = 0x1p-20; /* of sums of hundreds of rows */
    for (int i = 0; i < 2; i++) {   /* numbers, gradients */
        p.s.t[i ? DY : Y] = part_of(&t[G], at, m, out);
        p.s.t[i ? DA : A] = part_of(&t[BY], at, m, in);
        p.s.t[i ? DW : W] = part_of(&t[E_W + i], e * out, out, in);
        p.s.t[i ? DB : B] = part_of(&t[E_B + i], e, 1, out);
        p.s.t[i ? DLA : LA] = part_of(&t[E_LA + 2 * i], e * RANK, RANK, in);
        p.s.t[i ? DLB : LB] = part_of(&t[E_LB + 2 * i], e * some, some, RANK);
    }
    if (a->adapted) {
        p.with_b = true;
        p.rank = RANK;
        p.first = out - some;
        p.part = some;
        p.scale = SCALE;
        p.slack += act == IZ_F32 ? 0 : 2 * fixture_rounding(act, 1);
    }
    return p;
}

/* These tensors of each expert's product, of which one may have `by` as rows by
 * expert: those of others are as they were. */
static void compare(const struct mixture *a, unsigned written, int by)
{
    const struct tensor *t = &a->s.t[by];
    for (int64_t e = 0; e < a->here; e++) {
        struct product p = product_of(a, e);
        product_compare(&p, written);
    }
    for (int64_t i = 0; i < iz_view_len(t->v); i++)
        if (expert_of(a, i / t->v.cols) < 0)
            assert_true(fixture_get(t->v.p, t->v.dtype, i) == t->d[i]);
}

/* An expert without rows has gradients of zeros. */
static void check_products(struct mixture *a, bool adapted)
{
    struct tensor *t = a->s.t;
    unsigned low = adapted ? LOW : 0;
    double flops = 2. * (double)(iz_view_len(t[BY].v) * t[G].v.cols * a->here);
    a->adapted = adapted;
    run(a, FWD, BIT(BY) | BIT(E_W) | BIT(G) | low, BIT(G));
    assert_true(adapted ||
                fabs(a->s.flops * (double)a->e - flops) <= 1e-9 * flops);
    compare(a, BIT(Y), G);
    load_small(&t[G]);
    run(a, BWD_W, BIT(BY) | BIT(G) | low,
        BIT(E_DW) | (adapted ? BIT(E_DLA) | BIT(E_DLB) | BIT(E_DB) : 0));
    compare(a, BIT(DW) | (adapted ? BIT(DLA) | BIT(DLB) | BIT(DB) : 0), BY);
    run(a, BWD_A, BIT(G) | BIT(E_W) | BIT(BY) | low, BIT(BY));
    compare(a, BIT(DA), BY);
    load_small(&t[BY]);
    a->adapted = false;
}

/* Rows of the experts here, times their weights. */
static void want_weighed(const struct mixture *a, struct tensor *t)
{
    double *want = want_kept(t);
    int64_t n = t->v.cols;
    const int32_t *place = a->s.t[PLACE].v.p;
    for (int64_t i = 0; i < a->m * a->k * n; i++)
        if (expert_of(a, place[i / n]) >= 0)
            want[place[i / n] * n + i % n] *=
                (double)((float *)a->s.t[WEIGHT].v.p)[i / n];
}

/* Weighs rows of G, and tells what the weights get: of an expert's hidden
 * channels or, which is added, of a bias. */
static void check_weighed(struct mixture *a, bool bias)
{
    struct tensor *t = a->s.t;
    int64_t n = t[G].v.cols;
    const int32_t *place = t[PLACE].v.p;
    unsigned writes = BIT(DS) | BIT(G) | (bias ? 0 : BIT(DU));
    double *ds = want_kept(&t[DS]);
    want_weighed(a, &t[G]);
    want_weighed(a, &t[DU]);
    for (int64_t i = 0; i < a->m * a->k; i++) {
        int64_t e = expert_of(a, place[i]);
        const double *g = t[G].d + place[i] * n;
        if (e >= 0)
            ds[i] = bias ? ds[i] + fixture_dot(g, t[E_B].d + e * n, n)
                         : fixture_dot(g, t[DG].d + place[i] * n, n);
    }
    run(a, bias ? WEIGH_BIAS : WEIGH, BIT(bias ? E_B : DG) | writes, writes);
    fixture_close("dweight", &t[DS], 2e-6);
    fixture_close("weighed", &t[G], 0x1p-24);
    if (!bias)
        fixture_close("weighed gradient", &t[DU], 0x1p-24);
    for (int i = G; i <= DS; i++)
        tensor_load(&t[i]);
}

/* As it is, in the rows of the experts here. */
static void want_here(const struct mixture *a, struct tensor *t)
{
    double *want = want_kept(t);
    for (int64_t i = 0; i < iz_view_len(t->v); i++)
        if (expert_of(a, i / t->v.cols) >= 0)
            want[i] = fixture_get(t->v.p, t->v.dtype, i);
    tensor_store(t);
}

/* Of the rows of the experts here as those of all rows; the others stay. */
static void check_gates(struct mixture *a)
{
    struct tensor *t = a->s.t;
    unsigned reads = BIT(DU) | BIT(DG) | BIT(G);
    double tol = 1e-6 + fixture_rounding(t[G].v.dtype, 1);
    for (int back = 0; back < 2; back++) {
        unsigned writes = BIT(G) | (back ? BIT(DU) : 0);
        a->back = back;
        run(a, GATE_ALL, reads, writes);
        want_here(a, &t[G]);
        want_here(a, &t[DU]);
        run(a, GATE, reads, writes);
        fixture_close("gates", &t[G], tol);
        fixture_close("gradient of gates", &t[DU], tol);
    }
}

/* With rows spread by chance, or with all that can be in the first experts:
 * the others then have none, and a gradient of zeros. */
static void experts_agree_with_reference(void **state)
{
    static const struct size size[] = {
        {1, 1, 1, 1, 1, 0, 1},     {5, 3, 1, 4, 7, 0, 3},
        {5, 3, 2, 4, 7, 1, 1},     {11, 4, 2, 17, 9, 0, 4},
        {11, 4, 2, 17, 9, 0, 2},   {11, 4, 2, 17, 9, 3, 1},
        {190, 5, 3, 24, 16, 0, 5}, {190, 5, 3, 24, 16, 1, 3},
        {4, 64, 8, 5, 6, 0, 64},   {4, 64, 8, 5, 6, 30, 20}};
    for (int i = 0; i < 4 * COUNT(size); i += scene_step()) {
        const struct size *n = &size[i / 4];
        bool skewed = i / 2 % 2;
        backend_renew(state);
        struct mixture a = experts_new(scene_type(i + i / 4 * 2), n);
        for (int64_t j = 0; skewed && j < n->m * n->e; j++)
            a.s.t[P].d[j] = (double)-(j % n->e);
        tensor_store(&a.s.t[P]);
        mixture_route(&a);
        const int32_t *end = a.s.t[END].v.p;
        assert_true(!skewed || end[0] == n->m);
        assert_true(!skewed || end[n->k - 1] == n->m * n->k);
        check_rows(&a);
        check_products(&a, false);
        check_products(&a, true);
        check_weighed(&a, false);
        check_weighed(&a, true);
        a.act = i % 8 < 4 ? IZ_SILU : IZ_SWISH_7;
        check_gates(&a);
        scene_free(&a.s);
    }
}

/* Sums of all experts have the bits of those of some after the others. */
static void sums_do_not_depend_on_how_experts_are_cut(void **state)
{
    static const struct size n = {37, 9, 4, 33, 3, 0, 9};
    struct mixture a = experts_new(IZ_F32, &n);
    struct tensor *y = &a.s.t[ROWS], begin = tensor_copy(y), whole = {0};
    mixture_route(&a);
    for (int k = 0; k < 2 * 3; k++) {
        int64_t cut = 9 - k % 3 * 4; /* at once, then cut */
        a.back = k / 3;
        tensor_free(y);
        *y = tensor_copy(&begin);
        for (int64_t at = 0; at < 9; at += cut) {
            a.here = at + cut < 9 ? cut : 9 - at;
            a.first = a.back ? 9 - at - a.here : at;
            run(&a, COMBINE, BIT(BY) | BIT(ROWS), BIT(ROWS));
            tensor_load(y);
        }
        if (cut == 9) {
            tensor_free(&whole);
            whole = tensor_copy(y);
        }
        fixture_same_bits("sums", y->v, whole.v);
    }
    tensor_free(&begin);
    tensor_free(&whole);
    scene_free(&a.s);
}

/* Two choices in one memory, the second by what DS has in place of P. */
static void choose_again(struct iz_exec *x, const struct iz_view *v,
                         const void *arg)
{
    struct iz_routes r = mixture_routes(arg, v);
    struct iz_linear l = {.w = v[E_W], .out_in = true};
    iz_route_fwd(x, &r);
    iz_experts_fwd(x, v[DG], v[BY], &l, &r);
    r.p = v[DS];
    iz_route_fwd(x, &r);
    iz_experts_fwd(x, v[G], v[BY], &l, &r);
}

/* On a GPU the host remembers how many rows an expert has. */
static void a_new_choice_is_seen(void **state)
{
    static const struct size n = {19, 5, 2, 7, 9, 0, 5};
    struct mixture a = experts_new(IZ_F32, &n);
    struct tensor *t = a.s.t;
    unsigned reads = BIT(P) | BIT(DS) | BIT(BY) | BIT(E_W);
    tensor_free(&t[DS]);
    t[DS] = tensor_new(IZ_F32, n.m, n.e, 2);
    memcpy(t[P].d, t[DS].d, (size_t)(n.m * n.e) * sizeof(double));
    scene_run(&a.s,
              &(struct pass){choose_again, reads,
                             ROUTES | BIT(DS) | BIT(DG) | BIT(G)},
              &a);
    struct tensor got = tensor_copy(&t[G]);
    tensor_store(&t[P]);
    mixture_route(&a);
    run(&a, FWD, BIT(BY) | BIT(E_W), BIT(G));
    fixture_same_bits("y of the second choice", got.v, t[G].v);
    tensor_free(&got);
    scene_free(&a.s);
}

int ops_experts(void)
{
    const struct CMUnitTest tests[] = {
        SEEDED(experts_agree_with_reference),
        SEEDED(sums_do_not_depend_on_how_experts_are_cut),
        SEEDED(a_new_choice_is_seen),
    };
    if (!backend_multiplies())
        return 0;
    return cmocka_run_group_tests_name("experts", tests, backend_renew, NULL);
}
