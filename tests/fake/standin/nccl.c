/* SPDX-License-Identifier: Apache-2.0 */
/* Stand-in for NCCL between processes of one machine: calls run in order in
 * the thread of their stream.  Ranks that do not call the same in the same
 * order end with a message that names both calls.  Messages of a group move
 * side by side; the collectives of a group come before them. */
#define _GNU_SOURCE
#include <nccl.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tests/fake/standin/nccl_board.h"
#include "tests/fake/standin/standin.h"

struct call {
    struct call *next;
    struct ncclComm *comm;
    cudaStream_t stream;
    struct iz_signature sig; /* root is the other rank in a message */
    const void *src;
    void *dst;
    int64_t bytes;      /* of this rank */
    int64_t at, pieces; /* of a message that has left or arrived so far */
    bool done;
};

/* What one ncclGroupEnd, or one call outside of a group, gives to a stream. */
struct group {
    struct call *first, **end;
    int64_t number;
};

static _Thread_local struct {
    int depth;
    struct group *group;
} open_group;

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static void *device(const void *p, int64_t n)
{
    return n ? iz_standin_kernel(p, (size_t)n) : NULL;
}

static bool is_message(const struct call *k)
{
    return k->sig.verb != IZ_ALL_GATHER;
}

/* ---- collectives -------------------------------------------------------- */

/* Says what this rank begins, and holds it against what the others have said.
 */
static bool agree(const struct call *k)
{
    struct ncclComm *c = k->comm;
    struct iz_seat *mine = &c->board->seat[c->rank];
    mine->now = k->sig;
    mine->now.number = mine->begun;
    mine->begun++;
    if (!iz_board_barrier(c, "ncclAllGather"))
        return false;
    for (int r = 0; r < c->ranks; r++) {
        const struct iz_signature *theirs = &c->board->seat[r].now;
        if (!iz_signature_same(&mine->now, theirs))
            iz_board_mismatch(c, &mine->now, r, theirs);
    }
    return true;
}

/* An overlap of source and destination is the rank's own place or a mistake.
 */
static void check_in_place(const struct call *k, const char *src,
                           const char *dst)
{
    int64_t n = k->bytes, ranks = k->comm->ranks;
    if (src != dst + k->comm->rank * n && src < dst + ranks * n &&
        dst < src + n) {
        fprintf(stderr, "stand-in: ncclAllGather overlaps but not in place\n");
        abort();
    }
}

static bool all_gather(const struct call *k)
{
    struct ncclComm *c = k->comm;
    const char *src = device(k->src, k->bytes);
    char *dst = device(k->dst, k->bytes * c->ranks);
    check_in_place(k, src, dst);
    for (int64_t at = 0; at < k->bytes; at += IZ_BOARD_CHUNK) {
        size_t n = (size_t)least(k->bytes - at, IZ_BOARD_CHUNK);
        memcpy(c->board->seat[c->rank].data, src + at, n);
        if (!iz_board_barrier(c, "ncclAllGather"))
            return false;
        for (int r = 0; r < c->ranks; r++)
            memcpy(dst + r * k->bytes + at, c->board->seat[r].data, n);
        if (!iz_board_barrier(c, "ncclAllGather"))
            return false;
    }
    return true;
}

/* ---- messages ----------------------------------------------------------- */

/* One piece leaves when the one before it has been taken; the message is sent
 * when the last one has been. */
static bool send_piece(struct call *k, const char *src, struct iz_mail *m)
{
    int64_t n = least(k->bytes - k->at, IZ_BOARD_MAIL);
    if (m->full)
        return false;
    if (k->pieces && !n) {
        k->done = true;
        return true;
    }
    if (n)
        memcpy(m->data, src + k->at, (size_t)n);
    m->now = k->sig;
    k->at += n;
    k->pieces++;
    m->full = 1;
    return true;
}

static bool recv_piece(struct call *k, char *dst, struct iz_mail *m)
{
    struct iz_signature expected = k->sig;
    int64_t n = least(k->bytes - k->at, IZ_BOARD_MAIL);
    if (!m->full)
        return false;
    expected.verb = IZ_SEND;
    expected.root = k->comm->rank;
    if (!iz_signature_same(&expected, &m->now))
        iz_board_mismatch(k->comm, &k->sig, k->sig.root, &m->now);
    if (n)
        memcpy(dst + k->at, m->data, (size_t)n);
    k->at += n;
    m->full = 0;
    k->done = k->at == k->bytes;
    return true;
}

