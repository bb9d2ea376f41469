/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL, the only file that includes nccl.h; see nccl.h.  The communicator
 * is set up over MPI.
 *
 * A peer that dies or stops may show in three ways.  NCCL sees a broken
 * connection to another host and says so when asked (ncclCommGetAsyncError).
 * Between GPUs of one host there is no connection: a kernel waits for ever and
 * nothing is said.  And calls of the host (the first ones connect) may not
 * return either.  Therefore a thread of its own watches every call, from
 * ncclCommInitRank to ncclCommDestroy, and ends the job without a word to NCCL:
 * ncclCommAbort may wait for what is stuck, and kernels end with the process.
 */
#include "runtime/comm/nccl.h"

#include <cuda_runtime_api.h>
#include <errno.h>
#include <nccl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "codelets/base/die.h"
#include "codelets/base/futex.h"
#include "codelets/base/take.h"
#include "codelets/gpu/device.h"

#define WATCH_NS 100000000 /* between two looks of the watching thread */

struct iz_nccl {
    struct iz_coll *coll;
    ncclComm_t comm;
    pthread_t watcher;
    bool watched;
    struct iz_futex end; /* of watching; one change */
    /* The call under way, since when (iz_coll_now; 0: none is). */
    _Atomic(const char *) verb, what;
    _Atomic double since_s;
    /* The watching thread's own: the call that it saw last, and when. */
    double seen_s, looked_s;
};

bool iz_nccl_built(void)
{
    return true;
}

/* ---- watching ----------------------------------------------------------- */

/* A call is judged only if the look before has seen it too, a moment ago: after
 * a process was stopped and goes on, a call that has ended meanwhile is given
 * the time to say so. */
static void look(struct iz_nccl *n)
{
    char text[256];
    double since = n->since_s, now = iz_coll_now();
    bool again = since == n->seen_s && now - n->looked_s < 5e-9 * WATCH_NS;
    n->seen_s = since;
    n->looked_s = now;
    if (since == 0 || !again)
        return;
    snprintf(text, sizeof(text), "%s (%s through NCCL)", n->what, n->verb);
    iz_coll_called(n->coll, since, text);
}

static void *watch(void *arg)
{
    struct iz_nccl *n = arg;
    while (!iz_futex_look(&n->end)) {
        look(n);
        iz_futex_sleep(&n->end, 0, WATCH_NS);
    }
    return NULL;
}

/* The strings live at least as long as the communicator. */
static void begin(struct iz_nccl *n, const char *verb, const char *what)
{
    n->verb = verb;
    n->what = what;
    n->since_s = iz_coll_now();
}

static void done(struct iz_nccl *n)
{
    n->since_s = 0;
}

static void comm_nccl_check(struct iz_nccl *n, ncclResult_t r)
{
    if (r == ncclSuccess)
        return;
    const char *more = ncclGetLastError(n->comm);
    bool said = more && more[0];
    iz_die("%s (%s): NCCL: %s%s%s", n->what, n->verb, ncclGetErrorString(r),
           said ? ": " : "", said ? more : "");
}

/* The stream is asked, never waited for in CUDA. */
static void wait_done(struct iz_nccl *n, cudaStream_t stream)
{
    for (int turn = 0; !iz_device_done(stream); turn++) {
        ncclResult_t r = ncclSuccess;
        comm_nccl_check(n, ncclCommGetAsyncError(n->comm, &r));
        comm_nccl_check(n, r);
        iz_device_nap(turn);
    }
    done(n);
}

/* ---- begin and end ------------------------------------------------------ */

static int start_watching(struct iz_nccl *n)
{
    int r = pthread_create(&n->watcher, NULL, watch, n);
    n->watched = r == 0;
    if (r)
        fprintf(stderr, "izar: no thread that watches NCCL\n");
    return -r;
}

int iz_nccl_open(struct iz_nccl **out, struct iz_coll *c)
{
    struct iz_nccl *n = *out = iz_take(1, sizeof(*n), "NCCL");
    ncclUniqueId id;
    ncclResult_t r = ncclSuccess;
    n->coll = c;
    int err = start_watching(n);
    if (!err && c->rank == 0)
        r = ncclGetUniqueId(&id);
    if (r != ncclSuccess) {
        fprintf(stderr, "izar: NCCL: %s\n", ncclGetErrorString(r));
        err = -EIO;
    }
    if (!iz_coll_all_ok(c, !err))
        return err ? err : -EIO;
    iz_coll_broadcast(c, &id, sizeof(id), 0, "NCCL's id");
    begin(n, "connecting", "the communicator");
    comm_nccl_check(n, ncclCommInitRank(&n->comm, c->size, id, c->rank));
    done(n);
    return 0;
}

void iz_nccl_close(struct iz_nccl **n)
{
    if (*n && (*n)->comm) {
        begin(*n, "closing", "the communicator");
        ncclCommDestroy((*n)->comm);
        done(*n);
    }
    if (*n && (*n)->watched) {
        iz_futex_wake(&(*n)->end);
        pthread_join((*n)->watcher, NULL);
    }
    free(*n);
    *n = NULL;
}

/* ---- collectives -------------------------------------------------------- */

/* Between ncclGroupStart and ncclGroupEnd. */
static void send_to(struct iz_nccl *n, void *stream, const void *p,
                    int64_t bytes, int rank)
{
    const struct iz_coll *c = n->coll;
    if (iz_coll_host(c, rank) != iz_coll_host(c, c->rank))
        n->coll->far_bytes += bytes;
    comm_nccl_check(
        n, ncclSend(p, (size_t)bytes, ncclUint8, rank, n->comm, stream));
}

static void recv_from(struct iz_nccl *n, void *stream, void *p, int64_t bytes,
                      int rank)
{
    comm_nccl_check(
        n, ncclRecv(p, (size_t)bytes, ncclUint8, rank, n->comm, stream));
}

void iz_nccl_all_gather(struct iz_nccl *n, void *stream, void *full,
                        int64_t shard_bytes, const char *what)
{
    char *mine = (char *)full + n->coll->rank * shard_bytes;
    begin(n, "all-gather", what);
    comm_nccl_check(n, ncclAllGather(mine, full, (size_t)shard_bytes, ncclUint8,
                                     n->comm, stream));
    wait_done(n, stream);
}

void iz_nccl_send_recv(struct iz_nccl *n, void *stream, const void *from,
                       void *to, iz_way_of way, const void *arg, int items,
                       const char *verb, const char *what)
{
    const int self = n->coll->rank, size = n->coll->size;
    begin(n, verb, what);
    comm_nccl_check(n, ncclGroupStart());
    for (int k = 1; k < size; k++)
        for (int i = 0; i < items; i++) {
            int taker = (self + k) % size, giver = (self + size - k) % size;
            struct iz_way out = way(arg, i, self, taker);
            struct iz_way in = way(arg, i, giver, self);
            if (out.bytes)
                send_to(n, stream, (const char *)from + out.from, out.bytes,
                        taker);
            if (in.bytes)
                recv_from(n, stream, (char *)to + in.to, in.bytes, giver);
        }
    comm_nccl_check(n, ncclGroupEnd());
    wait_done(n, stream);
}
