/* SPDX-License-Identifier: Apache-2.0 */
/* The tasks of a pass over the units: samples come in, layers are called,
 * losses are added.  Training, evaluation and generation are loops over these.
 */
#include "runtime/step/units.h"

#include "runtime/step/boundary.h"
#include "runtime/step/fetch.h"
#include "runtime/step/rows_list.h"

/* ---- batches ---- */

struct batch_arg {
    const struct iz_data *data;
    enum iz_split split;
    int64_t first; /* index of the first sample */
    int samples;
    int64_t input_bytes; /* of all */
    double tasks;        /* whose losses are added; 0: all targets count */
};

/* A simulation has no data. */
static bool is_masked(const struct iz_engine *e, enum iz_split split)
{
    return e->data && iz_data_masked(e->data, split);
}

struct count_arg {
    const struct iz_data *data;
    enum iz_split split;
    int64_t first, samples;
};

/* buf: targets that are learnt. */
static void run_count(struct iz_exec *x, void **buf, const void *arg)
{
    const struct count_arg *a = arg;
    *(double *)buf[0] =
        (double)iz_data_learnt(a->data, a->split, a->first, a->samples);
}

void iz_units_count(struct iz_engine *e, enum iz_split split, int64_t first,
                    int64_t samples)
{
    struct count_arg a = {e->data, split, first, samples};
    if (!is_masked(e, split))
        return;
    iz_submit(e->graph,
              &(struct iz_task){.kind = IZ_BATCH,
                                .where = IZ_ON_HOST,
                                .run = run_count,
                                .arg = &a,
                                .arg_bytes = sizeof(a),
                                .data = {{e->scalar.learnt_handle, STARPU_W}},
                                .unit = -1,
                                .step = (int)e->step});
}

/* The loss of a step is the mean over its targets, wherever they are: a batch's
 * mean counts by the number of its own.  1 where no target is excluded, to the
 * bit. */
static double weight(const struct batch_arg *a, const double *learnt)
{
    if (!a->tasks)
        return 1;
    if (*learnt == 0)
        return 0;
    return (double)iz_data_learnt(a->data, a->split, a->first, a->samples) *
           a->tasks / *learnt;
}

/* buf: samples, their weight, targets that are learnt. */
static void run_batch(struct iz_exec *x, void **buf, const void *arg)
{
    const struct batch_arg *a = arg;
    char *input = buf[0];
    *(double *)buf[1] = weight(a, a->tasks > 0 ? buf[2] : NULL);
    iz_data_batch(a->data, a->split, a->first, a->samples, input,
                  input + a->input_bytes);
}

void iz_units_batch(struct iz_engine *e, struct iz_track *l,
                    enum iz_split split, int64_t first, int64_t tasks)
{
    bool masked = is_masked(e, split);
    struct batch_arg a = {.data = e->data,
                          .split = split,
                          .first = first,
                          .samples = e->plan.samples,
                          .input_bytes =
                              e->plan.samples * e->model->input_bytes,
                          .tasks = masked ? (double)tasks : 0};
    iz_submit(e->graph,
              &(struct iz_task){
                  .kind = IZ_BATCH,
                  .where = IZ_ON_HOST,
                  .run = run_batch,
                  .arg = &a,
                  .arg_bytes = sizeof(a),
                  .data = {{l->batch_handle, STARPU_W},
                           {l->weight_handle, STARPU_W},
                           {masked ? e->scalar.learnt_handle : NULL, STARPU_R}},
                  .unit = 0,
                  .step = (int)e->step});
}

/* First sample of a task: global order is step, micro-batch, rank, slice, so
 * that it does not depend on the number of ranks for one global batch. */
int64_t iz_units_first_sample(const struct iz_engine *e, int micro, int slice)
{
    int64_t per_micro = (int64_t)e->plan.samples * e->plan.slices;
    int64_t row = (e->step * e->plan.micro_batches + micro) * e->plan.ranks +
                  e->plan.rank;
    return row * per_micro + (int64_t)slice * e->plan.samples;
}

/* ---- units ---- */

static double call_flops(const struct iz_engine *e, int u,
                         enum iz_unit_call call)
{
    const struct iz_unit_cost *c = &e->plan.cost[u];
    if (call == IZ_CALL_BACKWARD)
        return c->backward_flops +
               (e->plan.act.recompute ? c->forward_flops : 0);
    if (call == IZ_CALL_FORWARD)
        return c->forward_flops;
    /* The last unit's loss alone is its one product of three. */
    return c->backward_flops / 3;
}

static double call_bytes(const struct iz_engine *e, int u,
                         enum iz_unit_call call)
{
    const struct iz_unit_cost *c = &e->plan.cost[u];
    if (call != IZ_CALL_BACKWARD)
        return c->forward_bytes;
    return c->backward_bytes + (e->plan.act.recompute ? c->forward_bytes : 0);
}