static struct iz_mail *mail_of(const struct call *k)
{
    const struct ncclComm *c = k->comm;
    int peer = k->sig.root;
    return k->sig.verb == IZ_SEND ? &c->board->mail[c->rank][peer]
                                  : &c->board->mail[peer][c->rank];
}

/* Messages between two ranks go one after the other. */
static bool has_turn(const struct group *g, const struct call *k)
{
    for (const struct call *j = g->first; j != k; j = j->next)
        if (!j->done && j->sig.verb == k->sig.verb &&
            j->sig.root == k->sig.root)
            return false;
    return true;
}

static bool move(const struct group *g, struct call *k)
{
    if (!has_turn(g, k))
        return false;
    return k->sig.verb == IZ_SEND
               ? send_piece(k, device(k->src, k->bytes), mail_of(k))
               : recv_piece(k, device(k->dst, k->bytes), mail_of(k));
}

/* A peer that has begun a collective which this rank has not will neither send
 * nor receive before it is over. */
static void check_peer(const struct call *k)
{
    const struct ncclComm *c = k->comm;
    const struct iz_seat *peer = &c->board->seat[k->sig.root];
    bool ahead = peer->begun > c->board->seat[c->rank].begun;
    if (ahead && mail_of(k)->full == (k->sig.verb == IZ_SEND))
        iz_board_mismatch(c, &k->sig, k->sig.root, &peer->now);
}

/* One round over the messages of a group: how many are left, whether one has
 * moved. */
static int round_of(const struct group *g, bool *moved)
{
    int left = 0;
    for (struct call *k = g->first; k; k = k->next) {
        if (!is_message(k) || k->done)
            continue;
        if (move(g, k))
            *moved = true;
        else if (has_turn(g, k))
            check_peer(k);
        left += !k->done;
    }
    return left;
}

static void run_messages(const struct group *g)
{
    struct iz_wait w = iz_wait_begin(g->first->comm, "messages");
    bool moved = false;
    while (round_of(g, &moved)) {
        if (moved)
            w = iz_wait_begin(w.c, w.what);
        else if (!iz_wait_more(&w))
            return;
        moved = false;
    }
}

/* ---- groups ------------------------------------------------------------- */

static void group_free(struct group *g)
{
    struct call *next;
    for (struct call *k = g->first; k; k = next) {
        next = k->next;
        free(k);
    }
    free(g);
}

/* In the thread of the stream.  The groups of a communicator run in the order
 * of their submission, whatever their streams. */
static void run_group(void *arg)
{
    struct group *g = arg;
    struct ncclComm *c = g->first->comm;
    struct iz_wait w = iz_wait_begin(c, "an earlier group of calls");
    while (c->done != g->number && iz_wait_more(&w))
        continue;
    iz_fault(c, g->number);
    for (const struct call *k = g->first; k && !c->aborted; k = k->next)
        if (!is_message(k) && !(agree(k) && all_gather(k)))
            break;
    if (!c->aborted)
        run_messages(g);
    group_free(g);
    c->done++;
}

static ncclResult_t group_submit(struct group *g)
{
    struct call *first = g->first;
    bool one = true;
    if (!first) {
        group_free(g);
        return ncclSuccess;
    }
    for (struct call *k = first; k; k = k->next)
        one = one && k->comm == first->comm && k->stream == first->stream;
    if (!one) {
        fprintf(stderr, "stand-in: a group of NCCL calls has more than one "
                        "communicator or stream\n");
        group_free(g);
        return ncclInvalidUsage;
    }
    g->number = first->comm->issued++;
    return cudaLaunchHostFunc(first->stream, run_group, g)
               ? ncclUnhandledCudaError
               : ncclSuccess;
}

static struct group *group_make(void)
{
    struct group *g = calloc(1, sizeof(*g));
    if (g)
        g->end = &g->first;
    return g;
}

ncclResult_t ncclGroupStart(void)
{
    if (open_group.depth++)
        return ncclSuccess;
    open_group.group = group_make();
    return open_group.group ? ncclSuccess : ncclSystemError;
}

