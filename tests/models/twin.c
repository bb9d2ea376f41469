/* SPDX-License-Identifier: Apache-2.0 */
/* See twin.h. */
#include "tests/models/twin.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

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

struct iz_model *twin_open(const struct twin_kind *k, const void *config)
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

void twin_train(struct twin *t, enum iz_recompute level)
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

void twin_evaluate(struct twin *t)
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
