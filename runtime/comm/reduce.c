/* SPDX-License-Identifier: Apache-2.0 */
/* Reduce-scatter.  As in gather.c local buffers are read, and remote ranks send
 * messages; between GPUs NCCL moves the shards.  The sums are our own, in rank
 * order and in fp32: MPI fixes no order of summation, and NCCL's reductions
 * round at every hop, too. */
#include <assert.h>

#include "codelets/base/die.h"
#include "codelets/base/int64.h"
#include "codelets/buffer/flat_buffer.h"
#include "codelets/flat/flat.h"
#include "codelets/gpu/device.h"
#include "runtime/comm/nccl.h"
#include "runtime/comm/state.h"

/* Parts of a buffer: that of rank r is [first[r], first[r + 1]). */
static int64_t shard_bytes(const struct iz_coll *c, int r)
{
    return c->first[r + 1] - c->first[r];
}

static int64_t longest_shard(const struct iz_coll *c)
{
    int64_t most = 0;
    for (int r = 0; r < c->size; r++)
        most = max64(most, shard_bytes(c, r));
    return most;
}

static int64_t count_fragments(int64_t bytes, struct iz_coll_pipeline pipeline)
{
    return (bytes + pipeline.bytes - 1) / pipeline.bytes;
}

/* Of the fragment at `at` of rank r's shard; 0: it has no such fragment. */
static int64_t fragment_bytes(const struct iz_coll *c, int r, int64_t at,
                              struct iz_coll_pipeline pipeline)
{
    return max64(min64(pipeline.bytes, shard_bytes(c, r) - at), 0);
}

/* Ranks whose contributions are added in one sum, in order: those of a group,
 * or one of each group. */
struct group {
    int first, stride, n, self; /* self: this rank's place */
    int flight;                 /* its first set of requests */
};

/* The next fragments come into slots of the scratch while fragment k is being
 * summed from another.  A group's sums are formed in `full`, where its
 * contribution was, for every rank with this one's position. */
struct reduction {
    struct group within, between; /* the group; this position in all groups */
    struct iz_flight f;
    const struct iz_coll_sum *s;
    struct iz_coll_pipeline pipeline; /* of the wire type; so are the shards */
    int into_out; /* local rank whose fragments are read into `out`, -1: none */
    struct iz_norm2 *norm2; /* of `out` so far; NULL: nobody wants it */
};

/* Where nothing is added to `out`, one local rank's shard is read straight into
 * it: the sum then finds `out` in the cache. */
static int direct_source(const struct reduction *d)
{
    const struct iz_coll *c = d->f.c;
    const struct iz_coll_sum *s = d->s;
    if (s->accumulate || s->out_type != s->wire || d->between.n > 1 ||
        s->out == s->full + c->first[c->rank])
        return -1;
    for (int r = 0; r < c->size; r++)
        if (r != c->rank && iz_coll_is_local(c, r))
            return r;
    return -1;
}

static int group_rank(const struct group *t, int i)
{
    return t->first + i * t->stride;
}

/* The k-th to receive from and to send to. */
static int group_from(const struct group *t, int k)
{
    return group_rank(t, (t->self + t->n - k) % t->n);
}

static int group_to(const struct group *t, int k)
{
    return group_rank(t, (t->self + k) % t->n);
}

/* Place of `from` among the others of the group. */
static int group_slot(const struct group *t, int from)
{
    int i = (from - t->first) / t->stride;
    return i < t->self ? i : i - 1;
}

/* Where the fragment at `at` of the owner's shard as rank `from` has it is, or
 * will be when it has arrived in the slot. */
static char *reduce_source(const struct reduction *d, const struct group *t,
                           int slot, int from, int owner, int64_t at)
{
    const struct iz_coll *c = d->f.c;
    int64_t place = slot * (c->size - 1) + group_slot(t, from);
    if (from == c->rank)
        return d->s->full + c->first[owner] + at;
    if (from == d->into_out)
        return d->s->out + at;
    if (t == &d->within)
        place += owner / t->n * (t->n - 1);
    else
        place += t->n * (d->within.n - 1);
    return (char *)c->scratch + place * d->pipeline.bytes;
}

