/* SPDX-License-Identifier: Apache-2.0 */
/* All parameters at once, with no task running: initial values. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/int64.h"
#include "codelets/base/take.h"
#include "codelets/flat/flat.h"
#include "runtime/base/progress.h"
#include "runtime/base/text.h"
#include "runtime/comm/coll.h"
#include "runtime/engine/access.h"
#include "runtime/engine/bounce.h"
#include "runtime/engine/param_quant.h"
#include "runtime/step/fetch.h"
#include "runtime/step/submit.h"
#include "runtime/step/train.h"

#define PIECE (1 << 17)

/* Parameters count from the first unit on.  Adapters have streams of their own:
 * those of the others are the same as in the model without. */
static uint64_t stream_of(const struct iz_model *m, int u, int p)
{
    uint64_t stream = (uint64_t)p;
    if (p >= iz_unit_base(&m->unit[u]))
        return (UINT64_C(1) << 63) + ((uint64_t)u << 16) + stream;
    while (u-- > 0)
        stream += (uint64_t)iz_unit_base(&m->unit[u]);
    return stream;
}

/* Where a part begins in the unit's flat array. */
static int64_t part_begin(const struct iz_engine *e, int u,
                          enum iz_unit_part part)
{
    const struct iz_plan_unit *p = &e->plan.unit[u];
    return part == IZ_PART_TRAINED  ? 0
           : part == IZ_PART_FROZEN ? p->padded
                                    : p->padded + p->frozen.padded;
}

/* Initial values of elements [from, from + n) of a part of a unit's
 * parameters, which depend on the seed, the parameter and the position alone.
 * Behind the last one there is nothing to set. */
static void step_init_fill(const struct iz_engine *e, int u,
                           enum iz_unit_part part, float *out, int64_t from,
                           int64_t n)
{
    const struct iz_unit *unit = &e->model->unit[u];
    int64_t before = part_begin(e, u, part);
    for (int p = 0; p < unit->n_params; p++) {
        const struct iz_param *q = &unit->param[p];
        int64_t begin = e->unit[u].offset[p] - before;
        int64_t i = from > begin ? from : begin;
        int64_t end = begin + q->rows * q->cols;
        if (iz_param_part(q) != part)
            continue;
        if (end > from + n)
            end = from + n;
        if (q->init == IZ_INIT_NORMAL && i < end)
            iz_flat_normal(out + (i - from), end - i, e->config->run.seed,
                           stream_of(e->model, u, p), i - begin, q->std);
        for (; q->init != IZ_INIT_NORMAL && i < end; i++)
            out[i - from] = q->init == IZ_INIT_ONE ? 1 : 0;
    }
}

struct init {
    struct iz_engine *e;
    bool gpu;             /* something lives there */
    int most;             /* workers that may take part */
    _Atomic int64_t next; /* chunk, counted over all units */
    struct iz_progress progress;
};

/* Elements [at, at + n) of a chunk.  The values of the first go to `param` and,
 * where its states have a master, to `state`. */
struct window {
    struct iz_engine *e;
    const struct iz_chunk *k;
    int u;
    bool frozen;
    int64_t at, n;
    char *param, *state;
    _Atomic int64_t next;
};

static void fill_blocks(void *arg, int i, struct iz_exec *x)
{
    enum { BLOCK = 4096 };
    struct window *w = arg;
    struct iz_state_layout l = iz_chunk_states(w->e, w->u, w->k);
    int64_t first = iz_owned_of(w->e, w->u, w->frozen).first + w->k->first;
    float buf[BLOCK];
    int64_t b;
    while ((b = atomic_fetch_add(&w->next, BLOCK)) < w->n) {
        int64_t n = min64(w->n - b, BLOCK);
        char *param = w->param + iz_step_param_bytes(w->e, b);
        memset(buf, 0, sizeof(buf)); /* padding */
        step_init_fill(w->e, w->u, w->frozen, buf, first + w->at + b, n);
        if (!w->frozen && l.lower)
            iz_cast_split((uint16_t *)param, (uint16_t *)w->state + b, buf, n);
        else
            iz_cast_params(param, w->e->plan.param_type, buf, n);
        if (!w->frozen && l.master && !l.lower)
            memcpy((float *)w->state + b, buf, (size_t)n * sizeof(*buf));
    }
}

