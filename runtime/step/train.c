/* SPDX-License-Identifier: Apache-2.0 */
/* One step as submissions.  Nothing here waits: order and memory bounds follow
 * from the data that the tasks declare. */
#include "runtime/step/train.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/int64.h"
#include "codelets/base/take.h"
#include "runtime/engine/alloc.h"
#include "runtime/engine/trace.h"
#include "runtime/plan/matrices.h"
#include "runtime/step/boundary.h"
#include "runtime/step/clip.h"
#include "runtime/step/fetch.h"
#include "runtime/step/reduce.h"
#include "runtime/step/submit.h"
#include "runtime/step/touched.h"
#include "runtime/step/units.h"
#include "runtime/step/update.h"

/* ---- waves ---- */

/* Adds the gradient of one micro-batch of unit u, and lets backward fill the
 * next buffers: a ring buffer must be reduced before its turn comes again. */
static void backward_micro(struct iz_engine *e, int u, int track)
{
    int tied =
        iz_unit_ties_trained(e->model, u) ? e->model->unit[u].tied_unit : -1;
    bool trained = e->plan.unit[u].n > 0;
    starpu_data_handle_t grad[IZ_SLICES_MAX] = {0},
                         tied_grad[IZ_SLICES_MAX] = {0};
    for (int s = 0; s < e->plan.slices; s++) {
        grad[s] = trained ? iz_engine_next_grad(e, u) : NULL;
        tied_grad[s] = tied < 0 ? NULL : iz_engine_next_grad(e, tied);
        struct iz_call c = {.kind = IZ_BACKWARD,
                            .call = IZ_CALL_BACKWARD,
                            .unit = u,
                            .samples = e->plan.samples,
                            .grad = grad[s],
                            .tied_grad = tied_grad[s]};
        iz_units_call(e, &c, &e->track[track + s]);
        if (u + 1 == e->model->n_units)
            iz_units_add_loss(e, &e->track[track + s]);
    }
    if (trained)
        iz_reduce(e, u, 0, grad, e->plan.slices);
    if (tied >= 0)
        iz_reduce(e, tied, 1, tied_grad, e->plan.slices);
}

static void forward_tracks(struct iz_engine *e, int u, int tracks)
{
    for (int b = 0; b < tracks; b++) {
        struct iz_call c = {.kind = IZ_FORWARD,
                            .call = IZ_CALL_FORWARD,
                            .unit = u,
                            .samples = e->plan.samples};
        iz_units_call(e, &c, &e->track[b]);
    }
}

/* The update of a unit can follow its last gradient at once when nothing has
 * to be known about the others. */
static void after_backward(struct iz_engine *e, int u)
{
    iz_reduce_end(e, u);
    if (iz_step_updates_early(e) && u >= e->update_order.late)
        iz_update_unit(e, u);
}

static void submit_batches(struct iz_engine *e, int first, int micros)
{
    int64_t n = e->config->train_batch_size;
    struct iz_samples all = {IZ_TRAIN, false, e->step * n, n};
    if (first == 0) {
        iz_touched_begin(e, all);
        iz_units_count(e, &all);
    }
    for (int b = 0; b < micros * e->plan.slices; b++)
        iz_units_batch(e, &e->track[b], &all,
                       iz_units_first_sample(e, first + b / e->plan.slices,
                                             b % e->plan.slices),
                       e->plan.samples);
}

static void submit_wave(struct iz_engine *e, int first, int micros)
{
    const struct iz_uses *uses = &e->uses.training;
    bool last_wave = first + micros == e->plan.micro_batches;
    iz_graph_position(e->graph, 0);
    submit_batches(e, first, micros);
    iz_boundary_begin(e, micros * e->plan.slices, true);
    iz_fetch_ahead(e, uses, 0);
    for (int i = 0; i < uses->visits; i++) {
        int u = iz_step_pass_unit(e, i);
        bool backward = i + 1 >= e->model->n_units;
        iz_graph_position(e->graph, iz_step_pass_position(e, i));
        if (!backward)
            forward_tracks(e, u, micros * e->plan.slices);
        for (int g = 0; backward && g < micros; g++)
            backward_micro(e, u, g * e->plan.slices);
        if (backward && last_wave)
            after_backward(e, u);
        iz_fetch_ahead(e, uses, uses->item[i + 1]);
    }
}

static void barrier(struct iz_engine *e)
{
    if (!e->config->run.overlap)
        iz_graph_wait(e->graph);
}

/* The units from `from` on that are updated; returns the next one. */
static int publish_units(struct iz_engine *e, int from, int end)
{
    for (; from < end && !iz_update_held(e, from); from++)
        iz_fetch_publish(e, from, false);
    return from;
}

/* Whether the step has no target and is to be skipped whole: the data tell it
 * to all ranks before anything is submitted. */