static void reduce_recv(struct reduction *d, const struct group *t, int slot,
                        int from, int owner, int64_t at)
{
    const struct iz_coll *c = d->f.c;
    int64_t bytes = fragment_bytes(c, owner, at, d->pipeline);
    if (bytes && !iz_coll_is_local(c, from))
        iz_flight_recv(&d->f, t->flight + slot,
                       reduce_source(d, t, slot, from, owner, at), bytes, from);
}

static void reduce_send(struct reduction *d, const struct group *t, int slot,
                        int to, int owner, int64_t at)
{
    const struct iz_coll *c = d->f.c;
    int64_t bytes = fragment_bytes(c, owner, at, d->pipeline);
    if (bytes && !iz_coll_is_local(c, to))
        iz_flight_send(&d->f, t->flight + slot,
                       d->s->full + c->first[owner] + at, bytes, to);
}

/* What the group gives to the shards that ranks with its members' positions
 * own, and room for what other groups give. */
static void reduce_post(struct reduction *d, int slot, int64_t at)
{
    const struct group *in = &d->within, *over = &d->between;
    for (int i = 1; i < in->n; i++) {
        int from = group_from(in, i), to = group_to(in, i);
        for (int k = 0; k < over->n; k++) {
            reduce_recv(d, in, slot, from, group_rank(over, k), at);
            reduce_send(d, in, slot, to, to - in->first + k * in->n, at);
        }
    }
    for (int k = 1; k < over->n; k++)
        reduce_recv(d, over, slot, group_from(over, k), d->f.c->rank, at);
}

/* Reads what local ranks of the group have of it, as soon as they have formed
 * the sums of so many fragments. */
static void reduce_local(struct reduction *d, const struct group *t, int slot,
                         int owner, int64_t at, int64_t fragments)
{
    struct iz_coll *c = d->f.c;
    int64_t bytes = fragment_bytes(c, owner, at, d->pipeline);
    for (int i = 1; bytes && i < t->n; i++) {
        int from = group_from(t, i);
        if (iz_coll_is_local(c, from))
            iz_local_read(c, from, reduce_source(d, t, slot, from, owner, at),
                          c->first[owner] + at, bytes, fragments, d->f.what);
    }
}

/* The last sum goes to `out`, that of a group of several into its place. */
static void reduce_add(struct reduction *d, const struct group *t, int slot,
                       int owner, int64_t at)
{
    struct iz_coll *c = d->f.c;
    const void **addend = c->state->addend;
    const struct iz_coll_sum *s = d->s;
    int64_t size = iz_dtype_bytes(s->wire);
    int64_t n = fragment_bytes(c, owner, at, d->pipeline) / size;
    for (int i = 0; i < t->n; i++)
        addend[i] = reduce_source(d, t, slot, group_rank(t, i), owner, at);
    if (n && t == &d->within && d->between.n > 1)
        iz_flat_sum(s->full + c->first[owner] + at, s->wire, false, addend,
                    t->n, s->wire, n);
    else if (n)
        iz_flat_sum_norm2(d->norm2,
                          s->out + at / size * iz_dtype_bytes(s->out_type),
                          s->out_type, s->accumulate, addend, t->n, s->wire, n);
}

/* Fragment k of what the group adds; its sums go to groups that want them. */
static void reduce_within(struct reduction *d, int64_t k)
{
    const struct group *in = &d->within, *over = &d->between;
    int slot = (int)(k % d->pipeline.in_flight);
    int64_t at = k * d->pipeline.bytes;
    for (int i = 0; i < over->n; i++)
        reduce_local(d, in, slot, group_rank(over, i), at, 0);
    iz_flight_wait(&d->f, in->flight + slot);
    for (int i = 0; i < over->n; i++)
        reduce_add(d, in, slot, group_rank(over, i), at);
    if (over->n > 1)
        iz_local_announce(d->f.c, k + 1);
    for (int i = 1; i < over->n; i++)
        reduce_send(d, over, slot, group_to(over, i), group_to(over, i), at);
}

static void reduce_between(struct reduction *d, int64_t k)
{
    const struct group *over = &d->between;
    int slot = (int)(k % d->pipeline.in_flight), own = d->f.c->rank;
    int64_t at = k * d->pipeline.bytes;
    reduce_local(d, over, slot, own, at, k + 1);
    iz_flight_wait(&d->f, over->flight + slot);
    reduce_add(d, over, slot, own, at);
}

