/* SPDX-License-Identifier: Apache-2.0 */
/* The ops of a mixture of experts against double precision: routers, rows to
 * experts and back, and the products of each expert with its rows. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/codelets/ops/reference.h"
#include "tests/codelets/ops/scene.h"

/* First what iz_route_fwd fills in. */
enum { P, LSE, WEIGHT, PLACE, CHOSEN, END, ROUTED };
enum { DWEIGHT = ROUTED, DLOGITS, TOLD, ROUTER_TENSORS };
#define ROUTES                                                                 \
    (BIT(P) | BIT(LSE) | BIT(WEIGHT) | BIT(PLACE) | BIT(CHOSEN) | BIT(END))

/* Of rows, experts and how many of them a row chooses. */
struct mixture {
    struct scene s;
    int64_t m, e, k;
    bool normalise;
    float balance, z;
};

static struct mixture mixture_new(int64_t m, int64_t e, int64_t k)
{
    return (struct mixture){.s = {.n = ROUTED,
                                  .t = {[P] = tensor_new(IZ_F32, m, e, 2),
                                        [LSE] = tensor_new(IZ_F32, m, 1, 1),
                                        [WEIGHT] = tensor_new(IZ_F32, m, k, 1),
                                        [PLACE] = bytes_new(m * k * 4),
                                        [CHOSEN] = bytes_new(m * k * 4),
                                        [END] = bytes_new(e * 4)}},
                            .m = m,
                            .e = e,
                            .k = k};
}

static struct iz_view numbers(struct iz_view v, int64_t rows, int64_t cols)
{
    return (struct iz_view){v.p, IZ_I32, rows, cols, NULL, NULL};
}

static struct iz_routes routes_of(const struct mixture *a,
                                  const struct iz_view *v)
{
    return (struct iz_routes){.p = v[P],
                              .lse = v[LSE],
                              .weight = v[WEIGHT],
                              .place = numbers(v[PLACE], a->m, a->k),
                              .chosen = numbers(v[CHOSEN], a->m, a->k),
                              .end = numbers(v[END], 1, a->e),
                              .normalise = a->normalise};
}

static void route_op(struct iz_exec *x, const struct iz_view *v,
                     const void *arg)
{
    struct iz_routes r = routes_of(arg, v);
    iz_route_fwd(x, &r);
}

static const struct pass route = {route_op, BIT(P), ROUTES};

/* ---- routers ---- */

static void tell_op(struct iz_exec *x, const struct iz_view *v, const void *arg)
{
    const struct mixture *a = arg;
    struct iz_routes r = routes_of(a, v);
    iz_route_tell(x, v[TOLD].p, &r, (double)a->balance, (double)a->z);
}

static void route_bwd_op(struct iz_exec *x, const struct iz_view *v,
                         const void *arg)
{
    const struct mixture *a = arg;
    struct iz_routes r = routes_of(a, v);
    iz_route_bwd(x, v[DLOGITS], v[DWEIGHT], &r, a->balance, a->z);
}

/* The router by the book, of the choice that was made. */
static double objective(void *arg)
{
    struct mixture *a = arg;
    const int32_t *chosen = a->s.t[CHOSEN].v.p;
    double *rows = calloc((size_t)a->e, 3 * sizeof(*rows));
    double *mean = rows + a->e, *p = mean + a->e, f = 0, z = 0;
    for (int64_t t = 0; t < a->m; t++) {
        double sum = 0, of_chosen = 0;
        for (int64_t i = 0; i < a->e; i++)
            sum += p[i] = exp(a->s.t[P].d[t * a->e + i]);
        for (int64_t i = 0; i < a->e; i++)
            mean[i] += (p[i] /= sum) / (double)a->m;
        for (int64_t j = 0; j < a->k; j++)
            of_chosen += p[chosen[t * a->k + j]];
        for (int64_t j = 0; j < a->k; j++) {
            int32_t i = chosen[t * a->k + j];
            rows[i]++;
            f += a->s.t[DWEIGHT].d[t * a->k + j] * p[i] /
                 (a->normalise ? of_chosen : 1);
        }
        z += log(sum) * log(sum) / (double)a->m;
    }
    for (int64_t i = 0; i < a->e; i++)
        f += (double)a->balance * (double)a->e * rows[i] / (double)a->m *
             mean[i];
    free(rows);
    return f + (double)a->z * z;
}

