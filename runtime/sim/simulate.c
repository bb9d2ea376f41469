/* SPDX-License-Identifier: Apache-2.0 */
/* iz_run of a program that is linked with a simulating StarPU: the same config,
 * plan and submissions as a run, on a machine described by a file.  One rank
 * stands for all; what its collectives cost follows from the number of ranks.
 * Nothing is computed and no data exist. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/take.h"
#include "codelets/base/units.h"
#include "runtime/base/environment.h"
#include "runtime/base/json.h"
#include "runtime/base/text.h"
#include "runtime/data/data.h"
#include "runtime/engine/trace.h"
#include "runtime/machine/machine_file.h"
#include "runtime/model/prepare.h"
#include "runtime/plan/choose.h"
#include "runtime/plan/fit.h"
#include "runtime/plan/forecast.h"
#include "runtime/report/summary.h"
#include "runtime/run/options.h"
#include "runtime/step/train.h"

#define STEPS 3 /* the first two fill the pipeline */

struct simulation {
    const struct iz_program *p;
    struct iz_options o;
    struct iz_config c;
    struct iz_machine machine;
    struct iz_rate rate[IZ_RATES];
    struct iz_model *model;
    struct iz_plan plan;
    struct iz_coll coll;
    struct iz_engine *e;
    int ranks, steps, clips;
    int64_t clip_end_ns[STEPS + 1];
    struct iz_time_shares *shares;
    double begin_s, end_s; /* of the window of whole steps */
    struct iz_span *span;
    int n_spans, room;
    int64_t lost;
    uint64_t hash; /* of every task's kind, unit, begin and end */
};

static int find_rates(void *arg)
{
    struct simulation *s = arg;
    int r = iz_machine_check(&s->machine, &s->plan, stderr);
    if (!r)
        iz_machine_rates(&s->machine, &s->plan, s->rate);
    return r;
}

static int plan_for(struct simulation *s, struct iz_target *t)
{
    int user = iz_environment_number("STARPU_NCPU", 0);
    if (user)
        t->workers = user;
    struct iz_limits limit = iz_machine_limits(&s->machine, &s->c, s->ranks);
    const struct iz_plan_for f = {.model = s->model,
                                  .ranks = s->ranks,
                                  .target = t,
                                  .limit = &limit,
                                  .rate = s->rate};
    int r = iz_plan_complete(&s->plan, &s->c, &f, find_rates, s);
    return r ? r : iz_plan_fit(&s->plan, &s->c, s->model, &limit, stderr);
}

static int prepare(struct simulation *s)
{
    struct iz_target t;
    s->ranks = s->o.ranks ? s->o.ranks : 1;
    if (!s->o.machine)
        return iz_text_refuse(stderr, "a simulation needs --machine FILE (see "
                                      "configs/machines)");
    int r = iz_config_read(&s->c, &s->p->section, s->o.path, s->o.set,
                           s->o.n_set, s->ranks, stdout, stderr);
    if (!r)
        r = iz_machine_read(&s->machine, &s->c, s->o.machine, stderr);
    if (!r)
        r = iz_data_look(&s->c.data, stderr);
    if (!r)
        r = s->p->open(&s->model, s->p->section.target);
    if (!r)
        r = iz_model_prepare(s->model, &s->c, s->p->section.hf, stderr);
    if (!r)
        r = iz_machine_target(&t, &s->machine, &s->c, s->ranks, stderr);
    if (!r)
        r = iz_plan_check(&s->c, s->model, &t, s->ranks, stderr);
    return r ? r : plan_for(s, &t);
}

static int open_engine(struct simulation *s)
{
    s->coll = (struct iz_coll){.size = s->ranks, .local_size = 1};
    struct iz_train_config t = {.config = &s->c,
                                .model = s->model,
                                .coll = &s->coll,
                                .device = s->plan.target.gpu ? 0 : -1,
                                .simulated = true};
    memcpy(t.rate, s->rate, sizeof(t.rate));
    int r = iz_train_open(&s->e, &t, &s->plan);
    s->shares = r ? NULL : iz_summary_shares_open(s->e);
    return r;
}

/* ---- what the tasks did ---- */

static void keep(void *arg, const struct iz_span *span)
{
    struct simulation *s = arg;
    s->span =
        iz_take_more(s->span, s->n_spans, &s->room, sizeof(*s->span), "spans");
    s->span[s->n_spans++] = *span;
    /* Spans come worker by worker, so the step says which one it is. */
    if (span->kind == IZ_CLIP && span->step < STEPS) {
        s->clip_end_ns[span->step] = span->end_ns;
        s->clips++;
    }
}

/* From the end of one step's `clip` to that of the last one: whole steps, with
 * the optimizer of the one before under each. */
static void simulate_measure(struct simulation *s)
{
    int64_t begin = s->clip_end_ns[s->clips > 2 ? 1 : 0];
    int64_t end = s->clip_end_ns[s->clips - 1];
    for (int i = 0; i < s->n_spans; i++) {
        const struct iz_span *p = &s->span[i];
        s->hash = iz_span_hash(s->hash, p);
        /* What follows the last step has nothing to be under. */
        if (p->end_ns <= end)
            iz_time_shares_add(s->shares, p);
        else
            iz_time_shares_add_behind(s->shares, p);
    }
    iz_time_shares_until(s->shares, begin);
    iz_time_shares_until(s->shares, end);
    iz_time_shares_stop(s->shares, true);
    s->begin_s = (double)begin * 1e-9;
    s->end_s = (double)end * 1e-9;
}

static double hidden(const struct simulation *s, unsigned kinds)
{
    struct iz_kind_time t = iz_time_shares_kinds(s->shares, kinds);
    return t.seconds > 0 ? 100 * t.hidden_s / t.seconds : 100;
}

