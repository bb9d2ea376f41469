/* SPDX-License-Identifier: Apache-2.0 */
/* All parameters at once, with no task running: initial values, hash. */
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/die.h"
#include "codelets/base/int64.h"
#include "codelets/flat/flat.h"
#include "runtime/base/progress.h"
#include "runtime/comm/coll.h"
#include "runtime/step/train.h"
#include "runtime/step/zero.h"

#define PIECE (1 << 18)

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

/* Initial values of elements [from, from + n) of a unit's trained or of its
 * frozen parameters, which depend on the seed, the parameter and the position
 * alone.  Behind the last one there is nothing to set. */
static void step_init_fill(const struct iz_engine *e, int u, bool frozen,
                           float *out, int64_t from, int64_t n)
{
    const struct iz_unit *unit = &e->model->unit[u];
    int64_t before = frozen ? e->plan.unit[u].padded : 0;
    for (int p = 0; p < unit->n_params; p++) {
        const struct iz_param *q = &unit->param[p];
        int64_t begin = e->unit[u].offset[p] - before;
        int64_t i = from > begin ? from : begin;
        int64_t end = begin + q->rows * q->cols;
        if (q->frozen != frozen)
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
    int most;             /* workers that may take part */
    _Atomic int64_t next; /* chunk, counted over all units */
    struct iz_progress progress;
};

/* One chunk, where it is, or put together for the disk by worker i. */
static void init_chunk(const struct init *a, int u, bool frozen,
                       const struct iz_chunk *k, int i)
{
    enum { BLOCK = 4096 };
    struct iz_engine *e = a->e;
    const struct iz_plan *p = &e->plan;
    int64_t size = iz_param_bytes(e, 1);
    int64_t first = iz_part_of(e, u, frozen).first;
    int64_t state_bytes = iz_plan_chunk_bytes(p, &p->unit[u]);
    bool state_file = !frozen && !k->state, param_file = !e->unit[u].param;
    void *state = k->state;
    struct iz_state_layout l = iz_chunk_states(e, u, k);
    float buf[BLOCK];
    char *param = param_file ? e->staging[IZ_STAGING_PARAM].buffer[i].p
                             : (char *)e->unit[u].param + k->param_first * size;
    if (state_file) {
        state = e->staging[IZ_STAGING_STATE].buffer[i].p;
        memset(state, 0, (size_t)state_bytes);
    }
    if (param_file)
        memset(param, 0, (size_t)(k->filed * size));
    for (int64_t at = 0; at < k->count; at += BLOCK) {
        int64_t n = min64(k->count - at, BLOCK);
        memset(buf, 0, sizeof(buf)); /* padding */
        step_init_fill(e, u, frozen, buf, first + k->first + at, n);
        if (!frozen && l.lower)
            iz_split((uint16_t *)param + at, (uint16_t *)state + at, buf, n);
        else
            iz_cast_params(param + at * size, p->param_type, buf, n);
        if (!frozen && l.master && !l.lower)
            memcpy((float *)state + at, buf, (size_t)n * sizeof(*buf));
    }
    if (state_file)
        iz_nvme_write(e->file.state, state, k->state_at, state_bytes);
    if (param_file)
        iz_nvme_write(e->file.param, param, k->param_at, k->filed * size);
}

static int chunks_of(const struct iz_plan_unit *g)
{
    return g->chunks + g->frozen.chunks;
}

/* Every worker takes the next chunk. */
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

/* What this rank owns of elements [from, end) of a unit's trained or frozen
 * parameters, through the main thread, which can copy to a GPU between steps.
 */
static void init_range(struct init *a, int u, bool frozen, int64_t from,
                       int64_t end, float *buf)
{
    struct iz_part p = iz_part_of(a->e, u, frozen);
    end = min64(end, p.last);
    for (int64_t i = max64(from, p.first), n; i < end; i += n) {
        n = min64(end - i, PIECE);
        step_init_fill(a->e, u, frozen, buf, i, n);
        iz_access_put(a->e, u, p.array, i, buf, n);
        iz_progress_add(&a->progress, 4 * n);
    }
}

static int init_serial(struct init *a)
{
    float *buf = malloc(PIECE * sizeof(*buf));
    if (!buf)
        return -ENOMEM;
    for (int u = 0; u < a->e->plan.n_units; u++) {
        init_range(a, u, false, 0, INT64_MAX, buf);
        init_range(a, u, true, 0, INT64_MAX, buf);
    }
    free(buf);
    return 0;
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

static int no_memory(const struct iz_engine *e)
{
    fprintf(stderr, "izar: rank %d: no memory for the initial weights\n",
            e->plan.rank);
    return -ENOMEM;
}

static int init_all(struct iz_engine *e)
{
    const struct iz_plan *p = &e->plan;
    struct init a = {.e = e, .most = workers_for_init(e)};
    bool on_gpu =
        p->target.gpu && (p->zero.param_home == IZ_HOME_NONE ||
                          p->zero.state_home == IZ_HOME_NONE || p->zero.split);
    int64_t owned = 0;
    int r = 0;
    for (int u = 0; u < p->n_units; u++)
        owned += p->unit[u].owned + p->unit[u].frozen.owned;
    iz_progress_begin(&a.progress, "initial weights", 4 * owned);
    if (on_gpu)
        r = init_serial(&a);
    else
        iz_graph_on_workers(e->graph, init_chunks, &a);
    iz_progress_end(&a.progress);
    return r ? no_memory(e) : 0;
}

int iz_train_init(struct iz_engine *e)
{
    return iz_train_publish(e, init_all(e));
}

int iz_train_init_adapters(struct iz_engine *e)
{
    float *buf = malloc(PIECE * sizeof(*buf));
    struct init a = {.e = e, .progress = {.quiet = true}};
    int r = buf ? 0 : no_memory(e);
    for (int u = 0; u < e->plan.n_units && !r; u++) {
        const struct iz_unit *unit = &e->model->unit[u];
        for (int p = iz_unit_base(unit); p < unit->n_params; p++) {
            const struct iz_param *q = &unit->param[p];
            int64_t begin =
                e->unit[u].offset[p] - (q->frozen ? e->plan.unit[u].padded : 0);
            init_range(&a, u, q->frozen, begin, begin + q->rows * q->cols, buf);
        }
    }
    free(buf);
    return iz_train_publish(e, r);
}

int iz_train_publish(struct iz_engine *e, int err)
{
    err = iz_agree(e->coll, err);
    if (err)
        return err;
    for (int u = 0; u < e->plan.n_units; u++) {
        iz_fetch_publish(e, u, true);
        e->unit[u].version++;
        e->unit[u].copied = -1;
    }
    e->counts.fetched_bytes = 0;
    /* The comm worker must be idle before this thread calls a collective
     * itself. */
    iz_graph_wait(e->graph);
    return 0;
}

/* Of this rank's shard of a unit's trained or frozen parameters. */
static uint64_t hash_shard(struct iz_engine *e, int u, bool frozen, float *buf)
{
    struct iz_part p = iz_part_of(e, u, frozen);
    uint64_t sum = 0;
    for (int64_t i = p.begin, n; i < p.end; i += n) {
        n = min64(p.end - i, PIECE);
        iz_access_get(e, u, p.array, i, buf, n);
        sum += iz_flat_hash(((int64_t)u << 40) + p.at + i, buf, n);
    }
    return sum;
}

uint64_t iz_train_hash(struct iz_engine *e)
{
    uint64_t sum = 0;
    float *buf = malloc(PIECE * sizeof(*buf));
    if (!buf)
        iz_die("out of memory for the hash");
    iz_graph_wait(e->graph);
    for (int u = 0; u < e->plan.n_units; u++)
        sum += hash_shard(e, u, false, buf) + hash_shard(e, u, true, buf);
    free(buf);
    return sum;
}
