/* SPDX-License-Identifier: Apache-2.0 */
/* See twin.h. */
#include "tests/models/twin.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/flat/update.h"

int twin_first(const struct twin *t, int unit)
{
    int n = 0;

    for (int u = 0; u < unit; u++)
        n += t->m->unit[u].n_params;
    return n;
}

static void fill_params(struct twin *t)
{
    for (int u = 0, k = 0; u < t->m->n_units; u++)
        for (int i = 0; i < t->m->unit[u].n_params; i++, k++) {
            const struct iz_param *p = &t->m->unit[u].param[i];

            assert_true(k < TWIN_PARAMS);
            t->w[k] =
                tensor_new(t->type, p->rows, p->cols, p->rows == 1 ? 0.5 : 0.6);
            for (int64_t j = 0; p->init == IZ_INIT_ONE && j < p->cols; j++)
                t->w[k].d[j] += 1;
            tensor_store(&t->w[k]);
            t->dw[k] = tensor_new(t->type, p->rows, p->cols, 1);
            t->param[k] = t->w[k].d;
        }
}

static void fill_tokens(struct twin *t)
{
    int32_t *input = t->input, *target = t->target;

    for (int i = 0; i < t->samples * t->m->tokens; i++) {
        input[i] = fixture_below(t->m->vocab);
        target[i] = i % 4 == 2 ? -1 : fixture_below(t->m->vocab);
    }
}

static void fill_samples(struct twin *t)
{
    const struct iz_record *r = &t->m->record;

    t->input = fixture_take(t->samples * t->m->input_bytes);
    t->target = fixture_take(t->samples * t->m->target_bytes);
    if (!t->kind->fill) {
        fill_tokens(t);
        return;
    }
    t->records = calloc((size_t)(t->samples * r->bytes), 1);
    for (int i = 0; i < t->samples; i++) {
        t->kind->fill(t->m, t->records + i * r->bytes);
        assert_null(r->check(t->m->self, t->records + i * r->bytes));
        r->unpack(t->m->self, t->records + i * r->bytes, i, t->samples,
                  t->input, t->target);
    }
}

static struct iz_model *opened(const struct twin_kind *k, const void *config)
{
    struct iz_model *m;

    assert_int_equal(k->open(&m, config), 0);
    return m;
}

struct twin twin_new(const struct twin_kind *k, const void *config,
                     enum iz_dtype type, int samples)
{
    struct twin t = {.kind = k,
                     .config = config,
                     .m = opened(k, config),
                     .type = type,
                     .samples = samples,
                     .loss_scale = 1};
    const struct iz_model *m = t.m;
    int64_t most = 1;

    t.n = twin_first(&t, m->n_units);
    fill_params(&t);
    t.tied = tensor_new(type, t.w[0].v.rows, t.w[0].v.cols, 1);
    fill_samples(&t);
    t.y = calloc((size_t)m->n_units, sizeof(*t.y));
    t.saved = calloc((size_t)m->n_units, sizeof(*t.saved));
    for (int u = 0; u < m->n_units; u++) {
        t.y[u] = tensor_new(IZ_F32, samples, m->unit[u].out_elems, 1);
        most = m->unit[u].out_elems > most ? m->unit[u].out_elems : most;
    }
    t.d = tensor_new(IZ_F32, samples, most, 1);
    return t;
}

void twin_free(struct twin *t)
{
    for (int i = 0; i < t->n; i++) {
        tensor_free(&t->w[i]);
        tensor_free(&t->dw[i]);
    }
    for (int u = 0; u < t->m->n_units; u++)
        tensor_free(&t->y[u]);
    tensor_free(&t->tied);
    tensor_free(&t->d);
    free(t->y);
    free(t->saved);
    free(t->records);
    free(t->input);
    free(t->target);
    iz_model_close(&t->m);
}

void twin_set(struct twin *t, int i, double value)
{
    for (int64_t k = 0; k < iz_view_len(t->w[i].v); k++)
        t->w[i].d[k] = value;
    tensor_store(&t->w[i]);
}

typedef void call_fn(struct iz_exec *x, const struct iz_layer *a);

