/* SPDX-License-Identifier: Apache-2.0 */
/* One step as submissions.  Nothing here waits: order and memory bounds follow from
 * the data that the tasks declare. */
#include "runtime/train.h"

#include <errno.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/die.h"
#include "codelets/flat.h"

/* ---- batches ---- */

struct batch_arg {
    const struct iz_data *data;
    enum iz_split split;
    int64_t first; /* index of the first sample */
    int samples;
    int64_t input_bytes, target_bytes;
};

static void run_batch(struct iz_exec *x, void **buf, const void *arg)
{
    const struct batch_arg *a = arg;
    char *input = buf[0], *target = input + a->samples * a->input_bytes;
    (void)x;
    for (int i = 0; i < a->samples; i++)
        iz_data_sample(a->data, a->split, a->first + i,
                       (int32_t *)(input + i * a->input_bytes),
                       (int32_t *)(target + i * a->target_bytes));
}

static void submit_batch(struct iz_engine *e, struct iz_lane *l,
                         enum iz_split split, int64_t first)
{
    struct batch_arg a = {.data = e->data,
                          .split = split,
                          .first = first,
                          .samples = e->plan.samples,
                          .input_bytes = e->model->input_bytes,
                          .target_bytes = e->model->target_bytes};
    iz_submit(e->graph,
              &(struct iz_task){.kind = IZ_BATCH,
                                .run = run_batch,
                                .arg = &a,
                                .arg_bytes = sizeof(a),
                                .data = {{l->batch_handle, STARPU_W}},
                                .unit = 0,
                                .step = (int)e->step});
}

/* First sample of a task: global order is step, micro-batch, rank, slice, so that
 * it does not depend on the number of ranks for one global batch. */
static int64_t first_sample(const struct iz_engine *e, int micro, int slice)
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
               (e->plan.recompute ? c->forward_flops : 0);
    return call == IZ_CALL_FORWARD ? c->forward_flops : c->backward_flops / 3;
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

struct unit_call {
    enum iz_kind kind;
    enum iz_unit_call call;
    int unit, samples;
    starpu_data_handle_t grad, tied_grad;
    int64_t row;
};

static void attach_params(struct iz_engine *e, const struct unit_call *c,
                          struct iz_task *t, struct iz_unit_arg *a)
{
    int tied = e->model->unit[c->unit].tied_unit;
    a->at_param = add(t, iz_zero_param(e, c->unit), STARPU_R);
    a->at_tied =
        tied < 0 ? -1 : add(t, iz_zero_param(e, tied), STARPU_R);
    a->at_grad = add(t, c->grad, STARPU_W);
    a->at_tied_grad = add(t, c->tied_grad, STARPU_W);
}

/* Which activations a call reads and writes. */
static void attach_activations(struct iz_engine *e, const struct unit_call *c,
                               struct iz_lane *l, struct iz_task *t,
                               struct iz_unit_arg *a)
{
    int u = c->unit;
    bool first = u == 0, last = u + 1 == e->model->n_units;
    bool forward = c->call == IZ_CALL_FORWARD;
    bool backward = c->call == IZ_CALL_BACKWARD;
    bool training = c->kind == IZ_FORWARD || backward;
    a->at_batch =
        first || last ? add(t, l->batch_handle, STARPU_R) : (signed char)-1;
    a->at_x = first ? -1 : add(t, l->boundary_handle[u - 1], STARPU_R);
    a->at_y = forward ? add(t, l->boundary_handle[u], STARPU_W) : -1;
    a->at_d = !backward ? -1
                        : add(t, l->d_handle,
                              last ? STARPU_W : first ? STARPU_R : STARPU_RW);
    a->at_save = !training ? -1
                           : add(t, l->saved_handle[u],
                                 forward ? STARPU_W : STARPU_R);
    a->at_loss = -1;
    a->at_scale = -1;
    a->at_logits = -1;
    if (!last)
        return;
    if (c->call == IZ_CALL_GENERATE)
        a->at_logits = add(t, e->logits_handle, STARPU_W);
    else
        a->at_loss = add(t, l->loss_handle, STARPU_W);
    if (backward)
        a->at_scale = add(t, e->scale_handle, STARPU_R);
}

