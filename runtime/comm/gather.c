/* SPDX-License-Identifier: Apache-2.0 */
/* All-gathers, copies of groups, and ranges of a buffer to their owners and
 * back: each says by a way (way.h) which bytes go where.  A rank of the same
 * host is local: its buffer is read.  The others are remote: messages. */
#include <string.h>

#include "codelets/base/int64.h"
#include "runtime/comm/state.h"
#include "runtime/comm/way.h"

/* Bytes per peer and message.  Within a host: so that a buffer may be larger
 * than an int, and so that every few megabytes a new wait starts with fast
 * polling.  Between hosts, with IZ_FLIGHT_DEPTH of them in flight: so that a
 * wait for a receiver's answer does not leave the link idle. */
#define GATHER_LOCAL ((int64_t)4 << 20)
#define GATHER_REMOTE ((int64_t)256 << 10)

struct gather {
    struct iz_flight f;
    const char *own; /* what this rank gives from */
    char *out;       /* and takes into */
    iz_way_of way;
    const void *arg;
    int items;
    bool relays; /* one item that all take from one buffer: see bringer */
    struct iz_coll_pipeline pipeline;
};

/* The k-th peer to receive from and to send to: everybody at another one first,
 * so that no rank is the target of all. */
static int peer_from(const struct iz_coll *c, int k)
{
    return (c->rank + c->size - k) % c->size;
}

static int peer_to(const struct iz_coll *c, int k)
{
    return (c->rank + k) % c->size;
}

/* Of the way, what begins `at` bytes behind its begin. */
static struct iz_way fragment_of(const struct gather *d, int i, int giver,
                                 int taker, int64_t at)
{
    struct iz_way w = d->way(d->arg, i, giver, taker);
    w.from += at;
    w.to += at;
    w.bytes = max64(min64(d->pipeline.bytes, w.bytes - at), 0);
    return w;
}

/* A remote shard comes to each host once, to the rank whose position there
 * among those that take it is the owner's, modulo their number; the others of
 * the host read it from that rank. */
static int bringer(const struct gather *d, int taker, int owner)
{
    const struct iz_coll *c = d->f.c;
    const struct iz_coll_state *s = c->state;
    int left = s->index[owner];
    if (!s->reads_local || !d->relays)
        return taker;
    for (int r = 0;; r = (r + 1) % c->size)
        if (s->host[r] == s->host[taker] && d->way(d->arg, 0, owner, r).bytes &&
            left-- == 0)
            return r;
}

static void gather_post(struct gather *d, int i, int64_t at, int set)
{
    const struct iz_coll *c = d->f.c;
    for (int k = 1; k < c->size; k++) {
        int from = peer_from(c, k), to = peer_to(c, k);
        struct iz_way in = fragment_of(d, i, from, c->rank, at);
        struct iz_way out = fragment_of(d, i, c->rank, to, at);
        if (in.bytes && !iz_coll_is_local(c, from) &&
            bringer(d, c->rank, from) == c->rank)
            iz_flight_recv(&d->f, set, d->out + in.to, in.bytes, from);
        if (out.bytes && !iz_coll_is_local(c, to) &&
            bringer(d, to, c->rank) == to)
            iz_flight_send(&d->f, set, d->own + out.from, out.bytes, to);
    }
}

static void gather_local(struct gather *d, int i, int64_t at)
{
    struct iz_coll *c = d->f.c;
    for (int k = 1; k < c->size; k++) {
        int r = peer_from(c, k);
        struct iz_way w = fragment_of(d, i, r, c->rank, at);
        if (w.bytes && iz_coll_is_local(c, r))
            iz_local_read(c, r, d->out + w.to, w.from, w.bytes, 0, d->f.what);
    }
}

/* Waits for what comes of fragment k by messages, to this rank and to local
 * ones that receive for it. */
static void gather_arrived(struct gather *d, int64_t k)
{
    struct iz_coll *c = d->f.c;
    if (k < 0)
        return;
    iz_flight_wait(&d->f, (int)(k % d->pipeline.in_flight));
    if (d->relays)
        iz_local_announce(c, k + 1);
    for (int i = 1; d->relays && i < c->size; i++) {
        int owner = peer_from(c, i);
        struct iz_way w =
            fragment_of(d, 0, owner, c->rank, k * d->pipeline.bytes);
        if (!w.bytes || iz_coll_is_local(c, owner))
            continue;
        int r = bringer(d, c->rank, owner);
        if (r != c->rank)
            iz_local_read(c, r, d->out + w.to, w.to, w.bytes, k + 1, d->f.what);
    }
}

/* Counts what of an item comes and goes; returns the bytes of the longest way.
 */
static int64_t gather_count(struct gather *d, int i)
{
    struct iz_coll *c = d->f.c;
    int64_t most = 0;
    for (int k = 1; k < c->size; k++) {
        int64_t in = d->way(d->arg, i, peer_from(c, k), c->rank).bytes;
        int64_t out = d->way(d->arg, i, c->rank, peer_to(c, k)).bytes;
        iz_coll_count(c, out, in);
        most = max64(most, max64(in, out));
    }
    return most;
}

/* Among this rank's group of n consecutive ranks.  A rank that waits has posted
 * the fragment and all before it, items in order: of those who wait, the one
 * for the first fragment can go on. */
