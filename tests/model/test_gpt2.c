/* SPDX-License-Identifier: Apache-2.0 */
/* The whole model, as the program runs it unit by unit, against a
 * double-precision model of its own; and what the planner relies on: dry runs
 * tell the truth. */
#include "tests/ops/fixture.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/gemm.h"
#include "models/gpt2.h"
#include "tests/model/gpt2_double.h"

#define MAX_PARAMS 16

/* A model with its parameters, gradients and boundary tensors. */
struct run {
    struct iz_gpt2_config c;
    struct iz_model *m;
    enum iz_dtype type;
    int samples;
    struct tensor *w, *dw; /* own parameters of all units, one after another */
    struct tensor tied;    /* the head's part of the gradient of wte */
    struct tensor *y, d;   /* boundaries; gradient, in and out in one place */
    struct iz_exec *saved; /* of each unit, when activations are kept */
    int32_t *input, *target;
    double loss;
    float scale;
};

static int first_param(const struct iz_model *m, int unit)
{
    int n = 0;

    for (int u = 0; u < unit; u++)
        n += m->unit[u].n_params;
    return n;
}

static double spread(const struct iz_param *p)
{
    /* Large enough that every path of the gradient counts. */
    return p->rows == 1 ? 0.5 : 0.6;
}

static struct run run_new(struct iz_gpt2_config c, enum iz_dtype type,
                          int samples)
{
    struct run r = {.c = c, .type = type, .samples = samples, .scale = 1};
    int n, m = samples * c.seq;

    assert_int_equal(iz_gpt2_open(&r.m, &c), 0);
    n = first_param(r.m, r.m->n_units);
    r.w = calloc((size_t)n, sizeof *r.w);
    r.dw = calloc((size_t)n, sizeof *r.dw);
    for (int u = 0, k = 0; u < r.m->n_units; u++)
        for (int i = 0; i < r.m->unit[u].n_params; i++, k++) {
            const struct iz_param *p = &r.m->unit[u].param[i];
            r.w[k] = tensor_new(type, p->rows, p->cols, spread(p));
            r.dw[k] = tensor_new(type, p->rows, p->cols, 1);
        }
    r.tied = tensor_new(type, c.vocab, c.width, 1);
    r.y = calloc((size_t)r.m->n_units, sizeof *r.y);
    r.saved = calloc((size_t)r.m->n_units, sizeof *r.saved);
    for (int u = 0; u < r.m->n_units; u++)
        r.y[u] = tensor_new(IZ_F32, samples, r.m->unit[u].out_elems, 1);
    r.d = tensor_new(IZ_F32, samples, (int64_t)c.seq * c.width, 1);
    r.input = calloc((size_t)m, sizeof *r.input);
    r.target = calloc((size_t)m, sizeof *r.target);
    for (int i = 0; i < m; i++) {
        r.input[i] = fixture_below(c.vocab);
        r.target[i] = i % 4 == 2 ? -1 : fixture_below(c.vocab);
    }
    return r;
}

static void run_free(struct run *r)
{
    int n = first_param(r->m, r->m->n_units);

    for (int i = 0; i < n; i++) {
        tensor_free(&r->w[i]);
        tensor_free(&r->dw[i]);
    }
    for (int u = 0; u < r->m->n_units; u++)
        tensor_free(&r->y[u]);
    tensor_free(&r->tied);
    tensor_free(&r->d);
    free(r->w);
    free(r->dw);
    free(r->y);
    free(r->saved);
    free(r->input);
    free(r->target);
    iz_model_close(&r->m);
}

typedef void call_fn(struct iz_exec *x, const struct iz_layer *a);

static struct iz_view without_memory(struct iz_view v)
{
    v.p = NULL;
    return v;
}