static void submit_unit(struct iz_engine *e, const struct unit_call *c,
                        struct iz_lane *l)
{
    const struct iz_unit_cost *cost = &e->plan.cost[c->unit];
    struct iz_unit_arg a = {.layout = &e->group[c->unit].layout,
                            .call = c->call,
                            .samples = c->samples,
                            .param_type = e->plan.param_type,
                            .grad_type = e->plan.param_type,
                            .save_bytes = cost->save_bytes,
                            .row = c->row};
    struct iz_task t = {.kind = c->kind,
                        .run = iz_unit_run,
                        .arg = &a,
                        .arg_bytes = sizeof(a),
                        .flops = call_flops(e, c->unit, c->call),
                        .bytes = c->call == IZ_CALL_BACKWARD
                                     ? cost->backward_bytes
                                     : cost->forward_bytes,
                        .unit = c->unit,
                        .step = (int)e->step};
    attach_params(e, c, &t, &a);
    attach_activations(e, c, l, &t, &a);
    iz_submit(e->graph, &t);
}

static void run_add_loss(struct iz_exec *x, void **buf, const void *arg)
{
    (void)x;
    (void)arg;
    *(double *)buf[1] += *(double *)buf[0];
}

static void submit_add_loss(struct iz_engine *e, struct iz_lane *l)
{
    iz_submit(e->graph,
              &(struct iz_task){.kind = IZ_NORM,
                                .run = run_add_loss,
                                .data = {{l->loss_handle, STARPU_R},
                                         {e->loss_handle, STARPU_RW}},
                                .unit = -1,
                                .step = (int)e->step});
}

/* ---- waves ---- */

/* Unit of step i of a pass: 0 ... U-1 and, when training, back down. */
static int unit_at(const struct iz_engine *e, int i)
{
    int units = e->model->n_units;
    return i < units ? i : 2 * units - 2 - i;
}

static int list_uses(const struct iz_engine *e, bool training,
                     struct iz_uses *uses)
{
    size_t units = (size_t)e->model->n_units;
    uses->steps = (int)(training ? 2 * units - 1 : units);
    uses->group = calloc(4 * units, sizeof(*uses->group));
    uses->item = calloc(2 * units, sizeof(*uses->item));
    if (!uses->group || !uses->item)
        return -ENOMEM;
    for (int i = 0; i < uses->steps; i++) {
        const struct iz_unit *u = &e->model->unit[unit_at(e, i)];
        uses->item[i] = uses->n;
        uses->group[uses->n++] = unit_at(e, i);
        if (u->tied_unit >= 0)
            uses->group[uses->n++] = u->tied_unit;
    }
    uses->item[uses->steps] = uses->n;
    return 0;
}

/* Adds the gradient of one micro-batch of unit u, and lets backward fill the next
 * buffers: a ring buffer must be reduced before its turn comes again. */
static void backward_micro(struct iz_engine *e, int u, int lane)
{
    int tied = e->model->unit[u].tied_unit;
    starpu_data_handle_t grad[64], tied_grad[64];
    for (int s = 0; s < e->plan.slices; s++) {
        grad[s] = iz_zero_grad(e, u);
        tied_grad[s] = tied < 0 ? NULL : iz_zero_grad(e, tied);
        struct unit_call c = {.kind = IZ_BACKWARD,
                              .call = IZ_CALL_BACKWARD,
                              .unit = u,
                              .samples = e->plan.samples,
                              .grad = grad[s],
                              .tied_grad = tied_grad[s]};
        submit_unit(e, &c, &e->lane[lane + s]);
        if (u + 1 == e->model->n_units)
            submit_add_loss(e, &e->lane[lane + s]);
    }
    iz_zero_reduce(e, u, 0, grad, e->plan.slices);
    if (tied >= 0)
        iz_zero_reduce(e, tied, 1, tied_grad, e->plan.slices);
}

static void forward_lanes(struct iz_engine *e, int u, int lanes)
{
    for (int b = 0; b < lanes; b++) {
        struct unit_call c = {.kind = IZ_FORWARD,
                              .call = IZ_CALL_FORWARD,
                              .unit = u,
                              .samples = e->plan.samples};
        submit_unit(e, &c, &e->lane[b]);
    }
}

/* The update of a group can follow its last gradient at once when nothing has to
 * be known about the others. */
static void after_backward(struct iz_engine *e, int u, bool last_wave)
{
    if (!last_wave)
        return;
    iz_zero_norm(e, u);
    if (iz_control_early(e->config) && e->config->run.overlap)
        iz_zero_update(e, u);
}

