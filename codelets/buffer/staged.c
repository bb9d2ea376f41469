/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of a matrix in host memory pass through a GPU's scratch; see ops.h.
 * Two streams of the worker copy, one each way.  Events order them: a load
 * into a buffer follows what was computed in it and what was stored from it, a
 * computation follows its load, a store follows the computation. */
#include "codelets/base/die.h"
#include "codelets/gpu/device.h"
#include "codelets/ops/ops.h"

enum { IN, OUT };

static bool staged_works(const struct iz_exec *x, const struct iz_staged *s)
{
    return s->buffer[0].rows && !x->dry;
}

struct iz_staged iz_staged_open(struct iz_exec *x, struct iz_view all,
                                int64_t rows)
{
    struct iz_staged s = {.all = all, .first = {-1, -1}};
    for (int i = 0; i < 2; i++)
        s.buffer[i] = iz_exec_work(
            x, all.dtype, iz_exec_host_boundaries(x) ? rows : 0, all.cols);
    for (int i = 0; i < 2 && staged_works(x, &s); i++)
        if (!x->beside[i] && !(x->beside[i] = iz_device_stream_open()))
            iz_die("no stream for copies of rows");
    return s;
}

void iz_staged_close(struct iz_exec *x, struct iz_staged *s)
{
    if (!staged_works(x, s))
        return;
    for (int i = 0; i < 2; i++) {
        iz_device_follow(x->stream, s->loaded[i]);
        iz_device_follow(x->stream, s->stored[i]);
        iz_device_event_close(s->loaded[i]);
        iz_device_event_close(s->stored[i]);
    }
    iz_device_event_close(s->used);
}

/* The stream `beside` goes on where the task's is now. */
static void follow_task(struct iz_exec *x, struct iz_staged *s, int way)
{
    iz_device_record(&s->used, x->stream);
    iz_device_follow(x->beside[way], s->used);
}

static void load(struct iz_exec *x, struct iz_staged *s, int to, int64_t at,
                 int64_t n)
{
    struct iz_view from = iz_view_rows(s->all, at, n);
    s->first[to] = at;
    x->cost.bus_bytes[IN] += (double)iz_view_bytes(from);
    if (!staged_works(x, s))
        return;
    follow_task(x, s, IN);
    iz_device_follow(x->beside[IN], s->stored[to]);
    iz_device_copy(x->beside[IN], s->buffer[to].p, from.p, iz_view_bytes(from));
    iz_device_record(&s->loaded[to], x->beside[IN]);
}

struct iz_view iz_staged_load(struct iz_exec *x, struct iz_staged *s,
                              int64_t at, int64_t n, int64_t next,
                              int64_t n_next)
{
    if (!s->buffer[0].rows)
        return iz_view_rows(s->all, at, n);
    s->turn = s->first[s->turn] == at ? s->turn : !s->turn;
    if (s->first[s->turn] != at)
        load(x, s, s->turn, at, n);
    if (staged_works(x, s))
        iz_device_follow(x->stream, s->loaded[s->turn]);
    if (n_next)
        load(x, s, !s->turn, next, n_next);
    return iz_view_rows(s->buffer[s->turn], 0, n);
}

struct iz_view iz_staged_room(struct iz_exec *x, struct iz_staged *s,
                              int64_t at, int64_t n)
{
    if (!s->buffer[0].rows)
        return iz_view_rows(s->all, at, n);
    s->turn = !s->turn;
    if (staged_works(x, s))
        iz_device_follow(x->stream, s->stored[s->turn]);
    return iz_view_rows(s->buffer[s->turn], 0, n);
}

void iz_staged_store(struct iz_exec *x, struct iz_staged *s, int64_t at,
                     int64_t n)
{
    struct iz_view to = iz_view_rows(s->all, at, n);
    if (!s->buffer[0].rows)
        return;
    x->cost.bus_bytes[OUT] += (double)iz_view_bytes(to);
    if (!staged_works(x, s))
        return;
    follow_task(x, s, OUT);
    iz_device_copy(x->beside[OUT], to.p, s->buffer[s->turn].p,
                   iz_view_bytes(to));
    iz_device_record(&s->stored[s->turn], x->beside[OUT]);
}
