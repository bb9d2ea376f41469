/* SPDX-License-Identifier: Apache-2.0 */
/* The tasks of a pass over the units: samples come in, layers are called,
 * losses are added.  Training, evaluation and generation are loops over these.
 */
#include "runtime/step/units.h"

#include "codelets/ops/classifier.h"
#include "runtime/step/boundary.h"
#include "runtime/step/fetch.h"
#include "runtime/step/submit.h"
#include "runtime/step/touched.h"

/* ---- batches ---- */

struct batch_arg {
    const struct iz_data *data;
    enum iz_split split;
    int64_t first, samples; /* samples from the first on */
    int64_t input_bytes;    /* of all */
    int64_t begins_at;      /* where documents begin, in the batch; 0: not */
    double share;  /* by which the weight is multiplied; 0: all targets count */
    bool sum;      /* the mean loss is to become a sum */
    int64_t *told; /* where the number of a step's targets is for `clip` */
    int at_told;   /* buffer of what routers will tell; -1: none */
};

/* Whether a batch counts by the number of its targets; of pairs, its chosen
 * texts do.  A simulation has no data. */
static bool is_masked(const struct iz_engine *e, enum iz_split split)
{
    return e->data && iz_data_masked(e->data, split);
}

/* buf: loss tokens. */
static void run_count(struct iz_exec *x, void **buf, const void *arg)
{
    const struct batch_arg *a = arg;
    int64_t n = iz_data_loss_tokens(a->data, a->split, a->first, a->samples);
    *(double *)buf[0] = (double)n;
    if (a->told)
        *a->told = n;
}

void iz_units_count(struct iz_engine *e, const struct iz_samples *all)
{
    struct batch_arg a = {.data = e->data,
                          .split = all->split,
                          .first = all->first,
                          .samples = all->n};
    struct iz_task t = iz_task_of(e, IZ_BATCH, IZ_ON_HOST, run_count, -1);
    if (!all->eval)
        a.told = &e->events.targets[e->step % IZ_EVENTS];
    if (!all->eval && !is_masked(e, all->split)) {
        *a.told = e->data ? iz_data_targets(e->data, all->n) : all->n;
        return;
    }
    iz_task_add(&t, e->scalar.loss_tokens_handle, STARPU_W);
    iz_step_submit(e, &t, &a, sizeof(a));
}

/* The loss of a step is the mean over its targets, wherever they are: a batch's
 * mean counts by the number of its own.  1 where no target is excluded, to the
 * bit. */
static double weight(const struct batch_arg *a, const double *loss_tokens)
{
    if (!a->share)
        return 1;
    double own =
        (double)iz_data_loss_tokens(a->data, a->split, a->first, a->samples);
    return a->sum ? own : *loss_tokens ? own * a->share / *loss_tokens : 0;
}

/* buf: samples, their weight, loss tokens, what routers tell. */
static void run_batch(struct iz_exec *x, void **buf, const void *arg)
{
    const struct batch_arg *a = arg;
    char *input = buf[0];
    *(double *)buf[1] = weight(a, a->share > 0 ? buf[2] : NULL);
    if (a->at_told >= 0)
        *(struct iz_aux *)buf[a->at_told] = IZ_AUX_NOTHING;
    iz_data_batch(a->data, a->split, a->first, (int)a->samples, input,
                  input + a->input_bytes);
    if (a->begins_at)
        iz_data_documents(a->data, a->split, a->first, (int)a->samples, buf[0],
                          (int32_t *)(input + a->begins_at));
}

