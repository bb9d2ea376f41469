/* SPDX-License-Identifier: Apache-2.0 */
/* How a rank waits: the clock, naps that grow, the time-out, ranks of this host
 * whose process has ended (nobody else tells of them), and the hash of what all
 * ranks wait for together. */
#define _GNU_SOURCE /* syscall */

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "codelets/base/clock.h"
#include "codelets/base/die.h"
#include "codelets/base/mix.h"
#include "runtime/comm/state.h"

/* How long a rank is gone before others say so: its own last words, or the
 * launcher, come first. */
enum { LOST_S = 1 };

enum {
    PATIENCE = 12
}; /* time-outs of a wait for another host's disk, or for
     that of a rank with process numbers of its own */

#define SPIN_S 20e-6 /* what waking takes */
#define LOOK_S 0.1   /* of a wait, before others are looked for */

/* Containers of one host may number their processes each in its own way. */
static uint64_t pid_space(void)
{
    struct stat s;
    return stat("/proc/self/ns/pid", &s) != 0 ? 0 : (uint64_t)s.st_ino;
}

void iz_coll_gone_show(struct iz_coll *c)
{
    c->state->seat[c->rank]->pid = getpid();
    c->state->seat[c->rank]->pid_space = pid_space();
}

bool iz_coll_is_numbered(const struct iz_coll *c, int r)
{
    struct iz_seat *const *seat = c->state->seat;
    return r != c->rank && seat[r] && seat[r]->pid_space != 0 &&
           seat[r]->pid_space == seat[c->rank]->pid_space;
}

/* A descriptor per local rank, which becomes readable when its process ends,
 * whether its parent has taken notice or not.  Without one (an old kernel, no
 * memory) the number of the process is asked for. */
void iz_coll_gone_watch(struct iz_coll *c)
{
    struct iz_coll_state *s = c->state;
    s->ends = malloc((size_t)c->size * sizeof(*s->ends));
    for (int r = 0; s->ends && r < c->size; r++)
        s->ends[r] =
            iz_coll_is_numbered(c, r)
                ? (int)syscall(SYS_pidfd_open, (pid_t)s->seat[r]->pid, 0)
                : -1;
    s->seated = true;
}

void iz_coll_gone_close(struct iz_coll *c)
{
    struct iz_coll_state *s = c->state;
    for (int r = 0; s->ends && r < c->size; r++)
        if (s->ends[r] >= 0)
            close(s->ends[r]);
    free(s->ends);
    s->ends = NULL;
}

static bool has_ended(const struct iz_coll *c, int r)
{
    const struct iz_coll_state *s = c->state;
    struct pollfd end = {.fd = s->ends ? s->ends[r] : -1, .events = POLLIN};
    if (end.fd >= 0)
        return poll(&end, 1, 0) > 0;
    return iz_coll_is_numbered(c, r) && kill((pid_t)s->seat[r]->pid, 0) != 0 &&
           errno == ESRCH;
}

/* A rank of this host whose process has ended, or -1. */
static int gone_rank(const struct iz_coll *c)
{
    for (int r = 0; c->state->seated && r < c->size; r++)
        if (has_ended(c, r))
            return r;
    return -1;
}

/* A wait looks at the clock many times a second.  Longer than this between two
 * looks, the process was stopped itself, by a batch system or with the whole
 * machine, and that says nothing about others. */
#define BLINK_NS INT64_C(1000000000)

double iz_coll_now(void)
{
    static _Atomic int64_t seen_ns, stopped_ns;
    int64_t now = iz_clock_ns(), turn = now - atomic_exchange(&seen_ns, now);
    if (turn > BLINK_NS)
        stopped_ns += turn - BLINK_NS;
    return 1e-9 * (double)(now - stopped_ns);
}

static void check_all_there(const struct iz_coll *c, double now,
                            const char *what)
{
    _Atomic double *since = &c->state->lost_s;
    int lost = gone_rank(c);
    if (lost < 0)
        return;
    if (*since == 0)
        *since = now;
    else if (now - *since > LOST_S)
        iz_die_stuck("%s: rank %d is gone", what, lost);
}

/* By a signal or a debugger. */
static bool is_stopped(const struct iz_coll *c, int r)
{
    char path[64], text[512];
    if (!iz_coll_is_numbered(c, r))
        return false;
    snprintf(path, sizeof(path), "/proc/%lld/stat",
             (long long)c->state->seat[r]->pid);
    FILE *f = fopen(path, "r");
    size_t n = f ? fread(text, 1, sizeof(text) - 1, f) : 0;
    if (f)
        fclose(f);
    text[n] = 0;
    const char *name_end = strrchr(text, ')');
    return name_end && (name_end[2] == 'T' || name_end[2] == 't');
}

