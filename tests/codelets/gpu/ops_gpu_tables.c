/* SPDX-License-Identifier: Apache-2.0 */
/* Tables, products of pairs and conversion on a GPU against double precision.
 */
#include "tests/codelets/gpu/ops_gpu.h"

#include <stdlib.h>

#include "tests/codelets/ops/reference.h"

typedef void op_fn(struct iz_exec *x, const struct iz_view *v, const void *arg);

/* ---- tables ---- */

enum { Y, R, W, DY, DW, TABLE_TENSORS };

struct table {
    struct tensor t[TABLE_TENSORS];
    int32_t *row; /* pinned */
    struct ref_table ref;
};

static struct iz_table table_of(const struct iz_view *v, const struct table *t)
{
    return (struct iz_table){v[W], v[DW], t->row, t->ref.first};
}

static void table_forward(struct iz_exec *x, const struct iz_view *v,
                          const void *arg)
{
    struct iz_table t = table_of(v, arg);

    iz_table_fwd(x, v[Y], v[R], &t);
}

static void table_backward(struct iz_exec *x, const struct iz_view *v,
                           const void *arg)
{
    struct iz_table t = table_of(v, arg);

    iz_table_bwd(x, v[DY], &t);
}

static double table_objective(void *arg)
{
    struct table *t = arg;

    ref_table(&t->ref);
    return fixture_dot(t->ref.y, t->t[DY].d, iz_view_len(t->t[DY].v));
}

/* s: positions, width, rows, other rows. */
static void check_table(enum iz_dtype param, const int64_t s[4])
{
    enum iz_dtype act = iz_cuda_ops->act(param);
    struct table t = {.t = {[Y] = tensor_new(act, s[0], s[1], 1),
                            [R] = tensor_new(act, s[0], s[1], 1),
                            [W] = tensor_new(param, s[2], s[1], 1),
                            [DY] = tensor_new(act, s[0], s[1], 1),
                            [DW] = tensor_new(param, s[2], s[1], 1)},
                      .row = gpu_pinned(s[0] * 4)};
    struct gpu_op op = {.run = table_forward,
                        .arg = &t,
                        .t = t.t,
                        .n = TABLE_TENSORS,
                        .reads = 1u << R | 1u << W,
                        .writes = 1u << Y,
                        .act = act};
    double *want = calloc((size_t)(s[2] * s[1]), sizeof *want);

    for (int64_t i = 0; i < s[0]; i++)
        t.row[i] = fixture_below(s[2] + s[3]);
    t.ref = (struct ref_table){.y = calloc((size_t)(s[0] * s[1]), 8),
                               .w = t.t[W].d,
                               .r = t.t[R].d,
                               .row = t.row,
                               .m = s[0],
                               .c = s[1],
                               .v = s[2],
                               .first = s[3] / 2};
    ref_gradient(want, table_objective, &t, t.t[W].d, s[2] * s[1]);
    table_objective(&t);
    gpu_run(&op);
    fixture_close("rows", &t.t[Y], t.ref.y, 0);
    op.run = table_backward;
    op.reads = 1u << DY;
    op.writes = 1u << DW;
    gpu_run(&op);
    fixture_close("gradient of rows", &t.t[DW], want, 1e-5);
    for (int i = 0; i < TABLE_TENSORS; i++)
        tensor_free(&t.t[i]);
    gpu_unpin(t.row);
    free(t.ref.y);
    free(want);
}