void iz_units_batch(struct iz_engine *e, struct iz_track *track,
                    const struct iz_samples *all, int64_t first, int samples)
{
    bool masked = all->eval || is_masked(e, all->split);
    struct batch_arg a = {.data = e->data,
                          .split = all->split,
                          .first = first,
                          .samples = samples,
                          .input_bytes = samples * e->model->input_bytes,
                          .share = masked ? (double)all->n / samples : 0,
                          .sum = all->eval && !e->model->preference};
    if (e->model->documents_apart)
        a.begins_at = a.input_bytes + samples * e->model->target_bytes;
    struct iz_task t = iz_task_of(e, IZ_BATCH, IZ_ON_HOST, run_batch, 0);
    iz_task_add(&t, track->batch_handle, STARPU_W);
    iz_task_add(&t, track->weight_handle, STARPU_W);
    if (masked)
        iz_task_add(&t, e->scalar.loss_tokens_handle, STARPU_R);
    a.at_told = iz_task_add(&t, track->aux_handle, STARPU_W);
    iz_step_submit(e, &t, &a, sizeof(a));
    track->first = first;
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

static void set_cost(const struct iz_engine *e, const struct iz_call *c,
                     struct iz_task *t)
{
    const struct iz_unit_cost *k = &e->plan.cost[c->unit];
    struct iz_cost all = k->forward;
    if (c->call == IZ_CALL_BACKWARD) {
        all = k->backward;
        iz_cost_add(&all, &k->recompute[e->plan.unit[c->unit].recompute], 1);
    } else if (c->call != IZ_CALL_FORWARD) {
        /* The last unit's loss alone is its one product of three. */
        all = (struct iz_cost){.flops = k->backward.flops / 3};
    }
    t->flops = all.flops;
    t->bytes = all.bytes;
    t->seconds = all.seconds;
}

/* What it copies between host and GPU while it computes; a loss alone gives no
 * gradient. */
static void count_copies(struct iz_engine *e, const struct iz_call *c)
{
    const struct iz_unit_cost *k = &e->plan.cost[c->unit];
    bool forward = c->call == IZ_CALL_FORWARD;
    const double *n = (forward ? &k->forward : &k->backward)->bus_bytes;
    if (c->call == IZ_CALL_GENERATE)
        return; /* of one row */
    e->counts.up_bytes += (int64_t)n[0];
    if (c->call == IZ_CALL_BACKWARD)
        e->counts.up_bytes +=
            (int64_t)k->recompute[e->plan.unit[c->unit].recompute].bus_bytes[0];
    if (forward || c->call == IZ_CALL_BACKWARD)
        e->counts.down_bytes += (int64_t)n[1];
}

/* Whether a unit's forward differs for the reference of pairs. */
static bool has_reference(const struct iz_engine *e, int unit)
{
    return e->model->preference && unit >= e->plan.first_trained;
}

/* The output of the unit before, for the reference. */
static starpu_data_handle_t reference_read(struct iz_engine *e, int unit,
                                           struct iz_track *track)
{
    int before = unit - 1;
    if (has_reference(e, before))
        return track->reference_handle[before % 2];
    return iz_boundary_read(e, before, (int)(track - e->track));
}

/* Which buffers a call reads and writes; backward may work in what forward
 * kept. */
static void submit_call(struct iz_engine *e, const struct iz_call *c,
                        struct iz_track *track)
{
    int u = c->unit, index = (int)(track - e->track);
    int tied = e->model->unit[u].tied_unit;
    bool first = u == 0, last = u + 1 == e->model->n_units;
    bool forward = c->call == IZ_CALL_FORWARD;
    bool backward = c->call == IZ_CALL_BACKWARD;
    bool generate = c->call == IZ_CALL_GENERATE;
    bool training = (c->kind == IZ_FORWARD || backward) && !c->reference;
    bool pairs = last && !generate && e->model->preference;
    bool batch = first || last || e->model->unit[u].reads_input ||
                 e->model->documents_apart;
    bool scaled = last || e->model->unit[u].own_loss;
    bool rows = e->plan.zero.fetch || backward;
    /* What is not kept takes its place in scratch. */
    enum iz_recompute level =
        training ? e->plan.unit[u].recompute : IZ_RECOMPUTE_NONE;
    enum iz_recompute saves =
        level == IZ_RECOMPUTE_WIDENED ? level : IZ_RECOMPUTE_NONE;
    struct iz_unit_arg a = {.layout = &e->unit[u].layout,
                            .call = c->call,
                            .samples = c->samples,
                            .type = e->plan.param_type,
                            .recompute = level,
                            .save_bytes = e->plan.cost[u].save_bytes[saves],
                            .row = c->row,
                            .reference = c->reference,
                            .sample = training ? track->first : -1,
                            .packed = e->plan.zero.fetch};
    struct iz_task t = iz_task_of(e, c->kind, IZ_ON_COMPUTE, iz_unit_run, u);
    set_cost(e, c, &t);
    count_copies(e, c);
    a.at_param = iz_task_add(&t, iz_fetch_param(e, u), STARPU_R);
    a.at_tied =
        iz_task_add(&t, tied < 0 ? NULL : iz_fetch_param(e, tied), STARPU_R);
    a.at_grad = iz_task_add(&t, c->grad, STARPU_W);
    a.at_tied_grad = iz_task_add(&t, c->tied_grad, STARPU_W);
    a.at_rows = iz_task_add(&t, rows ? iz_touched_list(e, u) : NULL, STARPU_R);
    a.at_batch = iz_task_add(&t, batch ? track->batch_handle : NULL, STARPU_R);
    a.at_x = iz_task_add(&t,
                         first          ? NULL
                         : c->reference ? reference_read(e, u, track)
                                        : iz_boundary_read(e, u - 1, index),
                         STARPU_R);
    a.at_y = iz_task_add(&t,
                         !forward       ? NULL
                         : c->reference ? track->reference_handle[u % 2]
                                        : iz_boundary_written(e, u, index),
                         STARPU_W);
    a.at_reference = a.at_x;
    if (pairs && has_reference(e, u - 1))
        a.at_reference = iz_task_add(&t, reference_read(e, u, track), STARPU_R);
    a.at_d = iz_task_add(&t, backward ? track->d_handle : NULL,
                         last ? STARPU_W : STARPU_RW);
    a.at_save = iz_task_add(&t, training ? track->saved_handle[u] : NULL,
                            forward ? STARPU_W : STARPU_RW);
    a.at_logits = iz_task_add(
        &t, last && generate ? e->scalar.logits_handle : NULL, STARPU_W);
    a.at_loss = iz_task_add(&t, last && !generate ? track->loss_handle : NULL,
                            STARPU_W);
    a.at_scale = iz_task_add(
        &t, scaled && backward ? e->scalar.scale_handle : NULL, STARPU_R);
    a.at_weight = iz_task_add(
        &t, pairs || (last && backward) ? track->weight_handle : NULL,
        STARPU_R);
    bool tells = c->kind == IZ_FORWARD && e->model->unit[u].own_loss;
    a.at_told = iz_task_add(
        &t, (tells && !c->reference) || pairs ? track->aux_handle : NULL,
        STARPU_RW);
    iz_step_submit(e, &t, &a, sizeof(a));
    if (backward)
        iz_boundary_ahead(e, u, index);
}

/* The reference's forward keeps nothing.  It comes before the other one, while
 * the boundary that both may read is there. */
void iz_units_call(struct iz_engine *e, const struct iz_call *c,
                   struct iz_track *track)
{
    struct iz_call r = *c;
    r.reference = has_reference(e, c->unit) && c->kind != IZ_SAMPLE;
    if (r.reference && c->call == IZ_CALL_FORWARD)
        submit_call(e, &r, track);
    submit_call(e, c, track);
}

struct loss_arg {
    bool aux;    /* something is */
    bool pairs;  /* their loss has been weighted */
    int counted; /* in an evaluation, which adds sums; 0: of a step */
};

/* buf: loss, sum, weight; what is told, and its sum. */
static void run_add_loss(struct iz_exec *x, void **buf, const void *arg)
{
    const struct loss_arg *a = arg;
    double loss = *(double *)buf[0] * (a->pairs ? 1 : *(double *)buf[2]);
    if (a->counted)
        loss = iz_classifier_even(a->pairs ? loss * (a->counted / 2) : loss);
    *(double *)buf[1] += loss;
    if (a->aux)
        iz_aux_add(buf[4], buf[3]);
}

void iz_units_add_loss(struct iz_engine *e, struct iz_track *track)
{
    struct iz_task t = iz_task_of(e, IZ_NORM, IZ_ON_HOST, run_add_loss, -1);
    iz_task_add(&t, track->loss_handle, STARPU_R);
    iz_task_add(&t, e->scalar.loss_handle, STARPU_RW);
    iz_task_add(&t, track->weight_handle, STARPU_R);
    iz_task_add(&t, track->aux_handle, STARPU_R);
    iz_task_add(&t, e->scalar.aux_handle, STARPU_RW);
    struct loss_arg a = {track->aux_handle, e->model->preference,
                         track->counted};
    iz_step_submit(e, &t, &a, sizeof(a));
}

bool iz_units_go_on(struct iz_engine *e)
{
    iz_graph_wait(e->graph);
    return iz_coll_all_ok(e->coll, !e->events.stop || !*e->events.stop);
}

void iz_units_pass(struct iz_engine *e, struct iz_call c, int tracks)
{
    const struct iz_uses *uses = &e->uses.forward;
    enum iz_unit_call last = c.call;
    iz_boundary_begin(e, tracks, false);
    iz_fetch_ahead(e, uses, 0);
    for (c.unit = 0; c.unit < e->model->n_units; c.unit++) {
        iz_graph_position(e->graph, c.unit);
        c.call = c.unit + 1 < e->model->n_units ? IZ_CALL_FORWARD : last;
        for (int b = 0; b < tracks; b++) {
            struct iz_track *t = &e->track[b];
            if (last == IZ_CALL_EVALUATE)
                c.samples = t->samples;
            iz_units_call(e, &c, t);
            if (c.call == IZ_CALL_EVALUATE && t->counted)
                iz_units_add_loss(e, t);
        }
        iz_fetch_ahead(e, uses, uses->item[c.unit + 1]);
    }
}