static struct iz_view view_of(struct iz_view v, int64_t cols, bool dry)
{
    v.cols = cols;
    if (dry)
        v.p = NULL;
    return v;
}

/* The embedding's matrix, behind the unit's own parameters. */
static void add_tied(struct twin *t, const struct iz_unit *unit,
                     struct iz_view *w, struct iz_view *dw, bool dry)
{
    struct iz_view v = t->w[0].v;

    assert_true(unit->tied_unit == 0 && unit->tied_param == 0);
    w[unit->n_params] = view_of(v, v.cols, dry);
    dw[unit->n_params] = view_of(t->tied.v, v.cols, dry);
}

/* Calls a layer function of unit u, dry (every pointer NULL) or not. */
static void call(struct twin *t, int u, call_fn *f, struct iz_exec *x,
                 float *logits)
{
    const struct iz_unit *unit = &t->m->unit[u];
    int64_t out = unit->out_elems, in = u ? unit[-1].out_elems : 0;
    bool dry = x->dry, reads = u == 0 || u + 1 == t->m->n_units;
    struct iz_view w[TWIN_PARAMS], dw[TWIN_PARAMS];
    int at = twin_first(t, u);
    struct iz_layer a = {
        .self = unit->self,
        .unit = u,
        .samples = t->samples,
        .w = w,
        .dw = dw,
        .x = u ? view_of(t->y[u - 1].v, in, dry) : IZ_NONE,
        .y = view_of(t->y[u].v, out, dry),
        .dy = view_of(t->d.v, out, dry),
        .dx = view_of(t->d.v, in, dry),
        .input = dry || !(reads || unit->reads_input) ? NULL : t->input,
        .target = dry || !reads ? NULL : t->target,
        .loss = dry ? NULL : &t->got,
        .loss_scale = t->loss_scale,
        .row = t->m->tokens - 1,
        .logits = logits};

    for (int i = 0; i < unit->n_params; i++) {
        w[i] = view_of(t->w[at + i].v, t->w[at + i].v.cols, dry);
        dw[i] = view_of(t->dw[at + i].v, t->w[at + i].v.cols, dry);
    }
    if (unit->tied_unit >= 0)
        add_tied(t, unit, w, dw, dry);
    f(x, &a);
}

/* Calls f with work of exactly the size that a dry run asks for.  x->save is
 * the caller's. */
static void call_exact(struct twin *t, int u, call_fn *f, struct iz_exec *x,
                       float *logits)
{
    struct iz_exec dry = iz_exec_dry(IZ_CPU, IZ_F32);

    call(t, u, f, &dry, logits);
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
    call(t, u, f, x, logits);
    assert_int_equal(x->work.used, 0);
    assert_int_equal(x->work.peak, dry.work.peak);
    assert_int_equal(x->save.used, dry.save.peak);
    assert_true(x->flops == dry.flops && x->bytes == dry.bytes);
    free(x->work.base);
    x->work = (struct iz_arena){0};
}

static void forget(struct iz_exec *x)
{
    free(x->save.base);
    x->save = (struct iz_arena){0};
}

void twin_train(struct twin *t, bool keep)
{
    int last = t->m->n_units - 1;

    for (int u = 0; u < last; u++) {
        call_exact(t, u, t->m->unit[u].forward, &t->saved[u], NULL);
        if (!keep)
            forget(&t->saved[u]);
    }
    for (int u = last; u >= 0; u--) {
        struct iz_exec *x = &t->saved[u];

        if (!keep && u < last)
            call_exact(t, u, t->m->unit[u].forward, x, NULL);
        call_exact(t, u, t->m->unit[u].backward, x, NULL);
        forget(x);
    }
}

void twin_evaluate(struct twin *t)
{
    int last = t->m->n_units - 1;
    struct iz_exec x = {0};

    call_exact(t, last, t->m->unit[last].evaluate, &x, NULL);
}

void twin_generate(struct twin *t, float *logits)
{
    int last = t->m->n_units - 1;
    struct iz_exec x = {0};

    call_exact(t, last, t->m->unit[last].generate, &x, logits);
}

