/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/ckpt/engine_arrays.h"

#include <stdio.h>
#include <stdlib.h>

#include "codelets/base/take.h"
#include "runtime/base/text.h"

/* Arrays of a unit at most: master, states, frozen parameters, quantised ones.
 */
enum { ARRAYS = 3 + IZ_STATES_MAX };

static const char *const part_suffix[IZ_PARTS] = {[IZ_PART_TRAINED] = "",
                                                  [IZ_PART_FROZEN] = ".frozen",
                                                  [IZ_PART_QUANT] = ".base"};

static const char *array_name(const struct iz_engine *e, int u, int a)
{
    if (a == IZ_QUANT_WORDS)
        return iz_quant_name(e->unit[u].plan->quant.format);
    if (a < IZ_STATE)
        return "master";
    return iz_optimizer(e->plan.optimizer.type)->state[a - IZ_STATE].name;
}

static void engine_arrays_put(void *arg, int64_t from, const float *in,
                              int64_t n)
{
    struct iz_arrays_range *a = arg;
    iz_access_put(a->e, a->unit, a->array, a->first + from, in, n);
}

/* A rank saves its shard; where it owns the whole it must also load the whole.
 * What is quantised a rank has only from the others (iz_fetch_publish). */
static void make_array(struct iz_arrays *s, struct iz_engine *e, int u, int a,
                       bool load)
{
    struct iz_owned p = iz_owned_of_array(e, u, (enum iz_array)a);
    struct iz_arrays_range *arg = &s->arg[s->k.n_arrays];
    if (load && e->plan.zero.state.whole && a != IZ_QUANT_WORDS) {
        p.begin = 0;
        p.end = p.n;
    }
    int64_t total = iz_engine_array(e, u, (enum iz_array)a, p.n);
    int64_t begin = iz_engine_array(e, u, (enum iz_array)a, p.begin);
    int64_t end = iz_engine_array(e, u, (enum iz_array)a, p.end);
    if (total == 0)
        return;
    *arg = (struct iz_arrays_range){e, u, (enum iz_array)a, begin};
    s->k.sink[s->k.n_arrays] = (struct iz_ckpt_sink){engine_arrays_put, arg};
    struct iz_rank_range *q = &s->k.array[s->k.n_arrays++];
    *q = (struct iz_rank_range){
        .total = total, .first = end > begin ? begin : 0, .count = end - begin};
    snprintf(q->name, sizeof(q->name), "%s%s/%s", e->model->unit[u].name,
             part_suffix[iz_array_part(a)], array_name(e, u, a));
}

struct iz_ckpt_name *iz_arrays_names(const struct iz_model *m, int *n)
{
    *n = 0;
    for (int u = 0; u < m->n_units; u++)
        *n += m->unit[u].n_params;
    struct iz_ckpt_name *names = iz_take(*n, sizeof(*names), "names");
    struct iz_ckpt_name *to = names;
    for (int u = 0; u < m->n_units; u++)
        for (int64_t i = 0, at[IZ_PARTS] = {0}; i < m->unit[u].n_params;
             i++, to++) {
            const struct iz_param *p = &m->unit[u].param[i];
            enum iz_unit_part part = iz_param_part(p);
            to->offset = at[part];
            to->rows = p->rows;
            to->cols = p->cols;
            at[part] += p->rows * p->cols;
            snprintf(to->name, sizeof(to->name), "%s", p->name);
            snprintf(to->array, sizeof(to->array), "%s%s", m->unit[u].name,
                     part_suffix[part]);
        }
    return names;
}

enum {
    STEP,
    UPDATES,
    SCALE,
    ITERATION,
    OVERFLOW,
    HYSTERESIS,
    SAMPLES,
    SCALARS
};
static const char *const scalar_names[SCALARS] = {
    "step",          "updates",         "loss_scale", "scale_iteration",
    "last_overflow", "hysteresis_left", "samples"};