/* Of the first two ranks of a host one may be the slow one. */
static void tell_wait(const struct iz_coll *c, double now, double s,
                      const char *phase)
{
    _Atomic double *aux = &c->state->told_s;
    if (c->local_rank > 1 || now - *aux < c->timeout_s)
        return;
    *aux = now;
    fprintf(stderr,
            "izar: rank %d: has waited %.0f s for the other ranks in %s, and "
            "goes on: is a disk slow?\n",
            c->rank, s, phase);
}

/* The time-out is over in a phase in which disks are used. */
static void wait_for_disks(const struct iz_coll *c, double now, double s,
                           const char *phase)
{
    bool all_seen = c->state->seated; /* whoever ends will be noticed */
    for (int r = 0; c->state->seated && r < c->size; r++) {
        if (is_stopped(c, r))
            iz_die_stuck("%s: rank %d is stopped", phase, r);
        all_seen = all_seen && (r == c->rank || iz_coll_is_numbered(c, r));
    }
    if (!all_seen && s > PATIENCE * c->timeout_s)
        iz_die_stuck(
            "waited %g s for the other ranks in %s: is one dead or stopped, "
            "or its disk very slow? run.comm_timeout_s, %d times of which "
            "this is, allows for more",
            PATIENCE * c->timeout_s, phase, PATIENCE);
    tell_wait(c, now, s, phase);
}

/* phase: one in which disks are used, or NULL. */
static double coll_waited(const struct iz_coll *c, double start_s,
                          const char *what, const char *phase)
{
    double now = iz_coll_now(), s = now - start_s;
    bool late = c->timeout_s > 0 && s > c->timeout_s;
    if (late && !phase)
        iz_die_stuck("waited %g s for %s: is another rank dead or stopped?",
                     c->timeout_s, what);
    if (late)
        wait_for_disks(c, now, s, phase);
    if (s > LOOK_S)
        check_all_there(c, now, what);
    return s;
}

double iz_coll_waited(const struct iz_coll *c, double start_s, const char *what)
{
    return coll_waited(c, start_s, what, c->phase);
}

double iz_coll_called(const struct iz_coll *c, double start_s, const char *what)
{
    return coll_waited(c, start_s, what, NULL);
}

/* A sixteenth of the wait so far, so that it ends late by no more than that. */
long iz_coll_nap_ns(double waited_s)
{
    double ns = waited_s * 1e9 / 16;
    if (waited_s < SPIN_S)
        return 0;
    return ns < 20e3 ? 20000 : ns > 1e6 ? 1000000 : (long)ns;
}

/* Between two polls: nothing for as long as a message takes within a host, then
 * sleep.  Not sched_yield: called over and over, it moves the thread so far
 * back in the fair scheduler of recent kernels that threads beside it starve.
 */
void iz_coll_pause(const struct iz_coll *c, double start_s, const char *what)
{
    long ns = iz_coll_nap_ns(iz_coll_waited(c, start_s, what));
    if (ns)
        nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
}

void iz_coll_begin(struct iz_coll *c, enum iz_coll_kind kind, int64_t bytes,
                   const char *what)
{
    uint64_t h = iz_mix(c->order_hash + IZ_GOLDEN * (uint64_t)(kind + 1));
    h = iz_mix(h + (uint64_t)bytes);
    c->order_hash = iz_mix_text(h, what);
    struct iz_coll_last *l = c->state ? &c->state->last : NULL;
    if (!l)
        return;
    l->open = false;
    l->kind = kind;
    l->bytes = bytes;
    l->begin_ns = iz_clock_ns();
    l->number++;
    strncpy(l->what, what, sizeof(l->what) - 1);
}

void iz_coll_opens(struct iz_coll *c, bool open)
{
    c->state->last.open = open;
}

void iz_coll_count(struct iz_coll *c, int64_t to_others, int64_t from_others)
{
    c->sent_bytes += to_others;
    c->received_bytes += from_others;
}

void iz_coll_note(struct iz_coll *c, const char *what, int64_t bytes,
                  int64_t sent_bytes, int64_t received_bytes)
{
    iz_coll_begin(c, IZ_COLL_NOTE, bytes, what);
    iz_coll_count(c, sent_bytes, received_bytes);
}
