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
    int type;
    int64_t count, number; /* elements; messages there before it */
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
    int64_t sent[RANKS], received[RANKS];
    _Atomic int64_t issued, done; /* groups of calls, which run in order */
};

struct message {
    struct message *next;
    struct signature sig;
    int peer;
    bool leaves, begun, done;
    const void *p; /* of a device */
    int64_t bytes, at;
};

/* What one ncclGroupEnd, or one call outside of a group, gives to a stream. */
struct group {
    struct ncclComm *comm;
    cudaStream_t stream;
    struct message *first, **end;
    int64_t number;
};

static _Thread_local struct {
    int depth;
    struct group *group;
} open_group;

/* ---- waiting ------------------------------------------------------------ */

/* For something that others will change. */
struct wait {
    const struct ncclComm *c;
    const char *what;
    double since_s;
};

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static struct wait wait_begin(const struct ncclComm *c, const char *what)
{
    return (struct wait){c, what, now_s()};
}

/* Leaves the processor, because there are more ranks than processors: for a
 * sixteenth of the wait so far. */
static void look_away(double waited_s)
{
    double ns = waited_s * 1e9 / 16;
    ns = ns < 50e3 ? 50e3 : ns > 1e6 ? 1e6 : ns;
    nanosleep(&(struct timespec){.tv_nsec = (long)ns}, NULL);
}

/* Between two looks. */
static void wait_more(const struct wait *w)
{
    const char *most = getenv("IZ_STANDIN_TIMEOUT_S");
    double waited = now_s() - w->since_s;
    if (waited > (most && *most ? atof(most) : TIMEOUT_S))
        iz_standin_die("rank %d of %d waits in %s for too long", w->c->rank,
                       w->c->ranks, w->what);
    look_away(waited);
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

static void print_signature(int rank, const struct signature *s)
{
    fprintf(stderr,
            "  rank %d: %s number %" PRId64 ", %" PRId64
            " elements of type %d\n",
            rank, verbs[s->verb], s->number, s->count, s->type);
}

static void check(const struct ncclComm *c, const struct message *m,
                  const struct signature *theirs)
{
    const struct signature *s = &m->sig;
    if (theirs->verb == (s->verb == RECV ? SEND : s->verb) &&
        theirs->type == s->type && theirs->count == s->count &&
        theirs->number == s->number)
        return;
    print_signature(c->rank, s);
    print_signature(m->peer, theirs);
    iz_standin_die("mismatch of NCCL calls");
}

/* Where the next piece of a message is; n: its bytes. */
static char *piece(const struct message *m, size_t *n)
{
    int64_t left = m->bytes - m->at;
    *n = (size_t)(left < PIECE ? left : PIECE);
    return m->bytes ? (char *)iz_standin_kernel(m->p, (size_t)m->bytes) + m->at
                    : NULL;
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
    m->done = m->begun && !n;
    if (m->done)
        return true;
    if (n)
        memcpy(b->data, from, n);
    b->now = m->sig;
    m->at += (int64_t)n;
    m->begun = true;
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
    if (n)
        memcpy(to, b->data, n);
    m->at += (int64_t)n;
    m->done = m->at == m->bytes;
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
    struct wait w = wait_begin(g->comm, verbs[g->first->sig.verb]);
    bool moved = false;
    while (round_of(g, &moved)) {
        if (moved)
            w = wait_begin(w.c, w.what);
        else
            wait_more(&w);
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
    struct wait w = wait_begin(c, "an earlier group of calls");
    while (c->done != g->number)
        wait_more(&w);
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
    if (!open_group.depth++)
        open_group.group = group_make();
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    block("ncclGroupEnd");
    if (!open_group.depth)
        return ncclInvalidUsage;
    return --open_group.depth ? ncclSuccess : group_submit(open_group.group);
}

/* ---- calls -------------------------------------------------------------- */

static void add(struct group *g, struct message m)
{
    struct ncclComm *c = g->comm;
    m.sig.number = m.leaves ? c->sent[m.peer]++ : c->received[m.peer]++;
    *g->end = iz_standin_dup(&m, sizeof(m));
    g->end = &(*g->end)->next;
}

static int64_t bytes_of(size_t count, ncclDataType_t type)
{
    return (int64_t)count * (type == ncclInt32 ? 4 : 1);
}

/* Between this rank and each from `peer` to `last`; of what it receives each
 * has a row. */
static ncclResult_t submit(enum verb verb, const void *src, void *dst,
                           size_t count, ncclDataType_t type, int peer,
                           int last, ncclComm_t c, cudaStream_t s)
{
    if (!c || peer < 0 || last >= c->ranks)
        return ncclInvalidArgument;
    struct group *g = open_group.depth ? open_group.group : group_make();
    struct message m = {.sig = {verb, (int)type, (int64_t)count, 0},
                        .bytes = bytes_of(count, type)};
    if (g->first && (g->comm != c || g->stream != s))
        iz_standin_die("a group of NCCL calls has more than one communicator "
                       "or stream");
    g->comm = c;
    g->stream = s;
    for (m.peer = peer; m.peer <= last; m.peer++) {
        m.leaves = true;
        m.p = src;
        if (verb != RECV)
            add(g, m);
        m.leaves = false;
        m.p = (char *)dst + (m.peer - peer) * m.bytes;
        if (verb != SEND)
            add(g, m);
    }
    return open_group.depth ? ncclSuccess : group_submit(g);
}

/* An overlap of source and destination is the rank's own place or a mistake. */
ncclResult_t ncclAllGather(const void *src, void *dst, size_t count,
                           ncclDataType_t type, ncclComm_t c, cudaStream_t s)
{
    const char *from = src, *to = dst;
    int64_t n = bytes_of(count, type);
    if (from != to + c->rank * n && from < to + c->ranks * n && to < from + n)
        iz_standin_die("ncclAllGather overlaps but not in place");
    return submit(ALL_GATHER, src, dst, count, type, 0, c->ranks - 1, c, s);
}

ncclResult_t ncclSend(const void *src, size_t count, ncclDataType_t type,
                      int peer, ncclComm_t c, cudaStream_t s)
{
    return submit(SEND, src, NULL, count, type, peer, peer, c, s);
}

ncclResult_t ncclRecv(void *dst, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t c, cudaStream_t s)
{
    return submit(RECV, NULL, dst, count, type, peer, peer, c, s);
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
    *out = NULL;
    if (ranks < 1 || ranks > RANKS || rank < 0 || rank >= ranks)
        return ncclInvalidArgument;
    struct ncclComm *c = calloc(1, sizeof(*c));
    if (!c)
        return ncclSystemError;
    struct wait w = wait_begin(c, "ncclCommInitRank");
    c->rank = rank;
    c->ranks = ranks;
    cudaGetDevice(&c->device);
    struct board *b = c->board = board_map(id.internal);
    b->seat[rank].device = c->device;
    b->seat[rank].pid = getpid();
    b->arrived++;
    while (b->arrived < ranks)
        wait_more(&w);
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
    struct wait w = wait_begin(c, "ncclCommDestroy");
    block("ncclCommDestroy");
    if (!c)
        return ncclSuccess;
    while (c->done != c->issued)
        wait_more(&w);
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