static bool is_empty(struct iz_engine *e)
{
    int64_t n = e->config->train_batch_size, i = e->step * n, end = i + n;
    if (e->config->run.empty_steps != IZ_EMPTY_SKIP || !e->data ||
        !iz_data_masked(e->data, IZ_TRAIN))
        return false;
    while (i < end && !iz_data_loss_tokens(e->data, IZ_TRAIN, i, 1))
        i++;
    if (i == end)
        e->events.targets[e->step % IZ_EVENTS] = 0;
    return i == end;
}

static void submit_updates(struct iz_engine *e)
{
    int published = 0;
    bool early = iz_step_updates_early(e);
    for (int u = 0; u < e->plan.n_units; u++) {
        iz_graph_position(
            e->graph, iz_step_pass_position(e, 2 * e->model->n_units - 2 - u));
        if (!early || u < e->update_order.late)
            iz_update_unit(e, u);
        published = publish_units(e, published, u + 1);
    }
    iz_update_end(e);
    publish_units(e, published, e->plan.n_units);
    e->counts.updates++;
}

void iz_train_step(struct iz_engine *e)
{
    int all = e->plan.micro_batches, wave = e->plan.wave;
    bool empty = is_empty(e);
    int64_t begin = iz_clock_cpu_ns();
    iz_trace_step(e);
    for (int g = 0; !empty && g < all; g += wave)
        submit_wave(e, g, all - g < wave ? all - g : wave);
    barrier(e);
    iz_graph_position(e->graph, 2 * e->model->n_units);
    iz_clip_step(e, e->step + 1, empty);
    if (!empty)
        submit_updates(e);
    barrier(e);
    e->events.submitted_ns[e->step % IZ_EVENTS] = iz_clock_ns();
    e->counts.submit_ns += iz_clock_cpu_ns() - begin;
    e->step++;
    e->events.due++;
}

/* ---- evaluation ---- */

int64_t iz_train_eval_samples(const struct iz_engine *e)
{
    int64_t n = iz_data_windows(e->data, IZ_VAL);
    int64_t step = e->config->train_batch_size;
    int64_t most = e->config->run.eval_batches;
    return n / step < most ? n : most * step;
}

/* The next n of `all`, from `first` on, of all ranks, who take turns.  A rank
 * for which none is left is in the collectives with the first ones, and adds
 * nothing. */
static void eval_round(struct iz_engine *e, const struct iz_samples *all,
                       int64_t first, int64_t n)
{
    const struct iz_plan *p = &e->plan;
    int64_t each = p->samples, row = each * p->ranks;
    int tracks = (int)((n + row - 1) / row);
    for (int b = 0; b < tracks; b++) {
        struct iz_track *t = &e->track[b];
        int64_t at = b * row + p->rank * each;
        t->counted = (int)(at < n ? min64(n - at, each) : 0);
        t->samples = t->counted ? t->counted : (int)min64(n, each);
        iz_units_batch(e, t, all, first + (t->counted ? at : 0), t->samples);
    }
    if (p->zero.fetch)
        iz_touched_begin(e, (struct iz_samples){all->split, true, first, n});
    iz_units_pass(
        e, (struct iz_call){.kind = IZ_EVAL, .call = IZ_CALL_EVALUATE}, tracks);
    for (int b = 0; b < tracks; b++)
        e->track[b].counted = 0;
}

/* All of a split may be millions of tasks, and each that waits takes some KiB.
 */
enum { EVAL_TASKS = 4096 };

/* Ends early, and says of how many samples, when a signal asks for the end: a
 * batch system leaves the time for a save. */
static void eval_samples(struct iz_engine *e, struct iz_samples all)
{
    int64_t n = (int64_t)e->plan.tracks * e->plan.ranks * e->plan.samples;
    int64_t before = iz_graph_submitted(e->graph);
    iz_units_count(e, &all);
    for (int64_t at = 0; at < all.n; at += n) {
        eval_round(e, &all, all.first + at, min64(all.n - at, n));
        /* In the last round, and there alone, ranks may have fewer tasks than
         * others: they would not agree on whether to ask. */
        if (all.n - at <= n ||
            iz_graph_submitted(e->graph) - before < EVAL_TASKS)
            continue;
        if (!iz_units_go_on(e)) {
            all.n = min64(all.n, at + n);
            iz_units_count(e, &all);
        }
        before = iz_graph_submitted(e->graph);
    }
    iz_clip_eval(e, e->step, all.n);
    e->events.due++;
}

void iz_train_eval(struct iz_engine *e)
{
    eval_samples(
        e, (struct iz_samples){IZ_VAL, true, 0, iz_train_eval_samples(e)});
}

