/* SPDX-License-Identifier: Apache-2.0 */
/* The ops of experts against double precision: rows to experts and back, and
 * the products of each expert with its rows. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/codelets/ops/mixture.h"
#include "tests/codelets/ops/reference.h"

/* Rows and by expert, an expert's weights and its hidden channels; an adapter's
 * matrices and their gradients. */
enum {
    A = ROUTED,
    BY,
    W,
    DW,
    G,
    DU,
    DG,
    DS,
    LA,
    LB,
    DLA,
    DLB,
    B,
    DB,
    EXPERT_TENSORS
};
/* What a product reads that has adapters, and then a bias. */
enum { RANK = 2, LOW = BIT(LA) | BIT(LB) | BIT(B) };
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
    a.s.act = A;
    t[A] = tensor_new(act, n->m, n->in, 1);
    t[BY] = tensor_new(act, rows, n->in, 1);
    t[W] = tensor_new(type, n->here * n->out, n->in, 1);
    t[DW] = tensor_new(type, n->here * n->out, n->in, 1);
    t[G] = tensor_new(act, rows, n->out, 1);
    t[DU] = tensor_new(act, rows, 2 * n->out, 1);
    t[DG] = tensor_new(act, rows, n->out, 1);
    t[DS] = tensor_new(IZ_F32, n->m, n->k, 1);
    for (int i = LA; i <= DLB; i++)
        t[i] = i == LA || i == DLA
                   ? tensor_new(type, n->here * RANK, n->in, 1)
                   : tensor_new(type, n->here * adapted(n->out), RANK, 1);
    t[B] = tensor_new(type, 1, n->here * n->out, 1);
    t[DB] = tensor_new(type, 1, n->here * n->out, 1);
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
    UNGATE
};

