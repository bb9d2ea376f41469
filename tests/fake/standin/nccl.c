/* SPDX-License-Identifier: Apache-2.0 */
/* Stand-in for NCCL between processes of one machine.  Every call is messages,
 * also a collective, which run in the thread of the call's stream; those of a
 * group move side by side.  They travel through boxes in memory that the ranks
 * share.  A rank that finds another call there than it has made itself ends
 * with a message that names both. */
#define _GNU_SOURCE
#include <nccl.h>

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "tests/fake/standin/standin.h"

enum { RANKS = 16, PIECE = 64 << 10, TIMEOUT_S = 200 };

enum verb { ALL_GATHER, SEND, RECV };
static const char *const verbs[] = {"ncclAllGather", "ncclSend", "ncclRecv"};

/* What both sides must agree on, but that one sends what the other receives. */
struct signature {
    enum verb verb;
    int64_t bytes;
};

/* One piece of a message from one rank to another. */
struct box {
    atomic_int full;
    struct signature now;
    char data[PIECE];
};

struct board {
    atomic_int arrived;
    struct {
        atomic_int pid, left, device;
    } seat[RANKS];
    struct box box[RANKS][RANKS]; /* [from][to] */
};

struct ncclComm {
    struct board *board;
    int rank, ranks, device;
    _Atomic int64_t issued, done; /* groups of calls, which run in order */
};

struct message {
    struct message *next;
    struct signature sig;
    int peer;
    bool leaves, done;
    const void *p; /* of a device */
    int64_t at;
};

/* What one ncclGroupEnd, or one call outside of a group, gives to a stream. */
struct group {
    struct ncclComm *comm;
    cudaStream_t stream;
    struct message *first, **end;
    int64_t number;
};

static _Thread_local struct group *open_group;

/* Between two looks at what others will change: leaves the processor, because
 * there are more ranks than processors, for a sixteenth of the wait so far. */
static void wait_more(const struct ncclComm *c, const char *what,
                      int64_t *waited_us)
{
    int64_t us = *waited_us / 16;
    us = us < 50 ? 50 : us > 1000 ? 1000 : us;
    if (*waited_us > TIMEOUT_S * INT64_C(1000000))
        iz_standin_die("rank %d of %d waits in %s for too long", c->rank,
                       c->ranks, what);
    nanosleep(&(struct timespec){.tv_nsec = us * 1000}, NULL);
    *waited_us += us;
}

/* ---- what goes wrong on purpose; see standin.h -------------------------- */

static void fault(const struct ncclComm *c, int64_t group)
{
    const char *s = getenv("IZ_STANDIN_FAULT");
    int rank, number;
    int64_t at;
    if (s && sscanf(s, "%d:%" SCNd64 ":%d", &rank, &at, &number) == 3 &&
        rank == c->rank && at == group)
        kill(getpid(), number);
}

static void block(const char *function)
{
    const char *s = getenv("IZ_STANDIN_BLOCKS");
    while (s && strcmp(s, function) == 0)
        pause();
}

/* ---- messages ----------------------------------------------------------- */

static void check(const struct ncclComm *c, const struct message *m,
                  const struct signature *theirs)
{
    const struct signature *s = &m->sig;
    if (theirs->verb != (s->verb == RECV ? SEND : s->verb) ||
        theirs->bytes != s->bytes)
        iz_standin_die("mismatch of NCCL calls: %s of %lld bytes on rank %d, "
                       "%s of %lld on rank %d",
                       verbs[s->verb], (long long)s->bytes, c->rank,
                       verbs[theirs->verb], (long long)theirs->bytes, m->peer);
}

/* Where the next piece of a message is; n: its bytes. */
static char *piece(const struct message *m, size_t *n)
{
    int64_t left = m->sig.bytes - m->at;
    *n = (size_t)(left < PIECE ? left : PIECE);
    return (char *)iz_standin_kernel(m->p, (size_t)m->sig.bytes) + m->at;
}

/* One piece leaves when the one before it has been taken; the message has left
 * when the last one was. */