static void submit_batches(struct iz_engine *e, int first, int micros)
{
    for (int b = 0; b < micros * e->plan.slices; b++)
        submit_batch(e, &e->lane[b], IZ_TRAIN,
                     first_sample(e, first + b / e->plan.slices,
                                  b % e->plan.slices));
}

static void submit_wave(struct iz_engine *e, int first, int micros)
{
    const struct iz_uses *uses = &e->training;
    bool last_wave = first + micros == e->plan.micro_batches;
    submit_batches(e, first, micros);
    iz_zero_fetch(e, uses, 0);
    for (int i = 0; i < uses->steps; i++) {
        int u = unit_at(e, i);
        bool backward = i + 1 >= e->model->n_units;
        if (!backward)
            forward_lanes(e, u, micros * e->plan.slices);
        for (int g = 0; backward && g < micros; g++)
            backward_micro(e, u, g * e->plan.slices);
        if (backward)
            after_backward(e, u, last_wave);
        iz_zero_fetch(e, uses, uses->item[i + 1]);
    }
}

static void barrier(struct iz_engine *e)
{
    if (!e->config->run.overlap)
        iz_graph_wait(e->graph);
}

void iz_train_step(struct iz_engine *e)
{
    int all = e->plan.micro_batches, wave = e->plan.wave;
    bool early = iz_control_early(e->config) && e->config->run.overlap;
    starpu_iteration_push((unsigned long)e->step);
    for (int g = 0; g < all; g += wave)
        submit_wave(e, g, all - g < wave ? all - g : wave);
    barrier(e);
    iz_control_clip(e, e->step + 1);
    for (int u = 0; u < e->plan.n_groups; u++) {
        if (!early)
            iz_zero_update(e, u);
        iz_zero_publish(e, u);
    }
    barrier(e);
    e->step++;
    e->events_due++;
    starpu_iteration_pop();
}

/* ---- evaluation ---- */

static void evaluate_lanes(struct iz_engine *e, int lanes)
{
    int units = e->model->n_units;
    for (int u = 0; u < units; u++) {
        for (int b = 0; b < lanes; b++) {
            struct unit_call c = {.kind = IZ_EVAL,
                                  .call = u + 1 < units ? IZ_CALL_FORWARD
                                                        : IZ_CALL_EVALUATE,
                                  .unit = u,
                                  .samples = e->plan.samples};
            submit_unit(e, &c, &e->lane[b]);
            if (u + 1 == units)
                submit_add_loss(e, &e->lane[b]);
        }
        iz_zero_fetch(e, &e->forward, e->forward.item[u + 1]);
    }
}

void iz_train_eval(struct iz_engine *e)
{
    int tasks = e->config->run.eval_batches * e->plan.slices;
    e->eval_samples = (int64_t)tasks * e->plan.ranks;
    for (int t = 0; t < tasks; t += e->plan.lanes) {
        int n = tasks - t < e->plan.lanes ? tasks - t : e->plan.lanes;
        for (int b = 0; b < n; b++)
            submit_batch(e, &e->lane[b], IZ_VAL,
                         ((int64_t)e->plan.rank * tasks + t + b) *
                             e->plan.samples);
        iz_zero_fetch(e, &e->forward, 0);
        evaluate_lanes(e, n);
    }
    iz_control_eval(e, e->step);
    e->events_due++;
}

/* ---- generation ---- */

struct pick_arg {
    int32_t *text; /* whole text; this call writes text[at] */
    int at, seq;   /* tokens so far; length of the window */
    int vocab;
    double temperature;
    uint64_t seed;
};

