/* SPDX-License-Identifier: Apache-2.0 */
/* GPT-2 against a double-precision model. */
#include "tests/models/twin.h"

#include <math.h>
#include <stdlib.h>

#include "codelets/ops/gemm.h"
#include "models/gpt2.h"
#include "tests/models/gpt2_double.h"

static const struct iz_gpt2_config tiny = {2, 2, 6, 5, 7};
static const struct iz_gpt2_config longer = {1, 3, 9, 67, 11};

static int open_model(struct iz_model **out, const void *config)
{
    return iz_gpt2_open(out, config);
}

/* With the values of the twin's parameters. */
static struct gpt2_double double_of(const struct twin *t)
{
    const struct iz_gpt2_config *c = t->config;

    return (struct gpt2_double){c->layers, c->heads, c->width,
                                c->seq,    c->vocab, (double **)t->param};
}

static double loss(const struct twin *t)
{
    struct gpt2_double g = double_of(t);

    return gpt2_double_loss(&g, t->input, t->target, t->samples, 0, NULL);
}

static const struct twin_kind kind = {open_model, loss, NULL};

/* Tensor i along a random direction of +-1: one number for the whole tensor, so
 * that a model of a real shape can be checked. */
static void check_direction(struct twin *t, int i, const char *name)
{
    int64_t n = iz_view_len(t->dw[i].v);
    double got = 0, norm = 0, eps = 1e-6, *p = t->param[i], up;
    double *sign = calloc((size_t)n, sizeof(*sign));

    twin_load(t, i);
    for (int64_t k = 0; k < n; k++) {
        double d = twin_gradient(t, i, k);

        sign[k] = fixture_below(2) ? 1 : -1;
        got += d * sign[k];
        norm += d * d;
        p[k] += eps * sign[k];
    }
    up = loss(t);
    for (int64_t k = 0; k < n; k++)
        p[k] -= 2 * eps * sign[k];
    double want = (up - loss(t)) / (2 * eps);
    for (int64_t k = 0; k < n; k++)
        p[k] += eps * sign[k];
    free(sign);
    if (!(fabs(got - want) <= 1e-4 * sqrt(norm) + 1e-7))
        fail_msg("%s: %.6g along a direction, not %.6g", name, got, want);
}

static void check_directions(struct iz_gpt2_config c, int samples)
{
    struct twin t = twin_new(&kind, &c, IZ_F32, samples);

    for (int i = 0; i < t.n; i++) {
        struct tensor *w = &t.w[i]; /* as small as real weights are */

        for (int64_t k = 0; w->v.rows > 1 && k < iz_view_len(w->v); k++)
            w->d[k] = ((float *)w->v.p)[k] *= 0.1F;
    }
    twin_train(&t, true);
    assert_true(fabs(t.got - loss(&t)) <= 1e-5 * t.got);
    for (int u = 0, i = 0; u < t.m->n_units; u++)
        for (int k = 0; k < t.m->unit[u].n_params; k++, i++)
            check_direction(&t, i, t.m->unit[u].param[k].name);
    twin_free(&t);
}

/* Every loop over tiles and chunks turns several times. */
static void gradients_of_a_real_shape_agree(void **state)
{
    fixture_seed();
    check_directions((struct iz_gpt2_config){2, 4, 128, 160, 256}, 2);
    check_directions((struct iz_gpt2_config){1, 2, 96, 257, 1031}, 1);
}

static void gradients_agree_with_central_differences(void **state)
{
    fixture_seed();
    twin_check(&kind, &tiny, IZ_F32, 2, 1);
    twin_check(&kind, &(struct iz_gpt2_config){1, 1, 1, 1, 1}, IZ_F32, 3, 1);
    twin_check(&kind, &(struct iz_gpt2_config){3, 1, 3, 3, 5}, IZ_F32, 1, 1);
    twin_check(&kind, &longer, IZ_F32, 2, 3);
}

static void gradients_of_16_bit_weights_agree(void **state)
{
    fixture_seed();
    twin_check(&kind, &tiny, IZ_BF16, 2, 1);
    twin_check(&kind, &tiny, IZ_F16, 2, 1);
}

static void recomputed_activations_give_the_same_bits(void **state)
{
    twin_check_recompute(&kind, &longer, 2);
}

static struct twin seeded(struct iz_gpt2_config const *c)
{
    fixture_seed();
    return twin_new(&kind, c, IZ_F32, 2);
}

