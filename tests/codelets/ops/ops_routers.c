/* SPDX-License-Identifier: Apache-2.0 */
/* The router of a mixture of experts against double precision: what it chooses,
 * what it tells, its gradient. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/codelets/ops/mixture.h"
#include "tests/codelets/ops/reference.h"

enum { DWEIGHT = ROUTED, DLOGITS, TOLD, ROUTER_TENSORS };

static void tell_op(struct iz_exec *x, const struct iz_view *v, const void *arg)
{
    const struct mixture *a = arg;
    struct iz_routes r = mixture_routes(a, v);
    iz_route_aux(x, v[TOLD].p, &r, (double)a->balance, (double)a->z);
}

static void route_bwd_op(struct iz_exec *x, const struct iz_view *v,
                         const void *arg)
{
    const struct mixture *a = arg;
    struct iz_routes r = mixture_routes(a, v);
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
        for (int64_t i = 0; i < a->e; i++) {
            p[i] /= a->sigmoid ? 1 + p[i] : sum;
            mean[i] += p[i] / (double)a->m;
        }
        for (int64_t j = 0; j < a->k; j++)
            of_chosen += p[chosen[t * a->k + j]];
        for (int64_t j = 0; j < a->k; j++) {
            int32_t i = chosen[t * a->k + j];
            rows[i]++;
            f += a->s.t[DWEIGHT].d[t * a->k + j] * p[i] /
                 (a->normalise ? of_chosen : 1) *
                 (a->scale != 0 ? (double)a->scale : 1);
        }
        z += a->sigmoid ? 0 : log(sum) * log(sum) / (double)a->m;
    }
    for (int64_t i = 0; i < a->e; i++)
        f += (double)a->balance * (double)a->e * rows[i] / (double)a->m *
             mean[i];
    free(rows);
    return f + (double)a->z * z;
}

/* What a row chooses by: where nothing is added to it, logits do.  Experts of
 * groups that are not kept have nothing. */
static void scores_of(const struct mixture *a, int64_t t, double *score)
{
    const double *l = a->s.t[P].d + t * a->e;
    int64_t each = a->groups ? a->e / a->groups : a->e;
    double sum = 0, best[32] = {0};
    for (int64_t i = 0; i < a->e; i++)
        sum += exp(l[i]);
    for (int64_t i = 0; i < a->e; i++)
        score[i] = !a->choosy   ? l[i]
                   : a->sigmoid ? 1 / (1 + exp(-l[i])) + a->s.t[CHOICE].d[i]
                                : exp(l[i]) / sum + a->s.t[CHOICE].d[i];
    for (int64_t g = 0; g < a->groups; g++)
        for (int64_t i = g * each; i < (g + 1) * each; i++)
            for (int64_t j = g * each; j < i; j++)
                best[g] = j + i == 2 * g * each + 1
                              ? score[i] + score[j]
                              : fmax(best[g], score[i] + score[j]);
    for (int64_t g = 0, before = 0; g < a->groups; g++, before = 0) {
        for (int64_t h = 0; h < a->groups; h++)
            before += best[h] > best[g];
        for (int64_t i = g * each; before >= a->kept && i < (g + 1) * each; i++)
            score[i] = -INFINITY;
    }
}

/* k largest scores, of equal ones the first, by number; each expert's rows
 * ascend. */
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
    double *l = malloc((size_t)a->e * sizeof(*l));
    for (int64_t t = 0; t < a->m; t++) {
        scores_of(a, t, l);
        for (int64_t j = 0; j < a->k; j++) {
            int64_t c = chosen[t * a->k + j], before = 0;
            for (int64_t i = 0; i < a->e; i++)
                before += l[i] > l[c] || (l[i] == l[c] && i < c);
            assert_true(before < a->k);
            assert_true(!j || c > chosen[t * a->k + j - 1]);
        }
    }
    free(l);
}