static void tables_agree(void **state)
{
    static const int64_t size[][4] = {{1, 1, 1, 0},    {60, 3, 4, 8},
                                      {700, 8, 2, 40}, {1500, 1, 3, 5},
                                      {300, 16, 3, 0}, {33, 264, 40, 20}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
            check_table(fixture_types[t], size[i]);
}

/* ---- products of pairs ---- */

enum { PY, PZ, PE, PDY, PDZ, PDE, PAIR_TENSORS };

struct interact {
    struct tensor *t;
    double *out;
    int64_t n;
};

static void interact_forward(struct iz_exec *x, const struct iz_view *v,
                             const void *arg)
{
    (void)arg;
    iz_interact_fwd(x, v[PY], v[PZ], v[PE]);
}

static void interact_backward(struct iz_exec *x, const struct iz_view *v,
                              const void *arg)
{
    (void)arg;
    iz_interact_bwd(x, v[PDZ], v[PDE], v[PDY], v[PZ], v[PE]);
}

static double interact_objective(void *arg)
{
    struct interact *p = arg;
    struct tensor *t = p->t;

    ref_interact(p->out, t[PZ].d, t[PE].d, t[PZ].v.rows, p->n, t[PZ].v.cols);
    return fixture_dot(p->out, t[PDY].d, iz_view_len(t[PY].v));
}

static void run_pairs(struct tensor *t, op_fn *op, unsigned reads,
                      unsigned writes)
{
    gpu_run(&(struct gpu_op){.run = op,
                             .t = t,
                             .n = PAIR_TENSORS,
                             .reads = reads,
                             .writes = writes,
                             .act = t[PY].v.dtype});
}

static void check_pairs(enum iz_dtype act, int64_t m, int64_t n, int64_t d)
{
    int64_t cols = d + n * (n + 1) / 2;
    struct tensor t[PAIR_TENSORS] = {
        tensor_new(act, m, cols, 1),  tensor_new(act, m, d, 1),
        tensor_new(act, m * n, d, 1), tensor_new(act, m, cols, 1),
        tensor_new(act, m, d, 1),     tensor_new(act, m * n, d, 1)};
    struct interact p = {t, calloc((size_t)(m * cols), 8), n};
    double *dz = calloc((size_t)(m * d), 8),
           *de = calloc((size_t)(m * n * d), 8);
    unsigned in = 1u << PZ | 1u << PE;

    ref_gradient(dz, interact_objective, &p, t[PZ].d, m * d);
    ref_gradient(de, interact_objective, &p, t[PE].d, m * n * d);
    interact_objective(&p);
    run_pairs(t, interact_forward, in, 1u << PY);
    fixture_close("products", &t[PY], p.out, 2e-6);
    run_pairs(t, interact_backward, in | 1u << PDY, 1u << PDZ | 1u << PDE);
    fixture_close("dz", &t[PDZ], dz, 5e-6);
    fixture_close("de", &t[PDE], de, 5e-6);
    for (int i = 0; i < PAIR_TENSORS; i++)
        tensor_free(&t[i]);
    free(p.out);
    free(dz);
    free(de);
}

static void products_of_pairs_agree(void **state)
{
    static const int64_t size[][3] = {
        {1, 1, 1}, {3, 4, 5}, {1, 26, 16}, {2, 2, 150}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (int i = 0; i < 4; i++)
            check_pairs(iz_cuda_ops->act(fixture_types[t]), size[i][0],
                        size[i][1], size[i][2]);
}

/* ---- conversion ---- */

static void convert(struct iz_exec *x, const struct iz_view *v, const void *arg)
{
    (void)arg;
    iz_convert(x, v[1], v[0]);
}

static void conversion_rounds(void **state)
{
    (void)state;
    fixture_seed();
    for (int i = 0; i < 9; i++) {
        struct tensor t[2] = {tensor_new(fixture_types[i / 3], 3, 333, 2),
                              tensor_new(fixture_types[i % 3], 3, 333, 2)};

        gpu_run(&(struct gpu_op){.run = convert,
                                 .t = t,
                                 .n = 2,
                                 .reads = 1,
                                 .writes = 2,
                                 .act = t[1].v.dtype});
        fixture_close("converted", &t[1], t[0].d, 0);
        tensor_free(&t[0]);
        tensor_free(&t[1]);
    }
}

int ops_gpu_tables(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tables_agree),
        cmocka_unit_test(products_of_pairs_agree),
        cmocka_unit_test(conversion_rounds),
    };

    return cmocka_run_group_tests_name("gpu tables", tests, NULL, NULL);
}
