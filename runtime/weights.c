/* SPDX-License-Identifier: Apache-2.0 */
/* All parameters at once, with no task running: initial values, hash. */
#include <errno.h>
#include <stdlib.h>

#include "codelets/flat.h"
#include "runtime/train.h"

#define PIECE (1 << 18)

static void init_range(struct iz_engine *e, int u, int p, uint64_t stream,
                       float *buf)
{
    const struct iz_group *g = &e->group[u];
    const struct iz_param *q = &e->model->unit[u].param[p];
    int64_t base = e->plan.states_full ? 0 : g->plan->shard * e->plan.rank;
    int64_t from = g->offset[p], to = from + q->rows * q->cols;
    if (from < base)
        from = base;
    if (to > base + g->plan->owned)
        to = base + g->plan->owned;
    for (int64_t i = from; i < to; i += PIECE) {
        int64_t n = to - i < PIECE ? to - i : PIECE;
        for (int64_t k = 0; q->init != IZ_INIT_NORMAL && k < n; k++)
            buf[k] = q->init == IZ_INIT_ONE ? 1 : 0;
        if (q->init == IZ_INIT_NORMAL)
            iz_flat_normal(buf, n, e->config->run.seed, stream,
                           i - g->offset[p], q->std);
        iz_homes_put(e, u, IZ_MASTER, i - base, buf, n);
    }
}

int iz_train_init(struct iz_engine *e)
{
    float *buf = malloc(PIECE * sizeof(*buf));
    uint64_t stream = 0;
    if (!buf)
        return -ENOMEM;
    for (int u = 0; u < e->model->n_units; u++)
        for (int p = 0; p < e->model->unit[u].n_params; p++)
            init_range(e, u, p, stream++, buf);
    free(buf);
    iz_train_publish(e);
    return 0;
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
