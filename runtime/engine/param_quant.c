/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/engine/param_quant.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/int64.h"
#include "codelets/base/take.h"
#include "codelets/task/task.h"
#include "runtime/comm/coll.h"
#include "runtime/engine/access.h"
#include "runtime/engine/bounce.h"

enum { RUN = 16 }; /* groups that are filled at a time */

/* Some groups of a matrix, all of this rank: [first, last). */
struct run {
    struct iz_quant_matrix m;
    int64_t first, last;
    float mean; /* of the scales of the matrix, once known */
};

/* What a unit passes through: the groups of this rank and their scales, none
 * of those that are ready; and the sums of the scales of all ranks' groups.
 * Each worker takes the next run. */
struct filling {
    int unit;
    const struct iz_quant_source *from;
    enum iz_quant format;
    char *group;
    float *scale, *values; /* values: of a run for each worker */
    bool *ready;
    double *sum;
    int64_t shard; /* groups of each rank, with padding */
    struct iz_quant_groups own;
    bool on_gpu; /* the groups are a buffer's, and go to a GPU */
    struct run *run;
    int n, room;
    _Atomic int next, err;
};

/* Group g of the unit. */
static char *group_at(const struct filling *f, int64_t g)
{
    return f->group + (g - f->own.first) * iz_quant_bytes(f->format);
}

static float *scales_at(const struct filling *f, int64_t g)
{
    return f->scale + (g - f->own.first) * IZ_QUANT_SCALES;
}

/* Elements of its matrix before group g; there is none behind the last. */
static int64_t before(const struct run *r, int64_t g)
{
    return min64((g - r->m.group) * IZ_QUANT_GROUP, r->m.n);
}

static void list_runs(struct filling *f, const struct iz_unit *u)
{
    struct iz_quant_matrix m = {0};
    while (iz_unit_next_quant(u, &m)) {
        int64_t last = min64(m.group + m.groups, f->own.last);
        for (int64_t g = max64(m.group, f->own.first); g < last; g += RUN) {
            f->run = iz_take_more(f->run, f->n, &f->room, sizeof(*f->run),
                                  "groups of quantised parameters");
            f->run[f->n++] = (struct run){m, g, min64(g + RUN, last), 0};
        }
    }
}

/* A matrix is quantised there already, or all of it is not. */
static int fill_run(struct filling *f, const struct run *r, float *values)
{
    const struct iz_quant_source *from = f->from;
    int64_t at = before(r, r->first);
    for (int64_t g = r->first; g < r->last && from->group; g++)
        f->ready[g - f->own.first] = from->group(
            from->arg, f->unit, &r->m, g - r->m.group, group_at(f, g));
    if (f->ready[r->first - f->own.first])
        return 0;
    int err = from->read(from->arg, f->unit, r->m.first + at, values,
                         before(r, r->last) - at);
    for (int64_t g = r->first; g < r->last && !err; g++)
        f->sum[g] = iz_quant_codes(f->format, group_at(f, g), scales_at(f, g),
                                   values + (before(r, g) - at),
                                   before(r, g + 1) - before(r, g));
    return err;
}

static void fill_codes(void *arg, int i, struct iz_exec *x)
{
    struct filling *f = arg;
    float *values = f->values + (int64_t)i * RUN * IZ_QUANT_GROUP;
    int k, err;
    while (!f->err && (k = atomic_fetch_add(&f->next, 1)) < f->n)
        if ((err = fill_run(f, &f->run[k], values)))
            f->err = err;
}

static void fill_scales(void *arg, int i, struct iz_exec *x)
{
    struct filling *f = arg;
    int k;
    while ((k = atomic_fetch_add(&f->next, 1)) < f->n) {
        const struct run *r = &f->run[k];
        for (int64_t g = r->first; g < r->last; g++)
            if (!f->ready[g - f->own.first])
                iz_quant_scales(f->format, group_at(f, g), scales_at(f, g),
                                before(r, g + 1) - before(r, g), r->mean);
    }
}

static void set_means(struct filling *f)
{
    for (int k = 0; k < f->n; k++) {
        struct run *r = &f->run[k];
        r->mean = k && r[-1].m.group == r->m.group
                      ? r[-1].mean
                      : iz_quant_mean(f->sum + r->m.group, r->m.n);
    }
}

static int filling_open(struct filling *f, struct iz_engine *e, int unit,
                        const struct iz_quant_source *from)
{
    const struct iz_unit_memory *g = &e->unit[unit];
    const struct iz_plan_quant *q = &g->plan->quant;
    char *held = g->quant->param;
    size_t bytes = (size_t)iz_quant_bytes(q->format);
    size_t shard = 4 * (size_t)q->words.shard / bytes;
    bool on_gpu = held && iz_bounce_on_gpu(e, g->quant->param_home);
    iz_access_let_go(e);
    *f = (struct filling){
        .unit = unit,
        .from = from,
        .format = q->format,
        .group = on_gpu ? calloc(shard, bytes)
                 : held ? held
                        : e->staging[IZ_STAGING_PARAM].buffer[0].p,
        .on_gpu = on_gpu,
        .scale = malloc(shard * IZ_QUANT_SCALES * sizeof(float)),
        .values = malloc((size_t)e->plan.target.workers * RUN * IZ_QUANT_GROUP *
                         sizeof(float)),
        .ready = calloc(shard, sizeof(bool)),
        .shard = (int64_t)shard,
        .sum = calloc(shard * (size_t)e->plan.ranks, sizeof(double)),
        .own = iz_owned_groups(e, unit)};
    if (!held) {
        const struct iz_chunk *last = &g->quant[q->words.chunks - 1];
        memset(f->group, 0, (size_t)(4 * last->first + last->param_bytes));
    }
    return f->group && f->scale && f->values && f->ready && f->sum ? 0
                                                                   : -ENOMEM;
}

/* To where the groups live, if they were not made there. */
static void store(const struct filling *f, struct iz_engine *e, int unit)
{
    const struct iz_unit_memory *g = &e->unit[unit];
    const struct iz_plan_frozen *w = &g->plan->quant.words;
    if (f->on_gpu)
        iz_access_put(e, unit, IZ_QUANT_WORDS, w->shard * e->plan.rank,
                      (float *)(void *)f->group, w->shard);
    for (int i = 0; i < w->chunks && !g->quant->param; i++)
        iz_nvme_write(e->file.param, f->group + 4 * g->quant[i].first,
                      g->quant[i].param_at, g->quant[i].param_bytes);
}

int iz_param_quant_fill(struct iz_engine *e, int unit,
                        const struct iz_quant_source *from)
{
    struct filling f;
    if (!e->unit[unit].plan->quant.n)
        return 0;
    int err = filling_open(&f, e, unit, from);
    if (!err) {
        list_runs(&f, &e->model->unit[unit]);
        iz_graph_on_workers(e->graph, fill_codes, &f);
        err = f.err;
    }
    err = iz_agree(e->coll, err);
    if (!err && e->plan.ranks > 1)
        iz_coll_all_gather(e->coll, f.sum, f.shard * (int64_t)sizeof(double),
                           "scales of quantised parameters");
    if (!err) {
        set_means(&f);
        f.next = 0;
        iz_graph_on_workers(e->graph, fill_scales, &f);
    }
    if (!err)
        store(&f, e, unit);
    if (f.on_gpu)
        free(f.group);
    free(f.scale);
    free(f.values);
    free(f.ready);
    free(f.sum);
    free(f.run);
    return err;
}
