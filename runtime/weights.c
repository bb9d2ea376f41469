/* SPDX-License-Identifier: Apache-2.0 */
/* All parameters at once, with no task running: initial values, hash. */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/flat.h"
#include "runtime/progress.h"
#include "runtime/train.h"

#define PIECE (1 << 18)

/* Initial values of elements [from, from + n) of a unit's flat parameters,
 * which depend on the seed, the parameter and the position alone.  Behind the
 * last parameter there is nothing to set.  first: parameters of earlier units.
 */
static void fill(const struct iz_engine *e, int u, int first, float *out,
                 int64_t from, int64_t n)
{
    const struct iz_unit *unit = &e->model->unit[u];
    const int64_t *offset = e->group[u].offset;
    for (int p = 0; p < unit->n_params; p++) {
        const struct iz_param *q = &unit->param[p];
        int64_t i = from > offset[p] ? from : offset[p];
        int64_t end = from + n < offset[p + 1] ? from + n : offset[p + 1];
        if (q->init == IZ_INIT_NORMAL && i < end)
            iz_flat_normal(out + (i - from), end - i, e->config->run.seed,
                           (uint64_t)(first + p), i - offset[p], q->std);
        for (; q->init != IZ_INIT_NORMAL && i < end; i++)
            out[i - from] = q->init == IZ_INIT_ONE ? 1 : 0;
    }
}

/* First element that this rank updates in the flat parameters of a unit. */
static int64_t owned_from(const struct iz_engine *e, int u)
{
    return e->plan.states_full ? 0 : e->group[u].plan->shard * e->plan.rank;
}

struct init {
    struct iz_engine *e;
    int *first;           /* parameters of the units before each */
    int most;             /* workers that may take part */
    _Atomic int64_t next; /* chunk, counted over all units */
    struct iz_progress progress;
};

/* Where the states and the parameters of a chunk are, or are put together for
 * the disk by worker i. */
static void init_chunk(const struct init *a, int u, const struct iz_chunk *k,
                       int i)
{
    struct iz_engine *e = a->e;
    const struct iz_plan *p = &e->plan;
    int64_t size = iz_dtype_bytes(p->param_type), chunk = p->group[u].chunk;
    int64_t state_bytes = iz_plan_chunk_bytes(p, &p->group[u]);
    bool separate = p->state_arrays == 3;
    float *state = k->state ? k->state : e->state_stage[i].p;
    char *param = e->group[u].param
                      ? (char *)e->group[u].param +
                            (iz_homes_own(e, &e->group[u]) + k->first) * size
                      : e->param_stage[i].p;
    float *master = separate ? state : (float *)param;
    if (!k->state)
        memset(state, 0, (size_t)state_bytes);
    if (!e->group[u].param)
        memset(param, 0, (size_t)(chunk * size));
    fill(e, u, a->first[u], master, owned_from(e, u) + k->first, k->count);
    if (separate)
        iz_cast(param, p->param_type, master, IZ_F32, k->count);
    if (!k->state)
        iz_nvme_write(e->state_file, state, k->state_at, state_bytes);
    if (!e->group[u].param)
        iz_nvme_write(e->param_file, param, k->param_at, chunk * size);
}

/* Every worker takes the next chunk. */
static void init_chunks(void *arg, int i, struct iz_exec *x)
{
    struct init *a = arg;
    (void)x;
    while (i < a->most) {
        int64_t n = atomic_fetch_add(&a->next, 1);
        int u = 0;
        while (u < a->e->plan.n_groups && n >= a->e->plan.group[u].chunks)
            n -= a->e->plan.group[u++].chunks;
        if (u == a->e->plan.n_groups)
            return;
        init_chunk(a, u, &a->e->group[u].chunk[n], i);
        iz_progress_add(&a->progress, 4 * a->e->group[u].chunk[n].count);
    }
}

/* Through the main thread, which can copy to a GPU between steps. */
static int init_serial(struct init *a)
{
    struct iz_engine *e = a->e;
    float *buf = malloc(PIECE * sizeof(*buf));
    if (!buf)
        return -ENOMEM;
    for (int u = 0; u < e->plan.n_groups; u++) {
        int64_t from = owned_from(e, u), owned = e->plan.group[u].owned;
        int64_t left = e->plan.group[u].n - from;
        owned = left < owned ? left : owned;
        for (int64_t i = 0; i < owned; i += PIECE) {
            int64_t n = owned - i < PIECE ? owned - i : PIECE;
            fill(e, u, a->first[u], buf, from + i, n);
            iz_homes_put(e, u, IZ_MASTER, i, buf, n);
            iz_progress_add(&a->progress, 4 * n);
        }
    }
    free(buf);
    return 0;
}

static int workers_for_init(const struct iz_engine *e)
{
    int n = e->plan.target.workers;
    if (e->plan.state_stages && e->plan.state_stages < n)
        n = e->plan.state_stages;
    if (e->plan.param_stages && e->plan.param_stages < n)
        n = e->plan.param_stages;
    return n;
}

int iz_train_init(struct iz_engine *e)
{
    const struct iz_plan *p = &e->plan;
    struct init a = {.e = e, .most = workers_for_init(e)};
    bool on_gpu = p->target.gpu && (p->param_home == IZ_HOME_NONE ||
                                    p->state_home == IZ_HOME_NONE);
    int64_t owned = 0;
    int r = 0;
    a.first = calloc((size_t)p->n_groups, sizeof(*a.first));
    if (!a.first)
        return -ENOMEM;
    for (int u = 1; u < p->n_groups; u++)
        a.first[u] = a.first[u - 1] + e->model->unit[u - 1].n_params;
    for (int u = 0; u < p->n_groups; u++)
        owned += p->group[u].owned;
    iz_progress_begin(&a.progress, "initial weights", 4 * owned, p->rank,
                      p->ranks);
    if (on_gpu)
        r = init_serial(&a);
    else
        iz_graph_on_workers(e->graph, init_chunks, &a);
    iz_progress_end(&a.progress);
    free(a.first);
    if (!r)
        iz_train_publish(e);
    return r;
}

void iz_train_publish(struct iz_engine *e)
{
    for (int u = 0; u < e->plan.n_groups; u++) {
        iz_zero_publish(e, u);
        e->group[u].version++;
    }
    e->fetched_bytes = 0;
    /* The lane must be idle before this thread calls a collective itself. */
    iz_graph_wait(e->graph);
}

uint64_t iz_train_hash(struct iz_engine *e)
{
    uint64_t sum = 0;
    float *buf = malloc(PIECE * sizeof(*buf));
    iz_graph_wait(e->graph);
    for (int u = 0; buf && u < e->plan.n_groups; u++) {
        const struct iz_plan_group *p = e->group[u].plan;
        int64_t base = p->shard * e->plan.rank;
        int64_t skip = e->plan.states_full ? base : 0;
        int64_t end = base + p->shard < p->n ? base + p->shard : p->n;
        for (int64_t i = base; i < end; i += PIECE) {
            int64_t n = end - i < PIECE ? end - i : PIECE;
            iz_homes_get(e, u, IZ_MASTER, i - base + skip, buf, n);
            sum += iz_flat_hash(((int64_t)u << 40) + i, buf, n);
        }
    }
    free(buf);
    return sum;
}
