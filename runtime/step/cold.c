/* SPDX-License-Identifier: Apache-2.0 */
/* Experts that few rows want are cheaper where their parameters live: the host
 * forms their products, and rows go down and up in the place of parameters and
 * gradients.  Which units these are in a step follows from the rows of the step
 * before, never from times, so a run is reproducible.  See zero.h and train.h.
 */
#include <string.h>

#include "codelets/base/die.h"
#include "runtime/base/text.h"
#include "runtime/engine/alloc.h"
#include "runtime/step/train.h"
#include "runtime/step/zero.h"

/* ---- rows ---- */

/* Behind the last unit of the block's experts that begin with this one. */
static int end_of_experts(const struct iz_engine *e, int unit)
{
    while (e->model->unit[unit].rows)
        unit++;
    return unit;
}

static int first_of_experts(const struct iz_engine *e, int unit)
{
    while (e->model->unit[unit - 1].rows)
        unit--;
    return unit;
}

static bool begins_experts(const struct iz_engine *e, int unit)
{
    return e->model->unit[unit].rows && !e->model->unit[unit - 1].rows;
}

struct count_arg {
    const struct iz_model *model;
    int unit, end, samples;
    enum iz_dtype type; /* of the boundary */
};

/* buf: boundary before the first unit, rows of all units. */
static void run_count(struct iz_exec *x, void **buf, const void *arg)
{
    const struct count_arg *a = arg;
    int64_t *rows = buf[1];
    for (int u = a->unit; u < a->end; u++)
        rows[u] += iz_unit_rows(a->model, u, a->samples, a->type, buf[0]);
}

void iz_cold_count(struct iz_engine *e, int unit, int track)
{
    struct count_arg a = {.model = e->model,
                          .unit = unit,
                          .samples = e->plan.samples,
                          .type = e->plan.target.act};
    if (!e->cold.now || !begins_experts(e, unit))
        return;
    a.end = end_of_experts(e, unit);
    struct iz_task t = iz_task_of(e, IZ_NORM, IZ_ON_HOST, run_count, unit);
    iz_task_add(&t, iz_boundary_home(e, unit - 1, track), STARPU_R);
    iz_task_add(&t, e->cold.rows_handle, STARPU_RW);
    iz_step_submit(e, &t, &a, sizeof(a));
}

/* Of all experts of the unit's block in a step. */
static double block_rows(const struct iz_engine *e, int unit)
{
    const struct iz_plan *p = &e->plan;
    return (double)e->model->unit[unit].sample_rows * p->samples * p->slices *
           p->micro_batches;
}

/* Nobody routes in a simulation: of n experts of a block, the i-th has a part
 * of 1/i, as in Zipf's law; 1/n of those is less than an even share by about
 * ln n. */
static void assume_rows(struct iz_engine *e)
{
    for (int u = 1; u < e->plan.n_units; u++) {
        if (!begins_experts(e, u))
            continue;
        int end = end_of_experts(e, u), i = 0, all = 0;
        double sum = 0;
        for (int v = u; v < end; v++)
            for (int k = 0; k < e->model->unit[v].experts; k++)
                sum += 1.0 / ++all;
        for (int v = u; v < end; v++)
            for (int k = 0; k < e->model->unit[v].experts; k++)
                e->cold.rows[v] +=
                    (int64_t)(block_rows(e, v) / sum / (double)++i);
    }
}

/* ---- the choice ---- */

/* How often a pass of a step fetches a unit. */
static int fetches(const struct iz_plan *p)
{
    return (p->micro_batches + p->wave - 1) / p->wave;
}

static int64_t most_rows(const struct iz_engine *e, int unit)
{
    return (int64_t)e->plan.cold.rows * e->model->unit[unit].experts *
           fetches(&e->plan);
}

static void take_rows(struct iz_engine *e)
{
    struct iz_cold *c = &e->cold;
    size_t bytes = (size_t)e->plan.n_units * sizeof(*c->rows);
    int64_t begin = iz_clock_ns();
    if (starpu_data_acquire(c->rows_handle, STARPU_RW))
        iz_die("the rows of experts cannot be read");
    e->events.waited_ns += iz_clock_ns() - begin;
    if (e->simulated)
        assume_rows(e);
    memcpy(c->before, c->rows, bytes);
    memset(c->rows, 0, bytes);
    starpu_data_release(c->rows_handle);
}

void iz_cold_choose(struct iz_engine *e)
{
    struct iz_cold *c = &e->cold;
    bool *cold = iz_step_cold(e, e->step);
    if (!cold || c->chosen > e->step)
        return;
    bool first = c->chosen == 0; /* nothing is known */
    c->chosen = e->step + 1;
    memset(cold, 0, (size_t)e->plan.n_units * sizeof(*cold));
    if (first)
        return;
    take_rows(e);
    for (int u = 0; u < e->plan.n_units; u++)
        cold[u] = e->model->unit[u].rows && c->before[u] <= most_rows(e, u);
}

/* ---- costs ---- */

/* The unit's rows of the step before, in even shares. */
static double share_of(const struct iz_engine *e, int unit)
{
    int first = first_of_experts(e, unit), experts = 0;
    for (int u = first; u < end_of_experts(e, first); u++)
        experts += e->model->unit[u].experts;
    double even = block_rows(e, unit) * e->model->unit[unit].experts / experts;
    return (double)e->cold.before[unit] / even;
}

