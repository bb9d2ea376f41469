/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of tables, products of pairs and conversion against double
 * precision. */
#include "tests/codelets/gpu/emulated.h"

#include <stdlib.h>
#include <string.h>

#include "tests/codelets/gpu/dies.h"
#include "tests/codelets/ops/args.h"
#include "tests/codelets/ops/reference.h"

enum { FIRST = 3 }; /* row of a longer table that a table begins with */

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

/* s: positions, width, rows; `spread` more rows are in no table here. */
static struct table table_new(enum iz_dtype type, const int64_t s[4])
{
    int64_t m = s[0], c = s[1], v = s[2];
    struct table t = {tensor_new(type, m, c, 1), tensor_new(type, m, c, 1),
                      tensor_new(type, v, c, 1), tensor_new(type, m, c, 1),
                      tensor_new(type, v, c, 1), .kept = true};
    int32_t *row = calloc((size_t)m, sizeof *row);

    for (int64_t i = 0; i < m; i++)
        row[i] = fixture_below(v + s[3]) + (s[3] ? 0 : FIRST);
    t.t = (struct iz_table){t.w.v, t.dw.v, row, FIRST};
    t.ref = (struct ref_table){
        calloc((size_t)(m * c), 8), t.w.d, t.r.d, row, m, c, v, FIRST};
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

static void check_table(enum iz_dtype type, const int64_t s[4])
{
    struct table t = table_new(type, s);
    int64_t n = iz_view_len(t.w.v);
    double *want = calloc((size_t)n, sizeof *want);

    table_objective(&t);
    emulated_run(table_forward, &t, type);
    fixture_close("rows", &t.y, t.ref.y, 0);
    emulated_run(table_backward, &t, type);
    ref_gradient(want, table_objective, &t, t.w.d, n);
    fixture_close("gradient of rows", &t.dw, want, 1e-5);
    t.in_place = true;
    emulated_run(table_forward, &t, type);
    fixture_same_bits("in place", t.r.v, t.y.v);
    t.in_place = t.kept = false;
    t.ref.r = NULL;
    table_objective(&t);
    emulated_run(table_forward, &t, type);
    fixture_close("rows or zeros", &t.y, t.ref.y, 0);
    table_free(&t);
    free(want);
}

/* Rows with many positions are summed in pieces, with and without positions
 * that no row has; all of one table; widths of one element and of 16 bytes. */
static void tables_agree_with_reference(void **state)
{
    static const int64_t size[][4] = {
        {1, 1, 1, 0},    {1, 1, 1, 9},    {60, 3, 4, 8},   {700, 8, 2, 3},
        {700, 8, 2, 40}, {1500, 1, 3, 5}, {300, 16, 3, 0}, {33, 264, 40, 20}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
            check_table(fixture_types[t], size[i]);
}

/* ---- products of pairs ---- */

static void check_interact(enum iz_dtype type, int64_t m, int64_t n, int64_t d)
{
    struct interact t = interact_new(type, m, n, d);

    interact_objective(&t);
    emulated_run(interact_forward, &t, type);
    fixture_close("products", &t.y, t.out, 2e-6);
    emulated_run(interact_backward, &t, type);
    interact_check_gradients(&t, 5e-6);
    interact_free(&t);
}

static void products_of_pairs_agree_with_reference(void **state)
{
    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++) {
        check_interact(fixture_types[t], 1, 1, 1);
        check_interact(fixture_types[t], 3, 4, 5);
        check_interact(fixture_types[t], 1, 26, 16);
        check_interact(fixture_types[t], 2, 2, 150);
    }
    check_interact(IZ_F32, 1, 300, 1);
}

static void too_many_vectors(void)
{
    enum { N = 1025 };
    struct interact t = {.y = tensor_new(IZ_F32, 1, 1 + N * (N + 1) / 2, 1),
                         .z = tensor_new(IZ_F32, 1, 1, 1),
                         .e = tensor_new(IZ_F32, N, 1, 1)};

    emulated_run(interact_forward, &t, IZ_F32);
}

static void too_many_vectors_are_refused(void **state)
{
    (void)state;
    dies(too_many_vectors, "products of 1025 vectors; possible are 1024");
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

        emulated_run(convert, &p, fixture_types[i % 3]);
        fixture_close("converted", &p.to, p.from.d, 0);
        tensor_free(&p.from);
        tensor_free(&p.to);
    }
}

int gpu_tables(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tables_agree_with_reference),
        cmocka_unit_test(products_of_pairs_agree_with_reference),
        cmocka_unit_test(too_many_vectors_are_refused),
        cmocka_unit_test(conversion_rounds),
    };

    return cmocka_run_group_tests_name("tables", tests, NULL, NULL);
}
