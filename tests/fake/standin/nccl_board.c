/* SPDX-License-Identifier: Apache-2.0 */
/* Stand-in for NCCL: the board that ranks share, waiting for others, and what
 * is said when they do not do the same. */
#define _GNU_SOURCE
#include "tests/fake/standin/nccl_board.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define TIMEOUT_S 200

/* ---- waiting ------------------------------------------------------------ */

static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

struct iz_wait iz_wait_begin(const struct ncclComm *c, const char *what)
{
    return (struct iz_wait){c, what, now_s()};
}

/* Leaves the processor, because there are more ranks than processors: for a
 * sixteenth of the wait so far. */
static void look_away(double waited_s)
{
    double ns = waited_s * 1e9 / 16;
    ns = ns < 50e3 ? 50e3 : ns > 1e6 ? 1e6 : ns;
    nanosleep(&(struct timespec){.tv_nsec = (long)ns}, NULL);
}

bool iz_wait_more(struct iz_wait *w)
{
    const char *most = getenv("IZ_STANDIN_TIMEOUT_S");
    double waited = now_s() - w->since_s;
    if (w->c->aborted)
        return false;
    if (waited > (most && *most ? atof(most) : TIMEOUT_S)) {
        fprintf(stderr, "stand-in: rank %d of %d waits in %s for too long\n",
                w->c->rank, w->c->ranks, w->what);
        abort();
    }
    look_away(waited);
    return true;
}

bool iz_board_barrier(struct ncclComm *c, const char *what)
{
    struct iz_board *b = c->board;
    struct iz_wait w = iz_wait_begin(c, what);
    int phase = b->phase;
    if (atomic_fetch_add(&b->arrived, 1) == c->ranks - 1) {
        b->arrived = 0;
        b->phase = phase + 1;
        return true;
    }
    while (b->phase == phase)
        if (!iz_wait_more(&w))
            return false;
    return true;
}

/* ---- agreement ---------------------------------------------------------- */

bool iz_signature_same(const struct iz_signature *a,
                       const struct iz_signature *b)
{
    return a->verb == b->verb && a->type == b->type && a->root == b->root &&
           a->count == b->count && a->number == b->number;
}

static void print_signature(int rank, const struct iz_signature *s)
{
    static const char *const verbs[] = {"AllGather", "Send", "Recv"};
    fprintf(stderr,
            "  rank %d: %s number %" PRId64 ", %" PRId64
            " elements of type %d, root or peer %d\n",
            rank, verbs[s->verb], s->number, s->count, s->type, s->root);
}

void iz_board_mismatch(const struct ncclComm *c,
                       const struct iz_signature *mine, int other,
                       const struct iz_signature *theirs)
{
    fprintf(stderr, "stand-in: mismatch of NCCL calls\n");
    print_signature(c->rank, mine);
    print_signature(other, theirs);
    abort();
}

void iz_fault(const struct ncclComm *c, int64_t group)
{
    const char *s = getenv("IZ_STANDIN_FAULT");
    int rank, number;
    int64_t at;
    if (s && sscanf(s, "%d:%" SCNd64 ":%d", &rank, &at, &number) == 3 &&
        rank == c->rank && at == group)
        kill(getpid(), number);
}

void iz_blocks(const char *function)
{
    const char *s = getenv("IZ_STANDIN_BLOCKS");
    while (s && strcmp(s, function) == 0)
        pause();
}

bool iz_board_lost(const struct ncclComm *c)
{
    const char *silent = getenv("IZ_STANDIN_SILENT");
    if (silent && atoi(silent))
        return false;
    for (int r = 0; r < c->ranks; r++) {
        const struct iz_seat *s = &c->board->seat[r];
        if (!s->left && kill(s->pid, 0) && errno == ESRCH)
            return true;
    }
    return false;
}

/* ---- open and close ----------------------------------------------------- */

static struct iz_board *board_map(const char *name)
{
    int fd = shm_open(name, O_CREAT | O_RDWR, 0600);
    void *p = MAP_FAILED;
    if (fd < 0)
        return NULL;
    if (ftruncate(fd, sizeof(struct iz_board)) == 0)
        p = mmap(NULL, sizeof(struct iz_board), PROT_READ | PROT_WRITE,
                 MAP_SHARED, fd, 0);
    close(fd);
    return p == MAP_FAILED ? NULL : p;
}

/* As NCCL, which says "Duplicate GPU detected". */
static bool has_twin(const struct ncclComm *c)
{
    for (int r = 0; r < c->ranks; r++)
        if (r != c->rank && c->board->seat[r].device == c->device)
            return true;
    return false;
}

ncclResult_t iz_board_open(struct ncclComm *c, const char *name)
{
    c->board = board_map(name);
    if (!c->board)
        return ncclSystemError;
    c->board->seat[c->rank].device = c->device;
    c->board->seat[c->rank].pid = getpid();
    iz_board_barrier(c, "ncclCommInitRank");
    if (c->rank == 0)
        shm_unlink(name);
    return has_twin(c) ? ncclInvalidUsage : ncclSuccess;
}

void iz_board_close(struct ncclComm *c)
{
    c->board->seat[c->rank].left = 1;
    munmap(c->board, sizeof(*c->board));
    c->board = NULL;
}
