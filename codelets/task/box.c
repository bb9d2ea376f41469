/* SPDX-License-Identifier: Apache-2.0 */
/* What a graph tells when a run does not go on: its last tasks, those that run,
 * and those that wait and for which.  It is written while workers go on, and in
 * a signal's handler. */
#include <stdatomic.h>

#include "codelets/task/state.h"

enum { LAST = 1000 }; /* tasks of each list */

static void print_name(struct iz_sink *s, int kind, int unit, int step,
                       int position)
{
    iz_sink_text(s, "{");
    iz_sink_string(s, "task", iz_kinds[kind].name);
    iz_sink_number(s, "unit", unit);
    iz_sink_number(s, "step", step);
    iz_sink_number(s, "position", position);
}

void iz_span_print(struct iz_sink *s, const struct iz_span *t, int64_t zero_ns)
{
    print_name(s, t->kind, t->unit, t->step, t->position);
    iz_sink_number(s, "worker", t->worker);
    iz_sink_us(s, "begin_us", t->begin_ns - zero_ns);
    iz_sink_us(s, "end_us", t->end_ns - zero_ns);
    iz_sink_text(s, "}");
}

/* ---- tasks that have ended ---- */

/* In the rings of the logs nothing goes that is not written over: [at, end) of
 * each worker's are those to print. */
struct last {
    uint64_t at[STARPU_NMAXWORKERS], end[STARPU_NMAXWORKERS];
};

static const struct iz_span *span_of(const struct iz_graph *g, int w,
                                     uint64_t i)
{
    return &g->worker[w].log.span[i % SPANS];
}

/* Moves the begin of the worker whose task before it ended last. */
static bool take_one(const struct iz_graph *g, struct last *l)
{
    int best = -1;
    for (int w = 0; w < g->n_workers; w++)
        if (l->at[w] > 0 && l->end[w] - l->at[w] < SPANS &&
            (best < 0 || span_of(g, w, l->at[w] - 1)->end_ns >
                             span_of(g, best, l->at[best] - 1)->end_ns))
            best = w;
    if (best >= 0)
        l->at[best]--;
    return best >= 0;
}

static int oldest(const struct iz_graph *g, const struct last *l)
{
    int best = -1;
    for (int w = 0; w < g->n_workers; w++)
        if (l->at[w] < l->end[w] &&
            (best < 0 || span_of(g, w, l->at[w])->end_ns <
                             span_of(g, best, l->at[best])->end_ns))
            best = w;
    return best;
}

static void print_ended(const struct iz_graph *g, struct iz_sink *s,
                        int64_t zero_ns)
{
    struct last l;
    for (int w = 0; w < g->n_workers; w++)
        l.at[w] = l.end[w] = atomic_load(&g->worker[w].log.head);
    for (int i = 0; i < LAST && take_one(g, &l); i++)
        continue;
    iz_sink_key(s, "tasks");
    iz_sink_text(s, "[");
    const char *comma = "\n";
    for (int w; (w = oldest(g, &l)) >= 0; comma = ",\n") {
        iz_sink_text(s, comma);
        iz_span_print(s, span_of(g, w, l.at[w]++), zero_ns);
    }
    iz_sink_text(s, "]");
}

/* ---- tasks that have not ---- */

static const struct waiting *task_of(const struct iz_graph *g, int64_t number)
{
    return &g->waiting[number % WAITING];
}

/* The last task before `number` that has not ended and of which one of the two
 * writes what both use; -1: none. */
static int64_t before(const struct iz_graph *g, int64_t first, int64_t number,
                      uint32_t datum)
{
    for (int64_t i = number - 1; i >= first; i--) {
        const struct waiting *w = task_of(g, i);
        for (int k = 0; k < w->data && !w->ended; k++)
            if ((w->datum[k] | 1) == (datum | 1) && ((w->datum[k] | datum) & 1))
                return i;
    }
    return -1;
}

static void print_before(const struct iz_graph *g, struct iz_sink *s,
                         int64_t first, int64_t number)
{
    const struct waiting *w = task_of(g, number);
    int64_t seen[WAITING_DATA + 1];
    int n = 0;
    iz_sink_key(s, "after");
    iz_sink_text(s, "[");
    for (int k = 0; k < w->data; k++) {
        int64_t i = before(g, first, number, w->datum[k]);
        int j = 0;
        while (j < n && seen[j] != i)
            j++;
        if (i < 0 || j < n)
            continue;
        iz_sink_text(s, n ? ", " : "");
        iz_sink_number(s, NULL, i);
        seen[n++] = i;
    }
    iz_sink_text(s, "]");
}

static void print_waiting(const struct iz_graph *g, struct iz_sink *s,
                          int64_t first, int64_t number, int64_t zero_ns)
{
    const struct waiting *w = task_of(g, number);
    print_name(s, w->kind, w->unit, w->step, w->position);
    iz_sink_number(s, "number", number);
    if (w->begin_ns) {
        iz_sink_number(s, "worker", w->worker);
        iz_sink_us(s, "begin_us", w->begin_ns - zero_ns);
    } else {
        print_before(g, s, first, number);
    }
    iz_sink_text(s, "}");
}

/* The first ones: those that run, and those that wait, for others of this list.
 */
static void print_unended(const struct iz_graph *g, struct iz_sink *s,
                          int64_t zero_ns)
{
    int64_t end = g->submitted, first = end > WAITING ? end - WAITING : 0;
    int n = 0;
    iz_sink_key(s, "unended");
    iz_sink_text(s, "[");
    for (int64_t i = first; i < end && n < LAST; i++) {
        if (task_of(g, i)->ended)
            continue;
        iz_sink_text(s, n++ ? ",\n" : "\n");
        print_waiting(g, s, first, i, zero_ns);
    }
    iz_sink_text(s, "]");
}

void iz_graph_box(const struct iz_graph *g, struct iz_sink *s, int64_t zero_ns)
{
    iz_sink_number(s, "submitted", g->submitted);
    iz_sink_number(s, "ended", g->ended);
    print_unended(g, s, zero_ns);
    print_ended(g, s, zero_ns);
}
