/* SPDX-License-Identifier: Apache-2.0 */
/* How a rank waits: the clock, naps that grow, the time-out, ranks that are
 * gone, and the hash of what all ranks wait for together. */
#include <time.h>

#include "codelets/base/clock.h"
#include "codelets/base/die.h"
#include "codelets/base/mix.h"
#include "runtime/comm/state.h"

/* How long a rank is gone before others say so: its own last words, or the
 * launcher, come first. */
enum { LOST_S = 1 };

#define SPIN_S 20e-6 /* what waking takes */
#define LOOK_S 0.1   /* of a wait, before others are looked for */

double iz_coll_now(void)
{
    return 1e-9 * (double)iz_now_ns();
}

static void check_all_there(const struct iz_coll *c, double now,
                            const char *what)
{
    _Atomic double *since = &c->state->lost_s;
    int lost = iz_gone_rank(c);

    if (lost < 0)
        return;
    if (*since == 0)
        *since = now;
    else if (now - *since > LOST_S)
        iz_die("%s: rank %d is gone", what, lost);
}

double iz_coll_waited(const struct iz_coll *c, double start_s, const char *what)
{
    double now = iz_coll_now(), s = now - start_s;

    if (c->timeout_s > 0 && s > c->timeout_s)
        iz_die("waited %g s for %s: is another rank dead or stopped?",
               c->timeout_s, what);
    if (s > LOOK_S)
        check_all_there(c, now, what);
    return s;
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
}

void iz_coll_note(struct iz_coll *c, const char *what, int64_t sent_bytes,
                  int64_t received_bytes)
{
    iz_coll_begin(c, IZ_COLL_NOTE, sent_bytes, what);
    c->sent_bytes += sent_bytes;
    c->received_bytes += received_bytes;
}
