/* SPDX-License-Identifier: Apache-2.0 */
/* Forward and backward of one unit as tasks; see unit.h. */
#include "codelets/unit/unit.h"

#include <assert.h>
#include <math.h>

#include "codelets/base/int64.h"
#include "codelets/base/mix.h"
#include "codelets/buffer/flat_buffer.h"
#include "codelets/flat/touched_rows.h"

/* buf NULL: a dry run. */
static void *unit_at(void **buf, int i)
{
    return i < 0 || !buf ? NULL : buf[i];
}

/* Of parameter i, which begins with element `at`.  Behind it there are the
 * later ones of its part. */
static struct iz_view view_of(const struct iz_unit *u, int i,
                              enum iz_dtype type, char *flat, int64_t at)
{
    const struct iz_param *p = &u->param[i];
    struct iz_view v = {.dtype = type, .rows = p->rows, .cols = p->cols};
    at *= iz_dtype_bytes(type);
    v.odd = at % 16 != 0;
    if (flat)
        v.p = flat + at;
    for (int k = i + 1; k < u->n_params; k++)
        if (iz_param_part(&u->param[k]) == iz_param_part(p))
            v.room += u->param[k].rows * u->param[k].cols;
    return v;
}

/* Views of all parameters of a unit but for adapters and copies, the tied one
 * last, over flat buffers; returns how many.  With `reference` its copies are
 * in the place of what they copy. */
static int make_views(const struct iz_unit_layout *l, enum iz_dtype type,
                      char *own, char *tied, bool reference,
                      struct iz_view *out)
{
    const struct iz_unit *u = &l->model->unit[l->unit];
    int n = iz_unit_base(u);
    assert(u->n_params < IZ_UNIT_PARAMS);
    for (int i = 0; i < n; i++) {
        int k = reference ? iz_unit_reference(u, i) : i;
        out[i] = view_of(u, k, type, own, l->offset[k]);
    }
    if (u->tied_unit < 0)
        return n;
    const struct iz_unit *t = &l->model->unit[u->tied_unit];
    out[n] = reference ? view_of(t, iz_unit_reference(t, u->tied_param), type,
                                 tied, l->tied_reference)
                       : view_of(t, u->tied_param, type, tied, l->tied_offset);
    return n + 1;
}

static struct iz_view no_gradient(struct iz_view v)
{
    return (struct iz_view){.dtype = v.dtype, .cols = v.cols};
}

/* The same of gradients: what is frozen has none. */
static void make_gradient_views(const struct iz_unit_layout *l,
                                enum iz_dtype type, char *own, char *tied,
                                struct iz_view *out)
{
    const struct iz_unit *u = &l->model->unit[l->unit];
    int n = make_views(l, type, own, tied, false, out);
    for (int i = 0; i < n; i++) {
        bool frozen = i < iz_unit_base(u)
                          ? u->param[i].frozen
                          : !iz_unit_ties_trained(l->model, l->unit);
        if (frozen)
            out[i] = no_gradient(out[i]);
    }
}

/* Of adapter i of the unit. */
static struct iz_drop drop_of(const struct iz_unit_arg *a, int i)
{
    const struct iz_model *m = a->layout->model;
    struct iz_drop d = {.sample = a->sample, .samples = a->samples};
    d.key = iz_mix(iz_mix(m->dropout_key + (uint64_t)a->layout->unit) +
                   (uint64_t)i);
    d.p = a->sample < 0 ? 0 : m->adapter_dropout;
    return d;
}