static double call_seconds(const struct iz_engine *e, int u,
                           enum iz_unit_call call)
{
    const struct iz_unit_cost *c = &e->plan.cost[u];
    if (call == IZ_CALL_BACKWARD)
        return c->backward_s + (e->plan.act.recompute ? c->forward_s : 0);
    return call == IZ_CALL_FORWARD ? c->forward_s : 0;
}

/* Appends an access and returns its position; -1 for no handle. */
static signed char add(struct iz_task *t, starpu_data_handle_t h,
                       enum starpu_data_access_mode mode)
{
    int n = 0;
    if (!h)
        return -1;
    while (t->data[n].handle)
        n++;
    t->data[n] = (struct iz_access){h, mode};
    return (signed char)n;
}

static void attach_params(struct iz_engine *e, const struct iz_call *c,
                          struct iz_task *t, struct iz_unit_arg *a)
{
    int tied = e->model->unit[c->unit].tied_unit;
    bool needed = e->plan.zero.fetch || c->call == IZ_CALL_BACKWARD;
    a->at_param = add(t, iz_fetch_param(e, c->unit), STARPU_R);
    a->at_tied = tied < 0 ? -1 : add(t, iz_fetch_param(e, tied), STARPU_R);
    a->at_grad = add(t, c->grad, STARPU_W);
    a->at_tied_grad = add(t, c->tied_grad, STARPU_W);
    a->at_rows = needed ? add(t, iz_touched_list(e, c->unit), STARPU_R)
                        : (signed char)-1;
    a->packed = e->plan.zero.fetch;
}

/* Which activations a call reads and writes. */
static void attach_activations(struct iz_engine *e, const struct iz_call *c,
                               struct iz_track *l, struct iz_task *t,
                               struct iz_unit_arg *a)
{
    int u = c->unit, track = (int)(l - e->track);
    bool first = u == 0, last = u + 1 == e->model->n_units;
    bool forward = c->call == IZ_CALL_FORWARD;
    bool backward = c->call == IZ_CALL_BACKWARD;
    bool training = c->kind == IZ_FORWARD || backward;
    bool batch = first || last || e->model->unit[u].reads_input;
    a->at_batch = batch ? add(t, l->batch_handle, STARPU_R) : (signed char)-1;
    a->at_x = first ? -1 : add(t, iz_boundary_read(e, u - 1, track), STARPU_R);
    a->at_y = forward ? add(t, iz_boundary_written(e, u, track), STARPU_W) : -1;
    a->at_d = !backward ? -1
                        : add(t, l->d_handle,
                              last    ? STARPU_W
                              : first ? STARPU_R
                                      : STARPU_RW);
    /* Backward may work in what forward kept. */
    a->at_save =
        !training ? -1
                  : add(t, l->saved_handle[u], forward ? STARPU_W : STARPU_RW);
    a->at_loss = -1;
    a->at_scale = -1;
    a->at_weight = -1;
    a->at_logits = -1;
    if (!last)
        return;
    if (c->call == IZ_CALL_GENERATE)
        a->at_logits = add(t, e->scalar.logits_handle, STARPU_W);
    else
        a->at_loss = add(t, l->loss_handle, STARPU_W);
    if (!backward)
        return;
    a->at_scale = add(t, e->scalar.scale_handle, STARPU_R);
    a->at_weight = add(t, l->weight_handle, STARPU_R);
}

void iz_units_call(struct iz_engine *e, const struct iz_call *c,
                   struct iz_track *l)
{
    const struct iz_unit_cost *cost = &e->plan.cost[c->unit];
    struct iz_unit_arg a = {.layout = &e->group[c->unit].layout,
                            .call = c->call,
                            .samples = c->samples,
                            .type = e->plan.param_type,
                            .save_bytes = cost->save_bytes,
                            .row = c->row};
    struct iz_task t = {.kind = c->kind,
                        .run = iz_unit_run,
                        .arg = &a,
                        .arg_bytes = sizeof(a),
                        .flops = call_flops(e, c->unit, c->call),
                        .bytes = call_bytes(e, c->unit, c->call),
                        .seconds = call_seconds(e, c->unit, c->call),
                        .unit = c->unit,
                        .step = (int)e->step};
    attach_params(e, c, &t, &a);
    attach_activations(e, c, l, &t, &a);
    iz_submit(e->graph, &t);
    if (c->call == IZ_CALL_BACKWARD)
        iz_boundary_ahead(e, c->unit, (int)(l - e->track));
}

/* buf: loss, sum, weight. */
static void run_add_loss(struct iz_exec *x, void **buf, const void *arg)
{
    *(double *)buf[1] += *(double *)buf[0] * *(double *)buf[2];
}

void iz_units_add_loss(struct iz_engine *e, struct iz_track *l)
{
    iz_submit(e->graph,
              &(struct iz_task){.kind = IZ_NORM,
                                .where = IZ_ON_HOST,
                                .run = run_add_loss,
                                .data = {{l->loss_handle, STARPU_R},
                                         {e->scalar.loss_handle, STARPU_RW},
                                         {l->weight_handle, STARPU_R}},
                                .unit = -1,
                                .step = (int)e->step});
}