double twin_flops(struct twin *t)
{
    double flops = 0;

    for (int u = 0; u < t->m->n_units; u++) {
        struct iz_exec x = iz_exec_dry(IZ_CPU, IZ_F32);

        if (t->m->unit[u].forward)
            call(t, u, t->m->unit[u].forward, &x, NULL);
        call(t, u, t->m->unit[u].backward, &x, NULL);
        flops += x.flops;
    }
    return flops;
}

static bool is_tied(const struct twin *t)
{
    return t->m->unit[t->m->n_units - 1].tied_unit >= 0;
}

double twin_gradient(const struct twin *t, int i, int64_t k)
{
    return t->dw[i].d[k] + (i == 0 && is_tied(t) ? t->tied.d[k] : 0);
}

void twin_load(struct twin *t, int i)
{
    tensor_load(&t->dw[i]);
    if (i == 0 && is_tied(t))
        tensor_load(&t->tied);
}

/* By central differences. */
static double slope(const struct twin *t, int i, int64_t k)
{
    double *p = t->param[i], was = p[k], up;

    p[k] = was + 1e-5;
    up = t->kind->loss(t);
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

    twin_load(t, i);
    for (int64_t k = 0; k < iz_view_len(t->dw[i].v); k += step) {
        double want = slope(t, i, k);

        norm += want * want;
        error += pow(twin_gradient(t, i, k) - want, 2);
    }
    if (!(sqrt(error) <= tol * sqrt(norm) + 1e-8))
        fail_msg("%s: gradient off by %.3g of its norm %.3g", name,
                 sqrt(error / norm), sqrt(norm));
}

void twin_check(const struct twin_kind *k, const void *config,
                enum iz_dtype type, int samples, int step)
{
    struct twin t = twin_new(k, config, type, samples);
    double want = k->loss(&t), tol = 2e-5;

    if (type != IZ_F32)
        tol = type == IZ_BF16 ? 0x1p-8 : 0x1p-11;
    twin_train(&t, true);
    assert_true(fabs(t.got - want) <= 1e-5 * fmax(1, want));
    for (int u = 0, i = 0; u < t.m->n_units; u++)
        for (int p = 0; p < t.m->unit[u].n_params; p++, i++)
            check_tensor(&t, i, t.m->unit[u].param[p].name, step, tol);
    twin_free(&t);
}

/* ---- training ---- */

struct state {
    double *m, *v, *g;
    float *low_m, *low_v;
};

/* AdamW in double, by the book. */
static void step_in_double(double *p, double *m, double *v, double g,
                           const struct iz_step *a)
{
    *m = a->hyper.beta1 * *m + (1 - a->hyper.beta1) * g;
    *v = a->hyper.beta2 * *v + (1 - a->hyper.beta2) * g * g;
    *p -= a->hyper.lr * a->hyper.weight_decay * *p;
    *p -= a->hyper.lr * (*m / (1 - pow(a->hyper.beta1, (double)a->t))) /
          (sqrt(*v / (1 - pow(a->hyper.beta2, (double)a->t))) + a->hyper.eps);
}

/* One step of both. */
static void step(struct twin *t, struct state *s, const struct iz_step *a)
{
    struct iz_alike all = iz_alike_of(a);

    twin_train(t, true);
    for (int i = 0; i < t->n; i++)
        for (int64_t k = 0; k < iz_view_len(t->w[i].v); k++)
            s[i].g[k] = slope(t, i, k);
    for (int i = 0; i < t->n; i++) {
        int64_t n = iz_view_len(t->w[i].v);
        float *dw = t->dw[i].v.p, *tied = t->tied.v.p;

        for (int64_t k = 0; i == 0 && is_tied(t) && k < n; k++)
            dw[k] += tied[k];
        for (int64_t k = 0; k < n; k++)
            step_in_double(&t->param[i][k], &s[i].m[k], &s[i].v[k], s[i].g[k],
                           a);
        iz_update(&(struct iz_update){.optimizer = a->hyper.type,
                                      .n = n,
                                      .p = t->w[i].v.p,
                                      .state = {s[i].low_m, s[i].low_v},
                                      .g = dw,
                                      .span = &all,
                                      .spans = 1});
    }
}

