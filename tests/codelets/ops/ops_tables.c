/* SPDX-License-Identifier: Apache-2.0 */
/* Tables of rows, products of pairs, and conversion. */
#include "tests/codelets/ops/scene.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/codelets/ops/reference.h"

/* ---- tables ---- */

enum { Y, R, W, DY, DW, ROW, TABLE_TENSORS };

struct table {
    struct scene s;
    struct ref_table ref;
    bool kept, in_place;
};

static struct iz_table table_of(const struct iz_view *v, const struct table *t)
{
    return (struct iz_table){v[W], v[DW], v[ROW].p, t->ref.first};
}

static void table_forward(struct iz_exec *x, const struct iz_view *v,
                          const void *arg)
{
    const struct table *t = arg;
    struct iz_table a = table_of(v, t);

    iz_table_fwd(x, v[t->in_place ? R : Y], t->kept ? v[R] : IZ_NONE, &a);
}

static void table_backward(struct iz_exec *x, const struct iz_view *v,
                           const void *arg)
{
    struct iz_table t = table_of(v, arg);

    iz_table_bwd(x, v[DY], &t);
}

/* s: positions, width, rows, and rows that are in no table here, half of them
 * before. */
static struct table table_new(enum iz_dtype param, const int64_t s[4])
{
    enum iz_dtype act = backend.act(param);
    struct table t = {.s = {.n = TABLE_TENSORS,
                            .pinned = 1u << ROW,
                            .t = {[Y] = tensor_new(act, s[0], s[1], 1),
                                  [R] = tensor_new(act, s[0], s[1], 1),
                                  [W] = tensor_new(param, s[2], s[1], 1),
                                  [DY] = tensor_new(act, s[0], s[1], 1),
                                  [DW] = tensor_new(param, s[2], s[1], 1),
                                  [ROW] = bytes_new(s[0] * 4)}},
                      .kept = true};
    int32_t *row = t.s.t[ROW].v.p;

    for (int64_t i = 0; i < s[0]; i++)
        row[i] = fixture_below(s[2] + s[3]) + (s[3] ? 0 : 3);
    t.ref = (struct ref_table){.y = calloc((size_t)(s[0] * s[1]), 8),
                               .w = t.s.t[W].d,
                               .r = t.s.t[R].d,
                               .row = row,
                               .m = s[0],
                               .c = s[1],
                               .v = s[2],
                               .first = s[3] ? s[3] / 2 : 3};
    return t;
}

static void check_table(enum iz_dtype param, const int64_t s[4])
{
    struct table t = table_new(param, s);
    struct tensor *v = t.s.t;
    unsigned in = bit(R) | bit(W) | bit(ROW);
    double *want = calloc((size_t)(s[2] * s[1]), sizeof(*want));

    ref_table(&t.ref);
    scene_run(&t.s, table_forward, &t, in, bit(Y));
    fixture_close("rows", &v[Y], t.ref.y, 0);
    ref_table_gradient(&t.ref, want, v[DY].d);
    scene_run(&t.s, table_backward, &t, bit(DY) | bit(ROW), bit(DW));
    fixture_close("gradient of rows", &v[DW], want, 2e-6);
    t.in_place = true;
    scene_run(&t.s, table_forward, &t, in, bit(R));
    fixture_same_bits("in place", v[R].v, v[Y].v);
    t.in_place = t.kept = false;
    t.ref.r = NULL;
    ref_table(&t.ref);
    scene_run(&t.s, table_forward, &t, in & ~bit(R), bit(Y));
    fixture_close("rows or zeros", &v[Y], t.ref.y, 0);
    scene_free(&t.s);
    free(t.ref.y);
    free(want);
}

/* Rows that repeat, that never occur, and that another part has; with many
 * positions, which are summed in pieces; all of one table; widths of one
 * element and of 16 bytes. */
static void tables_agree_with_reference(void **state)
{
    static const int64_t size[][4] = {
        {1, 1, 1, 0},    {1, 1, 1, 9},    {60, 3, 4, 9},    {33, 17, 40, 9},
        {7, 16, 1, 9},   {60, 3, 4, 8},   {700, 8, 2, 3},   {700, 8, 2, 40},
        {1500, 1, 3, 5}, {300, 16, 3, 0}, {33, 264, 40, 20}};

    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < sizeof(size) / sizeof(size[0]); i++)
            check_table(fixture_types[t], size[i]);
}

/* ---- products of pairs ---- */

enum { PY, PZ, PE, PDY, PDZ, PDE, PAIR_TENSORS };

struct pairs {
    struct scene s;
    double *out;
    int64_t n;
};

static void pairs_forward(struct iz_exec *x, const struct iz_view *v,
                          const void *arg)
{
    iz_interact_fwd(x, v[PY], v[PZ], v[PE]);
}