void iz_cold_cost(const struct iz_engine *e, const struct iz_call *c,
                  struct iz_task *t)
{
    double passed =
        2 * (double)iz_plan_boundary_bytes(&e->plan, e->model, c->unit);
    if (iz_step_is_cold(e, c->unit)) { /* it only hands over */
        t->flops = t->seconds = 0;
        t->bytes = passed;
    } else if (e->cold.now && e->cold.before[c->unit]) {
        double share = share_of(e, c->unit);
        t->flops *= share;
        t->seconds *= share;
        t->bytes *= share;
    }
}

/* Weights are read, for backward twice, and their gradient is written. */
static void set_cost(const struct iz_engine *e, int unit, bool backward,
                     struct iz_task *t)
{
    const struct iz_unit_cost *k = &e->plan.cost[unit];
    double params =
        (double)iz_step_param_bytes(e, iz_plan_gathered(&e->plan.unit[unit]));
    t->flops =
        share_of(e, unit) *
        (backward ? k->backward_flops + k->repeat_flops[IZ_REPEAT_WIDENED]
                  : k->forward_flops);
    t->bytes = params * (backward ? 3 : 1);
}

/* ---- the host's part of a unit ---- */

/* The gradient of a block's output, which comes first in that of all that is
 * handed over, stays as it is until the block's router: one copy is enough. */
static starpu_data_handle_t dy_at_home(struct iz_engine *e, int unit,
                                       struct iz_track *track)
{
    int first = first_of_experts(e, unit);
    if (track->dy_home != first)
        iz_boundary_copy(e, false, end_of_experts(e, unit) - 1, track->d_handle,
                         track->dy_home_handle);
    track->dy_home = first;
    return track->dy_home_handle;
}

/* It reads what the block's router handed over, so the host's parts of all
 * units of a block may run at the same time; the units' rests follow one
 * another on the GPU. */
starpu_data_handle_t iz_cold_call(struct iz_engine *e, const struct iz_call *c,
                                  struct iz_track *track)
{
    int u = c->unit, router = first_of_experts(e, u) - 1;
    bool backward = c->call == IZ_CALL_BACKWARD;
    starpu_data_handle_t far =
        iz_engine_next_staging(e, IZ_STAGING_FAR)->handle;
    starpu_data_handle_t x =
        iz_boundary_home(e, router, (int)(track - e->track));
    struct iz_unit_arg a = {.layout = &e->unit[u].layout,
                            .call = c->call,
                            .samples = c->samples,
                            .type = e->plan.param_type,
                            .far = IZ_FAR_PRODUCTS,
                            .sample = -1};
    struct iz_task t = iz_task_of(e, c->kind, IZ_ON_HOST, iz_unit_run, u);
    set_cost(e, u, backward, &t);
    a.at_far = iz_task_add(&t, far, STARPU_W);
    a.at_x = iz_task_add(&t, x, STARPU_R);
    a.at_param = iz_task_add(&t, e->unit[u].param_handle, STARPU_R);
    a.at_grad = iz_task_add(&t, c->grad, STARPU_W);
    a.at_d =
        iz_task_add(&t, backward ? dy_at_home(e, u, track) : NULL, STARPU_R);
    a.at_tied = a.at_tied_grad = a.at_rows = a.at_batch = a.at_y = a.at_save =
        a.at_loss = a.at_scale = a.at_weight = a.at_logits = a.at_told =
            a.at_reference = -1;
    iz_step_submit(e, &t, &a, sizeof(a));
    return far;
}

/* ---- in words ---- */

char *iz_cold_text(const struct iz_engine *e, int64_t step)
{
    const struct iz_unit *unit = e->model->unit;
    struct iz_text text;
    if (!e->cold.log)
        return NULL;
    const bool *cold = iz_step_cold(e, step);
    FILE *f = iz_text_open(&text);
    const char *space = "";
    for (int u = 0, v; f && u < e->plan.n_units; u = v + 1) {
        for (v = u; v + 1 < e->plan.n_units && cold[u] && cold[v + 1]; v++)
            ;
        if (!cold[u])
            continue;
        fprintf(f, "%s%s", space, unit[u].name);
        if (v > u)
            fprintf(f, "..%s", unit[v].name);
        space = " ";
    }
    return iz_text_close(&text);
}

int iz_cold_units(const struct iz_engine *e, int64_t step, int *all)
{
    const bool *cold = iz_step_cold(e, step);
    int n = 0;
    *all = 0;
    for (int u = 0; u < e->plan.n_units; u++) {
        *all += e->model->unit[u].rows != NULL;
        n += cold && cold[u];
    }
    return n;
}

/* The unit that has the first n letters as its name; -1: none. */
static int named(const struct iz_model *m, const char *name, size_t n)
{
    for (int u = 0; u < m->n_units; u++)
        if (strlen(m->unit[u].name) == n &&
            memcmp(m->unit[u].name, name, n) == 0)
            return u;
    return -1;
}

void iz_cold_take(struct iz_engine *e, const char *text)
{
    bool *cold = iz_step_cold(e, e->step);
    if (!cold)
        return;
    memset(cold, 0, (size_t)e->plan.n_units * sizeof(*cold));
    for (size_t n; *text; text += n + (text[n] == ' ')) {
        n = strcspn(text, " ");
        const char *to = strstr(text, "..");
        bool range = to && to < text + n;
        int first = named(e->model, text, range ? (size_t)(to - text) : n);
        int last = range ? named(e->model, to + 2, (size_t)(text + n - to) - 2)
                         : first;
        for (int u = first; u >= 0 && u <= last; u++)
            cold[u] = e->model->unit[u].rows;
    }
    e->cold.chosen = e->step + 1;
}