/* A chunk that is at `param` and `state`, through the pinned buffer if that is
 * a GPU's memory.  With a GPU this is the main thread, and all workers help. */
static void fill_chunk(const struct init *a, int u, bool frozen,
                       const struct iz_chunk *k, char *param, char *state)
{
    enum { FEW = 1 << 16 }; /* take less than it takes to call the workers */
    struct iz_engine *e = a->e;
    struct iz_state_layout l = iz_chunk_states(e, u, k);
    int64_t size = iz_step_param_bytes(e, 1);
    int64_t own = frozen || !l.master ? 0 : iz_state_master_bytes(&l);
    int64_t most = a->gpu ? IZ_BOUNCE_BYTES / 8 : k->count;
    for (int64_t at = 0; at < k->count; at += most) {
        int64_t n = min64(k->count - at, most);
        char *place[2] = {param + at * size, own ? state + at * own : NULL};
        struct window w = {
            .e = e,
            .k = k,
            .u = u,
            .frozen = frozen,
            .at = at,
            .n = n,
            .param = iz_bounce_way(e, k->param_home, 0, place[0]),
            .state = own ? iz_bounce_way(e, k->home, 1, place[1]) : NULL};
        if (a->gpu && n > FEW)
            iz_graph_on_workers(e->graph, fill_blocks, &w);
        else
            fill_blocks(&w, 0, NULL);
        iz_bounce_pass(e, place[0], w.param, n * size, true);
        iz_bounce_pass(e, place[1], w.state, n * own, true);
    }
}

/* One chunk, where it is, or put together for the disk by worker i. */
static void init_chunk(const struct init *a, int u, bool frozen,
                       const struct iz_chunk *k, int i)
{
    struct iz_engine *e = a->e;
    bool state_file = !frozen && !k->state, param_file = !k->param;
    void *state = k->state;
    char *param =
        param_file ? e->staging[IZ_STAGING_PARAM].buffer[i].p : k->param;
    if (state_file) {
        state = e->staging[IZ_STAGING_STATE].buffer[i].p;
        memset(state, 0, (size_t)k->state_bytes);
    }
    if (param_file)
        memset(param, 0, (size_t)k->param_bytes);
    fill_chunk(a, u, frozen, k, param, state);
    if (state_file)
        iz_nvme_write(e->file.state, state, k->state_at, k->state_bytes);
    if (param_file)
        iz_nvme_write(e->file.param, param, k->param_at, k->param_bytes);
}

static int chunks_of(const struct iz_plan_unit *g)
{
    return g->chunks + g->frozen.chunks;
}

/* Every worker takes the next chunk; with a GPU the main thread takes all. */
static void init_chunks(void *arg, int i, struct iz_exec *x)
{
    struct init *a = arg;
    while (i < a->most) {
        int64_t n = atomic_fetch_add(&a->next, 1);
        int u = 0;
        while (u < a->e->plan.n_units && n >= chunks_of(&a->e->plan.unit[u]))
            n -= chunks_of(&a->e->plan.unit[u++]);
        if (u == a->e->plan.n_units)
            return;
        int trained = a->e->plan.unit[u].chunks;
        const struct iz_chunk *k = n < trained
                                       ? &a->e->unit[u].chunk[n]
                                       : &a->e->unit[u].frozen[n - trained];
        init_chunk(a, u, n >= trained, k, i);
        iz_progress_add(&a->progress, 4 * k->count);
    }
}

/* Each needs a buffer for what lives on disk. */
static int workers_for_init(const struct iz_engine *e)
{
    int64_t n = e->plan.target.workers;
    int state = e->plan.staging[IZ_STAGING_STATE].n;
    int param = e->plan.staging[IZ_STAGING_PARAM].n;
    n = min64(n, state ? state : n);
    return (int)min64(n, param ? param : n);
}

