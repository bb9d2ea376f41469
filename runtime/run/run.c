/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/run/run.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "runtime/base/environment.h"
#include "runtime/base/progress.h"
#include "runtime/model/rules.h"
#include "runtime/report/box.h"
#include "runtime/run/signals.h"
#include "runtime/run/state.h"
#include "runtime/step/train.h"

static _Atomic int stop_signal;

static int run_run_all(struct run *r)
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
    r->progress.taken = r->progress.begun = r->e->step;
    if (iz_run_first(r) && r->progress.begun >= r->c.run.steps && !r->o.replay)
        printf("nothing left to train: step %lld of %lld\n",
               (long long)r->progress.begun, (long long)r->c.run.steps);
    if (r->stop)
        iz_signals_catch(r->stop);
    r->coll->phase = NULL;
    s = iz_run_train(r);
    if (!r->o.replay)
        return iz_run_finish(r, s);
    return s ? s : iz_replay_end(r);
}

static void close_all(struct run *r)
{
    iz_box_close();
    iz_metrics_close(&r->metrics);
    iz_chain_close(r);
    iz_ckpt_save_close(&r->saver);
    iz_train_close(&r->e);
    iz_data_close(&r->data);
    iz_plan_clear(&r->plan);
    iz_cores_close(&r->cores);
    iz_model_close(&r->model);
    free(r->model_text);
    free(r->model_before);
    free(r->from.identity);
    free(r->facts);
    free(r->identity);
    free(r->changes);
    if (r->claim > 0)
        close(r->claim);
}

static int run_on(struct run *r)
{
    r->coll->timeout_s = 300; /* until the config is known */
    r->coll->phase = "the start of the run";
    iz_progress_rank(r->coll->rank, r->coll->size);
    int s = run_run_all(r);
    close_all(r);
    return s;
}

int iz_run_on(struct iz_coll *coll, const struct iz_program *p,
              const char *config, char **set, int n)
{
    struct run r = {.p = p, .coll = coll};
    r.o = (struct iz_options){.path = config, .set = set, .n_set = n};
    iz_environment_keep();
    iz_signals_open();
    return run_on(&r);
}

int iz_run(int argc, char **argv, const struct iz_program *p)
{
    struct run r = {.p = p, .stop = &stop_signal};
    iz_environment_keep();
    iz_signals_open();
    int s = iz_options_read(&r.o, argc, argv);
    if (!s && !r.o.plan && (r.o.ranks || r.o.machine)) {
        fprintf(stderr, "izar: --ranks and --machine only go with --plan; "
                        "start ranks with mpirun -np\n");
        s = -EINVAL;
    }
    if (s || iz_options_told(&r.o, p, argv[0])) {
        iz_options_clear(&r.o);
        return s ? 2 : 0;
    }
    s = iz_coll_open(&r.coll, &argc, &argv);
    if (!s)
        s = run_on(&r);
    iz_coll_close(&r.coll);
    iz_options_clear(&r.o);
    if (fflush(stdout) || ferror(stdout))
        fprintf(stderr, "izar: lines of the standard output were lost\n");
    return s ? 1 : 0;
}
