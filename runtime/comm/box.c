/* SPDX-License-Identifier: Apache-2.0 */
/* What the collectives tell when a run does not go on, and how a rank that ends
 * it has the other ranks of its host tell too.  All of it may be called in a
 * signal's handler. */
#include <signal.h>
#include <time.h>

#include "codelets/base/sink.h"
#include "runtime/comm/state.h"

enum { TURN_MS = 10, TURNS = 100 }; /* for others to write what they know */

static const char *const kinds[] = {[IZ_COLL_ALL_GATHER] = "all-gather",
                                    [IZ_COLL_REDUCE_SCATTER] = "reduce-scatter",
                                    [IZ_COLL_REFRESH] = "refresh",
                                    [IZ_COLL_EXCHANGE] = "exchange",
                                    [IZ_COLL_DOUBLES] = "gather of numbers",
                                    [IZ_COLL_BARRIER] = "barrier",
                                    [IZ_COLL_BROADCAST] = "broadcast",
                                    [IZ_COLL_ALL_OK] = "agreement",
                                    [IZ_COLL_NOTE] = "NCCL"};

void iz_coll_box(const struct iz_coll *c, struct iz_sink *s, int64_t zero_ns)
{
    const char *phase = c->phase;
    const struct iz_coll_last *l = c->state ? &c->state->last : NULL;
    if (phase) {
        iz_sink_string(s, "phase", phase);
    }
    if (!l || !l->number)
        return;
    iz_sink_key(s, "collective");
    iz_sink_text(s, "{");
    iz_sink_number(s, "number", l->number);
    iz_sink_string(s, "kind", kinds[l->kind]);
    iz_sink_string(s, "what", l->what);
    iz_sink_number(s, "bytes", l->bytes);
    iz_sink_us(s, "begin_us", l->begin_ns - zero_ns);
    if (l->kind != IZ_COLL_NOTE) { /* whose end only its task knows */
        iz_sink_key(s, "ended");
        iz_sink_text(s, l->open ? "false" : "true");
    }
    iz_sink_text(s, "}");
}

void iz_coll_boxes(struct iz_coll *c, int boxes)
{
    struct iz_seat *own = c->state ? c->state->seat[c->rank] : NULL;
    if (own)
        own->boxes = boxes < 0 ? own->boxes + 1 : boxes;
}

bool iz_coll_is_rank(const struct iz_coll *c, int64_t pid)
{
    int r = 0;
    while (c->state && r < c->size &&
           !(iz_coll_is_numbered(c, r) && c->state->seat[r]->pid == pid))
        r++;
    return c->state && r < c->size;
}

/* Whether a process of this host may be asked, and has not answered. */
static bool asked(const struct iz_coll *c, int r, int before)
{
    const struct iz_seat *s = c->state->seat[r];
    return iz_coll_is_numbered(c, r) && s->boxes > 0 &&
           (before < 0 || s->boxes == before);
}

void iz_coll_ask_boxes(const struct iz_coll *c)
{
    enum { MOST = 256 }; /* ranks of a host that are waited for */
    int before[MOST];
    for (int r = 0; c->state && r < c->size; r++) {
        if (r < MOST)
            before[r] = asked(c, r, -1) ? c->state->seat[r]->boxes : 0;
        if (asked(c, r, -1))
            kill((pid_t)c->state->seat[r]->pid, SIGQUIT);
    }
    for (int turn = 0, left = 1; c->state && left && turn < TURNS; turn++) {
        left = 0;
        for (int r = 0; r < c->size && r < MOST; r++)
            left += before[r] > 0 && asked(c, r, before[r]) &&
                    kill((pid_t)c->state->seat[r]->pid, 0) == 0;
        if (left)
            nanosleep(&(struct timespec){.tv_nsec = TURN_MS * 1000000}, NULL);
    }
}
