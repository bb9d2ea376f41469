/* SPDX-License-Identifier: Apache-2.0 */
/* Products of pairs, and conversion. */
#include "tests/codelets/ops/scene.h"

#include <math.h>
#include <string.h>

#include "tests/codelets/ops/reference.h"

/* ---- products of pairs ---- */

enum { PY, PZ, PE, PDY, PDZ, PDE, PAIR_TENSORS };

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

static const struct pass products = {pairs_forward, BIT(PZ) | BIT(PE), BIT(PY)};
static const struct pass gradients = {
    pairs_backward, BIT(PZ) | BIT(PE) | BIT(PDY), BIT(PDZ) | BIT(PDE)};

static double pairs_objective(void *arg)
{
    struct tensor *t = arg;
    int64_t m = t[PZ].v.rows, n = t[PE].v.rows / m;
    ref_interact(t[PY].want, t[PZ].d, t[PE].d, m, n, t[PZ].v.cols);
    return fixture_dot(t[PY].want, t[PDY].d, iz_view_len(t[PY].v));
}

/* n vectors and one more, of d columns. */
static struct scene pairs_new(enum iz_dtype act, int64_t m, int64_t n,
                              int64_t d)
{
    int64_t cols = d + n * (n + 1) / 2;
    return (struct scene){
        .n = PAIR_TENSORS,
        .t = {tensor_new(act, m, cols, 1), tensor_new(act, m, d, 1),
              tensor_new(act, m * n, d, 1), tensor_new(act, m, cols, 1),
              tensor_new(act, m, d, 1), tensor_new(act, m * n, d, 1)}};
}

static void check_pairs(enum iz_dtype act, const int64_t *size)
{
    struct scene s = pairs_new(act, size[0], size[1], size[2]);
    struct tensor *t = s.t;
    tensor_want(&t[PY]);
    for (int i = PZ; i <= PE; i++)
        ref_gradient(tensor_want(&t[i + PDY]), pairs_objective, t, t[i].d,
                     iz_view_len(t[i].v));
    pairs_objective(t);
    scene_run(&s, &products, NULL);
    fixture_close("products", &t[PY], 2e-6);
    scene_run(&s, &gradients, NULL);
    fixture_close("dz", &t[PDZ], 5e-6);
    fixture_close("de", &t[PDE], 5e-6);
    scene_free(&s);
}

static void products_of_pairs_agree_with_reference(void **state)
{
    static const int64_t size[][4] = {{1, 1, 1},   {3, 4, 5},  {1, 26, 16},
                                      {2, 26, 16}, {5, 2, 33}, {2, 2, 150}};
    scene_each(backend_acts, size, COUNT(size), 0, check_pairs);
    check_pairs(IZ_F32, (const int64_t[]){1, 300, 1});
}

static void products_of_pairs_let_nan_through(void **state)
{
    struct scene s = pairs_new(IZ_F32, 1, 2, 2);
    s.t[PE].d[3] = NAN; /* of v_2 */
    tensor_store(&s.t[PE]);
    scene_run(&s, &products, NULL);
    tensor_load(&s.t[PY]);
    assert_true(isfinite(s.t[PY].d[2]) && isnan(s.t[PY].d[3]));
    assert_true(isnan(s.t[PY].d[4]));
    scene_free(&s);
}

static void too_many_vectors(const void *arg)
{
    struct scene s = pairs_new(IZ_F32, 1, 1025, 1);
    scene_run(&s, &products, NULL);
}

static void too_many_vectors_are_refused(void **state)
{
    if (backend.x.backend == IZ_CPU)
        skip();
    scene_dies(too_many_vectors, NULL,
               "products of 1025 vectors; possible are 1024");
}

/* ---- conversion ---- */

enum { TO, FROM };

static void convert(struct iz_exec *x, const struct iz_view *v, const void *arg)
{
    iz_convert(x, v[TO], v[FROM]);
}

static void conversion_rounds(void **state)
{
    for (int i = 0; i < 9; i++) {
        struct scene s = {
            .n = 2,
            .t = {[TO] = tensor_new(fixture_types[i % 3], 3, 333, 2),
                  [FROM] = tensor_new(fixture_types[i / 3], 3, 333, 2)}};
        memcpy(tensor_want(&s.t[TO]), s.t[FROM].d, 3 * 333 * 8);
        scene_run(&s, &(struct pass){convert, BIT(FROM), BIT(TO)}, NULL);
        fixture_close("converted", &s.t[TO], 0);
        scene_free(&s);
    }
}

int ops_pairs(void)
{
    const struct CMUnitTest tests[] = {
        SEEDED(products_of_pairs_agree_with_reference),
        SEEDED(products_of_pairs_let_nan_through),
        SEEDED(too_many_vectors_are_refused),
        SEEDED(conversion_rounds),
    };
    return cmocka_run_group_tests_name("pairs", tests, NULL, NULL);
}
