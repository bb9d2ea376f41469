/* SPDX-License-Identifier: Apache-2.0 */
/* Tables of rows, products of pairs, and conversion. */
#include "tests/codelets/ops/args.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/codelets/ops/reference.h"

/* ---- tables ---- */

struct table {
    struct tensor y, r, w, dy, dw;
    struct iz_table t;
    struct ref_table ref;
    bool kept, in_place;
};

static void table_forward(struct iz_exec *x, void *arg)
{
    struct table *t = arg;

    iz_table_fwd(x, t->in_place ? t->r.v : t->y.v, t->kept ? t->r.v : IZ_NONE,
                 &t->t);
}

static void table_backward(struct iz_exec *x, void *arg)
{
    struct table *t = arg;

    iz_table_bwd(x, t->dy.v, &t->t);
}

static double table_objective(void *arg)
{
    struct table *t = arg;

    ref_table(&t->ref);
    return fixture_dot(t->ref.y, t->dy.d, iz_view_len(t->dy.v));
}

/* Rows 5 to 5 + v - 1 of a table of v + 9. */
static struct table table_new(enum iz_dtype type, int64_t m, int64_t c,
                              int64_t v)
{
    struct table t = {tensor_new(IZ_F32, m, c, 1), tensor_new(IZ_F32, m, c, 1),
                      tensor_new(type, v, c, 1),   tensor_new(IZ_F32, m, c, 1),
                      tensor_new(type, v, c, 1),   .kept = true};
    int32_t *row = calloc((size_t)m, sizeof *row);

    for (int64_t i = 0; i < m; i++)
        row[i] = fixture_below(v + 9);
    t.t = (struct iz_table){t.w.v, t.dw.v, row, 5};
    t.ref = (struct ref_table){
        calloc((size_t)(m * c), sizeof(double)), t.w.d, t.r.d, row, m, c, v, 5};
    return t;
}

static void table_free(struct table *t)
{
    struct tensor *all[] = {&t->y, &t->r, &t->w, &t->dy, &t->dw};

    for (int i = 0; i < 5; i++)
        tensor_free(all[i]);
    free((void *)(uintptr_t)t->t.row);
    free(t->ref.y);
}

static void check_table(enum iz_dtype type, const int64_t s[3])
{
    struct table t = table_new(type, s[0], s[1], s[2]);
    int64_t n = iz_view_len(t.w.v);
    double *want = calloc((size_t)n, sizeof *want);

    table_objective(&t);
    fixture_run(table_forward, &t);
    fixture_close("rows", &t.y, t.ref.y, 0);
    fixture_run(table_backward, &t);
    ref_gradient(want, table_objective, &t, t.w.d, n);
    fixture_close("gradient of rows", &t.dw, want, 2e-6);
    t.in_place = true;
    fixture_run(table_forward, &t);
    fixture_same_bits("in place", t.r.v, t.y.v);
    t.in_place = t.kept = false;
    t.ref.r = NULL;
    table_objective(&t);
    fixture_run(table_forward, &t);
    fixture_close("rows or zeros", &t.y, t.ref.y, 0);
    table_free(&t);
    free(want);
}

/* Rows that repeat, that never occur, and that another part has. */
static void tables_agree_with_reference(void **state)
{
    static const int64_t size[][3] = {
        {1, 1, 1}, {60, 3, 4}, {33, 17, 40}, {7, 16, 1}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (int i = 0; i < 4; i++)
            check_table(fixture_types[t], size[i]);
}

/* ---- products of pairs ---- */

static void check_interact(int64_t m, int64_t n, int64_t d)
{
    struct interact t = interact_new(IZ_F32, m, n, d);

    interact_objective(&t);
    fixture_run(interact_forward, &t);
    fixture_close("products", &t.y, t.out, 1e-6);
    fixture_run(interact_backward, &t);
    interact_check_gradients(&t, 2e-6);
    interact_free(&t);
}

static void products_of_pairs_agree_with_reference(void **state)
{
    (void)state;
    fixture_seed();
    check_interact(1, 1, 1);
    check_interact(3, 4, 5);
    check_interact(2, 26, 16);
    check_interact(5, 2, 33);
}

static void products_of_pairs_let_nan_through(void **state)
{
    struct tensor y, z, e;
    struct interact t;

    (void)state;
    fixture_seed();
    t = (struct interact){.y = y = tensor_new(IZ_F32, 1, 2 + 3, 1),
                          .z = z = tensor_new(IZ_F32, 1, 2, 1),
                          .e = e = tensor_new(IZ_F32, 2, 2, 1)};
    t.e.d[3] = NAN; /* of v_2 */
    tensor_store(&t.e);
    fixture_run(interact_forward, &t);
    tensor_load(&t.y);
    assert_true(isfinite(t.y.d[2]) && isnan(t.y.d[3]) && isnan(t.y.d[4]));
    tensor_free(&y);
    tensor_free(&z);
    tensor_free(&e);
}

/* ---- conversion ---- */

struct pair {
    struct tensor from, to;
};

static void convert(struct iz_exec *x, void *arg)
{
    struct pair *p = arg;

    iz_convert(x, p->to.v, p->from.v);
}

static void conversion_rounds(void **state)
{
    (void)state;
    fixture_seed();
    for (int i = 0; i < 9; i++) {
        struct pair p = {tensor_new(fixture_types[i / 3], 3, 333, 2),
                         tensor_new(fixture_types[i % 3], 3, 333, 2)};

        fixture_run(convert, &p);
        fixture_close("converted", &p.to, p.from.d, 0);
        tensor_free(&p.from);
        tensor_free(&p.to);
    }
}

int ops_tables(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tables_agree_with_reference),
        cmocka_unit_test(products_of_pairs_agree_with_reference),
        cmocka_unit_test(products_of_pairs_let_nan_through),
        cmocka_unit_test(conversion_rounds),
    };

    return cmocka_run_group_tests_name("tables", tests, NULL, NULL);
}
