/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in for NCCL: ranks are processes that a child of this program
 * forks, none of which has called CUDA before.  Calls in another order on one
 * rank are named; that data arrives is seen by every run that has several. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <nccl.h>

#include "tests/codelets/base/dies.h"
#include "tests/fake/standin/standin.h"

enum { RANKS = 3, COUNT = 100 };

struct rank {
    int rank;
    ncclResult_t connected;
    ncclComm_t comm;
    cudaStream_t stream;
    int32_t *all, *own, *in; /* device: [RANKS,COUNT], [COUNT], [COUNT] */
};

/* The test's own check: ranks have no framework. */
static void must(int ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "wrong: %s\n", what);
        _exit(3);
    }
}

static void *take(size_t n)
{
    void *p = NULL;
    must(!cudaMalloc(&p, n * sizeof(int32_t)), "cudaMalloc");
    return p;
}

static void rank_open(struct rank *k, int device, int rank, ncclUniqueId id)
{
    k->rank = rank;
    must(!cudaSetDevice(device), "cudaSetDevice");
    k->all = take(RANKS * COUNT);
    k->in = take(COUNT);
    k->own = take(COUNT);
    must(!cudaStreamCreateWithFlags(&k->stream, 0), "stream");
    k->connected = ncclCommInitRank(&k->comm, RANKS, id, rank);
}

/* ---- mistakes ----------------------------------------------------------- */

static void other_count(struct rank *k)
{
    ncclAllGather(k->own, k->all, k->rank == 2 ? 6 : 5, ncclInt32, k->comm,
                  k->stream);
    cudaStreamSynchronize(k->stream);
}

/* The receiver is in a collective that the sender comes to afterwards. */
static void message_or_collective(struct rank *k)
{
    if (k->rank == 0)
        ncclSend(k->own, 5, ncclInt32, 1, k->comm, k->stream);
    ncclAllGather(k->own, k->all, 5, ncclInt32, k->comm, k->stream);
    cudaStreamSynchronize(k->stream);
}

static void other_length(struct rank *k)
{
    if (k->rank == 0)
        ncclSend(k->own, 5, ncclInt32, 1, k->comm, k->stream);
    if (k->rank == 1)
        ncclRecv(k->in, 4, ncclInt32, 0, k->comm, k->stream);
    cudaStreamSynchronize(k->stream);
}

static void late(struct rank *k)
{
    if (k->rank)
        ncclAllGather(k->own, k->all, 5, ncclInt32, k->comm, k->stream);
    cudaStreamSynchronize(k->stream);
    ncclCommDestroy(k->comm);
}

static void overlap(struct rank *k)
{
    ncclAllGather(k->all + 1, k->all, 5, ncclInt32, k->comm, k->stream);
    cudaStreamSynchronize(k->stream);
}

/* Rank 1 dies; the others see it. */
static void death(struct rank *k)
{
    ncclResult_t r = ncclSuccess;
    if (k->rank == 1)
        _exit(0);
    ncclAllGather(k->own, k->all, 5, ncclInt32, k->comm, k->stream);
    while (r == ncclSuccess)
        ncclCommGetAsyncError(k->comm, &r);
    must(r == ncclRemoteError, "ncclRemoteError");
    must(cudaStreamQuery(k->stream) == cudaErrorNotReady, "a call waits");
}

/* ---- ranks -------------------------------------------------------------- */

static void twins(struct rank *k)
{
    must(k->connected == ncclInvalidUsage, "two ranks on one device");
}

/* What the child says: nothing, or both of these, and then it aborts. */
static const struct part {
    const char *name;
    void (*run)(struct rank *);
    const char *a, *b;
} parts[] = {
    {"twins", twins, NULL, NULL},
    {"death", death, NULL, NULL},
    {"other_count", other_count, "rank 2: ncclAllGather number 0, 6 ele",
     "ncclAllGather number 0, 5 ele"},
    {"message_or_collective", message_or_collective,
     "rank 0: ncclSend number 0, 5 ele",
     "rank 1: ncclAllGather number 0, 5 ele"},
    {"other_length", other_length, "rank 1: ncclRecv number 0, 4 ele",
     "rank 0: ncclSend number 0, 5 ele"},
    {"overlap", overlap, "overlaps", "in place"},
    {"late", late, "of 3 waits in ncclAllGather", "too long"},
};
enum { PARTS = sizeof(parts) / sizeof(parts[0]) };

/* Runs a part on all ranks; exits with the worst ending of them. */
static void on_ranks(const void *arg)
{
    const struct part *part = arg;
    bool alike = part->run == twins;
    int end = 0, status;
    ncclUniqueId id;
    if (part->run == death) /* the others are in the call */
        setenv("IZ_STANDIN_JITTER_US", "0", 1);
    if (part->a) /* those that nobody answers end, too */
        setenv("IZ_STANDIN_TIMEOUT_S", "3", 1);
    ncclGetUniqueId(&id);
    for (int r = 0; r < RANKS; r++)
        if (fork() == 0) {
            struct rank k;
            rank_open(&k, alike ? 0 : r, r, id);
            must(alike || k.connected == ncclSuccess, "ncclCommInitRank");
            part->run(&k);
            _exit(0);
        }
    while (wait(&status) > 0) {
        int e =
            WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
        end = e > end ? e : end;
    }
    _exit(end);
}

/* A dead rank is seen, two ranks on one device are refused, a missing one is
 * waited for in vain, and mismatches are named. */
static void test_part(void **state)
{
    const struct part *part = *state;
    struct ending e = ending_of(on_ranks, part);
    if (!part->a)
        assert_string_equal(e.text, "");
    else if (!strstr(e.text, part->a) || !strstr(e.text, part->b))
        fail_msg("it said: %s", e.text);
    assert_true(WIFEXITED(e.status));
    assert_int_equal(WEXITSTATUS(e.status), part->a ? 128 + SIGABRT : 0);
}

int main(void)
{
    struct CMUnitTest tests[PARTS];
    setenv("IZ_STANDIN_DEVICES", "3", 0);
    setenv("IZ_STANDIN_MEM_MB", "8", 0);
    setenv("IZ_STANDIN_JITTER_US", "500", 0);
    for (int i = 0; i < PARTS; i++)
        tests[i] = (struct CMUnitTest){parts[i].name, test_part, NULL, NULL,
                                       (void *)&parts[i]};
    return cmocka_run_group_tests_name("standin-nccl", tests, NULL, NULL);
}