/* Gives the weights in w their adapters, which are made in f. */
static void make_adapters(const struct iz_unit_arg *arg, char *own, char *grad,
                          struct iz_adapter *f, struct iz_view *w)
{
    const struct iz_unit_layout *l = arg->layout;
    const struct iz_unit *u = &l->model->unit[l->unit];
    enum iz_dtype type = arg->type;
    int step = iz_model_adapter(l->model);
    for (int i = iz_unit_base(u); i < iz_unit_own(u); i += step, f++) {
        const struct iz_param *a = &u->param[i], *b = a + 1;
        int64_t at[2] = {l->offset[i], l->offset[i + 1]};
        *f = (struct iz_adapter){.a = view_of(u, i, type, own, at[0]),
                                 .b = view_of(u, i + 1, type, own, at[1]),
                                 .da = view_of(u, i, type, grad, at[0]),
                                 .db = view_of(u, i + 1, type, grad, at[1]),
                                 .drop = drop_of(arg, i),
                                 .scale = iz_param_scale(l->model, b),
                                 .first = b->first,
                                 .next = w[a->adapts].adapter};
        if (a->frozen)
            f->da = no_gradient(f->da);
        if (b->frozen)
            f->db = no_gradient(f->db);
        if (step > 2) {
            f->m = view_of(u, i + 2, type, own, l->offset[i + 2]);
            f->dm = view_of(u, i + 2, type, grad, l->offset[i + 2]);
            if (u->param[i + 2].frozen)
                f->dm = no_gradient(f->dm);
        }
        w[a->adapts].adapter = f;
    }
}

/* A sparse table is a unit's only parameter. */
static void show_rows(const struct iz_unit_arg *a, void **buf,
                      struct iz_view *w, struct iz_view *dw)
{
    const struct iz_unit_layout *l = a->layout;
    if (!unit_at(buf, a->at_rows))
        return;
    struct iz_touched r =
        iz_touched_of(buf[a->at_rows], l->model->n_units, l->unit, w->cols);
    dw->row = r.row;
    dw->rows = r.n;
    if (!a->packed)
        return;
    w->row = r.row;
    w->rows = r.n;
}

/* A gradient buffer is summed whole: what no parameter covers must be zero. */
static void clear_uncovered(struct iz_exec *x, char *p, int64_t n,
                            enum iz_dtype type, int64_t from, int64_t to)
{
    int64_t size = iz_dtype_bytes(type);
    if (from)
        iz_buffer_clear(x, p, from * size);
    if (n > to)
        iz_buffer_clear(x, p + to * size, (n - to) * size);
}

static void clear_gradients(struct iz_exec *x, const struct iz_unit_arg *a,
                            void **buf)
{
    const struct iz_unit_layout *l = a->layout;
    const struct iz_unit *u = &l->model->unit[l->unit];
    if (a->at_grad >= 0 && a->at_rows < 0) {
        clear_uncovered(x, buf[a->at_grad], l->n, a->type, 0,
                        iz_unit_elems(u, IZ_PART_TRAINED));
    }
    if (a->at_tied_grad >= 0) {
        const struct iz_param *t =
            &l->model->unit[u->tied_unit].param[u->tied_param];
        clear_uncovered(x, buf[a->at_tied_grad], l->tied_n, a->type,
                        l->tied_offset, l->tied_offset + t->rows * t->cols);
    }
}

static struct iz_view boundary(enum iz_dtype act, const struct iz_model *m,
                               int unit, int samples, void *p)
{
    int64_t cols = unit < 0 ? 0 : m->unit[unit].out_elems;
    return (struct iz_view){
        .p = p, .dtype = act, .rows = samples, .cols = cols};
}

static void call_layer(struct iz_exec *x, const struct iz_unit *u,
                       struct iz_layer *l, enum iz_unit_call call)
{
    switch (call) {
    case IZ_CALL_FORWARD:
        u->forward(x, l);
        break;
    case IZ_CALL_BACKWARD:
        u->backward(x, l);
        break;
    case IZ_CALL_EVALUATE:
        u->evaluate(x, l);
        break;
    case IZ_CALL_GENERATE:
        u->generate(x, l);
        break;
    case IZ_CALL_AGAIN:
        l->again = true;
        u->forward(x, l);
        break;
    }
}

/* Forward again into scratch, its output thrown away, so that backward finds
 * what it would have kept. */
static void recompute(struct iz_exec *x, const struct iz_unit *u,
                      struct iz_layer l)
{
    int64_t mark = iz_exec_mark(x);
    struct iz_view y = iz_exec_work(x, x->act, l.samples, u->out_elems);
    l.y = y;
    call_layer(x, u, &l, IZ_CALL_AGAIN);
    iz_exec_release(x, mark);
    x->save.used = 0;
}