static void experts_op(struct iz_exec *x, const struct iz_view *v,
                       const void *arg)
{
    const struct mixture *a = arg;
    struct iz_routes r = mixture_routes(a, v);
    struct iz_linear l = {.w = v[W], .dw = v[DW], .out_in = true};
    struct iz_adapter f = {.a = v[LA],
                           .b = v[LB],
                           .da = v[DLA],
                           .db = v[DLB],
                           .scale = SCALE,
                           .first = v[G].cols / 3};
    if (a->adapted) {
        l.w.adapter = &f;
        l.b = v[B];
        l.db = v[DB];
    }
    switch ((enum op)a->op) {
    case DISPATCH:
        iz_experts_dispatch(x, v[BY], v[A], &r);
        break;
    case COMBINE:
    case SET:
        iz_experts_combine(x, v[A], a->op == SET ? IZ_NONE : v[A], v[BY], &r,
                           a->back);
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
        iz_experts_bias_bwd(x, v[DS], v[G], v[B], &r);
        break;
    case GATE:
        iz_experts_gated(x, IZ_NONE, v[G], IZ_NONE, v[DU], a->act, &r);
        break;
    case UNGATE:
        iz_experts_gated(x, v[DU], v[G], v[DG], v[DU], a->act, &r);
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
    int64_t n = t[A].v.cols;
    const int32_t *place = t[PLACE].v.p;
    double *y = none ? tensor_want(&t[A]) : want_kept(&t[A]);
    for (int64_t i = 0; i < a->m * a->k * n; i++)
        if (expert_of(a, place[i / n]) >= 0)
            y[i / n / a->k * n + i % n] +=
                t[BY].d[place[i / n] * n + i % n] *
                (back ? 1 : (double)((float *)t[WEIGHT].v.p)[i / n]);
    a->back = back;
    run(a, none ? SET : COMBINE, BIT(BY) | (none ? 0 : BIT(A)), BIT(A));
    fixture_close("sums of rows", &t[A], 1e-6);
    tensor_load(&t[A]);
}

static void check_rows(struct mixture *a)
{
    struct tensor *t = a->s.t;
    int64_t n = t[A].v.cols;
    const int32_t *place = t[PLACE].v.p;
    double *by = want_kept(&t[BY]);
    for (int64_t i = 0; i < a->m * a->k; i++)
        if (expert_of(a, place[i]) >= 0)
            memcpy(by + place[i] * n, t[A].d + i / a->k * n, (size_t)n * 8);
    run(a, DISPATCH, BIT(A) | BIT(BY), BIT(BY));
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

/* The weights of the experts here with what their adapters add. */
static double *weights_of(const struct mixture *a)
{
    const struct tensor *t = a->s.t;
    int64_t in = t[BY].v.cols, out = t[G].v.cols, some = adapted(out);
    int64_t n = a->here * out * in;
    double *w = malloc((size_t)n * sizeof(*w));
    memcpy(w, t[W].d, (size_t)n * sizeof(*w));
    for (int64_t i = 0; a->adapted && i < a->here * some * in * RANK; i++) {
        int64_t r = i % RANK, c = i / RANK % in, o = i / RANK / in % some;
        int64_t e = i / RANK / in / some;
        w[(e * out + out / 3 + o) * in + c] +=
            (double)SCALE * t[LB].d[(e * some + o) * RANK + r] *
            t[LA].d[(e * RANK + r) * in + c];
    }
    return w;
}

/* Adds what a row with gradient g [out] and input x [in] gives to those of
 * expert e's adapter. */
static void add_adapter_gradients(const struct mixture *a, int64_t e,
                                  const double *g, const double *x, double *da,
                                  double *db)
{
    const struct tensor *t = a->s.t;
    int64_t in = t[BY].v.cols, out = t[G].v.cols, some = adapted(out);
    const double *la = t[LA].d + e * RANK * in;
    const double *lb = t[LB].d + e * some * RANK;
    g += out / 3;
    for (int64_t r = 0; r < RANK; r++) {
        double low = (double)SCALE * fixture_dot(x, la + r * in, in), sum = 0;
        for (int64_t o = 0; o < some; o++) {
            db[(e * some + o) * RANK + r] += low * g[o];
            sum += (double)SCALE * g[o] * lb[o * RANK + r];
        }
        for (int64_t c = 0; c < in; c++)
            da[(e * RANK + r) * in + c] += sum * x[c];
    }
}

static void check_forward(struct mixture *a, const double *w, double tol)
{
    struct tensor *t = a->s.t;
    int64_t in = t[BY].v.cols, out = t[G].v.cols, rows = a->m * a->k;
    double *g = want_kept(&t[G]);
    double flops = 2. * (double)(rows * in * out) * (double)a->here;
    for (int64_t i = 0; i < rows * out; i++)
        if (expert_of(a, i / out) >= 0) {
            int64_t o = expert_of(a, i / out) * out + i % out;
            g[i] = fixture_dot(t[BY].d + i / out * in, w + o * in, in) +
                   (a->adapted ? t[B].d[o] : 0);
        }
    run(a, FWD, BIT(BY) | BIT(W) | BIT(G) | (a->adapted ? LOW : 0), BIT(G));
    assert_true(a->adapted ||
                fabs(a->s.flops * (double)a->e - flops) <= 1e-9 * flops);
    fixture_close("y", &t[G], tol);
    load_small(&t[G]);
}

/* Where activations have 16 bits, the adapter's first product has, too.  An
 * expert without rows has a gradient of zeros. */
static void check_products(struct mixture *a, bool adapted)
{
    struct tensor *t = a->s.t;
    enum iz_dtype act = t[BY].v.dtype;
    int64_t in = t[BY].v.cols, out = t[G].v.cols, rows = a->m * a->k;
    double tol = adapted ? 8e-6 : 4e-6;
    tol += adapted && act != IZ_F32 ? 4 * fixture_rounding(act, 1) : 0;
    a->adapted = adapted;
    double *w = weights_of(a);
    check_forward(a, w, tol);
    double *da = want_kept(&t[BY]), *dw = tensor_want(&t[DW]);
    double *dla = tensor_want(&t[DLA]), *dlb = tensor_want(&t[DLB]);
    double *db = tensor_want(&t[DB]);
    for (int64_t i = 0; i < rows; i++) {
        int64_t e = expert_of(a, i);
        const double *dy = t[G].d + i * out, *x = t[BY].d + i * in;
        if (e < 0)
            continue;
        add_adapter_gradients(a, e, dy, x, dla, dlb);
        memset(da + i * in, 0, (size_t)in * sizeof(*da));
        for (int64_t j = 0; j < out; j++)
            db[e * out + j] += dy[j];
        for (int64_t j = 0; j < out * in; j++) {
            da[i * in + j % in] += dy[j / in] * w[e * out * in + j];
            dw[e * out * in + j] += dy[j / in] * x[j % in];
        }
    }
    run(a, BWD_W, BIT(BY) | BIT(G) | (adapted ? LOW : 0),
        BIT(DW) | (adapted ? BIT(DLA) | BIT(DLB) | BIT(DB) : 0));
    fixture_close("dw", &t[DW], 4e-6);
    tensor_load(&t[DW]);
    for (int64_t i = 0; i < a->here * out * in; i++)
        assert_true(dw[i] != 0 || t[DW].d[i] == 0);
    if (adapted) {
        fixture_close("da of adapters", &t[DLA], tol);
        fixture_close("db of adapters", &t[DLB], tol);
        fixture_close("db", &t[DB], 4e-6);
    }
    run(a, BWD_A, BIT(G) | BIT(W) | BIT(BY) | (adapted ? LOW : 0), BIT(BY));
    fixture_close("da", &t[BY], tol);
    load_small(&t[BY]);
    a->adapted = false;
    free(w);
}

static void check_weights(struct mixture *a)
{
    struct tensor *t = a->s.t;
    int64_t f = t[G].v.cols;
    const int32_t *place = t[PLACE].v.p;
    double *g = want_kept(&t[G]), *du = want_kept(&t[DU]);
    double *ds = want_kept(&t[DS]);
    for (int64_t i = 0; i < a->m * a->k; i++) {
        double w = (double)((float *)t[WEIGHT].v.p)[i];
        int64_t at = place[i] * f;
        if (expert_of(a, place[i]) < 0)
            continue;
        ds[i] = fixture_dot(t[G].d + at, t[DG].d + at, f);
        for (int64_t c = 0; c < 2 * f; c++)
            du[2 * at + c] = w * t[DU].d[2 * at + c];
        for (int64_t c = 0; c < f; c++)
            g[at + c] = w * t[G].d[at + c];
    }
    unsigned written = BIT(DS) | BIT(G) | BIT(DU);
    run(a, WEIGH, BIT(DG) | written, written);
    fixture_close("dweight", &t[DS], 2e-6);
    fixture_close("weighed", &t[G], 0x1p-24);
    fixture_close("weighed gradient", &t[DU], 0x1p-24);
    tensor_load(&t[G]);
    tensor_load(&t[DU]);
}

/* A bias is of an output, which has as many columns as G here. */
static void check_bias(struct mixture *a)
{
    struct tensor *t = a->s.t;
    int64_t n = t[G].v.cols;
    const int32_t *place = t[PLACE].v.p;
    tensor_load(&t[DS]);
    double *dy = want_kept(&t[G]), *ds = want_kept(&t[DS]);
    for (int64_t i = 0; i < a->m * a->k; i++) {
        int64_t e = expert_of(a, place[i]), at = place[i] * n;
        if (e < 0)
            continue;
        ds[i] += fixture_dot(t[G].d + at, t[B].d + e * n, n);
        for (int64_t c = 0; c < n; c++)
            dy[at + c] = (double)((float *)t[WEIGHT].v.p)[i] * t[G].d[at + c];
    }
    unsigned both = BIT(DS) | BIT(G);
    run(a, WEIGH_BIAS, BIT(B) | both, both);
    fixture_close("dweight with bias", &t[DS], 2e-6);
    fixture_close("weighed dy", &t[G], 0x1p-24);
    tensor_load(&t[G]);
}

/* Gates of the rows of the experts here; the others stay. */
static void check_gates(struct mixture *a)
{
    struct tensor *t = a->s.t;
    int64_t f = t[G].v.cols, rows = a->m * a->k;
    bool turns = a->act == IZ_SWISH_7;
    int64_t step = turns ? 2 : 1, up = turns ? 1 : f;
    double *y = want_kept(&t[G]);
    for (int64_t i = 0; i < rows * f; i++) {
        const double *u = t[DU].d + i / f * 2 * f + i % f * step;
        if (expert_of(a, i / f) >= 0)
            y[i] = ref_activation(a->act, u[0]) * ref_up(a->act, u[up]);
    }
    run(a, GATE, BIT(DU) | BIT(G), BIT(G));
    fixture_close("gates", &t[G], 1e-6);
    tensor_load(&t[G]);
    double *again = want_kept(&t[G]), *du = want_kept(&t[DU]);
    for (int64_t i = 0; i < rows * f; i++) {
        int64_t at = i / f * 2 * f + i % f * step;
        const double *u = t[DU].d + at;
        double dy = t[DG].d[i];
        if (expert_of(a, i / f) < 0)
            continue;
        again[i] = ref_activation(a->act, u[0]) * ref_up(a->act, u[up]);
        du[at + up] = dy * ref_activation(a->act, u[0]);
        du[at] =
            dy * ref_activation_gradient(a->act, u[0]) * ref_up(a->act, u[up]);
    }
    run(a, UNGATE, BIT(DU) | BIT(DG) | BIT(G), BIT(DU) | BIT(G));
    fixture_close("gates again", &t[G], 1e-6);
    fixture_close("gradient of gates", &t[DU], 2e-6);
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
        check_weights(&a);
        check_bias(&a);
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
    int64_t bytes = iz_view_bytes(a.s.t[A].v);
    char *begin = malloc((size_t)bytes), *whole = malloc((size_t)bytes);
    struct tensor *y = &a.s.t[A];
    mixture_route(&a);
    memcpy(begin, y->v.p, (size_t)bytes);
    for (int back = 0; back < 2; back++)
        for (int64_t cut = 9; cut > 0; cut -= 4) { /* at once, then cut */
            memcpy(y->v.p, begin, (size_t)bytes);
            a.back = back;
            for (int64_t at = 0; at < 9; at += cut) {
                a.here = at + cut < 9 ? cut : 9 - at;
                a.first = back ? 9 - at - a.here : at;
                run(&a, COMBINE, BIT(BY) | BIT(A), BIT(A));
                tensor_load(y);
            }
            if (cut == 9)
                memcpy(whole, y->v.p, (size_t)bytes);
            assert_memory_equal(whole, y->v.p, (size_t)bytes);
        }
    free(begin);
    free(whole);
    scene_free(&a.s);
}

/* Two choices in one memory, the second by what DS has in place of P. */
static void choose_again(struct iz_exec *x, const struct iz_view *v,
                         const void *arg)
{
    struct iz_routes r = mixture_routes(arg, v);
    struct iz_linear l = {.w = v[W], .out_in = true};
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
    unsigned reads = BIT(P) | BIT(DS) | BIT(BY) | BIT(W);
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
    run(&a, FWD, BIT(BY) | BIT(W), BIT(G));
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