static void gather_ways(struct gather *d, int n)
{
    struct iz_coll *c = d->f.c;
    int64_t k = 0;
    if (n == 1)
        return;
    d->pipeline = (struct iz_coll_pipeline){GATHER_LOCAL, 2};
    for (int i = 0, r = c->rank - c->rank % n; i < n; i++)
        if (iz_coll_host(c, r + i) != iz_coll_host(c, c->rank))
            d->pipeline =
                (struct iz_coll_pipeline){GATHER_REMOTE, IZ_FLIGHT_DEPTH};
    iz_local_enter(c, d->own);
    for (int i = 0; i < d->items; i++)
        for (int64_t at = 0, end = gather_count(d, i); at < end;
             at += d->pipeline.bytes, k++) {
            gather_arrived(d, k - d->pipeline.in_flight);
            gather_post(d, i, at, (int)(k % d->pipeline.in_flight));
            gather_local(d, i, at);
        }
    for (int i = d->pipeline.in_flight; i > 0; i--)
        gather_arrived(d, k - i);
    iz_local_leave(c, d->f.what);
}

/* ---- all-gather ---- */

struct iz_way iz_way_gather(const void *shards, int i, int giver, int taker)
{
    const struct iz_shards *s = shards;
    int64_t at = giver % s->n * s->bytes;
    return (struct iz_way){at, at, giver / s->n == taker / s->n ? s->bytes : 0};
}

static struct iz_way shards_way(const void *first, int i, int giver, int taker)
{
    const int64_t *at = (const int64_t *)first + giver;
    return (struct iz_way){at[0], at[0], at[1] - at[0]};
}

static void gather(struct iz_coll *c, void *full, int64_t bytes, int n,
                   iz_way_of way, const void *arg, const char *what)
{
    struct gather d = {.f = {.c = c, .what = what},
                       .own = full,
                       .out = full,
                       .way = way,
                       .arg = arg,
                       .items = 1,
                       .relays = true};
    iz_coll_begin(c, IZ_COLL_ALL_GATHER, bytes / c->size, what);
    if (bytes)
        gather_ways(&d, n);
}

void iz_coll_all_gatherv(struct iz_coll *c, void *full, const char *what)
{
    gather(c, full, c->first[c->size] - c->first[0], c->size, shards_way,
           c->first, what);
}

void iz_coll_all_gather(struct iz_coll *c, void *full, int64_t shard_bytes,
                        const char *what)
{
    iz_coll_all_gather_among(c, full, shard_bytes, c->size, what);
}

void iz_coll_all_gather_among(struct iz_coll *c, void *full,
                              int64_t shard_bytes, int n, const char *what)
{
    const struct iz_shards s = {shard_bytes, n, c->size};
    gather(c, full, shard_bytes * n, n, iz_way_gather, &s, what);
}

/* ---- shards for a copy in each group ---- */

struct iz_way iz_way_refresh(const void *shards, int i, int giver, int taker)
{
    const struct iz_shards *s = shards;
    int share = s->ranks / s->n;
    return (struct iz_way){0, giver % share * s->bytes,
                           giver / share == taker % s->n ? s->bytes : 0};
}

void iz_coll_refresh(struct iz_coll *c, void *out, const void *own,
                     int64_t shard_bytes, int n, const char *what)
{
    const struct iz_shards s = {shard_bytes, n, c->size};
    struct iz_way self = iz_way_refresh(&s, 0, c->rank, c->rank);
    struct gather d = {.f = {.c = c, .what = what},
                       .own = own,
                       .out = out,
                       .way = iz_way_refresh,
                       .arg = &s,
                       .items = 1};
    iz_coll_begin(c, IZ_COLL_REFRESH, shard_bytes, what);
    if (self.bytes)
        memcpy(d.out + self.to, own, (size_t)self.bytes);
    if (shard_bytes)
        gather_ways(&d, c->size);
}

/* ---- ranges to their owners, and back ---- */

struct exchange {
    const struct iz_coll_range *list;
    int64_t shard; /* bytes of each rank's; 0: all are everyone's */
    bool back;
};

static struct iz_way range_way(const void *arg, int i, int giver, int taker)
{
    const struct exchange *x = arg;
    const struct iz_coll_range *a = &x->list[i];
    int owner = x->back ? giver : taker, other = x->back ? taker : giver;
    int64_t begin = a->begin, end = a->end;
    if (x->shard) {
        begin = max64(begin, other * x->shard);
        end = min64(end, (other + 1) * x->shard);
    }
    return (struct iz_way){begin, begin,
                           owner == a->owner ? max64(end - begin, 0) : 0};
}

void iz_coll_exchange(struct iz_coll *c, void *full, int64_t shard_bytes,
                      const struct iz_coll_range *list, int n, bool back,
                      const char *what)
{
    const struct exchange x = {list, shard_bytes, back};
    struct gather d = {.f = {.c = c, .what = what},
                       .own = full,
                       .out = full,
                       .way = range_way,
                       .arg = &x,
                       .items = n};
    int64_t bytes = 0;
    for (int i = 0; i < n; i++)
        bytes += list[i].end - list[i].begin;
    iz_coll_begin(c, IZ_COLL_EXCHANGE, bytes, what);
    if (bytes)
        gather_ways(&d, c->size);
}
