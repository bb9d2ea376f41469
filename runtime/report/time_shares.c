/* SPDX-License-Identifier: Apache-2.0 */
/* A sweep over the begins and ends of tasks; see time_shares.h. */
#include "runtime/report/time_shares.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/int64.h"
#include "codelets/base/take.h"

const char *const iz_use_names[IZ_USES] = {
    [IZ_USE_UNITS] = "units",     [IZ_USE_OPTIMIZER] = "optimizer",
    [IZ_USE_SUMS] = "sums",       [IZ_USE_NETWORK] = "network",
    [IZ_USE_UP] = "up",           [IZ_USE_DOWN] = "down",
    [IZ_USE_DISK] = "disk",       [IZ_USE_TASKS] = "no task",
    [IZ_USE_NOTHING] = "nothing",
};

/* What a logged span still counts for. */
struct entry {
    struct iz_span span;
    bool hides;        /* a computation: what runs beside it is hidden */
    int64_t block_end; /* of the computations that follow without a gap */
    enum { FRESH, DUE, COUNTED } hidden; /* time of its kind, beside those */
};

struct edge {
    int64_t ns;
    int entry, change; /* +1: it begins, -1: it ends */
};

/* Tasks that run at one time: computations, of each kind what is due, of each
 * use all, and of those what is on compute workers. */
struct under_way {
    int hiding, due[IZ_KINDS], running[IZ_USES_RUNNING], own[IZ_USES_RUNNING];
};

struct iz_time_shares {
    enum iz_where where[STARPU_NMAXWORKERS];
    int workers, compute; /* all, and those that compute units */
    struct entry *entry;
    int n, room;
    struct edge *edge, *block; /* and the first of those in a block */
    int edge_room;
    int64_t latest[3]; /* end seen up to the last rounds, oldest first */
    /* The window: all before `swept` is accounted, the sweep reaches to `to`;
     * and where the last calls put its end, oldest first. */
    bool open;
    int64_t swept, to, until[3];
    struct under_way now;
    int64_t hidden_ns[IZ_KINDS];
    struct iz_kind_time kind[IZ_KINDS]; /* without the hidden part */
    double window_ns, own_ns[IZ_USES], busy_ns[IZ_USES_RUNNING];
    double task_ns[IZ_USES_RUNNING], beside_ns[IZ_USES_RUNNING];
    double worker_ns[STARPU_NMAXWORKERS], all_ns[IZ_USES_RUNNING];
};

struct iz_time_shares *iz_time_shares_open(const enum iz_where *where,
                                           int workers)
{
    struct iz_time_shares *t = iz_take(1, sizeof(*t), "the log of tasks");
    assert(workers <= STARPU_NMAXWORKERS);
    memcpy(t->where, where, (size_t)workers * sizeof(*where));
    t->workers = workers;
    for (int w = 0; w < workers; w++)
        t->compute += where[w] == IZ_ON_COMPUTE;
    return t;
}

void iz_time_shares_close(struct iz_time_shares **t)
{
    if (!*t)
        return;
    free((*t)->entry);
    free((*t)->edge);
    free(*t);
    *t = NULL;
}

/* Whether what runs beside a task of this kind is hidden. */
static bool computes(enum iz_kind k)
{
    return k == IZ_FORWARD || k == IZ_BACKWARD || k == IZ_EVAL;
}

static enum iz_use use_of(const struct iz_time_shares *t,
                          const struct iz_span *s)
{
    static const enum iz_use links[IZ_WORKER_KINDS] = {
        [IZ_ON_COMM] = IZ_USE_NETWORK,
        [IZ_ON_H2D] = IZ_USE_UP,
        [IZ_ON_D2H] = IZ_USE_DOWN,
        [IZ_ON_IO] = IZ_USE_DISK};
    if (links[t->where[s->worker]])
        return links[t->where[s->worker]];
    if (IZ_KINDS_OPTIMIZER >> s->kind & 1)
        return IZ_USE_OPTIMIZER;
    return computes(s->kind) || s->kind == IZ_SAMPLE ? IZ_USE_UNITS
                                                     : IZ_USE_SUMS;
}