/* Kept activations come from their own buffer or, when nobody keeps them, from
 * the scratch of the task. */
static void attach_save(struct iz_exec *x, const struct iz_unit_arg *a,
                        void **buf)
{
    void *p = unit_at(buf, a->at_save);
    x->keeps_nothing = x->numerics.chunk_rows && !p;
    if (!p && a->save_bytes && !x->keeps_nothing)
        p = iz_exec_work(x, IZ_U8, 1, a->save_bytes).p;
    x->save = (struct iz_arena){.base = p, .size = a->save_bytes};
}

/* What the gradients are scaled by: 16-bit types want large ones, and a mean
 * over few targets counts less than one over many; that of pairs counts what is
 * such a mean itself. */
static void set_scale(struct iz_layer *l, const struct iz_unit_arg *a,
                      void **buf)
{
    float scale = a->at_scale < 0 ? 1 : *(float *)buf[a->at_scale];
    l->weight = a->at_weight < 0 ? 1 : *(double *)buf[a->at_weight];
    l->loss_scale = l->preference ? scale : (float)(scale * l->weight);
}

/* What a layer is called with, and what that points to. */
struct frame {
    struct iz_view w[IZ_UNIT_PARAMS], dw[IZ_UNIT_PARAMS];
    struct iz_view reference[IZ_UNIT_PARAMS];
    struct iz_adapter adapter[IZ_UNIT_PARAMS / 2];
    struct iz_layer layer;
};

static void make_frame(struct frame *f, const struct iz_exec *x,
                       const struct iz_unit_arg *a, void **buf)
{
    const struct iz_unit_layout *l = a->layout;
    const struct iz_model *m = l->model;
    char *own = unit_at(buf, a->at_param), *grad = unit_at(buf, a->at_grad);
    char *batch = unit_at(buf, a->at_batch), *d = unit_at(buf, a->at_d);
    int n = a->samples;
    char *tied = unit_at(buf, a->at_tied);
    make_views(l, a->type, own, tied, a->reference, f->w);
    make_gradient_views(l, a->type, grad, unit_at(buf, a->at_tied_grad), f->dw);
    if (!a->reference)
        make_adapters(a, own, grad, f->adapter, f->w);
    show_rows(a, buf, f->w, f->dw);
    f->layer = (struct iz_layer){
        .self = m->unit[l->unit].self,
        .unit = l->unit,
        .kind = m->unit[l->unit].kind,
        .index = m->unit[l->unit].index,
        .samples = n,
        .w = f->w,
        .dw = f->dw,
        .x = boundary(x->act, m, l->unit - 1, n, unit_at(buf, a->at_x)),
        .y = boundary(x->act, m, l->unit, n, unit_at(buf, a->at_y)),
        .dy = boundary(x->act, m, l->unit, n, d),
        .dx = boundary(x->act, m, l->unit - 1, n, d),
        .input = batch,
        .target = batch ? batch + n * m->input_bytes : NULL,
        .loss = unit_at(buf, a->at_loss),
        .row = a->row,
        .logits = unit_at(buf, a->at_logits),
        .aux = unit_at(buf, a->at_told),
    };
    if (m->preference && l->unit + 1 == m->n_units) {
        make_views(l, a->type, own, tied, true, f->reference);
        f->layer.preference = m->preference;
        f->layer.reference_w = f->reference;
        f->layer.reference_x =
            boundary(x->act, m, l->unit - 1, n, unit_at(buf, a->at_reference));
    }
    if (m->documents_apart)
        f->layer.begins = (struct iz_view){
            .p = batch ? batch + n * (m->input_bytes + m->target_bytes) : NULL,
            .dtype = IZ_I32,
            .rows = n,
            .cols = m->tokens};
}

