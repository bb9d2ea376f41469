/* SPDX-License-Identifier: Apache-2.0 */
/* Collectives of GPU memory: NCCL moves the bytes between the GPUs, or they go
 * through pinned memory and the collectives of the host.  Sums are our own in
 * both cases, in rank order and in fp32: NCCL's reductions fix no order and
 * round at every hop.  See coll.h. */
#include <assert.h>
#include <stdlib.h>

#include "codelets/base/die.h"
#include "codelets/base/int64.h"
#include "codelets/base/take.h"
#include "codelets/buffer/flat_buffer.h"
#include "codelets/flat/flat.h"
#include "codelets/gpu/device.h"
#include "runtime/comm/coll.h"
#include "runtime/comm/nccl.h"

void iz_coll_gpu_open(struct iz_coll *c, const struct iz_coll_gpu *g)
{
    c->gpu = iz_take(1, sizeof(*c->gpu), "collectives of GPUs");
    *c->gpu = *g;
}

/* Parts for a sum of its group: item j goes to the rank that has the owner's
 * position, of the part whose owner is in group j. */
static struct iz_way within_way(const void *shards, int j, int giver, int taker)
{
    const struct iz_shards *s = shards;
    return (struct iz_way){(j * s->n + taker % s->n) * s->bytes,
                           (j * s->n + giver % s->n) * s->bytes,
                           giver / s->n == taker / s->n ? s->bytes : 0};
}

