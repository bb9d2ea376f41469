/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/run/signals.h"

#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <unistd.h>

#include "codelets/base/build.h"
#include "codelets/base/clock.h"

/* A batch system's warnings never end a run at once.  At a job's time limit
 * Slurm sends SIGTERM twice within 20 ms, and launchers hand a terminal's
 * SIGINT on: repeated so soon, a signal counts once.  A person presses Ctrl-C
 * twice in less than two seconds.  SIGTERM is caught last (tests wait for it).
 */
static const struct {
    int number;
    bool warns;
    int64_t soon_ns;
} ends[] = {{SIGUSR1, true, 0},         {SIGUSR2, true, 0},
            {SIGXCPU, true, 0},         {SIGHUP, false, 2000000000},
            {SIGINT, false, 200000000}, {SIGTERM, false, 2000000000}};
enum { N_ENDS = sizeof(ends) / sizeof(*ends) };

static _Atomic int *stop_signal;
static bool ignored[N_ENDS]; /* at the start */

/* A constructor of UCX, which some builds of MPI link, takes SIGHUP. */
static void signals_see(void)
{
    struct sigaction old;
    for (int i = 0; i < N_ENDS; i++) {
        sigaction(ends[i].number, NULL, &old);
        ignored[i] = old.sa_handler == SIG_IGN;
    }
}

IZ_BEFORE_LIBRARIES(signals_see)

static int find(int number)
{
    int i = 0;
    while (ends[i].number != number)
        i++;
    return i;
}

static void on_early(int number)
{
    static const char text[] =
        "\nizar: a warning signal before step 0: there is nothing to save\n";
    ssize_t told = write(STDERR_FILENO, text, sizeof(text) - 1);
    _exit(told < 0 ? 1 : 128 + number);
}

static void on_signal(int number)
{
    static const char text[] =
        "\nizar: finishing the step; once more stops at once\n";
    static _Atomic int64_t first_ns;
    int i = find(number);
    int64_t now = iz_clock_ns(), first = 0;
    if (!ends[i].warns &&
        !atomic_compare_exchange_strong(&first_ns, &first, now)) {
        if (now - first > ends[i].soon_ns)
            _exit(128 + number);
        return;
    }
    if (*stop_signal)
        return;
    *stop_signal = number;
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

static void set_handler(int number, void (*handler)(int))
{
    struct sigaction a = {.sa_handler = handler, .sa_flags = SA_RESTART};
    sigemptyset(&a.sa_mask);
    sigaction(number, &a, NULL);
}

void iz_signals_open(void)
{
    for (int i = 0; i < N_ENDS; i++)
        set_handler(ends[i].number, ignored[i]      ? SIG_IGN
                                    : ends[i].warns ? on_early
                                                    : SIG_DFL);
    /* What a write cannot do is an error of that write: a pipe without a
     * reader, a file beyond the limit of its size. */
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
    set_handler(SIGBUS, on_lost_page);
}

/* nohup and shells have a program ignore what is not meant for it.  A shell
 * does so with SIGINT of what it starts with "&", which a user may well send
 * by name. */
void iz_signals_catch(_Atomic int *stop)
{
    stop_signal = stop;
    for (int i = 0; i < N_ENDS; i++)
        if (!ignored[i] || ends[i].number == SIGINT ||
            ends[i].number == SIGTERM)
            set_handler(ends[i].number, on_signal);
}
