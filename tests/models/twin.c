/* SPDX-License-Identifier: Apache-2.0 */
/* A model unit by unit, and the tests that every model has; see twin.h. */
#include "tests/models/twin.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/ops/blas.h"

/* Where the parameters of a unit begin in w. */
static int twin_first(const struct twin *t, int unit)
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

struct iz_model *twin_open(const struct twin_kind *k, const void *config)
{
    struct iz_model *m;
    assert_int_equal(k->open(&m, config), 0);
    return m;
}

/* Parameters large enough that every path of the gradient counts. */
static struct twin twin_new(const struct twin_kind *k, const void *config,
                            enum iz_dtype type, int samples)
{
    struct twin t = {.kind = k,
                     .config = config,
                     .m = twin_open(k, config),
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

static void twin_free(struct twin *t)
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

static struct iz_view view_of(struct iz_view v, int64_t cols, bool dry)
{
    v.cols = cols;
    if (dry)
        v.p = NULL;
    return v;
}

typedef void layer(struct iz_exec *x, const struct iz_layer *a);

/* Calls a layer function of unit u, dry (every pointer NULL) or not. */
static void call(struct twin *t, int u, layer *f, struct iz_exec *x)
{
    const struct iz_unit *unit = &t->m->unit[u];
    int64_t out = unit->out_elems, in = u ? unit[-1].out_elems : 0;
    bool dry = x->dry, reads = u == 0 || u + 1 == t->m->n_units;
    struct iz_view w[TWIN_PARAMS], dw[TWIN_PARAMS];
    int at = twin_first(t, u);
    struct iz_layer a = {
        .self = unit->self,
        .unit = u,
        .kind = unit->kind,
        .index = unit->index,
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
        .aux = dry || !unit->own_loss ? NULL : &t->aux,
        .again = t->again};
    for (int i = 0; i < unit->n_params; i++) {
        w[i] = view_of(t->w[at + i].v, t->w[at + i].v.cols, dry);
        dw[i] = view_of(t->dw[at + i].v, t->w[at + i].v.cols, dry);
    }
    if (unit->tied_unit >= 0) {
        /* The embedding's matrix, behind the unit's own parameters. */
        assert_true(unit->tied_unit == 0 && unit->tied_param == 0);
        w[unit->n_params] = view_of(t->w[0].v, t->w[0].v.cols, dry);
        dw[unit->n_params] = view_of(t->tied.v, t->w[0].v.cols, dry);
    }
    f(x, &a);
}

/* Calls f with work of exactly the size that a dry run asks for.  x->save is
 * the caller's. */
static void call_exact(struct twin *t, int u, layer *f, struct iz_exec *x)
{
    struct iz_exec dry = iz_exec_dry(IZ_CPU, IZ_F32);
    dry.widens = x->widens;
    call(t, u, f, &dry);
    x->backend = IZ_CPU;
    x->dry = false;
    x->act = IZ_F32;
    x->cost = (struct iz_cost){0};
    x->work = (struct iz_arena){.base = fixture_take(dry.work.peak),
                                .size = dry.work.peak};
    x->save.used = 0;
    if (!x->save.base && dry.save.peak) {
        x->save.base = fixture_take(dry.save.peak);
        x->save.size = dry.save.peak;
    }
    call(t, u, f, x);
    assert_true(x->widens || x->work.used == 0);
    assert_int_equal(x->work.used, dry.work.used);
    assert_int_equal(x->work.peak, dry.work.peak);
    assert_int_equal(x->save.used, dry.save.peak);
    assert_true(x->cost.flops == dry.cost.flops &&
                x->cost.bytes == dry.cost.bytes);
    free(x->work.base);
    x->work = (struct iz_arena){0};
}

static void forget(struct iz_exec *x)
{
    free(x->save.base);
    x->save = (struct iz_arena){0};
}

/* A forward whose output nobody reads. */
static void call_again(struct twin *t, int u, struct iz_exec *x)
{
    struct tensor y = t->y[u];
    t->y[u].v.p = fixture_take(iz_view_bytes(y.v));
    t->again = true;
    call_exact(t, u, t->m->unit[u].forward, x);
    t->again = false;
    free(t->y[u].v.p);
    t->y[u] = y;
}

/* Forward and backward of all units; what a backward recomputes is not kept.
 * Every call is made dry first and has arenas of exactly that size.  d of dw
 * are the gradients, with what the head adds. */
static void twin_train(struct twin *t, enum iz_recompute level)
{
    int last = t->m->n_units - 1;
    t->aux = (struct iz_aux){.least = INFINITY};
    for (int u = 0; u < last; u++) {
        t->saved[u].widens = level == IZ_RECOMPUTE_WIDENED;
        call_exact(t, u, t->m->unit[u].forward, &t->saved[u]);
        if (level == IZ_RECOMPUTE_FULL)
            forget(&t->saved[u]);
    }
    for (int u = last; u >= 0; u--) {
        struct iz_exec *x = &t->saved[u];
        if (level == IZ_RECOMPUTE_FULL && u < last)
            call_again(t, u, x);
        call_exact(t, u, t->m->unit[u].backward, x);
        forget(x);
    }
    for (int i = 0; i < t->n; i++)
        tensor_load(&t->dw[i]);
    if (t->m->unit[last].tied_unit < 0)
        return;
    tensor_load(&t->tied);
    for (int64_t k = 0; k < iz_view_len(t->tied.v); k++)
        t->dw[0].d[k] += t->tied.d[k];
}

/* The loss alone, by the last unit's evaluate. */
static void twin_evaluate(struct twin *t)
{
    struct iz_exec x = {0};
    int last = t->m->n_units - 1;
    call_exact(t, last, t->m->unit[last].evaluate, &x);
}

double twin_flops(const struct twin_kind *k, const void *config, int samples)
{
    struct twin t = twin_new(k, config, IZ_F32, samples);
    double flops = 0;
    for (int u = 0; u < t.m->n_units; u++) {
        struct iz_exec x = iz_exec_dry(IZ_CPU, IZ_F32);
        if (t.m->unit[u].forward)
            call(&t, u, t.m->unit[u].forward, &x);
        call(&t, u, t.m->unit[u].backward, &x);
        flops += x.cost.flops;
    }
    twin_free(&t);
    return flops;
}

/* ---- tests ---- */

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
