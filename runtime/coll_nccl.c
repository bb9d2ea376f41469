/* SPDX-License-Identifier: Apache-2.0 */
/* NCCL, the only file that includes nccl.h; see coll_nccl.h.  The communicator
 * is set up over MPI. */
#include "runtime/coll_nccl.h"

#include <cuda_runtime_api.h>
#include <errno.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "codelets/device.h"
#include "codelets/die.h"
#include "codelets/task.h"

struct iz_nccl {
    struct iz_coll *coll;
    ncclComm_t comm;
};

bool iz_nccl_built(void)
{
    return true;
}

/* A peer that has died shows as an asynchronous error, or not at all. */
static void check(struct iz_nccl *n, ncclResult_t r, const char *what)
{
    if (r == ncclSuccess || r == ncclInProgress)
        return;
    if (n->comm)
        ncclCommAbort(n->comm);
    iz_die("%s: NCCL: %s", what, ncclGetErrorString(r));
}

static void wait_done(struct iz_nccl *n, cudaStream_t stream, const char *what)
{
    int64_t begin = iz_now_ns();
    for (int turn = 0; !iz_device_done(stream); turn++) {
        ncclResult_t r = ncclSuccess;
        double waited = (double)(iz_now_ns() - begin) * 1e-9;
        check(n, ncclCommGetAsyncError(n->comm, &r), what);
        check(n, r, what);
        if (n->coll->timeout_s > 0 && waited > n->coll->timeout_s) {
            ncclCommAbort(n->comm);
            iz_die("waited %g s for %s: is another rank dead or stopped?",
                   n->coll->timeout_s, what);
        }
        struct timespec t = {.tv_nsec = turn < 64 ? 5000 : 20000};
        nanosleep(&t, NULL);
    }
}

int iz_nccl_open(struct iz_nccl **out, struct iz_coll *c)
{
    struct iz_nccl *n = calloc(1, sizeof(*n));
    ncclUniqueId id;
    ncclResult_t r = ncclSuccess;
    if (!n)
        return -ENOMEM;
    *out = n;
    n->coll = c;
    if (c->rank == 0)
        r = ncclGetUniqueId(&id);
    if (!iz_coll_all_ok(c, r == ncclSuccess)) {
        if (r != ncclSuccess)
            fprintf(stderr, "izar: NCCL: %s\n", ncclGetErrorString(r));
        return -EIO;
    }
    iz_coll_broadcast(c, &id, sizeof(id), 0, "NCCL's id");
    r = ncclCommInitRank(&n->comm, c->size, id, c->rank);
    if (r == ncclSuccess)
        return 0;
    fprintf(stderr, "izar: NCCL does not start: %s\n", ncclGetErrorString(r));
    return -EIO;
}

void iz_nccl_close(struct iz_nccl **n)
{
    if (*n && (*n)->comm)
        ncclCommDestroy((*n)->comm);
    free(*n);
    *n = NULL;
}

void iz_nccl_all_gather(struct iz_nccl *n, void *stream, void *full,
                        int64_t shard_bytes, const char *what)
{
    const char *mine = (char *)full + n->coll->rank * shard_bytes;
    check(n,
          ncclAllGather(mine, full, (size_t)shard_bytes, ncclUint8, n->comm,
                        stream),
          what);
    wait_done(n, stream, what);
}

void iz_nccl_exchange(struct iz_nccl *n, void *stream, void *in,
                      const void *full, int64_t part_bytes, const char *what)
{
    size_t bytes = (size_t)part_bytes;
    check(n, ncclGroupStart(), what);
    for (int k = 1; k < n->coll->size; k++) {
        int to = (n->coll->rank + k) % n->coll->size;
        int from = (n->coll->rank + n->coll->size - k) % n->coll->size;
        check(n,
              ncclSend((const char *)full + to * part_bytes, bytes, ncclUint8,
                       to, n->comm, stream),
              what);
        check(n,
              ncclRecv((char *)in + from * part_bytes, bytes, ncclUint8, from,
                       n->comm, stream),
              what);
    }
    check(n, ncclGroupEnd(), what);
    wait_done(n, stream, what);
}
