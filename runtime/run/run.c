/* SPDX-License-Identifier: Apache-2.0 */
/* From the command line to the summary; see run.h. */
#include "runtime/run/run.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "runtime/base/environment.h"
#include "runtime/base/progress.h"
#include "runtime/ckpt/engine_parts.h"
#include "runtime/config/rules.h"
#include "runtime/run/state.h"

static _Atomic int stop_signal;

static void on_signal(int number)
{
    static const char text[] =
        "\nizar: finishing the step; once more stops at once\n";
    if (atomic_exchange(&stop_signal, number))
        _exit(128 + number);
    if (write(STDERR_FILENO, text, sizeof(text) - 1) < 0)
        return;
}

static void catch_signals(void)
{
    struct sigaction a = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigemptyset(&a.sa_mask);
    sigaction(SIGINT, &a, NULL);
    sigaction(SIGTERM, &a, NULL);
    sigaction(SIGUSR1, &a, NULL);
}

/* ---- the loop ---- */

static void print_saved(struct run *r, int64_t step)
{
    iz_metrics_pause(r->metrics);
    printf("saved step %lld in %s/checkpoints\n", (long long)step,
           r->c.run.output);
}

/* Of a save beside training, when it has become a checkpoint. */
static void report_save(struct run *r)
{
    int64_t step = r->saver ? iz_save_done(r->saver) : 0;
    if (step && iz_run_first(r))
        print_saved(r, step);
}

static void take_event(struct run *r)
{
    struct iz_event v = iz_train_event(r->e);
    iz_metrics_event(r->metrics, &v);
    if (r->saver && !r->save_error)
        r->save_error = iz_save_event(r->saver, &v);
    report_save(r);
    if (v.eval)
        return;
    r->taken = v.step;
    r->stopped |= v.stop;
    if (v.failure && !r->failure)
        r->failure = v.failure;
}

/* Every rank takes the same events before it submits the same step, so all end
 * at the same one. */
static void throttle(struct run *r)
{
    while (r->e->step - r->taken >= r->c.run.in_flight)
        take_event(r);
}

static void take_all(struct run *r)
{
    while (r->e->events_taken < r->e->events_due)
        take_event(r);
}

/* Training waits. */
int iz_run_save_now(struct run *r)
{
    take_all(r);
    if (r->failure)
        return 0;
    int s = iz_state_save(r->e, r->model_text);
    iz_metrics_pause(r->metrics);
    if (!s && iz_run_first(r))
        print_saved(r, r->e->step);
    return s;
}

/* The save under way, if any, becomes a checkpoint. */
static int end_saves(struct run *r)
{
    int s = r->saver ? iz_save_finish(r->saver) : 0;
    report_save(r);
    return s;
}

/* One save at a time: the one before is waited for. */
static int save(struct run *r)
{
    int s = 0;
    if (!r->saver)
        return iz_run_save_now(r);
    if (iz_save_pending(r->saver)) {
        take_all(r);
        s = end_saves(r);
    }
    if (!s && !r->failure && !r->save_error)
        iz_save_begin(r->saver);
    return s;
}

static bool every(int64_t interval, int64_t step)
{
    return interval > 0 && step % interval == 0;
}

static int train(struct run *r)
{
    int s = 0;
    while (r->e->step < r->c.run.steps && !s) {
        throttle(r);
        if (r->stopped || r->failure || r->save_error)
            break;
        iz_train_step(r->e);
        bool end = r->e->step == r->c.run.steps;
        if (r->c.run.eval_batches &&
            (end || every(r->c.run.eval_interval, r->e->step)))
            iz_train_eval(r->e);
        if (!end && every(r->c.run.save_interval, r->e->step))
            s = save(r);
    }
    take_all(r);
    iz_trace_stop(r->e);
    if (!s)
        s = end_saves(r);
    return s ? s : r->save_error;
}

/* ---- order of it all ---- */

static int run_all(struct run *r)
{
    int s = iz_run_prepare_model(r);
    if (!s && r->o.parameters) {
        if (iz_run_first(r))
            iz_rules_print(r->model, stdout);
        return 0;
    }
    if (!s)
        s = iz_run_prepare(r);
    if (s)
        return s;
    if (r->o.plan) {
        if (iz_run_first(r))
            iz_run_print_plan(r);
        return 0;
    }
    s = iz_run_start(r);
    if (s)
        return s;
    r->taken = r->begun = r->e->step;
    if (iz_run_first(r) && r->begun >= r->c.run.steps)
        printf("nothing left to train: step %lld of %lld\n",
               (long long)r->begun, (long long)r->c.run.steps);
    catch_signals();
    s = train(r);
    return s ? s : iz_run_finish(r);
}

static void close_all(struct run *r)
{
    iz_metrics_close(&r->metrics);
    iz_save_close(&r->saver);
    iz_train_close(&r->e);
    iz_data_close(&r->data);
    iz_plan_clear(&r->plan);
    iz_topo_close(&r->topo);
    if (r->model)
        r->model->close(r->model);
    free(r->model_text);
    iz_coll_close(&r->coll);
}

static int print_texts(const struct iz_program *p, const struct iz_options *o,
                       const char *argv0)
{
    if (o->help)
        iz_options_help(p, argv0);
    else if (o->help_markdown)
        iz_config_doc(&p->section, true, stdout);
    else
        printf("izar %s\n", IZ_VERSION);
    return 0;
}

int iz_run(int argc, char **argv, const struct iz_program *p)
{
    struct run r = {.p = p, .stop = &stop_signal};
    iz_environment_keep();
    int s = iz_options_read(&r.o, argc, argv);
    if (!s && !r.o.plan && (r.o.ranks || r.o.machine)) {
        fprintf(stderr, "izar: --ranks and --machine only go with --plan; "
                        "start ranks with mpirun -np\n");
        s = -EINVAL;
    }
    if (s || r.o.help || r.o.help_markdown || r.o.version) {
        if (!s)
            print_texts(p, &r.o, argv[0]);
        iz_options_clear(&r.o);
        return s ? 2 : 0;
    }
    s = iz_coll_open(&r.coll, &argc, &argv);
    if (!s) {
        iz_progress_rank(r.coll->rank, r.coll->size);
        s = run_all(&r);
    }
    if (r.coll)
        close_all(&r);
    iz_options_clear(&r.o);
    return s ? 1 : 0;
}