static double uniform(uint64_t seed, uint64_t i)
{
    uint64_t z = seed + (i + 1) * UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return (double)((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

static int32_t choose(const struct pick_arg *a, const float *logits)
{
    float max = logits[0];
    int best = 0;
    for (int i = 1; i < a->vocab; i++)
        if (logits[i] > max) {
            max = logits[i];
            best = i;
        }
    if (a->temperature <= 0)
        return best;
    double sum = 0;
    for (int i = 0; i < a->vocab; i++)
        sum += exp((logits[i] - max) / a->temperature);
    double left = uniform(a->seed, (uint64_t)a->at) * sum;
    for (int i = 0; i < a->vocab; i++) {
        left -= exp((logits[i] - max) / a->temperature);
        if (left < 0)
            return i;
    }
    return best;
}

/* Puts the last `seq` tokens of the text into the window. */
static void fill_window(int32_t *window, const int32_t *text, int n, int seq)
{
    int from = n > seq ? n - seq : 0;
    memset(window, 0, (size_t)seq * 4);
    memcpy(window, text + from, (size_t)(n - from) * 4);
}

static void run_pick(struct iz_exec *x, void **buf, const void *arg)
{
    const struct pick_arg *a = arg;
    (void)x;
    a->text[a->at] = choose(a, buf[0]);
    fill_window(buf[1], a->text, a->at + 1, a->seq);
}

static void submit_token(struct iz_engine *e, const struct pick_arg *a)
{
    int units = e->model->n_units;
    int row = (a->at < a->seq ? a->at : a->seq) - 1;
    iz_zero_fetch(e, &e->forward, 0);
    for (int u = 0; u < units; u++) {
        struct unit_call c = {.kind = IZ_SAMPLE,
                              .call = u + 1 < units ? IZ_CALL_FORWARD
                                                    : IZ_CALL_GENERATE,
                              .unit = u,
                              .samples = 1,
                              .row = row};
        submit_unit(e, &c, &e->lane[0]);
        iz_zero_fetch(e, &e->forward, e->forward.item[u + 1]);
    }
    iz_submit(e->graph,
              &(struct iz_task){.kind = IZ_SAMPLE,
                                .run = run_pick,
                                .arg = a,
                                .arg_bytes = sizeof(*a),
                                .data = {{e->logits_handle, STARPU_R},
                                         {e->lane[0].batch_handle,
                                          STARPU_RW}},
                                .unit = -1,
                                .step = (int)e->step});
}

int iz_train_sample(struct iz_engine *e, const int32_t *prompt, int n_prompt,
                    int32_t *out, int n, double temperature)
{
    if (!e->model->unit[e->model->n_units - 1].generate || n_prompt < 1)
        return -EINVAL;
    iz_graph_wait(e->graph);
    memcpy(out, prompt, (size_t)n_prompt * 4);
    struct pick_arg a = {.text = out,
                         .seq = (int)(e->model->input_bytes / 4),
                         .vocab = e->model->vocab,
                         .temperature = temperature,
                         .seed = e->config->run.seed};
    fill_window(e->lane[0].batch, out, n_prompt, a.seq);
    for (a.at = n_prompt; a.at < n_prompt + n; a.at++)
        submit_token(e, &a);
    iz_graph_wait(e->graph);
    return iz_graph_error(e->graph);
}

/* ---- initial values, hash ---- */

#define PIECE (1 << 18)

static void init_range(struct iz_engine *e, int u, int p, uint64_t stream,
                       float *buf)
{
    const struct iz_group *g = &e->group[u];
    const struct iz_param *q = &e->model->unit[u].param[p];
    int64_t base = e->plan.states_full ? 0 : g->plan->shard * e->plan.rank;
    int64_t from = g->offset[p], to = from + q->rows * q->cols;
    if (from < base)
        from = base;
    if (to > base + g->plan->owned)
        to = base + g->plan->owned;
    for (int64_t i = from; i < to; i += PIECE) {
        int64_t n = to - i < PIECE ? to - i : PIECE;
        for (int64_t k = 0; q->init != IZ_INIT_NORMAL && k < n; k++)
            buf[k] = q->init == IZ_INIT_ONE ? 1 : 0;
        if (q->init == IZ_INIT_NORMAL)
            iz_flat_normal(buf, n, e->config->run.seed, stream,
                           i - g->offset[p], q->std);
        iz_homes_put(e, u, IZ_MASTER, i - base, buf, n);
    }
}

int iz_train_init(struct iz_engine *e)
{
    float *buf = malloc(PIECE * sizeof(*buf));
    uint64_t stream = 0;
    if (!buf)
        return -ENOMEM;
    for (int u = 0; u < e->model->n_units; u++)
        for (int p = 0; p < e->model->unit[u].n_params; p++)
            init_range(e, u, p, stream++, buf);
    free(buf);
    iz_train_publish(e);
    return 0;
}

void iz_train_publish(struct iz_engine *e)
{
    for (int u = 0; u < e->plan.n_groups; u++) {
        iz_zero_publish(e, u);
        e->group[u].version++;
    }
    e->fetched_bytes = 0;
}

uint64_t iz_train_hash(struct iz_engine *e)
{
    uint64_t sum = 0;
    float *buf = malloc(PIECE * sizeof(*buf));
    iz_graph_wait(e->graph);
    for (int u = 0; buf && u < e->plan.n_groups; u++) {
        const struct iz_plan_group *p = e->group[u].plan;
        int64_t base = p->shard * e->plan.rank;
        int64_t skip = e->plan.states_full ? base : 0;
        int64_t end = base + p->shard < p->n ? base + p->shard : p->n;
        for (int64_t i = base; i < end; i += PIECE) {
            int64_t n = end - i < PIECE ? end - i : PIECE;
            iz_homes_get(e, u, IZ_MASTER, i - base + skip, buf, n);
            sum += iz_flat_hash(((int64_t)u << 40) + i, buf, n);
        }
    }
    free(buf);
    return sum;
}

/* ---- events ---- */

struct iz_event iz_train_event(struct iz_engine *e)
{
    while (sem_wait(&e->event_ready) && errno == EINTR)
        ;
    return e->event[e->events_taken++ % IZ_EVENTS];
}

/* ---- open, close ---- */

static int open_graph(struct iz_engine *e, int workers)
{
    const struct iz_config *c = e->config;
    bool disk = e->plan.state_home == IZ_HOME_NVME ||
                e->plan.param_home == IZ_HOME_NVME;
    char **scratch = calloc((size_t)workers, sizeof(*scratch));
    int r = scratch ? 0 : -ENOMEM;
    for (int w = 0; w < workers && !r; w++) {
        scratch[w] = iz_memory_take(e->memory, IZ_TIER_DEVICE, IZ_MEM_SCRATCH,
                                    e->plan.scratch_bytes);
        r = scratch[w] ? 0 : -ENOMEM;
    }
    struct iz_graph_config g = {.workers = workers,
                                .lane = e->plan.ranks > 1,
                                .io_workers = disk ? 2 : 0,
                                .scheduler = c->run.scheduler,
                                .rank = e->plan.rank,
                                .work_bytes = e->plan.scratch_bytes,
                                .delay_us = c->run.inject_delay_us,
                                .delay_seed = c->run.inject_seed * 64 +
                                              (uint64_t)e->plan.rank};
    if (!r)
        r = iz_graph_open(&e->graph, &g, scratch);
    free(scratch);
    return r;
}

static bool pin_memory(const struct iz_config *c)
{
    return (c->zero.optimizer.home != IZ_HOME_NONE &&
            c->zero.optimizer.pin_memory) ||
           (c->zero.param.home != IZ_HOME_NONE && c->zero.param.pin_memory);
}

int iz_train_open(struct iz_engine **out, const struct iz_train_config *c,
                  struct iz_plan *plan)
{
    struct iz_engine *e = calloc(1, sizeof(*e));
    if (!e)
        return -ENOMEM;
    *out = e;
    e->config = c->config;
    e->model = c->model;
    e->coll = c->coll;
    e->data = c->data;
    e->stop = c->stop;
    e->plan = *plan;
    memset(plan, 0, sizeof(*plan));
    sem_init(&e->event_ready, 0, 0);
    iz_loss_scale_init(&e->control.scale, c->config);
    e->loss_scale = (float)e->control.scale.scale;
    int r = iz_memory_open(&e->memory, pin_memory(c->config));
    if (!r)
        r = open_graph(e, c->workers);
    if (!r)
        r = iz_homes_open(e);
    if (!r)
        r = list_uses(e, true, &e->training);
    if (!r)
        r = list_uses(e, false, &e->forward);
    if (r)
        iz_train_close(out);
    return r;
}

void iz_train_close(struct iz_engine **out)
{
    struct iz_engine *e = *out;
    if (!e)
        return;
    if (e->graph) {
        iz_graph_wait(e->graph);
        iz_homes_close(e);
    }
    iz_graph_close(&e->graph);
    iz_memory_close(&e->memory);
    iz_plan_clear(&e->plan);
    free(e->training.group);
    free(e->training.item);
    free(e->forward.group);
    free(e->forward.item);
    sem_destroy(&e->event_ready);
    free(e);
    *out = NULL;
}
