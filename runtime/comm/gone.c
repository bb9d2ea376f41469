/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks of this host whose process has ended: nobody else tells of them. */
#define _GNU_SOURCE /* syscall */

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "runtime/comm/state.h"

/* Containers of one host may number their processes each in its own way. */
static uint64_t pid_space(void)
{
    struct stat s;

    return stat("/proc/self/ns/pid", &s) != 0 ? 0 : (uint64_t)s.st_ino;
}

void iz_gone_show(struct iz_coll *c)
{
    struct iz_seat *own = c->state->seat[c->rank];

    own->pid = getpid();
    own->pid_space = pid_space();
}

/* A descriptor per near rank, which becomes readable when its process ends,
 * whether its parent has taken notice or not.  Without one (an old kernel, no
 * memory) the number of the process is asked for. */
void iz_gone_watch(struct iz_coll *c)
{
    struct iz_coll_state *s = c->state;
    uint64_t here = s->seat[c->rank]->pid_space;

    s->ends = malloc((size_t)c->size * sizeof(*s->ends));
    for (int r = 0; s->ends && r < c->size; r++) {
        bool near = r != c->rank && s->seat[r] && here != 0 &&
                    s->seat[r]->pid_space == here;

        s->ends[r] =
            near ? (int)syscall(SYS_pidfd_open, (pid_t)s->seat[r]->pid, 0) : -1;
    }
    s->seated = true;
}

void iz_gone_close(struct iz_coll *c)
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
    struct pollfd end = {.fd = !s->ends ? -1 : s->ends[r], .events = POLLIN};

    if (end.fd >= 0)
        return poll(&end, 1, 0) > 0;
    return s->seat[r]->pid_space != 0 &&
           s->seat[r]->pid_space == s->seat[c->rank]->pid_space &&
           kill((pid_t)s->seat[r]->pid, 0) != 0 && errno == ESRCH;
}

int iz_gone_rank(const struct iz_coll *c)
{
    const struct iz_coll_state *s = c->state;

    for (int r = 0; s->seated && r < c->size; r++)
        if (r != c->rank && s->seat[r] && has_ended(c, r))
            return r;
    return -1;
}