/* And the groups' sums to the owners. */
static struct iz_way between_way(const void *shards, int i, int giver,
                                 int taker)
{
    const struct iz_shards *s = shards;
    return (struct iz_way){taker * s->bytes, giver / s->n * s->bytes,
                           giver % s->n == taker % s->n ? s->bytes : 0};
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
    iz_nccl_deal(g->comm, stream, g->buffer, g->buffer + c->size * part,
                 within_way, &(struct iz_shards){part, c->size, c->size}, 1,
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

void iz_coll_gpu_deal(struct iz_coll *c, struct iz_exec *x, void *out,
                      const void *own, int64_t shard_bytes, int n,
                      bool refreshes, const char *what)
{
    struct iz_coll_gpu *g = c->gpu;
    const struct iz_shards s = {shard_bytes, n, c->size};
    iz_way_of way = refreshes ? iz_way_refresh : iz_way_gather;
    struct iz_way self = way(&s, 0, c->rank, c->rank);
    int parts = refreshes ? c->size / n : n;
    char *to = g->nccl ? out : g->buffer, *mine = to + self.to;
    if (refreshes && !g->nccl) /* behind what it is dealt into */
        mine = to + parts * shard_bytes;
    if (mine != own && (self.bytes || !g->nccl))
        iz_buffer_copy(x, mine, own, shard_bytes);
    if (g->nccl) {
        note(c, what, shard_bytes, parts - (self.bytes > 0));
        if (!refreshes && n == c->size)
            iz_nccl_all_gather(g->comm, x->stream, to, shard_bytes, what);
        else
            iz_nccl_deal(g->comm, x->stream, refreshes ? own : to, to, way, &s,
                         1, refreshes ? "copy" : "all-gather", what);
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

static struct iz_exec on_gpu(const struct iz_exec *x)
{
    struct iz_exec y = *x;
    y.backend = IZ_CUDA;
    return y;
}

/* What comes to this rank goes into the buffer. */
static void exchange_parts(struct iz_coll *c, struct iz_exec *x,
                           const struct iz_coll_sum *r, iz_way_of way,
                           const struct iz_shards *s, int items)
{
    char *buffer = c->gpu->buffer;
    for (int j = 0; j < items; j++) {
        struct iz_way self = way(s, j, c->rank, c->rank);
        iz_buffer_copy(x, buffer + self.to, r->full + self.from, self.bytes);
    }
    iz_nccl_deal(c->gpu->comm, x->stream, r->full, buffer, way, s, items,
                 "reduce-scatter", r->what);
}

/* Elements [first, first + n) of what `ranks` of them have in the buffer from
 * part `from` on. */
static void add_parts(const struct iz_coll *c, struct iz_exec *x,
                      const struct iz_coll_sum *r, int from, int ranks,
                      int64_t first, int64_t n, void *out, enum iz_dtype type,
                      bool accumulate)
{
    const void *part[IZ_SUM_INPUTS_MAX];
    for (int i = 0; i < ranks; i++)
        part[i] = c->gpu->buffer +
                  ((from + i) * r->shard + first) * iz_dtype_bytes(r->wire);
    iz_buffer_sum(x, out, type, accumulate, part, ranks, r->wire, n);
}

/* All ranks' parts come into the buffer in rank order, are added there, and
 * leave for the host if that is where they belong.  With several groups of
 * ranks those of this one come first, for all ranks with this one's position;
 * the group's sums take their places in `full`, and are exchanged in turn. */
static void reduce_nccl(struct iz_coll *c, struct iz_exec *x,
                        const struct iz_coll_sum *r)
{
    int64_t bytes = r->shard * iz_dtype_bytes(r->wire);
    int64_t n = r->shard - r->n_apart;
    int g = iz_coll_sum_group(c), groups = c->size / g, at = c->rank % g;
    const struct iz_shards s = {bytes, g, c->size};
    struct iz_exec y = on_gpu(x);
    assert(c->size <= IZ_SUM_INPUTS_MAX &&
           bytes * c->size <= c->gpu->buffer_bytes);
    assert(!r->norm2 && (r->out_on_gpu || !r->accumulate));
    note(c, r->what, bytes, c->size - 1);
    exchange_parts(c, x, r, within_way, &s, groups);
    for (int j = 0; groups > 1 && j < groups; j++)
        add_parts(c, &y, r, j * g, g, 0, r->shard,
                  r->full + (at + j * g) * bytes, r->wire, false);
    if (groups > 1)
        exchange_parts(c, x, r, between_way, &s, 1);
    int last = groups > 1 ? groups : g;
    void *sum = r->out_on_gpu ? r->out : r->full;
    if (n)
        add_parts(c, &y, r, 0, last, 0, n, sum, r->out_type, r->accumulate);
    if (r->n_apart)
        add_parts(c, &y, r, 0, last, n, r->n_apart, r->apart, r->apart_type,
                  r->accumulate_apart);
    if (n && !r->out_on_gpu)
        iz_buffer_copy(x, r->out, sum, n * iz_dtype_bytes(r->out_type));
}

/* The host's sum goes back up; what is added to there goes in fp32 through
 * `full`, which has served. */
static void take_up(struct iz_exec *x, const struct iz_coll_sum *r, void *sum,
                    enum iz_dtype type)
{
    const void *in = r->full;
    struct iz_exec y = on_gpu(x);
    iz_buffer_copy(x, r->accumulate ? r->full : r->out, sum,
                   r->shard * iz_dtype_bytes(type));
    if (r->accumulate)
        iz_buffer_sum(&y, r->out, r->out_type, true, &in, 1, type, r->shard);
}

static void reduce_mpi(struct iz_coll *c, struct iz_exec *x,
                       const struct iz_coll_sum *r)
{
    char *buffer = c->gpu->buffer;
    int64_t bytes = r->shard * iz_dtype_bytes(r->wire) * c->size;
    struct iz_coll_sum host = *r;
    assert(bytes + (r->out_on_gpu ? r->shard * 4 : 0) <= c->gpu->buffer_bytes);
    assert((!r->norm2 || !r->out_on_gpu) && !r->n_apart);
    iz_buffer_copy(x, buffer, r->full, bytes);
    iz_device_wait(x->stream);
    host.full = buffer;
    host.out = r->out_on_gpu ? buffer + bytes : r->out;
    host.out_type = r->out_on_gpu && r->accumulate ? IZ_F32 : r->out_type;
    host.accumulate = r->accumulate && !r->out_on_gpu;
    iz_coll_reduce_scatter(c, &host);
    if (r->out_on_gpu)
        take_up(x, r, host.out, host.out_type);
}

void iz_coll_gpu_reduce_scatter(struct iz_coll *c, struct iz_exec *x,
                                const struct iz_coll_sum *s)
{
    if (c->gpu->nccl)
        reduce_nccl(c, x, s);
    else
        reduce_mpi(c, x, s);
}