/* Calls a layer function of unit u, dry (every pointer NULL) or not. */
static void call(struct run *r, int u, call_fn *f, struct iz_exec *x,
                 float *logits)
{
    bool dry = x->dry;
    const struct iz_unit *unit = &r->m->unit[u];
    struct iz_view w[MAX_PARAMS], dw[MAX_PARAMS];
    int at = first_param(r->m, u), n = unit->n_params;
    struct iz_layer a = {.self = r->m->self,
                         .unit = u,
                         .samples = r->samples,
                         .w = w,
                         .dw = dw,
                         .x = u ? r->y[u - 1].v : IZ_NONE,
                         .y = r->y[u].v,
                         .dy = r->d.v,
                         .dx = r->d.v,
                         .input = dry ? NULL : r->input,
                         .target = dry ? NULL : r->target,
                         .loss = dry ? NULL : &r->loss,
                         .loss_scale = r->scale,
                         .row = r->c.seq - 1,
                         .logits = logits};

    for (int i = 0; i < n; i++) {
        w[i] = r->w[at + i].v;
        dw[i] = r->dw[at + i].v;
    }
    if (unit->tied_unit >= 0) {
        int t = first_param(r->m, unit->tied_unit) + unit->tied_param;
        w[n] = r->w[t].v;
        dw[n++] = r->tied.v;
    }
    if (dry) {
        for (int i = 0; i < n; i++) {
            w[i] = without_memory(w[i]);
            dw[i] = without_memory(dw[i]);
        }
        a.x = without_memory(a.x);
        a.y = without_memory(a.y);
        a.dy = without_memory(a.dy);
        a.dx = without_memory(a.dx);
    }
    f(x, &a);
}

/* Calls f with work of exactly the size that a dry run asks for.  x->save is
 * the caller's. */
static void call_exact(struct run *r, int u, call_fn *f, struct iz_exec *x,
                       float *logits)
{
    struct iz_exec dry = iz_exec_dry(IZ_CPU, IZ_F32);

    call(r, u, f, &dry, logits);
    x->backend = IZ_CPU;
    x->dry = false;
    x->act = IZ_F32;
    x->flops = x->bytes = 0;
    x->work = (struct iz_arena){.base = fixture_take(dry.work.peak),
                                .size = dry.work.peak};
    x->save.used = 0;
    if (!x->save.base && dry.save.peak) {
        x->save.base = fixture_take(dry.save.peak);
        x->save.size = dry.save.peak;
    }
    call(r, u, f, x, logits);
    assert_int_equal(x->work.used, 0);
    assert_int_equal(x->work.peak, dry.work.peak);
    assert_int_equal(x->save.used, dry.save.peak);
    assert_true(x->flops == dry.flops && x->bytes == dry.bytes);
    free(x->work.base);
    x->work = (struct iz_arena){0};
}

/* Forward and backward of all units; `keep` the saved activations or compute
 * them again right before each backward. */
static void train(struct run *r, bool keep)
{
    int last = r->m->n_units - 1;

    for (int u = 0; u < last; u++) {
        call_exact(r, u, r->m->unit[u].forward, &r->saved[u], NULL);
        if (!keep) {
            free(r->saved[u].save.base);
            r->saved[u].save = (struct iz_arena){0};
        }
    }
    for (int u = last; u >= 0; u--) {
        struct iz_exec *x = &r->saved[u];
        if (!keep && u < last)
            call_exact(r, u, r->m->unit[u].forward, x, NULL);
        call_exact(r, u, r->m->unit[u].backward, x, NULL);
        free(x->save.base);
        x->save = (struct iz_arena){0};
    }
}

static struct gpt2_double double_of(const struct run *r, double **param)
{
    int n = first_param(r->m, r->m->n_units);

    for (int i = 0; i < n; i++)
        param[i] = r->w[i].d;
    return (struct gpt2_double){r->c.layers, r->c.heads, r->c.width,
                                r->c.seq,    r->c.vocab, param};
}

static double loss_of(const struct run *r, const struct gpt2_double *g)
{
    return gpt2_double_loss(g, r->input, r->target, r->samples, 0, NULL);
}

/* Tensor i against central differences in double, every step-th element; the
 * error is measured against the norm of the tensor. */
static void check_tensor(struct run *r, const struct gpt2_double *g, int i,
                         const char *name, int step, double tol)
{
    double error = 0, norm = 0, *p = g->param[i];

    tensor_load(&r->dw[i]);
    tensor_load(&r->tied);
    for (int64_t k = 0; k < iz_view_len(r->dw[i].v); k += step) {
        double got = r->dw[i].d[k] + (i ? 0 : r->tied.d[k]), was = p[k], up;
        p[k] = was + 1e-5;
        up = loss_of(r, g);
        p[k] = was - 1e-5;
        double want = (up - loss_of(r, g)) / 2e-5;
        p[k] = was;
        norm += want * want;
        error += pow(got - want, 2);
    }
    /* The key's bias has no gradient of its own; hence the absolute part. */
    if (!(sqrt(error) <= tol * sqrt(norm) + 1e-8))
        fail_msg("%s: gradient off by %.3g of its norm %.3g", name,
                 sqrt(error / norm), sqrt(norm));
}