void iz_unit_run(struct iz_exec *x, void **buf, const void *arg)
{
    const struct iz_unit_arg *a = arg;
    const struct iz_unit *u = &a->layout->model->unit[a->layout->unit];
    struct frame f;
    make_frame(&f, x, a, buf);
    set_scale(&f.layer, a, buf);
    x->widens = a->recompute == IZ_RECOMPUTE_WIDENED;
    attach_save(x, a, buf);
    if (a->call == IZ_CALL_BACKWARD && a->recompute == IZ_RECOMPUTE_FULL &&
        !x->keeps_nothing)
        recompute(x, u, f.layer);
    call_layer(x, u, &f.layer, a->call);
    clear_gradients(x, a, buf);
}

/* ---- dry runs ---- */

/* probe: adapters for all weights in place of the unit's own; or NULL.  rows:
 * of the gradient of a sparse table, 0: dense. */
static void dry_call(struct iz_exec *x, const struct iz_model *m, int unit,
                     int samples, int64_t rows, enum iz_dtype type,
                     enum iz_unit_call call, struct iz_adapter *probe)
{
    int64_t offset[IZ_UNIT_PARAMS], of_tied[IZ_UNIT_PARAMS];
    const struct iz_unit *u = &m->unit[unit];
    const int64_t from[IZ_PARTS] = {0}; /* cache lines of any part */
    struct iz_unit_layout l = {.model = m, .unit = unit, .offset = offset};
    iz_unit_offsets(u, from, offset);
    if (u->tied_unit >= 0) {
        const struct iz_unit *t = &m->unit[u->tied_unit];
        iz_unit_offsets(t, from, of_tied);
        l.tied_offset = of_tied[u->tied_param];
        l.tied_reference = of_tied[iz_unit_reference(t, u->tied_param)];
    }
    struct iz_unit_arg a = {.layout = &l, .samples = samples, .type = type};
    struct frame f;
    make_frame(&f, x, &a, NULL);
    if (rows)
        f.dw[0].rows = rows;
    for (int i = 0; probe && i < iz_unit_base(&m->unit[unit]); i++)
        f.w[i].adapter = &probe[i];
    call_layer(x, &m->unit[unit], &f.layer, call);
}

static struct iz_exec dry_like(const struct iz_exec *like)
{
    struct iz_exec x = iz_exec_dry(like->backend, like->act);
    x.numerics = like->numerics;
    x.rate = like->rate;
    return x;
}

/* Of all ops and of the copies beside them. */
static struct iz_cost cost_of(const struct iz_exec *x)
{
    struct iz_cost c = x->cost;
    for (int i = 0; i < 2; i++)
        if (x->rate.bus_bytes_per_s[i] > 0)
            c.seconds =
                fmax(c.seconds, c.bus_bytes[i] / x->rate.bus_bytes_per_s[i]);
    return c;
}

/* Of one whose chunks keep nothing, and recompute what they are about to need.
 */
static void cost_of_chunks(struct iz_unit_cost *c, const struct iz_model *m,
                           int unit, int samples, enum iz_dtype param_type,
                           struct iz_exec *x)
{
    x->keeps_nothing = true;
    dry_call(x, m, unit, samples, 0, param_type, IZ_CALL_BACKWARD, NULL);
    c->recompute[IZ_RECOMPUTE_FULL] = cost_of(x);
    iz_cost_add(&c->recompute[IZ_RECOMPUTE_FULL], &c->backward, -1);
    dry_call(x, m, unit, samples, 0, param_type, IZ_CALL_FORWARD, NULL);
    c->work_bytes = max64(c->work_bytes, x->work.peak);
}