static void set_groups(struct reduction *d)
{
    const struct iz_coll *c = d->f.c;
    int g = iz_coll_sum_group(c), group = c->rank / g, at = c->rank % g;
    d->within = (struct group){group * g, 1, g, at, 0};
    d->between = (struct group){at, g, c->size / g, group, IZ_FLIGHT_DEPTH};
}

static int64_t reduce_received(const struct reduction *d)
{
    const struct iz_coll *c = d->f.c;
    const struct group *over = &d->between;
    int64_t bytes = (over->n - 1) * shard_bytes(c, c->rank);
    for (int k = 0; k < over->n; k++)
        bytes += (d->within.n - 1) * shard_bytes(c, group_rank(over, k));
    return bytes;
}

void iz_coll_reduce_scatter(struct iz_coll *c, const struct iz_coll_sum *s)
{
    struct iz_norm2 squares = {0};
    for (int r = 0; s->shard >= 0 && r <= c->size; r++)
        c->first[r] = r * s->shard;
    for (int r = 0; r <= c->size; r++)
        c->first[r] *= iz_dtype_bytes(s->wire);
    int64_t bytes = longest_shard(c), own = shard_bytes(c, c->rank);
    int64_t all = c->first[c->size] - c->first[0];
    struct reduction d = {.f = {.c = c, .what = s->what},
                          .s = s,
                          .norm2 = s->norm2 ? &squares : NULL,
                          .pipeline = iz_coll_pipeline(c, bytes)};
    iz_coll_begin(c, IZ_COLL_REDUCE_SCATTER, all / c->size, s->what);
    if (s->norm2)
        *s->norm2 = 0;
    if (bytes == 0)
        return;
    int64_t needs = iz_coll_scratch_bytes(c->size, bytes);
    if (needs > c->scratch_bytes)
        iz_die("%s: a reduce-scatter needs %lld bytes of scratch and has %lld",
               s->what, (long long)needs, (long long)c->scratch_bytes);
    set_groups(&d);
    d.into_out = direct_source(&d);
    iz_coll_count(c, all - own, reduce_received(&d));
    iz_local_enter(c, s->full);
    int slots = d.pipeline.in_flight,
        later = d.between.n > 1 ? slots / 2 : slots;
    int64_t fragments = count_fragments(bytes, d.pipeline);
    for (int64_t k = 0; k < fragments + slots; k++) {
        if (k >= slots && later < slots)
            reduce_between(&d, k - slots);
        if (k >= later && k - later < fragments)
            reduce_within(&d, k - later);
        if (k < fragments)
            reduce_post(&d, (int)(k % slots), k * d.pipeline.bytes);
    }
    if (s->norm2)
        *s->norm2 = iz_norm2_end(&squares);
    iz_local_leave(c, s->what);
}

/* ---- of GPU memory ---- */

struct iz_way iz_way_within(const void *shards, int j, int giver, int taker)
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
    iz_nccl_send_recv(c->gpu->comm, x->stream, r->full, buffer, way, s, items,
                      "reduce-scatter", r->what);
}

/* Elements [first, first + n) of what `ranks` of them have in the buffer from
 * shard `from` on. */
static void add_parts(const struct iz_coll *c, struct iz_exec *x,
                      const struct iz_coll_sum *r, int from, int ranks,
                      int64_t first, int64_t n, void *out, enum iz_dtype type,
                      bool accumulate)
{
    const void *addend[IZ_SUM_INPUTS_MAX];
    for (int i = 0; i < ranks; i++)
        addend[i] = c->gpu->buffer +
                    ((from + i) * r->shard + first) * iz_dtype_bytes(r->wire);
    iz_buffer_sum(x, out, type, accumulate, addend, ranks, r->wire, n);
}

/* All ranks' shards come into the buffer in rank order, are added there, and
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
    int64_t moved = bytes * (c->size - 1);
    iz_coll_note(c, r->what, bytes, moved, moved);
    exchange_parts(c, x, r, iz_way_within, &s, groups);
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