static void check_router(struct mixture *a, enum iz_dtype act)
{
    struct tensor *t = a->s.t;
    a->s.n = ROUTER_TENSORS;
    t[DWEIGHT] = tensor_new(IZ_F32, a->m, a->k, 1);
    t[DLOGITS] = tensor_new(act, a->m, a->e, 1);
    t[TOLD] = bytes_new(sizeof(struct iz_aux));
    a->s.pinned = BIT(TOLD);
    mixture_route(a);
    check_choice(a);
    ref_gradient(tensor_want(&t[DLOGITS]), objective, a, t[P].d, a->m * a->e);
    scene_run(&a->s,
              &(struct pass){route_bwd_op, ROUTES | BIT(DWEIGHT), BIT(DLOGITS)},
              a);
    fixture_close("dlogits", &t[DLOGITS], 2e-5);
    struct iz_aux *aux = t[TOLD].v.p;
    *aux = (struct iz_aux){.loss = 3, .least = 0.7, .most = 1.2};
    scene_run(&a->s, &(struct pass){tell_op, ROUTES | BIT(TOLD), BIT(TOLD)}, a);
    memset(t[DWEIGHT].d, 0, (size_t)(a->m * a->k) * sizeof(double));
    double want = 3 + objective(a), even = (double)(a->m * a->k) / (double)a->e;
    assert_true(fabs(aux->loss - want) <= 1e-6 * want);
    double least = 0.7, most = 1.2;
    const int32_t *end = t[END].v.p;
    for (int64_t i = 0; i < a->e; i++) {
        double rows = end[i] - (i ? end[i - 1] : 0);
        least = fmin(least, rows / even);
        most = fmax(most, rows / even);
    }
    assert_true(aux->least == least && aux->most == most);
    scene_free(&a->s);
}

/* By sigmoid or not, with something added for choosing alone, in groups. */
static void routers_agree_with_central_differences(void **state)
{
    static const struct mixture like[] = {
        {.m = 1, .e = 1, .k = 1},
        {.m = 1, .e = 5, .k = 5},
        {.m = 7, .e = 4, .k = 1},
        {.m = 9, .e = 8, .k = 2},
        {.m = 133, .e = 16, .k = 3},
        {.m = 3, .e = 130, .k = 8},
        {.m = 31, .e = 16, .k = 3, .groups = 4, .kept = 2, .sigmoid = true},
        {.m = 31, .e = 96, .k = 6, .groups = 32, .kept = 3, .sigmoid = true},
        {.m = 9, .e = 130, .k = 8, .sigmoid = true, .scale = 2.5F},
        {.m = 33, .e = 7, .k = 2, .scale = 0.4F},
        {.m = 33, .e = 8, .k = 2, .groups = 2, .kept = 1},
        {.m = 5, .e = 1, .k = 1, .sigmoid = true}};
    for (int k = 0; k < 2 * COUNT(like); k++) {
        const struct mixture *n = &like[k / 2];
        struct mixture a = mixture_new(n->m, n->e, n->k);
        a.choosy = k / 2 >= 6;
        a.sigmoid = n->sigmoid;
        a.groups = n->groups;
        a.kept = n->kept;
        a.scale = n->scale;
        a.normalise = (k + k / 2) % 2;
        a.balance = !n->sigmoid && k % 2 ? 0.7f : 0;
        a.z = !n->sigmoid && k % 2 ? 0.3f : 0;
        check_router(&a, backend.act(fixture_types[k % 3]));
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
    mixture_route(&a);
    const int32_t *place = a.s.t[PLACE].v.p;
    const float *weight = a.s.t[WEIGHT].v.p;
    for (int i = 0; i < 6; i++) {
        assert_true(place[i] >= 0 && place[i] < 6 && !there[place[i]]);
        there[place[i]] = true;
        assert_true(isnan(weight[i]) == (i / 2 == 1));
    }
    scene_free(&a.s);
}

int ops_routers(void)
{
    const struct CMUnitTest tests[] = {
        SEEDED(routers_agree_with_central_differences),
        SEEDED(of_equal_ones_the_first_is_chosen),
        SEEDED(nan_stays_and_still_has_a_place),
    };
    return cmocka_run_group_tests_name("routers", tests, backend_renew, NULL);
}
