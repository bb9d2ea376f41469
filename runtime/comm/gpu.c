/* SPDX-License-Identifier: Apache-2.0 */
/* Collectives of GPU memory: NCCL moves the bytes between the GPUs, or they go
 * through pinned memory and the collectives of the host.  Sums are in reduce.c.
 * See coll.h. */
#include <assert.h>
#include <stdlib.h>

#include "codelets/base/die.h"
#include "codelets/base/int64.h"
#include "codelets/base/take.h"
#include "codelets/buffer/flat_buffer.h"
#include "codelets/gpu/device.h"
#include "runtime/comm/coll.h"
#include "runtime/comm/nccl.h"

void iz_coll_gpu_open(struct iz_coll *c, const struct iz_coll_gpu *g)
{
    c->gpu = iz_take(1, sizeof(*c->gpu), "collectives of GPUs");
    *c->gpu = *g;
}

/* The first ones take memory that NCCL would else take in step 1: of a length
 * that makes it connect as it will then. */
static void exchange_once(struct iz_coll *c)
{
    struct iz_coll_gpu *g = c->gpu;
    int64_t part = max64(g->buffer_bytes / (2 * c->size) / 512 * 512, 1);
    void *stream = iz_device_stream_open();
    if (!stream)
        iz_die("the others wait for the first exchange");
    iz_nccl_all_gather(g->comm, stream, g->buffer, part, "the first one");
    iz_nccl_send_recv(g->comm, stream, g->buffer, g->buffer + c->size * part,
                      iz_way_within,
                      &(struct iz_shards){part, c->size, c->size}, 1,
                      "reduce-scatter", "the first one");
    iz_device_stream_close(stream);
}

int iz_coll_gpu_connect(struct iz_coll *c)
{
    int r = 0;
    if (!c->gpu || !c->gpu->nccl)
        return 0;
    r = iz_nccl_open(&c->gpu->comm, c);
    if (!r)
        exchange_once(c);
    return r;
}

void iz_coll_gpu_close(struct iz_coll *c)
{
    if (!c->gpu)
        return;
    iz_nccl_close(&c->gpu->comm);
    free(c->gpu);
    c->gpu = NULL;
}

/* Every rank gives so many others as much as it gets from them. */
static void note(struct iz_coll *c, const char *what, int64_t shard_bytes,
                 int others)
{
    int64_t moved = shard_bytes * others;
    iz_coll_note(c, what, shard_bytes, moved, moved);
}

void iz_coll_gpu_gather(struct iz_coll *c, struct iz_exec *x, void *out,
                        const void *own, int64_t shard_bytes, int n,
                        bool refreshes, const char *what)
{
    struct iz_coll_gpu *g = c->gpu;
    const struct iz_shards s = {shard_bytes, n, c->size};
    iz_way_of way = refreshes ? iz_way_refresh : iz_way_gather;
    struct iz_way self = way(&s, 0, c->rank, c->rank);
    int parts = refreshes ? c->size / n : n;
    char *to = g->nccl ? out : g->buffer, *mine = to + self.to;
    if (refreshes && !g->nccl) /* behind what it is gathered into */
        mine = to + parts * shard_bytes;
    if (mine != own && (self.bytes || !g->nccl))
        iz_buffer_copy(x, mine, own, shard_bytes);
    if (g->nccl) {
        note(c, what, shard_bytes, parts - (self.bytes > 0));
        if (!refreshes && n == c->size)
            iz_nccl_all_gather(g->comm, x->stream, to, shard_bytes, what);
        else
            iz_nccl_send_recv(g->comm, x->stream, refreshes ? own : to, to, way,
                              &s, 1, refreshes ? "copy" : "all-gather", what);
        return;
    }
    assert(shard_bytes * (parts + refreshes) <= g->buffer_bytes);
    iz_device_wait(x->stream);
    if (refreshes)
        iz_coll_refresh(c, to, mine, shard_bytes, n, what);
    else
        iz_coll_all_gather_among(c, to, shard_bytes, n, what);
    iz_buffer_copy(x, out, to, shard_bytes * parts);
}