/* A power of two as loss scale changes exponents only. */
static void loss_scale_scales_exactly(void **state)
{
    struct twin a = seeded(&tiny), b = seeded(&tiny);

    b.loss_scale = 1024;
    twin_train(&a, true);
    twin_train(&b, true);
    assert_true(a.got == b.got);
    for (int i = 0; i < a.n; i++) {
        twin_load(&a, i);
        twin_load(&b, i);
        for (int64_t k = 0; k < iz_view_len(a.dw[i].v); k++)
            assert_true(a.dw[i].d[k] * 1024 == b.dw[i].d[k]);
    }
    twin_free(&a);
    twin_free(&b);
}

static void evaluate_and_generate_agree(void **state)
{
    struct twin t = seeded(&tiny);
    struct gpt2_double g = double_of(&t);
    float logits[7];
    double want[7], was;

    twin_train(&t, true);
    was = t.got;
    t.got = -1;
    twin_evaluate(&t);
    assert_true(t.got == was);
    twin_generate(&t, logits);
    gpt2_double_loss(&g, t.input, t.target, 1, tiny.seq - 1, want);
    for (int v = 0; v < 7; v++)
        assert_true(fabs((double)logits[v] - want[v]) < 1e-5);
    twin_free(&t);
}

/* The loss with all elements of parameter i of unit u set to value. */
static double loss_with(int u, int i, double value)
{
    struct twin t = twin_new(&kind, &tiny, IZ_F32, 1);
    double got;

    twin_set(&t, twin_first(&t, u) + i, value);
    twin_train(&t, true);
    got = t.got;
    twin_free(&t);
    return got;
}

static void nan_and_overflow_reach_the_loss(void **state)
{
    fixture_seed();
    for (int i = 0; i < 12; i++)
        assert_true(isnan(loss_with(1, i, NAN)));
    assert_true(isnan(loss_with(0, 1, NAN)));
    assert_true(isfinite(loss_with(3, 0, 1e30)));
    assert_false(isfinite(loss_with(3, 0, 3.4e38)));
    assert_false(isfinite(loss_with(1, 9, INFINITY)));
}

/* The published 124 M parameters, and 6 N + attention flops per token. */
static void sizes_are_those_of_the_paper(void **state)
{
    struct iz_gpt2_config c = {12, 12, 768, 1024, 50257};
    struct iz_model *m;

    assert_int_equal(twin_parameters(&kind, &c), 124439808);
    assert_int_equal(iz_gpt2_open(&m, &c), 0);
    assert_string_equal(m->unit[4].name, "h.3");
    assert_string_equal(m->unit[4].param[2].name, "h.3.attn.c_attn.weight");
    assert_int_equal(m->unit[13].tied_unit, 0);
    iz_model_close(&m);
    assert_null(m);
}

static void flops_follow_the_closed_form(void **state)
{
    struct twin t = seeded(&longer);
    double c = longer.width, seq = longer.seq, m = 2 * seq;
    double weights = 12 * c * c * longer.layers + c * longer.vocab;
    double attention = 6 * c * (seq + 1) * longer.layers;

    assert_true(twin_flops(&t) == m * (6 * weights + attention));
    twin_free(&t);
}

static void impossible_models_are_refused(void **state)
{
    static const struct iz_gpt2_config bad[] = {
        {0, 2, 6, 5, 7},  {2, 4, 6, 5, 7}, {2, 0, 6, 5, 7},
        {2, 2, -6, 5, 7}, {2, 2, 6, 0, 7}, {2, 2, 6, 5, 1 << 30}};

    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        twin_refuses(&kind, &bad[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_agree_with_central_differences),
        cmocka_unit_test(gradients_of_a_real_shape_agree),
        cmocka_unit_test(gradients_of_16_bit_weights_agree),
        cmocka_unit_test(recomputed_activations_give_the_same_bits),
        cmocka_unit_test(loss_scale_scales_exactly),
        cmocka_unit_test(evaluate_and_generate_agree),
        cmocka_unit_test(nan_and_overflow_reach_the_loss),
        cmocka_unit_test(sizes_are_those_of_the_paper),
        cmocka_unit_test(flops_follow_the_closed_form),
        cmocka_unit_test(impossible_models_are_refused),
    };

    iz_gemm_open();
    return cmocka_run_group_tests_name("gpt2", tests, NULL, NULL);
}