static void check_gradients(struct iz_gpt2_config c, enum iz_dtype type,
                            int samples, int step)
{
    double *param[64], tol = 2e-5;
    struct run r = run_new(c, type, samples);
    struct gpt2_double g = double_of(&r, param);

    if (type != IZ_F32)
        tol = type == IZ_BF16 ? 0x1p-8 : 0x1p-11;
    train(&r, true);
    double want = loss_of(&r, &g);
    assert_true(fabs(r.loss - want) <= 1e-5 * fmax(1, want));
    for (int u = 0, i = 0; u < r.m->n_units; u++)
        for (int k = 0; k < r.m->unit[u].n_params; k++, i++)
            check_tensor(&r, &g, i, r.m->unit[u].param[k].name, step, tol);
    run_free(&r);
}

/* Tensor i along a random direction of +-1: one number for the whole tensor, so
 * that a model of a real shape can be checked. */
static void check_direction(struct run *r, const struct gpt2_double *g, int i,
                            const char *name)
{
    int64_t n = iz_view_len(r->dw[i].v);
    double got = 0, norm = 0, eps = 1e-6, *p = g->param[i], up;
    double *sign = calloc((size_t)n, sizeof *sign);

    tensor_load(&r->dw[i]);
    tensor_load(&r->tied);
    for (int64_t k = 0; k < n; k++) {
        double d = r->dw[i].d[k] + (i ? 0 : r->tied.d[k]);
        sign[k] = fixture_below(2) ? 1 : -1;
        got += d * sign[k];
        norm += d * d;
        p[k] += eps * sign[k];
    }
    up = loss_of(r, g);
    for (int64_t k = 0; k < n; k++)
        p[k] -= 2 * eps * sign[k];
    double want = (up - loss_of(r, g)) / (2 * eps);
    for (int64_t k = 0; k < n; k++)
        p[k] += eps * sign[k];
    free(sign);
    if (!(fabs(got - want) <= 1e-4 * sqrt(norm) + 1e-7))
        fail_msg("%s: %.6g along a direction, not %.6g", name, got, want);
}

static void check_directions(struct iz_gpt2_config c, int samples)
{
    double *param[64];
    struct run r = run_new(c, IZ_F32, samples);
    struct gpt2_double g = double_of(&r, param);

    for (int i = 0; i < first_param(r.m, r.m->n_units); i++) {
        struct tensor *t = &r.w[i]; /* as small as real weights are */
        for (int64_t k = 0; t->v.rows > 1 && k < iz_view_len(t->v); k++)
            t->d[k] = ((float *)t->v.p)[k] *= 0.1F;
    }
    train(&r, true);
    assert_true(fabs(r.loss - loss_of(&r, &g)) <= 1e-5 * r.loss);
    for (int u = 0, i = 0; u < r.m->n_units; u++)
        for (int k = 0; k < r.m->unit[u].n_params; k++, i++)
            check_direction(&r, &g, i, r.m->unit[u].param[k].name);
    run_free(&r);
}

/* Every loop over tiles and chunks turns several times. */
static void gradients_of_a_real_shape_agree(void **state)
{
    (void)state;
    fixture_seed();
    check_directions((struct iz_gpt2_config){2, 4, 128, 160, 256}, 2);
    check_directions((struct iz_gpt2_config){1, 2, 96, 257, 1031}, 1);
}

static const struct iz_gpt2_config tiny = {2, 2, 6, 5, 7};
static const struct iz_gpt2_config longer = {1, 3, 9, 67, 11};

static void gradients_agree_with_central_differences(void **state)
{
    (void)state;
    fixture_seed();
    check_gradients(tiny, IZ_F32, 2, 1);
    check_gradients((struct iz_gpt2_config){1, 1, 1, 1, 1}, IZ_F32, 3, 1);
    check_gradients((struct iz_gpt2_config){3, 1, 3, 3, 5}, IZ_F32, 1, 1);
    check_gradients(longer, IZ_F32, 2, 3);
}

static void gradients_of_16_bit_weights_agree(void **state)
{
    (void)state;
    fixture_seed();
    check_gradients(tiny, IZ_BF16, 2, 1);
    check_gradients(tiny, IZ_F16, 2, 1);
}

static void same_gradients(struct run *a, struct run *b)
{
    int n = first_param(a->m, a->m->n_units);

    for (int i = 0; i < n; i++)
        fixture_same_bits("gradient", a->dw[i].v, b->dw[i].v);
    fixture_same_bits("tied gradient", a->tied.v, b->tied.v);
    assert_memory_equal(&a->loss, &b->loss, sizeof a->loss);
}

static struct run seeded(struct iz_gpt2_config c, enum iz_dtype type)
{
    fixture_seed();
    return run_new(c, type, 2);
}

