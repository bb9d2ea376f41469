/* SPDX-License-Identifier: Apache-2.0 */
/* Ranks of one host read each other's buffers where they are, with one system
 * call and no copy on the way (process_vm_readv): a buffer needs no special
 * memory, so it keeps its large pages and its place in the plan.  Counters in a
 * few shared cache lines say when a buffer may be read. */
#define _GNU_SOURCE /* process_vm_readv */

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/uio.h>

#include "codelets/base/die.h"
#include "codelets/base/mix.h"
#include "runtime/comm/state.h"

/* Bytes read, or -1 with errno. */
static ssize_t read_memory(int64_t pid, void *dst, uint64_t src, int64_t bytes)
{
    struct iovec to = {dst, (size_t)bytes};
    struct iovec from = {(void *)(uintptr_t)src, (size_t)bytes};
    return process_vm_readv((pid_t)pid, &to, 1, &from, 1, 0);
}

/* What a rank shows to be read on trial. */
static uint64_t token(int rank)
{
    return iz_mix(IZ_GOLDEN * (uint64_t)(rank + 1));
}

static bool try_one(struct iz_coll *c, int r)
{
    const struct iz_seat *s = c->state->seat[r];
    uint64_t seen = 0;
    ssize_t n = read_memory(s->pid, &seen, s->full, sizeof(seen));
    if (n == (ssize_t)sizeof(seen) && seen == token(r))
        return true;
    snprintf(c->state->why, sizeof(c->state->why),
             "rank %d may not read the memory of rank %d: %s", c->rank, r,
             n < 0 ? strerror(errno) : "it is another process's");
    return false;
}

bool iz_local_try(struct iz_coll *c)
{
    static uint64_t own;
    struct iz_coll_state *s = c->state;
    bool ok = true;
    own = token(c->rank);
    memset(s->seat[c->rank], 0, sizeof(*s->seat[c->rank]));
    iz_coll_gone_show(c);
    s->seat[c->rank]->full = (uint64_t)(uintptr_t)&own;
    /* Where Yama restricts reading to parents; the other ranks are none. */
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    iz_coll_barrier(c, "memory that can be read");
    iz_coll_gone_watch(c);
    for (int r = 0; r < c->size && ok; r++)
        if (r != c->rank && s->seat[r])
            ok = try_one(c, r);
    iz_coll_barrier(c, "memory that was read");
    return ok;
}

void iz_local_forbid(void)
{
    prctl(PR_SET_PTRACER, 0, 0, 0, 0);
}

static struct iz_seat *own_seat(struct iz_coll *c)
{
    return c->state->seat[c->rank];
}

void iz_local_enter(struct iz_coll *c, const void *full)
{
    iz_coll_opens(c, true);
    struct iz_seat *s = own_seat(c);
    if (!c->state->reads_local)
        return;
    s->full = (uint64_t)(uintptr_t)full;
    atomic_store_explicit(&s->fragments, 0, memory_order_relaxed);
    atomic_store_explicit(&s->at, ++c->state->number, memory_order_release);
    iz_futex_wake(&s->moved);
}

void iz_local_announce(struct iz_coll *c, int64_t n)
{
    struct iz_seat *s = own_seat(c);
    if (!c->state->reads_local)
        return;
    atomic_store_explicit(&s->fragments, (uint64_t)n, memory_order_release);
    iz_futex_wake(&s->moved);
}

/* A counter in seat s never goes back as long as this rank has not left. */
static void wait_for(struct iz_coll *c, struct iz_seat *s,
                     const _Atomic uint64_t *counter, uint64_t value,
                     const char *what)
{
    double start = 0;
    for (;;) {
        uint32_t seen = iz_futex_look(&s->moved);
        if (atomic_load_explicit(counter, memory_order_acquire) >= value)
            return;
        if (start == 0)
            start = iz_coll_now();
        iz_coll_sleep(c, start, what, &s->moved, seen);
    }
}

void iz_local_leave(struct iz_coll *c, const char *what)
{
    struct iz_coll_state *s = c->state;
    struct iz_seat *own = own_seat(c);
    if (s->reads_local) {
        atomic_store_explicit(&own->left, s->number, memory_order_release);
        iz_futex_wake(&own->moved);
    }
    for (int r = 0; s->reads_local && r < c->size; r++)
        if (r != c->rank && iz_coll_is_local(c, r))
            wait_for(c, s->seat[r], &s->seat[r]->left, s->number, what);
    iz_coll_opens(c, false);
}

void iz_local_read(struct iz_coll *c, int r, void *dst, int64_t at,
                   int64_t bytes, int64_t fragments, const char *what)
{
    struct iz_seat *s = c->state->seat[r];
    wait_for(c, s, &s->at, c->state->number, what);
    wait_for(c, s, &s->fragments, (uint64_t)fragments, what);
    for (int64_t done = 0; done < bytes;) {
        ssize_t n = read_memory(s->pid, (char *)dst + done,
                                s->full + (uint64_t)(at + done), bytes - done);
        if (n < 0 && errno == ESRCH)
            iz_die_stuck("%s: rank %d is gone", what, r);
        if (n <= 0)
            iz_die("%s: reading the memory of rank %d: %s", what, r,
                   n < 0 ? strerror(errno) : "nothing comes");
        done += n;
    }
}