static void pairs_backward(struct iz_exec *x, const struct iz_view *v,
                           const void *arg)
{
    iz_interact_bwd(x, v[PDZ], v[PDE], v[PDY], v[PZ], v[PE]);
}

static double pairs_objective(void *arg)
{
    struct pairs *p = arg;
    struct tensor *t = p->s.t;

    ref_interact(p->out, t[PZ].d, t[PE].d, t[PZ].v.rows, p->n, t[PZ].v.cols);
    return fixture_dot(p->out, t[PDY].d, iz_view_len(t[PY].v));
}

/* n vectors and one more, of d columns. */
static struct pairs pairs_new(enum iz_dtype act, int64_t m, int64_t n,
                              int64_t d)
{
    int64_t cols = d + n * (n + 1) / 2;

    return (struct pairs){
        {.n = PAIR_TENSORS,
         .t = {tensor_new(act, m, cols, 1), tensor_new(act, m, d, 1),
               tensor_new(act, m * n, d, 1), tensor_new(act, m, cols, 1),
               tensor_new(act, m, d, 1), tensor_new(act, m * n, d, 1)}},
        calloc((size_t)(m * cols), 8),
        n};
}

static void check_pairs(enum iz_dtype act, int64_t m, int64_t n, int64_t d)
{
    struct pairs p = pairs_new(act, m, n, d);
    struct tensor *t = p.s.t;
    unsigned in = bit(PZ) | bit(PE);
    double *dz = calloc((size_t)(m * d), 8);
    double *de = calloc((size_t)(m * n * d), 8);

    ref_gradient(dz, pairs_objective, &p, t[PZ].d, m * d);
    ref_gradient(de, pairs_objective, &p, t[PE].d, m * n * d);
    pairs_objective(&p);
    scene_run(&p.s, pairs_forward, NULL, in, bit(PY));
    fixture_close("products", &t[PY], p.out, 2e-6);
    scene_run(&p.s, pairs_backward, NULL, in | bit(PDY), bit(PDZ) | bit(PDE));
    fixture_close("dz", &t[PDZ], dz, 5e-6);
    fixture_close("de", &t[PDE], de, 5e-6);
    scene_free(&p.s);
    free(p.out);
    free(dz);
    free(de);
}

static void products_of_pairs_agree_with_reference(void **state)
{
    static const int64_t size[][3] = {{1, 1, 1},   {3, 4, 5},  {1, 26, 16},
                                      {2, 26, 16}, {5, 2, 33}, {2, 2, 150}};

    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (int i = 0; backend_acts(fixture_types[t]) && i < 6; i++)
            check_pairs(fixture_types[t], size[i][0], size[i][1], size[i][2]);
    check_pairs(IZ_F32, 1, 300, 1);
}

static void products_of_pairs_let_nan_through(void **state)
{
    struct pairs p;

    fixture_seed();
    p = pairs_new(IZ_F32, 1, 2, 2);
    p.s.t[PE].d[3] = NAN; /* of v_2 */
    tensor_store(&p.s.t[PE]);
    scene_run(&p.s, pairs_forward, NULL, bit(PZ) | bit(PE), bit(PY));
    tensor_load(&p.s.t[PY]);
    assert_true(isfinite(p.s.t[PY].d[2]) && isnan(p.s.t[PY].d[3]));
    assert_true(isnan(p.s.t[PY].d[4]));
    scene_free(&p.s);
    free(p.out);
}

static void too_many_vectors(void)
{
    struct pairs p = pairs_new(IZ_F32, 1, 1025, 1);

    scene_run(&p.s, pairs_forward, NULL, bit(PZ) | bit(PE), bit(PY));
}

static void too_many_vectors_are_refused(void **state)
{
    if (backend.x.backend == IZ_CPU)
        skip();
    scene_dies(too_many_vectors, "products of 1025 vectors; possible are 1024");
}

/* ---- conversion ---- */

enum { TO, FROM };

static void convert(struct iz_exec *x, const struct iz_view *v, const void *arg)
{
    iz_convert(x, v[TO], v[FROM]);
}

static void conversion_rounds(void **state)
{
    fixture_seed();
    for (int i = 0; i < 9; i++) {
        struct scene s = {
            .n = 2,
            .t = {[TO] = tensor_new(fixture_types[i % 3], 3, 333, 2),
                  [FROM] = tensor_new(fixture_types[i / 3], 3, 333, 2)}};

        scene_run(&s, convert, NULL, bit(FROM), bit(TO));
        fixture_close("converted", &s.t[TO], s.t[FROM].d, 0);
        scene_free(&s);
    }
}

int ops_tables(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tables_agree_with_reference),
        cmocka_unit_test(products_of_pairs_agree_with_reference),
        cmocka_unit_test(products_of_pairs_let_nan_through),
        cmocka_unit_test(too_many_vectors_are_refused),
        cmocka_unit_test(conversion_rounds),
    };

    return cmocka_run_group_tests_name("tables", tests, NULL, NULL);
}
