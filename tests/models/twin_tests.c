/* SPDX-License-Identifier: Apache-2.0 */
/* The tests that every model has; see twin.h. */
#include "tests/models/twin.h"

#include <math.h>

#include "codelets/ops/blas.h"

static const struct twin_kind *kind; /* of this program */

/* By central differences. */
static double slope(const struct twin *t, int i, int64_t k)
{
    double *p = t->param[i], was = p[k];
    p[k] = was + 1e-5;
    double up = t->kind->loss(t);
    p[k] = was - 1e-5;
    up -= t->kind->loss(t);
    p[k] = was;
    return up / 2e-5;
}

/* The error is measured against the norm of the tensor; one may have no
 * gradient, as a key's bias: hence the absolute part. */
static void check_tensor(struct twin *t, int i, const char *name, int step,
                         double tol)
{
    double error = 0, norm = 0;
    for (int64_t k = 0; k < iz_view_len(t->dw[i].v); k += step) {
        double want = slope(t, i, k);
        norm += want * want;
        error += pow(t->dw[i].d[k] - want, 2);
    }
    if (!(sqrt(error) <= tol * sqrt(norm) + 1e-8))
        fail_msg("%s: gradient off by %.3g of its norm %.3g", name,
                 sqrt(error / norm), sqrt(norm));
}

static void check_gradients(struct twin_case c, enum iz_dtype type)
{
    struct twin t = twin_new(kind, c.config, type, c.samples);
    double want = kind->loss(&t), tol = 2e-5;
    if (type != IZ_F32)
        tol = type == IZ_BF16 ? 0x1p-8 : 0x1p-11;
    twin_train(&t, IZ_RECOMPUTE_NONE);
    assert_true(fabs(t.got + t.aux.loss - want) <= 1e-5 * fmax(1, want));
    for (int u = 0, i = 0; u < t.m->n_units; u++)
        for (int p = 0; p < t.m->unit[u].n_params; p++, i++)
            check_tensor(&t, i, t.m->unit[u].param[p].name, c.step, tol);
    twin_free(&t);
}

static void gradients_agree_with_central_differences(void **state)
{
    for (const struct twin_case *c = kind->gradients; c->config; c++)
        check_gradients(*c, IZ_F32);
    check_gradients(kind->usual, IZ_BF16);
    check_gradients(kind->usual, IZ_F16);
}

/* ---- bits ---- */

static struct twin seeded(struct twin_case c, enum iz_dtype type)
{
    fixture_seed(NULL);
    return twin_new(kind, c.config, type, c.samples);
}

static void assert_same_gradients(const struct twin *a, const struct twin *b)
{
    for (int i = 0; i < a->n; i++)
        fixture_same_bits("gradient", a->dw[i].v, b->dw[i].v);
    fixture_same_bits("tied gradient", a->tied.v, b->tied.v);
    assert_memory_equal(&a->got, &b->got, sizeof(a->got));
}

/* With every type of parameters; and so does evaluation the loss, but that it
 * rounds it. */
static void recomputed_activations_give_the_same_bits(void **state)
{
    for (int type = 0; type < 3; type++) {
        struct twin a = seeded(kind->recomputed, fixture_types[type]);
        twin_train(&a, IZ_RECOMPUTE_NONE);
        for (int r = IZ_RECOMPUTE_WIDENED; r < IZ_RECOMPUTES; r++) {
            struct twin b = seeded(kind->recomputed, fixture_types[type]);
            twin_train(&b, (enum iz_recompute)r);
            assert_same_gradients(&a, &b);
            twin_free(&b);
        }
        double loss = a.got;
        a.got = -1;
        twin_evaluate(&a);
        assert_true(fabs(a.got - loss) <= 0x1p-27);
        twin_free(&a);
    }
}

/* What is not kept is made again: the more of it, the less is kept. */
static void what_is_recomputed_is_counted(void **state)
{
    struct twin t = seeded(kind->recomputed, IZ_F32);
    struct iz_exec like = iz_exec_dry(IZ_CPU, IZ_F32);
    for (int u = 0; u + 1 < t.m->n_units; u++) {
        struct iz_unit_cost k =
            iz_unit_cost(t.m, u, t.samples, 0, IZ_F32, &like);
        const int64_t *save = k.save_bytes;
        double widened = k.recompute[IZ_RECOMPUTE_WIDENED].flops;
        double full = k.recompute[IZ_RECOMPUTE_FULL].flops;
        bool widens = save[IZ_RECOMPUTE_WIDENED] < save[IZ_RECOMPUTE_NONE];
        assert_true(save[IZ_RECOMPUTE_WIDENED] <= save[IZ_RECOMPUTE_NONE]);
        assert_true(save[IZ_RECOMPUTE_FULL] == 0 &&
                    k.recompute[IZ_RECOMPUTE_NONE].flops == 0);
        assert_true(widens == (widened > 0));
        assert_true(widened <= full);
        assert_true(full <= k.forward.flops);
        assert_true(widens == (save[IZ_RECOMPUTE_NONE] > 0));
        assert_true(!widens || full < k.forward.flops);
    }
    twin_free(&t);
}

/* A power of two as loss scale changes exponents only. */
static void loss_scale_scales_exactly(void **state)
{
    struct twin a = seeded(kind->usual, IZ_F32);
    struct twin b = seeded(kind->usual, IZ_F32);
    b.loss_scale = 1024;
    twin_train(&a, IZ_RECOMPUTE_NONE);
    twin_train(&b, IZ_RECOMPUTE_NONE);
    assert_true(a.got == b.got);
    for (int i = 0; i < a.n; i++)
        for (int64_t k = 0; k < iz_view_len(a.dw[i].v); k++)
            assert_true(a.dw[i].d[k] * 1024 == b.dw[i].d[k]);
    twin_free(&a);
    twin_free(&b);
}

/* In all of a parameter; in a block, one element is enough. */
static void nan_reaches_the_loss(void **state)
{
    for (int i = 0, n = 1; i < n; i++) {
        struct twin t = seeded(kind->usual, IZ_F32);
        bool ends = i < twin_first(&t, 1) ||
                    i >= twin_first(&t, t.m->n_units - 1) || t.m->table_rows;
        n = t.n;
        for (int64_t k = 0; k < (ends ? iz_view_len(t.w[i].v) : 1); k++)
            t.w[i].d[k] = NAN;
        tensor_store(&t.w[i]);
        twin_train(&t, IZ_RECOMPUTE_NONE);
        assert_true(isnan(t.got));
        twin_free(&t);
    }
}

int twin_main(const struct twin_kind *k, const struct CMUnitTest *own, size_t n)
{
    struct CMUnitTest tests[8] = {
        SEEDED(gradients_agree_with_central_differences),
        SEEDED(recomputed_activations_give_the_same_bits),
        SEEDED(what_is_recomputed_is_counted),
        SEEDED(loss_scale_scales_exactly),
        SEEDED(nan_reaches_the_loss),
    };
    kind = k;
    int first = k->loss ? 0 : 1;
    for (size_t i = 0; i < n; i++)
        tests[5 + i] = own[i];
    iz_blas_open();
    return _cmocka_run_group_tests(k->name, tests + first, 5 - first + n, NULL,
                                   NULL);
}