static struct entry *log_span(struct iz_time_shares *t, const struct iz_span *s)
{
    t->all_ns[use_of(t, s)] += (double)(s->end_ns - s->begin_ns);
    t->entry =
        iz_take_more(t->entry, t->n, &t->room, sizeof(*t->entry), "tasks");
    t->entry[t->n] = (struct entry){.span = *s, .hidden = COUNTED};
    return &t->entry[t->n++];
}

void iz_time_shares_add_behind(struct iz_time_shares *t,
                               const struct iz_span *s)
{
    log_span(t, s);
}

void iz_time_shares_add(struct iz_time_shares *t, const struct iz_span *s)
{
    struct entry *e = log_span(t, s);
    struct iz_kind_time *k = &t->kind[s->kind];
    k->seconds += (double)(s->end_ns - s->begin_ns) * 1e-9;
    k->tasks++;
    t->latest[2] = max64(t->latest[2], s->end_ns);
    e->hides = computes(s->kind);
    e->hidden = e->hides ? COUNTED : FRESH;
}

/* ---- the sweep ---- */

static int by_time(const void *a, const void *b)
{
    const struct edge *x = a, *y = b;
    if (x->ns != y->ns)
        return x->ns < y->ns ? -1 : 1;
    return y->change - x->change; /* begins first: no gap between two */
}

/* Begin and end of every task. */
static int list_edges(struct iz_time_shares *t)
{
    int n = 0;
    for (int i = 0; i < t->n; i++) {
        const struct iz_span *s = &t->entry[i].span;
        if (s->end_ns <= s->begin_ns)
            continue;
        t->edge = iz_take_more(t->edge, n + 1, &t->edge_room, sizeof(*t->edge),
                               "begins and ends of tasks");
        t->edge[n++] = (struct edge){s->begin_ns, i, 1};
        t->edge[n++] = (struct edge){s->end_ns, i, -1};
    }
    if (n)
        qsort(t->edge, (size_t)n, sizeof(*t->edge), by_time);
    return n;
}

/* Idle workers beside a unit lack a task of their own; else they wait for what
 * runs, for each kind of it alike. */
static void account_idle(struct iz_time_shares *t, double ns)
{
    int kinds = 0;
    for (int c = IZ_USE_OPTIMIZER; c < IZ_USES_RUNNING; c++)
        kinds += t->now.running[c] > 0;
    if (t->now.running[IZ_USE_UNITS])
        t->own_ns[IZ_USE_TASKS] += ns;
    else if (!kinds)
        t->own_ns[IZ_USE_NOTHING] += ns;
    else
        for (int c = IZ_USE_OPTIMIZER; c < IZ_USES_RUNNING; c++)
            t->own_ns[c] += t->now.running[c] ? ns / kinds : 0;
}

/* Time of the window during which the same tasks run. */
static void account_window(struct iz_time_shares *t, double ns)
{
    int idle = t->compute;
    for (int c = 0; c < IZ_USES_RUNNING; c++) {
        double tasks_ns = t->now.running[c] * ns;
        idle -= t->now.own[c];
        t->own_ns[c] += t->now.own[c] * ns;
        t->busy_ns[c] += t->now.running[c] ? ns : 0;
        t->task_ns[c] += tasks_ns;
        t->beside_ns[c] += t->now.running[IZ_USE_UNITS] ? tasks_ns : 0;
    }
    t->window_ns += ns;
    if (idle > 0)
        account_idle(t, idle * ns);
}

/* Nothing begins or ends between the two; before the first and after the last
 * edge nothing runs. */
static void account(struct iz_time_shares *t, int64_t begin, int64_t end)
{
    for (int k = 0; k < IZ_KINDS && t->now.hiding; k++)
        t->hidden_ns[k] += t->now.due[k] * (end - begin);
    begin = max64(begin, t->swept);
    end = min64(end, t->to);
    if (end > begin)
        account_window(t, (double)(end - begin));
}

static void time_shares_apply(struct iz_time_shares *t, const struct edge *g)
{
    const struct entry *e = &t->entry[g->entry];
    if (e->hides)
        t->now.hiding += g->change;
    for (; !t->now.hiding && t->block <= g; t->block++)
        t->entry[t->block->entry].block_end = g->ns;
    if (e->hidden == DUE)
        t->now.due[e->span.kind] += g->change;
    enum iz_use use = use_of(t, &e->span);
    t->now.running[use] += g->change;
    if (t->where[e->span.worker] == IZ_ON_COMPUTE)
        t->now.own[use] += g->change;
    int64_t at = min64(max64(g->ns, t->swept), t->to);
    t->worker_ns[e->span.worker] -= g->change * (double)(at - t->swept);
}