void iz_arrays_scalars(const struct iz_engine *e, const struct iz_control *c,
                       int64_t step, struct iz_ckpt_scalar *s)
{
    double v[SCALARS] = {(double)step,
                         (double)c->updates,
                         c->scale.scale,
                         (double)c->scale.iteration,
                         (double)c->scale.last_overflow,
                         c->scale.hysteresis_left,
                         (double)(step * e->config->train_batch_size)};
    for (int i = 0; i < SCALARS; i++) {
        snprintf(s[i].name, sizeof(s[i].name), "%s", scalar_names[i]);
        s[i].value = v[i];
    }
}

void iz_arrays_close(struct iz_arrays *s)
{
    free(s->k.array);
    free(s->k.sink);
    free((void *)s->k.names);
    free(s->k.scalar);
    free(s->arg);
    *s = (struct iz_arrays){0};
}

void iz_arrays_open(struct iz_arrays *s, struct iz_engine *e,
                    const struct iz_ckpt_of *of, bool load)
{
    static const char what[] = "a checkpoint";
    int states = iz_optimizer(e->plan.optimizer.type)->states;
    int units = e->model->n_units, most = ARRAYS * units;
    *s = (struct iz_arrays){
        .k = {.dir = e->config->run.output,
              .keep_last = e->config->run.keep_last,
              .array = iz_take(most, sizeof(struct iz_rank_range), what),
              .sink = iz_take(most, sizeof(struct iz_ckpt_sink), what),
              .scalar = iz_take(SCALARS, sizeof(struct iz_ckpt_scalar), what),
              .n_scalars = SCALARS,
              .of = *of,
              .optimizer = iz_optimizer(e->plan.optimizer.type)->name,
              .rounding = e->plan.optimizer.moments == IZ_MOMENT_F32
                              ? IZ_CKPT_EXACT
                              : IZ_MOMENT_ROUNDING},
        .arg = iz_take(most, sizeof(*s->arg), what)};
    s->k.names = iz_arrays_names(e->model, &s->k.n_names);
    for (int u = 0; u < units; u++) {
        for (int a = IZ_MASTER; a < IZ_STATE + states; a++)
            make_array(s, e, u, a, load);
        make_array(s, e, u, IZ_FROZEN, load);
        make_array(s, e, u, IZ_QUANT_WORDS, load);
    }
    iz_arrays_scalars(e, &e->scalar.control, e->step, s->k.scalar);
}

static int take_scalars(struct iz_engine *e, const struct iz_ckpt_scalar *s)
{
    double samples = (double)e->config->train_batch_size * s[STEP].value;
    if (samples != s[SAMPLES].value)
        return iz_text_refuse(
            e->plan.rank == 0 ? stderr : NULL,
            "train_batch_size is %lld, but the checkpoint of step "
            "%.0f was trained on %.0f samples: the data position would "
            "not be the same",
            (long long)e->config->train_batch_size, s[STEP].value,
            s[SAMPLES].value);
    struct iz_control *c = &e->scalar.control;
    e->step = (int64_t)s[STEP].value;
    c->updates = (int64_t)s[UPDATES].value;
    e->counts.updates = c->updates;
    /* Only a scale that was dynamic has come to where a dynamic one goes on. */
    if (c->scale.hysteresis_left > 0 && s[HYSTERESIS].value > 0)
        c->scale =
            (struct iz_loss_scale){.scale = s[SCALE].value,
                                   .iteration = (int64_t)s[ITERATION].value,
                                   .last_overflow = (int64_t)s[OVERFLOW].value,
                                   .hysteresis_left = (int)s[HYSTERESIS].value};
    e->scalar.loss_scale = (float)c->scale.scale;
    return 0;
}

int iz_arrays_load(struct iz_engine *e, const struct iz_ckpt_of *of,
                   int64_t step)
{
    struct iz_arrays s;
    iz_arrays_open(&s, e, of, true);
    int r = iz_ckpt_load(&s.k, step, e->coll);
    if (!r)
        r = take_scalars(e, s.k.scalar);
    iz_arrays_close(&s);
    return iz_train_publish(e, r);
}