/* Of a step. */
static double kind_seconds(const struct simulation *s, enum iz_kind kind)
{
    return iz_time_shares_kind(s->shares, kind).seconds / s->clips;
}

/* ---- report ---- */

static void report(const struct simulation *s)
{
    const struct iz_engine *e = s->e;
    struct iz_summary t = {.e = e, .shares = s->shares};
    char text[512];
    enum iz_bottleneck limit = iz_summary_bottleneck(&t, text, sizeof(text));
    int counted = s->clips - (s->clips > 2 ? 2 : 1);
    double step = (s->end_s - s->begin_s) / counted;
    double tokens = (double)s->c.train_batch_size * s->model->tokens / step;
    double flops = e->plan.step_flops / step;
    double peak = (double)s->machine.flops_per_s[e->plan.param_type];
    double up = (double)e->counts.up_bytes / s->steps;
    double down = (double)e->counts.down_bytes / s->steps;
    double optimizer =
        step * iz_time_shares_total(s->shares).share[IZ_USE_OPTIMIZER];
    printf("simulated on %s, rank 0 of %d: step %.4f s, %.0f %ss/s, "
           "%.2f TFLOP/s per rank",
           s->machine.name, s->ranks, step, tokens, s->model->item,
           flops * 1e-12);
    if (e->plan.target.gpu)
        printf(" = %.1f %% of the machine's", 100 * flops / peak);
    printf("\n  a step moves %.1f MiB to the GPU, %.1f MiB to the host; "
           "hidden: copies and collectives %.1f %%, optimizer %.1f %%\n",
           iz_units_mib(up), iz_units_mib(down), hidden(s, IZ_KINDS_LINKS),
           hidden(s, IZ_KINDS_OPTIMIZER));
    iz_summary_print_bottleneck(&t, stdout);
    iz_summary_print_time(&t, stdout);
    if (s->lost)
        printf("  (%lld task times were lost: shares and limits are "
               "approximate)\n",
               (long long)s->lost);
    if (s->ranks > 1)
        printf("  left out: ranks that are late, other jobs, the links "
               "between hosts shared in time; collectives cost N - 1 messages "
               "and (N - 1) / N of the bytes over the slowest link: an "
               "all-gather once for a host, a sum once for each of its "
               "ranks\n");
    printf("{\"simulation\": {\"machine\": ");
    iz_json_print(stdout, s->machine.name);
    printf(", \"ranks\": %d, "
           "\"step_s\": %.9f, \"%ss_per_s\": %.3f, \"flop_per_s\": %.6g, "
           "\"up_bytes\": %.0f, \"down_bytes\": %.0f, \"tasks\": %lld, "
           "\"forward_s\": %.6f, \"backward_s\": %.6f, "
           "\"optimizer_s\": %.6f, "
           "\"copies_hidden_percent\": %.3f, \"adam_hidden_percent\": %.3f, "
           "\"device_bytes\": %lld, \"host_bytes\": %lld, "
           "\"predicted_s\": %.9f, \"samples\": %d, \"micro_batches\": %d, "
           "\"ratio\": %g, \"lost_spans\": %lld, "
           "\"limited_by\": \"%s\", "
           "\"task_hash\": \"%016llx\"}}\n",
           s->ranks, step, s->model->item, tokens, flops, up, down,
           (long long)iz_graph_submitted(e->graph), kind_seconds(s, IZ_FORWARD),
           kind_seconds(s, IZ_BACKWARD), optimizer, hidden(s, IZ_KINDS_LINKS),
           hidden(s, IZ_KINDS_OPTIMIZER),
           (long long)iz_plan_device_bytes(&e->plan),
           (long long)iz_plan_host_bytes(&e->plan),
           iz_forecast(&e->plan, s->rate).step_s, s->c.micro_batch,
           s->c.grad_accum, s->c.zero.optimizer.ratio, (long long)s->lost,
           iz_bottleneck_names[limit], (unsigned long long)s->hash);
}

static int simulate(struct simulation *s)
{
    int r = open_engine(s);
    if (r)
        return r;
    iz_plan_print(&s->e->plan, s->model, stdout);
    iz_forecast_print(&s->e->plan, s->rate, stdout);
    iz_environment_print(stdout);
    fflush(stdout);
    s->steps = STEPS;
    for (int i = 0; i < s->steps; i++)
        iz_train_step(s->e);
    iz_graph_wait(s->e->graph);
    iz_trace_stop(s->e);
    s->lost = iz_graph_spans(s->e->graph, keep, s);
    if (s->clips < 2)
        return -EIO;
    simulate_measure(s);
    report(s);
    return 0;
}

static int simulate_run_all(struct simulation *s)
{
    int r = prepare(s);
    if (r)
        return r;
    if (!s->o.plan)
        return simulate(s);
    iz_plan_print(&s->plan, s->model, stdout);
    iz_forecast_print(&s->plan, s->rate, stdout);
    return 0;
}

int iz_run(int argc, char **argv, const struct iz_program *p)
{
    struct simulation s = {.p = p};
    iz_environment_keep();
    int r = iz_options_read(&s.o, argc, argv);
    if (!r && (s.o.resume || s.o.parameters))
        r = iz_text_refuse(stderr, "a simulation has no weights and no "
                                   "checkpoints: it takes no --resume, "
                                   "--replay or --parameters");
    if (r || iz_options_told(&s.o, p, argv[0])) {
        iz_options_clear(&s.o);
        return r ? 2 : 0;
    }
    r = simulate_run_all(&s);
    iz_time_shares_close(&s.shares);
    iz_train_close(&s.e);
    iz_plan_clear(&s.plan);
    iz_model_close(&s.model);
    iz_options_clear(&s.o);
    free(s.span);
    return r ? 1 : 0;
}