static bool send_piece(const struct ncclComm *c, struct message *m)
{
    struct box *b = &c->board->box[c->rank][m->peer];
    size_t n;
    const char *from = piece(m, &n);
    if (b->full)
        return false;
    m->done = !n;
    if (m->done)
        return true;
    memcpy(b->data, from, n);
    b->now = m->sig;
    m->at += (int64_t)n;
    b->full = 1;
    return true;
}

static bool recv_piece(const struct ncclComm *c, struct message *m)
{
    struct box *b = &c->board->box[m->peer][c->rank];
    size_t n;
    char *to = piece(m, &n);
    if (!b->full)
        return false;
    check(c, m, &b->now);
    memcpy(to, b->data, n);
    m->at += (int64_t)n;
    m->done = m->at == m->sig.bytes;
    b->full = 0;
    return true;
}

/* Messages from one rank to another go one after the other. */
static bool has_turn(const struct group *g, const struct message *m)
{
    for (const struct message *j = g->first; j != m; j = j->next)
        if (!j->done && j->leaves == m->leaves && j->peer == m->peer)
            return false;
    return true;
}

/* One round over the messages of a group: how many are left, whether one has
 * moved. */
static int round_of(const struct group *g, bool *moved)
{
    int left = 0;
    for (struct message *m = g->first; m; m = m->next) {
        if (m->done)
            continue;
        if (has_turn(g, m))
            *moved |=
                m->leaves ? send_piece(g->comm, m) : recv_piece(g->comm, m);
        left += !m->done;
    }
    return left;
}

static void run_messages(const struct group *g)
{
    int64_t waited_us = 0;
    bool moved = false;
    while (round_of(g, &moved)) {
        if (moved)
            waited_us = 0;
        else
            wait_more(g->comm, verbs[g->first->sig.verb], &waited_us);
        moved = false;
    }
}

/* ---- groups ------------------------------------------------------------- */

static void group_free(struct group *g)
{
    struct message *next;
    for (struct message *m = g->first; m; m = next) {
        next = m->next;
        free(m);
    }
    free(g);
}

/* In the thread of the stream.  The groups of a communicator run in the order
 * of their submission, whatever their streams. */
static void run_group(void *arg)
{
    struct group *g = arg;
    struct ncclComm *c = g->comm;
    int64_t waited_us = 0;
    while (c->done != g->number)
        wait_more(c, "an earlier group of calls", &waited_us);
    fault(c, g->number);
    run_messages(g);
    group_free(g);
    c->done++;
}

static ncclResult_t group_submit(struct group *g)
{
    if (!g->first) {
        group_free(g);
        return ncclSuccess;
    }
    g->number = g->comm->issued++;
    return cudaLaunchHostFunc(g->stream, run_group, g) ? ncclUnhandledCudaError
                                                       : ncclSuccess;
}

static struct group *group_make(void)
{
    struct group *g = iz_standin_dup(&(struct group){0}, sizeof(*g));
    g->end = &g->first;
    return g;
}

ncclResult_t ncclGroupStart(void)
{
    open_group = group_make();
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    struct group *g = open_group;
    block("ncclGroupEnd");
    open_group = NULL;
    return group_submit(g);
}

/* ---- calls -------------------------------------------------------------- */

static void add(struct group *g, struct message m)
{
    *g->end = iz_standin_dup(&m, sizeof(m));
    g->end = &(*g->end)->next;
}

/* Between this rank and each from `peer` to `last`; of what it receives each
 * has a row. */
static ncclResult_t submit(enum verb verb, const void *src, void *dst,
                           size_t bytes, int peer, int last, ncclComm_t c,
                           cudaStream_t s)
{
    struct group *g = open_group ? open_group : group_make();
    struct message m = {.sig = {verb, (int64_t)bytes}};
    if (g->first && (g->comm != c || g->stream != s))
        iz_standin_die("a group of NCCL calls has more than one communicator "
                       "or stream");
    g->comm = c;
    g->stream = s;
    for (m.peer = peer; bytes && m.peer <= last; m.peer++) {
        m.leaves = true;
        m.p = src;
        if (verb != RECV)
            add(g, m);
        m.leaves = false;
        m.p = (char *)dst + (size_t)(m.peer - peer) * bytes;
        if (verb != SEND)
            add(g, m);
    }
    return open_group ? ncclSuccess : group_submit(g);
}