/* k largest logits, of equal ones the first; each expert's rows ascend. */
static void check_choice(const struct mixture *a)
{
    const int32_t *chosen = a->s.t[CHOSEN].v.p, *place = a->s.t[PLACE].v.p;
    const int32_t *end = a->s.t[END].v.p;
    int32_t *next = calloc((size_t)a->e, sizeof(*next));
    for (int64_t i = 1; i < a->e; i++)
        next[i] = end[i - 1];
    for (int64_t i = 0; i < a->m * a->k; i++)
        assert_int_equal(place[i], next[chosen[i]]++);
    assert_memory_equal(next, end, (size_t)a->e * sizeof(*next));
    free(next);
    for (int64_t t = 0; t < a->m; t++) {
        const double *l = a->s.t[P].d + t * a->e;
        for (int64_t j = 0; j < a->k; j++) {
            int64_t c = chosen[t * a->k + j], before = 0;
            for (int64_t i = 0; i < a->e; i++)
                before += l[i] > l[c] || (l[i] == l[c] && i < c);
            assert_int_equal(before, j);
        }
    }
}

struct loads {
    double least, most;
};

/* The fewest and the most rows of an expert. */
static struct loads loads_of(const struct mixture *a)
{
    const int32_t *chosen = a->s.t[CHOSEN].v.p;
    struct loads l = {.least = INFINITY};
    for (int64_t i = 0; i < a->e; i++) {
        double n = 0;
        for (int64_t j = 0; j < a->m * a->k; j++)
            n += chosen[j] == i;
        l.least = fmin(l.least, n);
        l.most = fmax(l.most, n);
    }
    return l;
}

static void check_router(struct mixture *a, enum iz_dtype act)
{
    struct tensor *t = a->s.t;
    a->s.n = ROUTER_TENSORS;
    t[DWEIGHT] = tensor_new(IZ_F32, a->m, a->k, 1);
    t[DLOGITS] = tensor_new(act, a->m, a->e, 1);
    t[TOLD] = bytes_new(sizeof(struct iz_told));
    a->s.pinned = BIT(TOLD);
    scene_run(&a->s, &route, a);
    check_choice(a);
    ref_gradient(tensor_want(&t[DLOGITS]), objective, a, t[P].d, a->m * a->e);
    scene_run(&a->s,
              &(struct pass){route_bwd_op, ROUTES | BIT(DWEIGHT), BIT(DLOGITS)},
              a);
    fixture_close("dlogits", &t[DLOGITS], 2e-5);
    struct iz_told *told = t[TOLD].v.p;
    *told = (struct iz_told){.loss = 3, .least = 0.7, .most = 1.2};
    scene_run(&a->s, &(struct pass){tell_op, ROUTES | BIT(TOLD), BIT(TOLD)}, a);
    memset(t[DWEIGHT].d, 0, (size_t)(a->m * a->k) * sizeof(double));
    double want = 3 + objective(a), even = (double)(a->m * a->k) / (double)a->e;
    assert_true(fabs(told->loss - want) <= 1e-6 * want);
    struct loads l = loads_of(a);
    assert_true(told->least == fmin(0.7, l.least / even));
    assert_true(told->most == fmax(1.2, l.most / even));
    scene_free(&a->s);
}

static void routers_agree_with_central_differences(void **state)
{
    static const int64_t size[][3] = {{1, 1, 1}, {1, 5, 5},    {7, 4, 1},
                                      {9, 8, 2}, {133, 16, 3}, {3, 130, 8}};
    for (size_t i = 0; i < sizeof(size) / sizeof(size[0]); i++)
        for (int how = 0; how < 4; how++) {
            struct mixture a = mixture_new(size[i][0], size[i][1], size[i][2]);
            a.normalise = how & 1;
            a.balance = how & 2 ? 0.7f : 0;
            a.z = how & 2 ? 0.3f : 0;
            check_router(&a, backend.act(fixture_types[i % 3]));
        }
}

/* Quarters, so that many logits are equal. */
static void of_equal_ones_the_first_is_chosen(void **state)
{
    struct mixture a = mixture_new(40, 9, 4);
    for (int64_t i = 0; i < 40 * 9; i++)
        a.s.t[P].d[i] = floor(a.s.t[P].d[i]) / 4;
    tensor_store(&a.s.t[P]);
    check_router(&a, backend.act(IZ_F32));
}

/* Of what is no number, any k different experts, and no weight that hides it.
 */
static void nan_stays_and_still_has_a_place(void **state)
{
    struct mixture a = mixture_new(3, 5, 2);
    bool there[6] = {false};
    a.s.t[P].d[7] = NAN; /* of row 1 */
    tensor_store(&a.s.t[P]);
    scene_run(&a.s, &route, &a);
    const int32_t *place = a.s.t[PLACE].v.p;
    const float *weight = a.s.t[WEIGHT].v.p;
    for (int i = 0; i < 6; i++) {
        assert_true(place[i] >= 0 && place[i] < 6 && !there[place[i]]);
        there[place[i]] = true;
        assert_true(isnan(weight[i]) == (i / 2 == 1));
    }
    scene_free(&a.s);
}

