/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/step/move.h"

#include <stdlib.h>
#include <string.h>

#include "codelets/base/take.h"
#include "codelets/buffer/flat_buffer.h"
#include "runtime/step/submit.h"

struct move_arg {
    struct iz_move m;
    struct iz_coll *coll;
    const char *unit;
    bool gathers;
    int rank;    /* in its group */
    int control; /* buffer; -1: it is not read */
    struct iz_stretch list[];
};

static void move_stretch(struct iz_exec *x, void **buf,
                         const struct move_arg *a, const struct iz_stretch *s)
{
    int n = a->m.group;
    char *to = (char *)buf[a->m.to] + s->to, *place = to + a->rank * s->bytes;
    char *from = a->m.from < 0 ? place : (char *)buf[a->m.from] + s->from;
    if (a->m.gpu && (a->m.refreshes || a->gathers)) {
        iz_coll_gpu_gather(a->coll, x, to, from, s->bytes, n, a->m.refreshes,
                           a->unit);
    } else if (a->m.refreshes) {
        iz_coll_refresh(a->coll, to, from, s->bytes, n, a->unit);
    } else {
        if (from != place)
            iz_buffer_copy(x, place, from, s->bytes);
        if (a->gathers)
            iz_coll_all_gather_among(a->coll, to, s->bytes, n, a->unit);
    }
}

static void run_move(struct iz_exec *x, void **buf, const void *arg)
{
    const struct move_arg *a = arg;
    if (a->control >= 0 && ((const struct iz_control *)buf[a->control])->skip)
        return;
    for (int i = 0; i < a->m.n; i++)
        if (a->list[i].bytes)
            move_stretch(x, buf, a, &a->list[i]);
}

/* What the link or the network moves; a copy that a mover does not make is read
 * and written in one memory.  A collective of GPUs that passes through the host
 * takes up all that comes, and down before what lives on the GPU. */
static void count_bytes(struct iz_engine *e, struct iz_task *t,
                        const struct move_arg *a, int64_t bytes)
{
    const struct iz_plan *p = &e->plan;
    bool within = t->where == IZ_ON_COMM || t->where == IZ_ON_COMPUTE;
    int parts = a->m.refreshes ? p->ranks / a->m.group : a->m.group;
    if (!a->m.refreshes && !a->gathers) {
        t->bytes = (double)(bytes * (within ? 2 : 1));
        return;
    }
    t->bytes = (double)(bytes * (parts - a->gathers));
    t->rate = a->m.refreshes          ? IZ_RATE_COPY
              : a->m.group < p->ranks ? IZ_RATE_GROUP
                                      : IZ_RATE_GATHER;
    if (a->m.gpu && !p->target.nccl)
        iz_step_count_link(e, bytes * parts, a->m.from_host ? 0 : bytes);
}

void iz_move(struct iz_engine *e, struct iz_task *t, struct iz_move m)
{
    int64_t size = m.n * (int64_t)sizeof(*m.list), bytes = 0;
    struct move_arg *a;
    for (int i = 0; i < m.n; i++)
        bytes += m.list[i].bytes;
    if (!bytes)
        return;
    if (!m.group)
        m.group = 1;
    a = iz_take(1, (int64_t)sizeof(*a) + size, "a move");
    a->m = m;
    a->coll = e->coll;
    a->unit = iz_step_unit_name(e, t->unit);
    a->gathers = !m.refreshes && m.group > 1 && t->where == IZ_ON_COMM;
    a->rank = m.refreshes ? 0 : e->plan.rank % m.group;
    a->control =
        iz_task_add(t, m.skips ? e->scalar.control_handle : NULL, STARPU_R);
    memcpy(a->list, m.list, (size_t)size);
    t->run = run_move;
    count_bytes(e, t, a, bytes);
    iz_step_submit(e, t, a, sizeof(*a) + (size_t)size);
    free(a);
}
