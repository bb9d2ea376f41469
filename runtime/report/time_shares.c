/* SPDX-License-Identifier: Apache-2.0 */
/* A sweep over the begins and ends of tasks; see time_shares.h. */
#include "runtime/report/time_shares.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/die.h"

const char *const iz_use_names[IZ_USES] = {
    [IZ_USE_UNITS] = "units",     [IZ_USE_OPTIMIZER] = "optimizer",
    [IZ_USE_SUMS] = "sums",       [IZ_USE_NETWORK] = "network",
    [IZ_USE_UP] = "up",           [IZ_USE_DOWN] = "down",
    [IZ_USE_DISK] = "disk",       [IZ_USE_TASKS] = "no task",
    [IZ_USE_NOTHING] = "nothing",
};

struct edge {
    int64_t ns;
    short use, worker;
    int change; /* +1: a task begins, -1: it ends */
};

struct iz_usage {
    enum iz_where place[STARPU_NMAXWORKERS];
    int workers, compute; /* all, and those that compute units */
    bool open;
    int64_t swept;    /* all before is accounted */
    int64_t until[3]; /* the last calls, oldest first */
    struct iz_span *span;
    int n, room;
    struct edge *edge;
    int edge_room;
    /* Running now: everywhere, and on compute workers. */
    int running[IZ_USES_RUNNING], own[IZ_USES_RUNNING];
    double window_ns, own_ns[IZ_USES], busy_ns[IZ_USES_RUNNING];
    double task_ns[IZ_USES_RUNNING], beside_ns[IZ_USES_RUNNING];
    double worker_ns[STARPU_NMAXWORKERS], all_ns[IZ_USES_RUNNING];
};

int iz_usage_open(struct iz_usage **out, const enum iz_where *place,
                  int workers)
{
    struct iz_usage *u = calloc(1, sizeof(*u));
    *out = u;
    if (!u)
        return -ENOMEM;
    assert(workers <= STARPU_NMAXWORKERS);
    memcpy(u->place, place, (size_t)workers * sizeof(*place));
    u->workers = workers;
    for (int w = 0; w < workers; w++)
        u->compute += place[w] == IZ_ON_COMPUTE;
    return 0;
}

void iz_usage_close(struct iz_usage **u)
{
    if (!*u)
        return;
    free((*u)->span);
    free((*u)->edge);
    free(*u);
    *u = NULL;
}

static enum iz_use use_of(const struct iz_usage *u, const struct iz_span *s)
{
    switch (u->place[s->worker]) {
    case IZ_ON_LANE:
        return IZ_USE_NETWORK;
    case IZ_ON_UP:
        return IZ_USE_UP;
    case IZ_ON_DOWN:
        return IZ_USE_DOWN;
    case IZ_ON_IO:
        return IZ_USE_DISK;
    default:
        break;
    }
    switch (s->kind) {
    case IZ_FORWARD:
    case IZ_BACKWARD:
    case IZ_EVAL:
    case IZ_SAMPLE:
        return IZ_USE_UNITS;
    case IZ_ADAM:
        return IZ_USE_OPTIMIZER;
    default:
        return IZ_USE_SUMS;
    }
}

static void *grown(void *p, int *room, size_t size)
{
    *room = *room ? 2 * *room : 1024;
    p = realloc(p, (size_t)*room * size);
    if (!p)
        iz_die("out of memory for the log of tasks");
    return p;
}

void iz_usage_add(struct iz_usage *u, const struct iz_span *s)
{
    u->all_ns[use_of(u, s)] += (double)(s->end_ns - s->begin_ns);
    if (u->n == u->room)
        u->span = grown(u->span, &u->room, sizeof(*u->span));
    u->span[u->n++] = *s;
}

/* ---- the sweep ---- */

static int by_time(const void *a, const void *b)
{
    const struct edge *x = a, *y = b;
    if (x->ns != y->ns)
        return x->ns < y->ns ? -1 : 1;
    return x->change - y->change; /* ends first */
}

