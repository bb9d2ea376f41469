/* SPDX-License-Identifier: Apache-2.0 */
/* From the command line to the summary; see run.h. */
#include "runtime/run/run.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "codelets/base/clock.h"
#include "runtime/base/environment.h"
#include "runtime/base/progress.h"
#include "runtime/model/rules.h"
#include "runtime/run/state.h"
#include "runtime/step/train.h"

static _Atomic int stop_signal;

/* SIGUSR1 is a batch system's warning and never ends a run at once.  At a job's
 * time limit Slurm sends SIGTERM twice within 20 ms, and launchers hand a
 * terminal's SIGINT on: repeated so soon, a signal counts once.  A person
 * presses Ctrl-C twice in less than two seconds. */
static void on_signal(int number)
{
    static const char text[] =
        "\nizar: finishing the step; once more stops at once\n";
    static _Atomic int64_t first_ns;
    int64_t soon_ns = number == SIGINT ? 200000000 : 2000000000;
    int64_t now = iz_clock_ns(), first = 0;
    if (number != SIGUSR1 &&
        !atomic_compare_exchange_strong(&first_ns, &first, now)) {
        if (now - first > soon_ns)
            _exit(128 + number);
        return;
    }
    if (stop_signal)
        return;
    stop_signal = number;
    if (write(STDERR_FILENO, text, sizeof(text) - 1) < 0)
        return;
}

/* A mapped file has become shorter, or its disk fails. */
static void on_lost_page(int number)
{
    static const char text[] = "\nizar: a file of data.path or model.import "
                               "was cut, or cannot be read any more (SIGBUS)\n";
    if (write(STDERR_FILENO, text, sizeof(text) - 1) >= 0)
        _exit(1);
    _exit(128 + number);
}

/* What a write cannot do is an error of that write: a pipe without a reader, a
 * file beyond the limit of its size. */
static void ignore_signals(void)
{
    struct sigaction a = {.sa_handler = on_lost_page};
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
    sigaction(SIGBUS, &a, NULL);
}

static void catch_signals(void)
{
    struct sigaction a = {.sa_handler = on_signal, .sa_flags = SA_RESTART};
    sigemptyset(&a.sa_mask);
    sigaction(SIGINT, &a, NULL);
    sigaction(SIGTERM, &a, NULL);
    sigaction(SIGUSR1, &a, NULL);
}

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
    if (iz_run_first(r) && r->progress.begun >= r->c.run.steps)
        printf("nothing left to train: step %lld of %lld\n",
               (long long)r->progress.begun, (long long)r->c.run.steps);
    catch_signals();
    r->coll->phase = NULL;
    s = iz_run_train(r);
    return s ? s : iz_run_finish(r);
}

static void close_all(struct run *r)
{
    iz_metrics_close(&r->metrics);
    iz_save_close(&r->saver);
    iz_train_close(&r->e);
    iz_data_close(&r->data);
    iz_plan_clear(&r->plan);
    iz_cores_close(&r->cores);
    iz_model_close(&r->model);
    free(r->model_text);
    free(r->from.identity);
    free(r->facts);
    free(r->identity);
    free(r->changes);
    if (r->claim > 0)
        close(r->claim);
    iz_coll_close(&r->coll);
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
    bool text = r.o.help || r.o.help_markdown || r.o.version;
    if (!s && r.o.help)
        iz_options_help(p, argv[0]);
    else if (!s && r.o.help_markdown)
        iz_config_doc(&p->section, true, stdout);
    else if (!s && r.o.version)
        printf("izar %s\n", IZ_VERSION);
    if (s || text) {
        iz_options_clear(&r.o);
        return s ? 2 : 0;
    }
    s = iz_coll_open(&r.coll, &argc, &argv);
    if (!s) {
        ignore_signals();
        r.coll->timeout_s = 300; /* until the config is known */
        r.coll->phase = "the start of the run";
        iz_progress_rank(r.coll->rank, r.coll->size);
        s = run_run_all(&r);
    }
    if (r.coll)
        close_all(&r);
    iz_options_clear(&r.o);
    if (fflush(stdout) || ferror(stdout))
        fprintf(stderr, "izar: lines of the standard output were lost\n");
    return s ? 1 : 0;
}