/* The part of a unit with a forward.  c has that of its backward. */
static void forward_cost(struct iz_unit_cost *c, const struct iz_model *m,
                         int unit, int samples, int64_t rows,
                         enum iz_dtype param_type, const struct iz_exec *like)
{
    struct iz_exec x = dry_like(like);
    dry_call(&x, m, unit, samples, rows, param_type, IZ_CALL_FORWARD, NULL);
    c->save_bytes[IZ_RECOMPUTE_NONE] =
        max64(c->save_bytes[IZ_RECOMPUTE_NONE], x.save.peak);
    c->work_bytes = max64(c->work_bytes, x.work.peak);
    c->forward = cost_of(&x);
    if (!c->save_bytes[IZ_RECOMPUTE_NONE])
        return; /* nothing is kept, so nothing is recomputed */
    x = dry_like(like);
    x.widens = true;
    dry_call(&x, m, unit, samples, rows, param_type, IZ_CALL_FORWARD, NULL);
    int64_t most = x.work.peak;
    x = dry_like(like);
    x.widens = true;
    dry_call(&x, m, unit, samples, rows, param_type, IZ_CALL_BACKWARD, NULL);
    most = max64(most, x.work.peak);
    c->save_bytes[IZ_RECOMPUTE_WIDENED] = x.save.peak;
    if (!x.numerics.chunk_rows) /* scratch has room for all that is kept */
        most -= c->save_bytes[IZ_RECOMPUTE_NONE] - x.save.peak;
    c->work_bytes = max64(c->work_bytes, most);
    c->recompute[IZ_RECOMPUTE_WIDENED] = cost_of(&x);
    iz_cost_add(&c->recompute[IZ_RECOMPUTE_WIDENED], &c->backward, -1);
    x = dry_like(like);
    if (like->numerics.chunk_rows) {
        cost_of_chunks(c, m, unit, samples, param_type, &x);
        return;
    }
    /* It also writes its output into scratch. */
    iz_exec_work(&x, x.act, samples, m->unit[unit].out_elems);
    dry_call(&x, m, unit, samples, rows, param_type, IZ_CALL_AGAIN, NULL);
    c->work_bytes = max64(c->work_bytes, x.work.peak);
    c->recompute[IZ_RECOMPUTE_FULL] = cost_of(&x);
}

struct iz_unit_cost iz_unit_cost(const struct iz_model *m, int unit,
                                 int samples, int64_t rows,
                                 enum iz_dtype param_type,
                                 const struct iz_exec *like)
{
    const struct iz_unit *u = &m->unit[unit];
    struct iz_unit_cost c = {0};
    struct iz_exec x = dry_like(like);
    dry_call(&x, m, unit, samples, rows, param_type, IZ_CALL_BACKWARD, NULL);
    c.save_bytes[IZ_RECOMPUTE_NONE] = x.save.peak;
    c.work_bytes = x.work.peak;
    c.backward = cost_of(&x);
    c.attends = x.attends;
    c.why_own = x.why_own;
    if (u->forward)
        forward_cost(&c, m, unit, samples, rows, param_type, like);
    for (int call = IZ_CALL_EVALUATE; call <= IZ_CALL_GENERATE; call++) {
        if (call == IZ_CALL_EVALUATE ? !u->evaluate : !u->generate)
            continue;
        x = dry_like(like);
        dry_call(&x, m, unit, call == IZ_CALL_GENERATE ? 1 : samples, rows,
                 param_type, (enum iz_unit_call)call, NULL);
        c.work_bytes = max64(c.work_bytes, x.work.peak);
        c.save_bytes[IZ_RECOMPUTE_NONE] =
            max64(c.save_bytes[IZ_RECOMPUTE_NONE], x.save.peak);
    }
    return c;
}

void iz_unit_ask(const struct iz_model *m, int unit, int samples,
                 enum iz_dtype param_type, const struct iz_exec *like,
                 struct iz_refusal *why)
{
    const struct iz_unit *u = &m->unit[unit];
    struct iz_exec x = dry_like(like);
    x.stream = like->stream;
    x.cuda = like->cuda;
    x.ask = why;
    if (u->forward)
        dry_call(&x, m, unit, samples, 0, param_type, IZ_CALL_FORWARD, NULL);
    x.work = (struct iz_arena){.size = like->work.size};
    dry_call(&x, m, unit, samples, 0, param_type, IZ_CALL_BACKWARD, NULL);
}

void iz_unit_probe(const struct iz_model *m, int unit, struct iz_adapter *probe)
{
    struct iz_exec x = iz_exec_dry(IZ_CPU, IZ_F32);
    dry_call(&x, m, unit, 1, 0, IZ_F32, IZ_CALL_BACKWARD, probe);
}