static void check_weights(const struct twin *t)
{
    for (int i = 0; i < t->n; i++)
        for (int64_t k = 0; k < iz_view_len(t->w[i].v); k++) {
            double got = (double)((float *)t->w[i].v.p)[k];

            if (!(fabs(got - t->param[i][k]) <= 2e-5))
                fail_msg("parameter %d, element %d: %.9g, not %.9g", i, (int)k,
                         got, t->param[i][k]);
        }
}

/* eps is far above the error of a gradient, which a small gradient would
 * otherwise make a step of. */
static void train_both(struct twin *t, struct state *s)
{
    struct iz_step a = {.hyper = {.type = IZ_OPTIMIZER_ADAMW,
                                  .lr = 0.02,
                                  .beta1 = 0.9,
                                  .beta2 = 0.95,
                                  .eps = 1e-3,
                                  .weight_decay = 0.1,
                                  .adamw = true,
                                  .bias_correction = true},
                        .grad_scale = 1};
    double first = t->kind->loss(t), loss = first;

    for (a.t = 1; a.t <= 10; a.t++) {
        loss = t->kind->loss(t);
        step(t, s, &a);
        assert_true(fabs(t->got - loss) <= 1e-5 * loss);
    }
    assert_true(loss < first - 0.1);
    check_weights(t);
}

void twin_check_steps(const struct twin_kind *k, const void *config,
                      int samples)
{
    struct state s[TWIN_PARAMS];
    struct twin t = twin_new(k, config, IZ_F32, samples);

    for (int i = 0; i < t.n; i++) {
        size_t n = (size_t)iz_view_len(t.w[i].v);

        s[i] = (struct state){calloc(n, 8), calloc(n, 8), calloc(n, 8),
                              calloc(n, 4), calloc(n, 4)};
    }
    train_both(&t, s);
    for (int i = 0; i < t.n; i++) {
        free(s[i].m);
        free(s[i].v);
        free(s[i].g);
        free(s[i].low_m);
        free(s[i].low_v);
    }
    twin_free(&t);
}

static struct twin seeded(const struct twin_kind *k, const void *config,
                          enum iz_dtype type, int samples)
{
    fixture_seed();
    return twin_new(k, config, type, samples);
}

void twin_check_recompute(const struct twin_kind *k, const void *config,
                          int samples)
{
    for (int type = 0; type < 3; type++) {
        struct twin a = seeded(k, config, fixture_types[type], samples);
        struct twin b = seeded(k, config, fixture_types[type], samples);
        double loss;

        twin_train(&a, true);
        twin_train(&b, false);
        for (int i = 0; i < a.n; i++)
            fixture_same_bits("gradient", a.dw[i].v, b.dw[i].v);
        if (is_tied(&a))
            fixture_same_bits("tied gradient", a.tied.v, b.tied.v);
        assert_memory_equal(&a.got, &b.got, sizeof(a.got));
        loss = a.got;
        a.got = -1;
        twin_evaluate(&a);
        assert_true(a.got == loss);
        twin_free(&a);
        twin_free(&b);
    }
}

void twin_check_nan(const struct twin_kind *k, const void *config, int samples,
                    int first, int end)
{
    for (int i = first; i < end; i++) {
        struct twin t = twin_new(k, config, IZ_F32, samples);

        assert_true(i < t.n);
        twin_set(&t, i, NAN);
        twin_train(&t, true);
        assert_true(isnan(t.got));
        twin_free(&t);
    }
}

int64_t twin_parameters(const struct twin_kind *k, const void *config)
{
    struct iz_model *m = opened(k, config);
    int64_t n = 0;

    for (int u = 0; u < m->n_units; u++)
        for (int i = 0; i < m->unit[u].n_params; i++)
            n += m->unit[u].param[i].rows * m->unit[u].param[i].cols;
    iz_model_close(&m);
    return n;
}

void twin_refuses(const struct twin_kind *k, const void *config)
{
    struct iz_model *m;

    assert_true(k->open(&m, config) < 0);
    assert_null(m);
}