ncclResult_t ncclGroupEnd(void)
{
    struct group *g = open_group.group;
    iz_blocks("ncclGroupEnd");
    if (!open_group.depth)
        return ncclInvalidUsage;
    if (--open_group.depth)
        return ncclSuccess;
    open_group.group = NULL;
    return group_submit(g);
}

static ncclResult_t add(struct call k)
{
    struct group *g = open_group.depth ? open_group.group : group_make();
    struct call *copy = malloc(sizeof(*copy));
    if (!g || !copy)
        return ncclSystemError;
    *copy = k;
    *g->end = copy;
    g->end = &copy->next;
    return open_group.depth ? ncclSuccess : group_submit(g);
}

/* ---- calls -------------------------------------------------------------- */

static ncclResult_t submit(enum iz_verb verb, const void *src, void *dst,
                           size_t count, ncclDataType_t type, int root,
                           ncclComm_t c, cudaStream_t s)
{
    static const int64_t type_bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    struct call k = {.comm = c,
                     .stream = s,
                     .sig = {.verb = verb,
                             .type = (int)type,
                             .root = root,
                             .count = (int64_t)count},
                     .src = src,
                     .dst = dst};
    if (!c || type > ncclBfloat16 || root < 0 || root >= c->ranks)
        return ncclInvalidArgument;
    k.bytes = k.sig.count * type_bytes[type];
    if (verb == IZ_SEND)
        k.sig.number = c->sent[root]++;
    if (verb == IZ_RECV)
        k.sig.number = c->received[root]++;
    return add(k);
}

ncclResult_t ncclAllGather(const void *src, void *dst, size_t count,
                           ncclDataType_t type, ncclComm_t c, cudaStream_t s)
{
    return submit(IZ_ALL_GATHER, src, dst, count, type, 0, c, s);
}

ncclResult_t ncclSend(const void *src, size_t count, ncclDataType_t type,
                      int peer, ncclComm_t c, cudaStream_t s)
{
    return submit(IZ_SEND, src, NULL, count, type, peer, c, s);
}

ncclResult_t ncclRecv(void *dst, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t c, cudaStream_t s)
{
    return submit(IZ_RECV, NULL, dst, count, type, peer, c, s);
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

ncclResult_t ncclCommInitRank(ncclComm_t *out, int ranks, ncclUniqueId id,
                              int rank)
{
    iz_blocks("ncclCommInitRank");
    *out = NULL;
    if (ranks < 1 || ranks > IZ_BOARD_RANKS || rank < 0 || rank >= ranks)
        return ncclInvalidArgument;
    struct ncclComm *c = calloc(1, sizeof(*c));
    if (!c)
        return ncclSystemError;
    c->rank = rank;
    c->ranks = ranks;
    ncclResult_t r = cudaGetDevice(&c->device) ? ncclSystemError
                                               : iz_board_open(c, id.internal);
    if (r == ncclSuccess)
        *out = c;
    else
        free(c);
    return r;
}

/* Waits for the calls that streams still hold. */
ncclResult_t ncclCommDestroy(ncclComm_t c)
{
    struct iz_wait w = iz_wait_begin(c, "ncclCommDestroy");
    iz_blocks("ncclCommDestroy");
    if (!c)
        return ncclSuccess;
    while (c->done != c->issued)
        if (!iz_wait_more(&w)) /* aborted */
            usleep(50);
    iz_board_close(c);
    free(c);
    return ncclSuccess;
}

/* Calls that wait for other ranks give up; what they were to write is
 * undefined. */
ncclResult_t ncclCommAbort(ncclComm_t c)
{
    if (c)
        c->aborted = true;
    return ncclCommDestroy(c);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t c, ncclResult_t *r)
{
    *r = iz_board_lost(c) ? ncclRemoteError : ncclSuccess;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t r)
{
    static const char *const texts[] = {
        [ncclSuccess] = "no error",
        [ncclUnhandledCudaError] = "unhandled cuda error",
        [ncclSystemError] = "unhandled system error",
        [ncclInternalError] = "internal error",
        [ncclInvalidArgument] = "invalid argument",
        [ncclInvalidUsage] = "invalid usage",
        [ncclRemoteError] =
            "remote process exited or there was a network error",
        [ncclInProgress] = "NCCL operation in progress"};
    return texts[r];
}

const char *ncclGetLastError(ncclComm_t c)
{
    return "";
}
