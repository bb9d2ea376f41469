/* SPDX-License-Identifier: Apache-2.0 */
/* The black box; see box.h.  From a signal's handler nothing is called that
 * takes a lock or memory: what needs them is made ready before. */
#include "runtime/report/box.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "codelets/base/die.h"
#include "codelets/base/sink.h"
#include "runtime/base/text.h"
#include "runtime/engine/trace.h"

enum { PATH = IZ_PATH_MAX + 64 };

static struct {
    _Atomic(const struct iz_engine *) e;
    char path[PATH], tmp[PATH + 8];
    char *about; /* the run's description */
    int64_t begin_ns;
    _Atomic bool ends; /* the last one is written, or being written */
    atomic_flag busy;
} box = {.busy = ATOMIC_FLAG_INIT};

/* QUIT is the one after which a run goes on. */
static struct fatal {
    int number;
    const char *name;
    struct sigaction old;
} signals[] = {{.number = SIGQUIT, .name = "SIGQUIT"},
               {.number = SIGSEGV, .name = "SIGSEGV"},
               {.number = SIGBUS, .name = "SIGBUS"},
               {.number = SIGFPE, .name = "SIGFPE"},
               {.number = SIGABRT, .name = "SIGABRT"},
               {.number = SIGILL, .name = "SIGILL"}};
enum { SIGNALS = sizeof(signals) / sizeof(*signals) };

/* Its description has the bytes by class, which are those that were taken. */
static void print_box(const struct iz_engine *e, struct iz_sink *s,
                      const char *why)
{
    iz_sink_text(s, "{\"about\": ");
    iz_sink_text(s, box.about);
    iz_sink_string(s, "reason", why);
    iz_sink_number(s, "pid", getpid());
    iz_sink_number(s, "time", time(NULL));
    iz_sink_us(s, "now_us", iz_clock_ns() - box.begin_ns);
    iz_sink_number(s, "step", e->step);
    iz_coll_box(e->coll, s, box.begin_ns);
    iz_graph_box(e->graph, s, box.begin_ns);
    iz_sink_text(s, "}\n");
    iz_sink_flush(s);
}

/* Returns the file's name.  NULL: there is none, or another thread is at it. */
static const char *write_box(const char *why)
{
    const struct iz_engine *e = box.e;
    struct iz_sink s;
    if (!e || atomic_flag_test_and_set(&box.busy))
        return NULL;
    s.fd = open(box.tmp, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    s.n = 0;
    s.failed = s.fd < 0;
    if (s.fd >= 0)
        print_box(e, &s, why);
    if (s.fd >= 0)
        close(s.fd);
    bool good = !s.failed && rename(box.tmp, box.path) == 0;
    iz_coll_boxes(e->coll, -1);
    atomic_flag_clear(&box.busy);
    return good ? box.path : NULL;
}

/* The last one of this process; the other ranks write theirs too. */
static const char *last_box(const char *why)
{
    const struct iz_engine *e = box.e;
    if (!e || atomic_exchange(&box.ends, true))
        return NULL;
    const char *path = write_box(why);
    iz_coll_ask_boxes(e->coll);
    return path;
}

static void tell(const struct iz_engine *e, const char *name, const char *path,
                 const char *more)
{
    struct iz_sink s = {.fd = STDERR_FILENO};
    iz_sink_text(&s, "\nizar: ");
    if (e->plan.ranks > 1) {
        iz_sink_text(&s, "rank ");
        iz_sink_number(&s, NULL, e->plan.rank);
        iz_sink_text(&s, ": ");
    }
    iz_sink_text(&s, name);
    iz_sink_text(&s, " (");
    iz_sink_text(&s, path);
    iz_sink_text(&s, more);
    iz_sink_flush(&s);
}

/* A rank that asks has the word itself. */
static void on_quit(const char *name, pid_t from)
{
    int kept = errno;
    const struct iz_engine *e = box.e;
    bool asked = e && iz_coll_is_rank(e->coll, from);
    const char *path =
        box.ends ? NULL : write_box(asked ? "another rank ends the run" : name);
    if (path && !asked)
        tell(e, name, path, "): goes on\n");
    errno = kept;
}

/* What was to be done before is done when the handler returns. */
static void on_fatal(struct fatal *f)
{
    const struct iz_engine *e = box.e;
    const char *path = last_box(f->name);
    if (path)
        tell(e, f->name, path, ")\n");
    sigaction(f->number, &f->old, NULL);
    raise(f->number);
}

static void on_box_signal(int number, siginfo_t *info, void *context)
{
    struct fatal *f = signals;
    while (f->number != number)
        f++;
    if (number == SIGQUIT)
        on_quit(f->name, info->si_pid);
    else
        on_fatal(f);
}

void iz_box_open(const struct iz_engine *e)
{
    struct sigaction a = {.sa_sigaction = on_box_signal,
                          .sa_flags = SA_RESTART | SA_SIGINFO};
    struct iz_text t;
    snprintf(box.path, PATH, "%s/stuck-rank%d.json", e->config->run.output,
             e->plan.rank);
    snprintf(box.tmp, sizeof(box.tmp), "%s.tmp", box.path);
    box.begin_ns = iz_clock_ns();
    iz_trace_describe(e, iz_text_open(&t), e->step, box.begin_ns);
    box.about = iz_text_close(&t);
    box.e = e;
    iz_die_set_box(last_box);
    sigemptyset(&a.sa_mask);
    for (int i = 0; i < SIGNALS; i++)
        sigaction(signals[i].number, &a, &signals[i].old);
    iz_coll_boxes(e->coll, 1);
}

void iz_box_close(void)
{
    const struct iz_engine *e = box.e;
    if (!e)
        return;
    iz_coll_boxes(e->coll, 0);
    for (int i = 0; i < SIGNALS; i++)
        sigaction(signals[i].number, &signals[i].old, NULL);
    iz_die_set_box(NULL);
    box.e = NULL;
    free(box.about);
}