static void recomputed_activations_give_the_same_bits(void **state)
{
    (void)state;
    for (int t = 0; t < 3; t++) {
        struct run a = seeded(longer, fixture_types[t]);
        struct run b = seeded(longer, fixture_types[t]);
        train(&a, true);
        train(&b, false);
        same_gradients(&a, &b);
        run_free(&a);
        run_free(&b);
    }
}

/* A power of two as loss scale changes exponents only. */
static void loss_scale_scales_exactly(void **state)
{
    struct run a = seeded(tiny, IZ_F32), b = seeded(tiny, IZ_F32);
    int n = first_param(a.m, a.m->n_units);

    (void)state;
    b.scale = 1024;
    train(&a, true);
    train(&b, true);
    assert_true(a.loss == b.loss);
    for (int i = 0; i < n; i++) {
        tensor_load(&a.dw[i]);
        tensor_load(&b.dw[i]);
        for (int64_t k = 0; k < iz_view_len(a.dw[i].v); k++)
            assert_true(a.dw[i].d[k] * 1024 == b.dw[i].d[k]);
    }
    run_free(&a);
    run_free(&b);
}

static void evaluate_and_generate_agree(void **state)
{
    struct run r = seeded(tiny, IZ_F32);
    int head = r.m->n_units - 1;
    float logits[7];
    double want[7], *param[64], loss;
    struct gpt2_double g = double_of(&r, param);
    struct iz_exec x = {0};

    (void)state;
    train(&r, true);
    loss = r.loss;
    r.loss = -1;
    call_exact(&r, head, r.m->unit[head].evaluate, &x, NULL);
    assert_true(r.loss == loss);
    call_exact(&r, head, r.m->unit[head].generate, &x, logits);
    gpt2_double_loss(&g, r.input, r.target, 1, tiny.seq - 1, want);
    for (int v = 0; v < 7; v++)
        assert_true(fabs((double)logits[v] - want[v]) < 1e-5);
    run_free(&r);
}

/* The loss with all elements of parameter i of unit u set to value. */
static double loss_with(int u, int i, double value)
{
    struct run r = run_new(tiny, IZ_F32, 1);
    struct tensor *w = &r.w[first_param(r.m, u) + i];
    double loss;

    for (int64_t k = 0; k < iz_view_len(w->v); k++)
        w->d[k] = value;
    tensor_store(w);
    train(&r, true);
    loss = r.loss;
    run_free(&r);
    return loss;
}

static void nan_and_overflow_reach_the_loss(void **state)
{
    (void)state;
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
    int64_t n = 0;

    (void)state;
    assert_int_equal(iz_gpt2_open(&m, &c), 0);
    for (int u = 0; u < m->n_units; u++)
        for (int i = 0; i < m->unit[u].n_params; i++)
            n += m->unit[u].param[i].rows * m->unit[u].param[i].cols;
    assert_int_equal(n, 124439808);
    assert_string_equal(m->unit[4].name, "h.3");
    assert_string_equal(m->unit[4].param[2].name, "h.3.attn.c_attn.weight");
    assert_int_equal(m->unit[13].tied_unit, 0);
    iz_model_close(&m);
    assert_null(m);
}

static void flops_follow_the_closed_form(void **state)
{
    struct run r = seeded(longer, IZ_F32);
    double flops = 0, c = longer.width, t = longer.seq, m = 2 * t;
    double weights = 12 * c * c * longer.layers + c * longer.vocab;
    double attention = 6 * c * (t + 1) * longer.layers;

    (void)state;
    for (int u = 0; u < r.m->n_units; u++) {
        struct iz_exec x = iz_exec_dry(IZ_CPU, IZ_F32);
        if (r.m->unit[u].forward)
            call(&r, u, r.m->unit[u].forward, &x, NULL);
        call(&r, u, r.m->unit[u].backward, &x, NULL);
        flops += x.flops;
    }
    assert_true(flops == m * (6 * weights + attention));
    run_free(&r);
}

static void impossible_models_are_refused(void **state)
{
    static const struct iz_gpt2_config bad[] = {
        {0, 2, 6, 5, 7},  {2, 4, 6, 5, 7}, {2, 0, 6, 5, 7},
        {2, 2, -6, 5, 7}, {2, 2, 6, 0, 7}, {2, 2, 6, 5, 1 << 30}};

    (void)state;
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct iz_model *m;
        assert_true(iz_gpt2_open(&m, &bad[i]) < 0);
        assert_null(m);
    }
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