static void init_all(struct iz_engine *e)
{
    const struct iz_plan *p = &e->plan;
    struct init a = {.e = e, .most = workers_for_init(e)};
    a.gpu =
        p->target.gpu && (p->zero.param.home == IZ_HOME_NONE ||
                          p->zero.frozen.home == IZ_HOME_NONE ||
                          p->zero.state.home == IZ_HOME_NONE || p->zero.split);
    int64_t owned = 0;
    iz_access_let_go(e);
    for (int u = 0; u < p->n_units; u++)
        owned += p->unit[u].owned + p->unit[u].frozen.owned;
    iz_progress_begin(&a.progress, "initial weights", 4 * owned);
    if (a.gpu)
        init_chunks(&a, 0, NULL);
    else
        iz_graph_on_workers(e->graph, init_chunks, &a);
    iz_progress_end(&a.progress);
}

static int initial_values(void *arg, int unit, int64_t from, float *out,
                          int64_t n)
{
    step_init_fill(arg, unit, IZ_PART_QUANT, out, from, n);
    return 0;
}

int iz_train_init(struct iz_engine *e)
{
    struct iz_quant_source initial = {.read = initial_values, .arg = e};
    int err = 0;
    init_all(e);
    for (int u = 0; u < e->plan.n_units && !err; u++)
        err = iz_param_quant_fill(e, u, &initial);
    if (err)
        iz_text_refuse(stderr, "rank %d: no memory for the initial weights",
                       e->plan.rank);
    return iz_train_publish(e, err);
}

/* Gives a parameter these values, or its initial ones (NULL), as far as this
 * rank owns it; through the main thread, which can copy to a GPU between steps.
 */
static void put_param(struct iz_engine *e, int u, int p, const float *values)
{
    const struct iz_param *q = &e->model->unit[u].param[p];
    enum iz_unit_part part = iz_param_part(q);
    struct iz_owned own = iz_owned_of(e, u, part);
    int64_t begin = e->unit[u].offset[p] - part_begin(e, u, part);
    int64_t end = min64(begin + q->rows * q->cols, own.last);
    float *buf =
        values ? NULL : iz_take(PIECE, sizeof(*buf), "the initial weights");
    for (int64_t i = max64(begin, own.first), n; i < end; i += n) {
        n = values ? end - i : min64(end - i, PIECE);
        if (!values)
            step_init_fill(e, u, part, buf, i, n);
        iz_access_put(e, u, own.array, i, values ? values + (i - begin) : buf,
                      n);
    }
    free(buf);
}

int iz_train_init_adapters(struct iz_engine *e)
{
    for (int u = 0; u < e->plan.n_units; u++) {
        const struct iz_unit *unit = &e->model->unit[u];
        for (int p = iz_unit_base(unit); p < iz_unit_own(unit); p++)
            put_param(e, u, p, NULL);
    }
    return iz_train_publish(e, 0);
}

int iz_train_init_references(struct iz_engine *e)
{
    bool any = false;
    for (int u = 0; u < e->plan.n_units; u++) {
        const struct iz_unit *unit = &e->model->unit[u];
        float *all = unit->n_references ? iz_access_gather(e, u) : NULL;
        any |= unit->n_references > 0;
        for (int i = iz_unit_own(unit); i < unit->n_params; i++)
            put_param(e, u, i, all + e->unit[u].offset[unit->param[i].adapts]);
        free(all);
    }
    return any ? iz_train_publish(e, 0) : 0;
}

int iz_train_publish(struct iz_engine *e, int err)
{
    err = iz_agree(e->coll, err);
    if (err)
        return err;
    for (int u = 0; u < e->plan.n_units; u++) {
        iz_fetch_publish(e, u, true);
        e->unit[u].version++;
    }
    e->counts.fetched_bytes = 0;
    /* The comm worker must be idle before this thread calls a collective
     * itself. */
    iz_graph_wait(e->graph);
    return 0;
}