/* An overlap of source and destination is the rank's own place or a mistake. */
ncclResult_t ncclAllGather(const void *src, void *dst, size_t count,
                           ncclDataType_t type, ncclComm_t c, cudaStream_t s)
{
    const char *from = src, *to = dst;
    int64_t n = (int64_t)count;
    if (from != to + c->rank * n && from < to + c->ranks * n && to < from + n)
        iz_standin_die("ncclAllGather overlaps but not in place");
    return submit(ALL_GATHER, src, dst, count, 0, c->ranks - 1, c, s);
}

ncclResult_t ncclSend(const void *src, size_t count, ncclDataType_t type,
                      int peer, ncclComm_t c, cudaStream_t s)
{
    return submit(SEND, src, NULL, count, peer, peer, c, s);
}

ncclResult_t ncclRecv(void *dst, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t c, cudaStream_t s)
{
    return submit(RECV, NULL, dst, count, peer, peer, c, s);
}

/* ---- communicators ------------------------------------------------------ */

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    static atomic_int made;
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    memset(id, 0, sizeof(*id));
    snprintf(id->internal, sizeof(id->internal), "/iz-standin-%d-%d-%ld",
             (int)getpid(), atomic_fetch_add(&made, 1), t.tv_nsec);
    return ncclSuccess;
}

static struct board *board_map(const char *name)
{
    int fd = shm_open(name, O_CREAT | O_RDWR, 0600);
    void *p = MAP_FAILED;
    if (fd >= 0 && ftruncate(fd, sizeof(struct board)) == 0)
        p = mmap(NULL, sizeof(struct board), PROT_READ | PROT_WRITE, MAP_SHARED,
                 fd, 0);
    if (p == MAP_FAILED)
        iz_standin_die("no memory that ranks share");
    close(fd);
    return p;
}

/* As NCCL, which says "Duplicate GPU detected". */
static bool has_twin(const struct ncclComm *c)
{
    for (int r = 0; r < c->ranks; r++)
        if (r != c->rank && c->board->seat[r].device == c->device)
            return true;
    return false;
}

/* Returns when all ranks have come. */
ncclResult_t ncclCommInitRank(ncclComm_t *out, int ranks, ncclUniqueId id,
                              int rank)
{
    block("ncclCommInitRank");
    if (ranks > RANKS)
        return ncclInvalidArgument;
    struct ncclComm *c = iz_standin_dup(
        &(struct ncclComm){.rank = rank, .ranks = ranks}, sizeof(*c));
    int64_t waited_us = 0;
    cudaGetDevice(&c->device);
    struct board *b = c->board = board_map(id.internal);
    b->seat[rank].device = c->device;
    b->seat[rank].pid = getpid();
    b->arrived++;
    while (b->arrived < ranks)
        wait_more(c, "ncclCommInitRank", &waited_us);
    if (rank == 0)
        shm_unlink(id.internal);
    if (has_twin(c))
        return ncclInvalidUsage;
    *out = c;
    return ncclSuccess;
}

/* Waits for the calls that streams still hold. */
ncclResult_t ncclCommDestroy(ncclComm_t c)
{
    int64_t waited_us = 0;
    block("ncclCommDestroy");
    while (c->done != c->issued)
        wait_more(c, "ncclCommDestroy", &waited_us);
    c->board->seat[c->rank].left = 1;
    munmap(c->board, sizeof(*c->board));
    free(c);
    return ncclSuccess;
}

/* Of a rank that has not left the board but no longer exists. */
ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *result)
{
    const char *silent = getenv("IZ_STANDIN_SILENT");
    *result = ncclSuccess;
    for (int r = 0; r < c->ranks && !(silent && atoi(silent)); r++)
        if (!c->board->seat[r].left && kill(c->board->seat[r].pid, 0) &&
            errno == ESRCH)
            *result = ncclRemoteError;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t r)
{
    static const char *const texts[] = {
        [ncclSuccess] = "no error",
        [ncclUnhandledCudaError] = "unhandled cuda error",
        [ncclInvalidArgument] = "invalid argument",
        [ncclInvalidUsage] = "invalid usage",
        [ncclRemoteError] =
            "remote process exited or there was a network error"};
    return texts[r];
}

const char *ncclGetLastError(ncclComm_t c)
{
    return "";
}
