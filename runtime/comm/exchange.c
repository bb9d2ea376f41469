/* SPDX-License-Identifier: Apache-2.0 */
/* Ranges of a buffer to their owners, and back; see coll.h. */
#include "codelets/base/int64.h"
#include "runtime/comm/state.h"

/* Bytes of a message: see GATHER_FAR in move.c. */
#define PIECE ((int64_t)256 << 10)

struct exchange {
    struct iz_flight f;
    char *full;
    int64_t shard; /* bytes of each rank's; 0: all are everyone's */
    bool back;
};

struct part {
    int64_t begin, end;
};

/* What of a range lies in rank r's shard. */
static struct part of_shard(const struct exchange *x,
                            const struct iz_coll_range *a, int r)
{
    if (!x->shard)
        return (struct part){a->begin, a->end};
    return (struct part){max64(a->begin, r * x->shard),
                         min64(a->end, (r + 1) * x->shard)};
}

/* What goes from one rank to another of a range. */
static struct part between(const struct exchange *x,
                           const struct iz_coll_range *a, int from, int to)
{
    int owner = x->back ? from : to, other = x->back ? to : from;
    if (owner != a->owner || other == owner)
        return (struct part){0, 0};
    return of_shard(x, a, other);
}

static int64_t bytes_in(struct part p)
{
    return max64(p.end - p.begin, 0);
}

/* Of messages, what lies in [at, at + PIECE); all ranks cut a range alike. */
static struct part piece_of(struct part p, int64_t at)
{
    return (struct part){max64(p.begin, at), min64(p.end, at + PIECE)};
}

static void post_piece(struct exchange *x, const struct iz_coll_range *a,
                       int64_t at, int group)
{
    struct iz_coll *c = x->f.c;
    for (int r = 0; r < c->size; r++) {
        struct part in = piece_of(between(x, a, r, c->rank), at);
        struct part out = piece_of(between(x, a, c->rank, r), at);
        if (iz_coll_is_near(c, r))
            continue;
        if (bytes_in(in))
            iz_flight_recv(&x->f, group, x->full + in.begin, bytes_in(in), r);
        if (bytes_in(out))
            iz_flight_send(&x->f, group, x->full + out.begin, bytes_in(out), r);
    }
}

static void read_near(struct exchange *x, const struct iz_coll_range *a)
{
    struct iz_coll *c = x->f.c;
    for (int i = 1; i < c->size; i++) {
        int r = (c->rank + c->size - i) % c->size;
        struct part in = between(x, a, r, c->rank);
        if (iz_coll_is_near(c, r) && bytes_in(in))
            iz_near_read(c, r, x->full + in.begin, in.begin, bytes_in(in), 0,
                         x->f.what);
    }
}

static void count_exchange(const struct exchange *x,
                           const struct iz_coll_range *list, int n)
{
    struct iz_coll *c = x->f.c;
    int64_t out = 0, in = 0;
    for (int i = 0; i < n; i++)
        for (int r = 0; r < c->size; r++) {
            in += bytes_in(between(x, &list[i], r, c->rank));
            out += bytes_in(between(x, &list[i], c->rank, r));
        }
    iz_coll_count(c, out, in);
}

void iz_coll_exchange(struct iz_coll *c, void *full, int64_t shard_bytes,
                      const struct iz_coll_range *list, int n, bool back,
                      const char *what)
{
    struct exchange x = {{.c = c, .what = what}, full, shard_bytes, back};
    int64_t bytes = 0, k = 0;
    for (int i = 0; i < n; i++)
        bytes += list[i].end - list[i].begin;
    iz_coll_begin(c, IZ_COLL_EXCHANGE, bytes, what);
    if (c->size == 1 || !bytes)
        return;
    count_exchange(&x, list, n);
    iz_near_enter(c, full);
    for (int i = 0; i < n; i++)
        for (int64_t at = list[i].begin; at < list[i].end; at += PIECE, k++) {
            int group = (int)(k % IZ_FLIGHT_PIECES);
            iz_flight_wait(&x.f, group);
            post_piece(&x, &list[i], at, group);
        }
    for (int i = 0; i < n; i++)
        read_near(&x, &list[i]);
    for (int group = 0; group < IZ_FLIGHT_PIECES; group++)
        iz_flight_wait(&x.f, group);
    iz_near_leave(c, what);
}
