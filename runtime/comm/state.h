/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of the collectives share; nobody else includes it.  Each calls
 * only those before it: wait.c waits and sees that a rank of this host has
 * ended, mpi.c sends messages, local.c reads the memory of ranks of the same
 * host, open.c starts and ends all that, gather.c moves buffers, reduce.c sums
 * them. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "codelets/base/futex.h"
#include "runtime/comm/coll.h"

/* ---- wait.c ---- */

/* Writes into its seat which process this rank is. */
void iz_coll_gone_show(struct iz_coll *c);
/* From now on ends of the others' processes are noticed; the seats are filled
 * in. */
void iz_coll_gone_watch(struct iz_coll *c);
/* After the last collective. */
void iz_coll_gone_close(struct iz_coll *c);
/* Whether r is another rank whose process this one could number. */
bool iz_coll_is_numbered(const struct iz_coll *c, int r);

enum iz_coll_kind {
    IZ_COLL_ALL_GATHER,
    IZ_COLL_REDUCE_SCATTER,
    IZ_COLL_REFRESH,
    IZ_COLL_EXCHANGE,
    IZ_COLL_DOUBLES,
    IZ_COLL_BARRIER,
    IZ_COLL_BROADCAST,
    IZ_COLL_ALL_OK,
    IZ_COLL_NOTE
};

/* Every collective starts with this. */
void iz_coll_begin(struct iz_coll *c, enum iz_coll_kind kind, int64_t bytes,
                   const char *what);
/* From here to there it may wait. */
void iz_coll_opens(struct iz_coll *c, bool open);
/* What others have in the end of this rank's and it of theirs that they did not
 * have, in bytes, whatever the way. */
void iz_coll_count(struct iz_coll *c, int64_t to_others, int64_t from_others);

/* One turn of a wait for a remote rank that began at start_s (iz_coll_now):
 * naps, longer with time, and ends the job after the time-out, or when a rank
 * of this host is gone. */
void iz_coll_pause(const struct iz_coll *c, double start_s, const char *what);

/* How long the next nap is in a wait that has lasted so long; 0: go on looking.
 */
long iz_coll_nap_ns(double waited_s);

/* ---- mpi.c ---- */

/* One turn of a wait for a local rank, which wakes this one: `seen` is what
 * iz_futex_look(f) gave before what is waited for was missing.  Lets messages
 * go on meanwhile: a remote rank may wait for one of this rank's before it can
 * send what the local rank waits for. */
void iz_coll_sleep(const struct iz_coll *c, double start_s, const char *what,
                   struct iz_futex *f, uint32_t seen);

/* The messages of one collective: MPI_Isend and MPI_Irecv of just these bytes
 * with one tag, in the order of the calls.  Of n fragments that are in flight
 * at the same time number k is in set k % n of the requests; sums of groups of
 * ranks have as many further ones. */
enum { IZ_FLIGHT_DEPTH = 4, IZ_FLIGHT_SETS = 2 * IZ_FLIGHT_DEPTH };
struct iz_flight {
    struct iz_coll *c;
    const char *what;
    int n[IZ_FLIGHT_SETS];
};

void iz_flight_open(struct iz_coll *c);
void iz_flight_close(struct iz_coll *c);
void iz_flight_recv(struct iz_flight *f, int set, void *p, int64_t bytes,
                    int from);
void iz_flight_send(struct iz_flight *f, int set, const void *p, int64_t bytes,
                    int to);
void iz_flight_wait(struct iz_flight *f, int set);

/* ---- local.c ---- */

/* Of each rank, in memory that all ranks of its host see. */
struct iz_seat {
    struct iz_futex moved; /* one of the counters has */
    _Atomic uint64_t at;   /* number of the collective that `full` is for */
    _Atomic uint64_t fragments; /* of it: those that have arrived or been
                                   summed in `full`: others may read them */
    _Atomic uint64_t left; /* the last collective that it read others for */
    uint64_t full;         /* address in that process */
    int64_t pid;
    /* In which that number means this process; 0: unknown. */
    uint64_t pid_space;
    _Atomic int boxes; /* 0: it can write none; else 1 and those it has */
};

/* Finds out whether this rank can read all others of its host; seats and pids
 * are filled in.  False with c->state->why set. */
bool iz_local_try(struct iz_coll *c);
/* Takes back what iz_local_try allowed to others. */
void iz_local_forbid(void);
/* From now on the others may read `full` as this rank's. */
void iz_local_enter(struct iz_coll *c, const void *full);
/* Ends when all of the host have read what they need. */
void iz_local_leave(struct iz_coll *c, const char *what);
/* This rank's fragments [0, n) have arrived, or their sums are formed. */
void iz_local_announce(struct iz_coll *c, int64_t n);
/* Copies bytes of rank r's `full`, once it has announced so many fragments;
 * with 0, once it has entered the same collective, and what it had written
 * before is there. */
void iz_local_read(struct iz_coll *c, int r, void *dst, int64_t at,
                   int64_t bytes, int64_t fragments, const char *what);

/* ---- all ---- */

/* The last one begun. */
struct iz_coll_last {
    char what[64];
    enum iz_coll_kind kind;
    int64_t number, bytes, begin_ns; /* number: all ranks count alike */
    _Atomic bool open;
};

struct iz_coll_state {
    void *requests;      /* mpi.c's */
    const void **addend; /* size: what is summed, in rank order */

    int *host, *index;     /* of each rank: first rank of its host, position */
    struct iz_seat **seat; /* of each rank of this host; NULL: other hosts */
    bool seated;           /* seats tell processes */
    int *ends; /* of each rank of this host: a pidfd, or -1; or NULL */
    _Atomic double lost_s; /* when a rank was first seen to be gone, 0: none */
    _Atomic double told_s; /* when a long wait was last told of */
    bool can_read_local, reads_local; /* memory of the host's ranks */
    char why[160];                    /* why it cannot be */
    uint64_t number;                  /* of collectives that read memory */
    struct iz_coll_last last;
};

/* Whether the memory of rank r is read; other ranks get messages. */
static inline bool iz_coll_is_local(const struct iz_coll *c, int r)
{
    return c->state->reads_local && c->state->seat[r];
}
