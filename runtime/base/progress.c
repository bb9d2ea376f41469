/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/base/progress.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "codelets/base/clock.h"
#include "codelets/base/units.h"

#define SECOND INT64_C(1000000000)
#define LIVE_NS (SECOND / 5)
#define PLAIN_S 10
#define FIRST_NS (3 * SECOND / 2) /* until a terminal shows anything */

int iz_progress_columns(int fd, int ranks)
{
    struct winsize w;
    const char *live = getenv("IZ_LIVE");
    if (getenv("IZ_PLAIN") || !isatty(fd) || (ranks > 1 && !live))
        return 0;
    if (live && atoi(live) > 1)
        return atoi(live);
    return ioctl(fd, TIOCGWINSZ, &w) || !w.ws_col ? 80 : w.ws_col;
}

static struct {
    int rank, ranks;
} self = {0, 1};

void iz_progress_rank(int rank, int ranks)
{
    self.rank = rank;
    self.ranks = ranks;
}

void iz_progress_begin(struct iz_progress *p, const char *what, int64_t bytes)
{
    const char *every = getenv("IZ_PROGRESS");
    *p = (struct iz_progress){.what = what,
                              .total = bytes,
                              .quiet = self.rank != 0,
                              .begin_ns = iz_clock_ns(),
                              .shown = -1,
                              .showing = ATOMIC_FLAG_INIT};
    p->columns = iz_progress_columns(STDERR_FILENO, self.ranks);
    p->every_ns = (int64_t)((every ? atof(every) : PLAIN_S) * (double)SECOND);
    p->shown_ns = p->begin_ns;
    if (p->columns) {
        p->every_ns = LIVE_NS;
        p->shown_ns += FIRST_NS - LIVE_NS;
    }
}

static void progress_show(struct iz_progress *p, int64_t now)
{
    int64_t bytes = atomic_load(&p->done);
    double s = (double)(now - p->begin_ns) * 1e-9, done = (double)bytes;
    double left = done > 0 ? s * ((double)p->total - done) / done : 0;
    char line[256];
    snprintf(line, sizeof(line),
             "%s: %.0f of %.0f MiB  %.0f %%  %.0f MiB/s  %.0f s left", p->what,
             iz_units_mib(done), iz_units_mib(p->total),
             p->total ? 100 * done / (double)p->total : 100,
             s > 0 ? iz_units_mib(done) / s : 0, left);
    if (p->columns)
        fprintf(stderr, "\r\033[K%.*s", p->columns - 1, line);
    else
        fprintf(stderr, "%s\n", line);
    fflush(stderr);
    p->live = p->columns > 0;
    p->shown_ns = now;
    p->shown = bytes;
}

void iz_progress_add(struct iz_progress *p, int64_t bytes)
{
    p->done += bytes;
    if (p->quiet)
        return;
    int64_t now = iz_clock_ns();
    if (now - p->shown_ns < p->every_ns ||
        atomic_flag_test_and_set(&p->showing))
        return;
    progress_show(p, now);
    atomic_flag_clear(&p->showing);
}

void iz_progress_end(struct iz_progress *p)
{
    if (p->live)
        fprintf(stderr, "\r\033[K");
    else if (p->shown >= 0 && p->shown < p->done)
        progress_show(p, iz_clock_ns());
    p->live = false;
}