/* Drops what counts for nothing any more.  A computation does until all that is
 * still to be counted began after its end; a task that is still running may
 * have begun two rounds ago. */
static void time_shares_forget(struct iz_time_shares *t)
{
    int64_t oldest = t->latest[0];
    int n = 0;
    for (int i = 0; i < t->n; i++) {
        struct entry *e = &t->entry[i];
        e->hidden += e->hidden != COUNTED;
        if (e->hidden == DUE)
            oldest = min64(oldest, e->span.begin_ns);
    }
    for (int i = 0; i < t->n; i++) {
        struct entry *e = &t->entry[i];
        e->hides &= e->block_end > oldest;
        if (e->span.end_ns > t->swept || e->hides || e->hidden != COUNTED)
            t->entry[n++] = *e;
    }
    t->n = n;
    t->latest[0] = t->latest[1];
    t->latest[1] = t->latest[2];
}

/* A round: the window's time before `to`, and the hidden time of what is due,
 * which was added in the round before. */
static void sweep(struct iz_time_shares *t, int64_t to)
{
    int n = list_edges(t);
    int64_t at = INT64_MIN;
    t->block = t->edge;
    t->to = to;
    for (int i = 0; i < n; i++) {
        account(t, at, t->edge[i].ns);
        at = t->edge[i].ns;
        time_shares_apply(t, &t->edge[i]);
    }
    account(t, at, INT64_MAX);
    t->swept = to;
    time_shares_forget(t);
}

/* A task is logged when it ends, so the last two rounds of the window wait: a
 * task that is still running may have begun there. */
void iz_time_shares_until(struct iz_time_shares *t, int64_t ns)
{
    t->until[0] = t->until[1];
    t->until[1] = t->until[2];
    t->until[2] = ns;
    if (!t->open)
        t->swept = t->until[0] = t->until[1] = ns;
    t->open = true;
    sweep(t, t->until[0]);
}

void iz_time_shares_stop(struct iz_time_shares *t, bool last)
{
    for (int i = 0; i < t->n && last; i++)
        t->entry[i].hidden += t->entry[i].hidden == FRESH;
    sweep(t, t->open ? t->until[2] : t->swept);
    t->open = false;
}

/* ---- figures ---- */

struct iz_kind_time iz_time_shares_kind(const struct iz_time_shares *t,
                                        enum iz_kind k)
{
    struct iz_kind_time time = t->kind[k];
    time.hidden_s = (double)t->hidden_ns[k] * 1e-9;
    return time;
}

struct iz_kind_time iz_time_shares_kinds(const struct iz_time_shares *t,
                                         unsigned kinds)
{
    struct iz_kind_time sum = {0};
    for (int k = 0; k < IZ_KINDS; k++) {
        struct iz_kind_time one = iz_time_shares_kind(t, (enum iz_kind)k);
        sum.seconds += kinds >> k & 1 ? one.seconds : 0;
        sum.hidden_s += kinds >> k & 1 ? one.hidden_s : 0;
    }
    return sum;
}

struct iz_time_total iz_time_shares_total(const struct iz_time_shares *t)
{
    struct iz_time_total total = {.window_s = t->window_ns * 1e-9};
    if (t->window_ns <= 0)
        return total;
    for (int c = 0; c < IZ_USES; c++)
        total.share[c] =
            t->own_ns[c] / t->window_ns / (t->compute ? t->compute : 1);
    for (int c = 0; c < IZ_USES_RUNNING; c++) {
        total.busy[c] = t->busy_ns[c] / t->window_ns;
        total.task_s[c] = t->task_ns[c] * 1e-9;
        total.beside_units_s[c] = t->beside_ns[c] * 1e-9;
    }
    for (int w = 0; w < t->workers; w++)
        total.worker[w] = t->worker_ns[w] / t->window_ns;
    return total;
}

double iz_time_shares_seconds(const struct iz_time_shares *t, enum iz_use use)
{
    return t->all_ns[use] * 1e-9;
}