/* ---- experts ---- */

/* Rows and by expert, an expert's weights and its hidden channels. */
enum { A = ROUTED, BY, W, DW, G, DU, DG, DS, EXPERT_TENSORS };

static struct mixture experts_new(enum iz_dtype type, int64_t m, int64_t e,
                                  int64_t k, int64_t in, int64_t out)
{
    struct mixture a = mixture_new(m, e, k);
    struct tensor *t = a.s.t;
    enum iz_dtype act = backend.act(type);
    a.s.n = EXPERT_TENSORS;
    t[A] = tensor_new(act, m, in, 1);
    t[BY] = tensor_new(act, m * k, in, 1);
    t[W] = tensor_new(type, e * out, in, 1);
    t[DW] = tensor_new(type, e * out, in, 1);
    t[G] = tensor_new(act, m * k, out, 1);
    t[DU] = tensor_new(act, m * k, 2 * out, 1);
    t[DG] = tensor_new(act, m * k, out, 1);
    t[DS] = tensor_new(IZ_F32, m, k, 1);
    return a;
}

static void dispatch_op(struct iz_exec *x, const struct iz_view *v,
                        const void *arg)
{
    struct iz_routes r = routes_of(arg, v);
    iz_dispatch(x, v[BY], v[A], &r);
}

static void combine_op(struct iz_exec *x, const struct iz_view *v,
                       const void *arg)
{
    const struct mixture *a = arg;
    struct iz_routes r = routes_of(a, v);
    iz_combine(x, v[A], v[A], v[BY], &r, a->normalise);
}

static struct iz_linear linear_of(const struct iz_view *v)
{
    return (struct iz_linear){.w = v[W], .dw = v[DW], .out_in = true};
}

static void fwd_op(struct iz_exec *x, const struct iz_view *v, const void *arg)
{
    struct iz_routes r = routes_of(arg, v);
    struct iz_linear l = linear_of(v);
    iz_experts_fwd(x, v[G], v[BY], &l, &r);
}

static void da_op(struct iz_exec *x, const struct iz_view *v, const void *arg)
{
    struct iz_routes r = routes_of(arg, v);
    struct iz_linear l = linear_of(v);
    iz_experts_da(x, v[BY], v[G], &l, &r);
}

static void dw_op(struct iz_exec *x, const struct iz_view *v, const void *arg)
{
    struct iz_routes r = routes_of(arg, v);
    struct iz_linear l = linear_of(v);
    iz_experts_dw(x, v[G], v[BY], &l, &r);
}

static void weigh_op(struct iz_exec *x, const struct iz_view *v,
                     const void *arg)
{
    struct iz_routes r = routes_of(arg, v);
    iz_weigh_bwd(x, v[DS], v[G], v[DU], v[DG], &r);
}

/* The expert of a row by expert. */
static int64_t expert_of(const struct mixture *a, int64_t row)
{
    const int32_t *end = a->s.t[END].v.p;
    int64_t i = 0;
    while (end[i] <= row)
        i++;
    return i;
}

static void check_rows(struct mixture *a)
{
    struct tensor *t = a->s.t;
    int64_t n = t[A].v.cols;
    const int32_t *place = t[PLACE].v.p;
    double *by = tensor_want(&t[BY]);
    for (int64_t i = 0; i < a->m * a->k; i++)
        memcpy(by + place[i] * n, t[A].d + i / a->k * n, (size_t)n * 8);
    scene_run(&a->s, &(struct pass){dispatch_op, ROUTES | BIT(A), BIT(BY)}, a);
    fixture_close("rows by expert", &t[BY], 0);
    tensor_load(&t[BY]);
    for (int weighed = 0; weighed < 2; weighed++) {
        double *y = tensor_want(&t[A]);
        a->normalise = weighed;
        memcpy(y, t[A].d, (size_t)(a->m * n) * 8);
        for (int64_t i = 0; i < a->m * a->k * n; i++)
            y[i / n / a->k * n + i % n] +=
                t[BY].d[place[i / n] * n + i % n] *
                (weighed ? (double)((float *)t[WEIGHT].v.p)[i / n] : 1);
        scene_run(&a->s,
                  &(struct pass){combine_op, ROUTES | BIT(A) | BIT(BY), BIT(A)},
                  a);
        fixture_close("sums of rows", &t[A], 1e-6);
        tensor_load(&t[A]);
    }
}