/* Begin and end of every task within [swept, to). */
static int list_edges(struct iz_usage *u, int64_t to)
{
    int n = 0;
    for (int i = 0; i < u->n; i++) {
        const struct iz_span *s = &u->span[i];
        int64_t b = s->begin_ns > u->swept ? s->begin_ns : u->swept;
        int64_t e = s->end_ns < to ? s->end_ns : to;
        if (e <= b)
            continue;
        while (n + 2 > u->edge_room)
            u->edge = grown(u->edge, &u->edge_room, sizeof(*u->edge));
        struct edge g = {b, (short)use_of(u, s), s->worker, 1};
        u->edge[n++] = g;
        g.ns = e;
        g.change = -1;
        u->edge[n++] = g;
    }
    if (n)
        qsort(u->edge, (size_t)n, sizeof(*u->edge), by_time);
    return n;
}

/* Idle workers beside a unit lack a task of their own; else they wait for what
 * runs, for each kind of it alike. */
static void account_idle(struct iz_usage *u, double ns)
{
    int kinds = 0;
    for (int c = IZ_USE_OPTIMIZER; c < IZ_USES_RUNNING; c++)
        kinds += u->running[c] > 0;
    if (u->running[IZ_USE_UNITS])
        u->own_ns[IZ_USE_TASKS] += ns;
    else if (!kinds)
        u->own_ns[IZ_USE_NOTHING] += ns;
    else
        for (int c = IZ_USE_OPTIMIZER; c < IZ_USES_RUNNING; c++)
            u->own_ns[c] += u->running[c] ? ns / kinds : 0;
}

static void account(struct iz_usage *u, double ns)
{
    int idle = u->compute;
    for (int c = 0; c < IZ_USES_RUNNING; c++) {
        double tasks_ns = u->running[c] * ns;
        idle -= u->own[c];
        u->own_ns[c] += u->own[c] * ns;
        u->busy_ns[c] += u->running[c] ? ns : 0;
        u->task_ns[c] += tasks_ns;
        u->beside_ns[c] += u->running[IZ_USE_UNITS] ? tasks_ns : 0;
    }
    u->window_ns += ns;
    if (idle > 0)
        account_idle(u, idle * ns);
}

static void apply(struct iz_usage *u, const struct edge *e)
{
    u->running[e->use] += e->change;
    if (u->place[e->worker] == IZ_ON_COMPUTE)
        u->own[e->use] += e->change;
    u->worker_ns[e->worker] -= e->change * (double)(e->ns - u->swept);
}

static void forget(struct iz_usage *u, int64_t to)
{
    int n = 0;
    for (int i = 0; i < u->n; i++)
        if (u->span[i].end_ns > to)
            u->span[n++] = u->span[i];
    u->n = n;
}

static void sweep(struct iz_usage *u, int64_t to)
{
    int n = list_edges(u, to);
    int64_t at = u->swept;
    for (int i = 0; i < n; i++) {
        account(u, (double)(u->edge[i].ns - at));
        at = u->edge[i].ns;
        apply(u, &u->edge[i]);
    }
    account(u, (double)(to - at));
    forget(u, to);
    u->swept = to;
}

/* A task is logged when it ends, so the last two rounds wait: a task that is
 * still running may have begun there. */
void iz_usage_until(struct iz_usage *u, int64_t ns)
{
    if (!u->open) {
        u->open = true;
        u->swept = u->until[0] = u->until[1] = u->until[2] = ns;
        return;
    }
    u->until[0] = u->until[1];
    u->until[1] = u->until[2];
    u->until[2] = ns;
    sweep(u, u->until[0]);
}

void iz_usage_stop(struct iz_usage *u)
{
    if (u->open)
        sweep(u, u->until[2]);
    u->open = false;
    u->n = 0;
}

struct iz_usage_total iz_usage_total(const struct iz_usage *u)
{
    struct iz_usage_total t = {.window_s = u->window_ns * 1e-9};
    if (u->window_ns <= 0)
        return t;
    for (int c = 0; c < IZ_USES; c++)
        t.share[c] =
            u->own_ns[c] / u->window_ns / (u->compute ? u->compute : 1);
    for (int c = 0; c < IZ_USES_RUNNING; c++) {
        t.busy[c] = u->busy_ns[c] / u->window_ns;
        t.task_s[c] = u->task_ns[c] * 1e-9;
        t.beside_units_s[c] = u->beside_ns[c] * 1e-9;
    }
    for (int w = 0; w < u->workers; w++)
        t.worker[w] = u->worker_ns[w] / u->window_ns;
    return t;
}

double iz_usage_seconds(const struct iz_usage *u, enum iz_use use)
{
    return u->all_ns[use] * 1e-9;
}