/* Those that have no target would prove nothing; some have one. */
struct iz_event iz_train_probe(struct iz_engine *e)
{
    bool val = e->config->run.eval_batches > 0;
    int64_t last = e->step > 0 ? e->step - 1 : 0;
    struct iz_samples s = {val ? IZ_VAL : IZ_TRAIN, true,
                           val ? 0 : last * e->config->train_batch_size,
                           (int64_t)e->plan.slices * e->plan.samples *
                               e->plan.ranks};
    while (!iz_data_loss_tokens(e->data, s.split, s.first, s.n))
        s.first += s.n;
    eval_samples(e, s);
    return iz_train_event(e);
}

/* ---- events ---- */

struct iz_event iz_train_event(struct iz_engine *e)
{
    int64_t begin = iz_clock_ns();
    while (sem_wait(&e->events.ready) && errno == EINTR)
        ;
    e->events.waited_ns += iz_clock_ns() - begin;
    struct iz_event v = e->events.at[e->events.taken++ % IZ_EVENTS];
    if (!v.eval)
        e->update_order.late = v.late;
    return v;
}

/* ---- open, close ---- */

/* Sooner than other ranks, which wait for this one, give up. */
#define STUCK_S 60.0

static int open_graph(struct iz_engine *e, const struct iz_train_config *t)
{
    const struct iz_config *c = e->config;
    const struct iz_plan *p = &e->plan;
    struct iz_graph_config g = {
        .workers = p->target.workers,
        .device = t->device,
        .act = p->target.act,
        .numerics = p->target.numerics,
        .comm = p->ranks > 1,
        .comm_alone = !c->zero.overlap_comm,
        .io_workers = iz_bytes_tier(&p->bytes, IZ_TIER_NVME) ? 2
                      : p->staging[IZ_STAGING_CKPT].n        ? 1
                                                             : 0,
        .scheduler = c->run.scheduler,
        .rank = p->rank,
        .simulated = t->simulated,
        .stuck_s = fmin(c->run.comm_timeout_s / 2, STUCK_S),
        .work_bytes = p->act.scratch_bytes,
        .host_work_bytes = iz_plan_host_scratch(p),
        .delay_us = c->run.inject_delay_us,
        .delay_seed = c->run.inject_seed * 64 + (uint64_t)p->rank};
    memcpy(g.rate, t->rate, sizeof(g.rate));
    return iz_graph_open(&e->graph, &g);
}

/* One rank of each host first: the others then read what its StarPU has
 * measured of the bus, which it may also do for a run on the CPU; at the same
 * time, one would read files that another is writing.  r: what this rank has
 * met so far; all ranks come here, or some would wait. */
static int open_graph_in_turn(struct iz_engine *e,
                              const struct iz_train_config *t, int r)
{
    bool turns = !t->simulated && e->plan.ranks > 1;
    bool first = !turns || e->coll->local_rank == 0;
    if (!r && first)
        r = open_graph(e, t);
    if (turns && !iz_coll_all_ok(e->coll, !r))
        return r ? r : -ECANCELED;
    return r || first ? r : open_graph(e, t);
}

/* After StarPU's start (see iz_graph_open), and by workers that are bound. */
static int open_memory(struct iz_engine *e)
{
    const struct iz_plan *p = &e->plan;
    const char *wish = !p->target.gpu ? NULL
                       : e->config->run.device == IZ_DEVICE_AUTO
                           ? "run.device: auto"
                           : "run.device: cuda";
    int r = 0;
    if (e->simulated)
        e->memory = iz_memory_open_simulated();
    else
        r = iz_memory_open(&e->memory, e->graph, &p->places, p->zero.pin_cpu,
                           wish);
    if (!r)
        r = iz_alloc_open(e);
    if (!r)
        iz_graph_give(e->graph, e->scratch, iz_memory_shadow(e->memory));
    return r;
}

int iz_train_open(struct iz_engine **out, const struct iz_train_config *c,
                  struct iz_plan *plan)
{
    struct iz_engine *e = *out = iz_take(1, sizeof(*e), "the engine");
    e->config = c->config;
    e->model = c->model;
    e->coll = c->coll;
    e->coll->sum_group = iz_sum_group(&plan->sum);
    e->data = c->data;
    e->events.stop = c->stop;
    e->simulated = c->simulated;
    e->plan = *plan;
    memset(plan, 0, sizeof(*plan));
    sem_init(&e->events.ready, 0, 0);
    iz_loss_scale_init(&e->scalar.control.scale, c->config);
    e->scalar.loss_scale = (float)e->scalar.control.scale.scale;
    int r = open_graph_in_turn(e, c, iz_trace_open(e));
    if (!r && c->cores)
        iz_cores_bind(c->cores, e->graph);
    if (!r)
        r = open_memory(e);
    if (!r)
        iz_fetch_open(e);
    if (c->cores)
        iz_cores_release(c->cores);
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
        iz_alloc_close(e);
    }
    iz_trace_close(e);
    iz_graph_close(&e->graph);
    iz_memory_close(&e->memory);
    iz_plan_clear(&e->plan);
    sem_destroy(&e->events.ready);
    free(e);
    *out = NULL;
}