static void check_products(struct mixture *a)
{
    struct tensor *t = a->s.t;
    int64_t in = t[BY].v.cols, out = t[G].v.cols, rows = a->m * a->k;
    double *g = tensor_want(&t[G]);
    for (int64_t i = 0; i < rows * out; i++)
        g[i] = fixture_dot(
            t[BY].d + i / out * in,
            t[W].d + (expert_of(a, i / out) * out + i % out) * in, in);
    scene_run(&a->s, &(struct pass){fwd_op, ROUTES | BIT(BY) | BIT(W), BIT(G)},
              a);
    assert_true(a->s.flops == 2. * (double)(rows * in * out));
    fixture_close("y", &t[G], 4e-6);
    tensor_load(&t[G]);
    double *dw = tensor_want(&t[DW]), *da = tensor_want(&t[BY]);
    memset(da, 0, (size_t)(rows * in) * 8);
    for (int64_t i = 0; i < rows * out; i++) {
        int64_t w = (expert_of(a, i / out) * out + i % out) * in;
        for (int64_t c = 0; c < in; c++) {
            dw[w + c] += t[G].d[i] * t[BY].d[i / out * in + c];
            da[i / out * in + c] += t[G].d[i] * t[W].d[w + c];
        }
    }
    scene_run(&a->s, &(struct pass){dw_op, ROUTES | BIT(BY) | BIT(G), BIT(DW)},
              a);
    fixture_close("dw", &t[DW], 4e-6);
    tensor_load(&t[DW]);
    for (int64_t w = 0; w < a->e * out * in; w++)
        assert_true(dw[w] != 0 || t[DW].d[w] == 0);
    scene_run(&a->s, &(struct pass){da_op, ROUTES | BIT(G) | BIT(W), BIT(BY)},
              a);
    fixture_close("da", &t[BY], 4e-6);
}

static void check_weights(struct mixture *a)
{
    struct tensor *t = a->s.t;
    int64_t f = t[G].v.cols;
    const int32_t *place = t[PLACE].v.p;
    double *g = tensor_want(&t[G]), *du = tensor_want(&t[DU]);
    double *ds = tensor_want(&t[DS]);
    for (int64_t i = 0; i < a->m * a->k; i++) {
        double w = (double)((float *)t[WEIGHT].v.p)[i];
        int64_t at = place[i] * f;
        ds[i] = fixture_dot(t[G].d + at, t[DG].d + at, f);
        for (int64_t c = 0; c < 2 * f; c++)
            du[2 * at + c] = w * t[DU].d[2 * at + c];
        for (int64_t c = 0; c < f; c++)
            g[at + c] = w * t[G].d[at + c];
    }
    scene_run(&a->s,
              &(struct pass){weigh_op, ROUTES | BIT(G) | BIT(DU) | BIT(DG),
                             BIT(DS) | BIT(G) | BIT(DU)},
              a);
    fixture_close("dweight", &t[DS], 2e-6);
    fixture_close("weighed", &t[G], 0x1p-24);
    fixture_close("weighed gradient", &t[DU], 0x1p-24);
}

/* With rows spread by chance, or with all that can be in the first experts:
 * the others then have none, and a gradient of zeros. */
static void experts_agree_with_reference(void **state)
{
    static const int64_t size[][5] = {{1, 1, 1, 1, 1},
                                      {5, 3, 1, 4, 7},
                                      {11, 4, 2, 17, 9},
                                      {190, 5, 3, 24, 16},
                                      {4, 64, 8, 5, 6}};
    for (size_t i = 0; i < 6 * sizeof(size) / sizeof(size[0]); i++) {
        const int64_t *n = size[i / 6];
        if (!backend_computes(fixture_types[i % 3]))
            continue;
        struct mixture a =
            experts_new(fixture_types[i % 3], n[0], n[1], n[2], n[3], n[4]);
        bool skewed = i / 3 % 2;
        for (int64_t j = 0; skewed && j < n[0] * n[1]; j++)
            a.s.t[P].d[j] = (double)-(j % n[1]);
        tensor_store(&a.s.t[P]);
        scene_run(&a.s, &route, &a);
        const int32_t *end = a.s.t[END].v.p;
        assert_true(!skewed || end[0] == n[0]);
        assert_true(!skewed || end[n[2] - 1] == n[0] * n[2]);
        check_rows(&a);
        check_products(&a);
        check_weights(&a);
        scene_free(&a.s);
    }
}

int ops_experts(void)
{
    const struct CMUnitTest tests[] = {
        SEEDED(routers_agree_with_central_differences),
        SEEDED(of_equal_ones_the_first_is_chosen),
        SEEDED(nan_stays_and_still_has_a_place),
        SEEDED(experts_agree_with_reference),
    };
    return cmocka_run_group_tests_name("experts", tests, backend_renew, NULL);
}
