/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/engine/param_quant.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/int64.h"
#include "runtime/comm/coll.h"
#include "runtime/engine/access.h"
#include "runtime/engine/bounce.h"

enum { RUN = 64 }; /* groups that are filled at a time */

/* What a unit passes through: the groups of this rank and their scales, none
 * of those that are ready; and the sums of the scales of all ranks' groups. */
struct filling {
    enum iz_quant format;
    char *group;
    float *scale, *values;
    bool *ready;
    double *sum;
    int64_t shard; /* groups of each rank, with padding */
    struct iz_quant_groups own;
    bool on_gpu; /* the groups are a buffer's, and go to a GPU */
};

/* Group g of the unit. */
static char *group_at(const struct filling *f, int64_t g)
{
    return f->group + (g - f->own.first) * iz_quant_bytes(f->format);
}

/* Those of a matrix that are this rank's. */
static struct iz_quant_groups own_of(const struct filling *f,
                                     const struct iz_quant_matrix *m)
{
    return (struct iz_quant_groups){max64(m->group, f->own.first),
                                    min64(m->group + m->groups, f->own.last)};
}

static void fill_ready(struct filling *f, int unit,
                       const struct iz_quant_matrix *m,
                       const struct iz_quant_source *from)
{
    struct iz_quant_groups own = own_of(f, m);
    for (int64_t g = own.first; g < own.last && from->group; g++) {
        f->ready[g - f->own.first] =
            from->group(from->arg, unit, m, g - m->group, group_at(f, g));
    }
}

/* The values of a run of groups of a matrix follow one another. */
static int fill_codes(struct filling *f, int unit, const struct iz_unit *u,
                      const struct iz_quant_matrix *m,
                      const struct iz_quant_source *from)
{
    struct iz_quant_groups own = own_of(f, m);
    int64_t begin, first, n;
    int err = 0;
    for (int64_t g = own.first; g < own.last && !err; g += RUN) {
        int64_t end = min64(g + RUN, own.last);
        if (f->ready[g - f->own.first])
            continue;
        iz_unit_quant_group(u, g, &begin);
        n = iz_unit_quant_group(u, end - 1, &first);
        err = from->read(from->arg, unit, begin, f->values, first + n - begin);
        for (int64_t i = g; i < end && !err; i++) {
            int64_t at = i - f->own.first;
            n = iz_unit_quant_group(u, i, &first);
            f->sum[i] = iz_quant_codes(f->format, group_at(f, i),
                                       f->scale + at * IZ_QUANT_SCALES,
                                       f->values + (first - begin), n);
        }
    }
    return err;
}

static int fill_matrices(struct filling *f, int unit, const struct iz_unit *u,
                         const struct iz_quant_source *from)
{
    struct iz_quant_matrix m = {0};
    int err = 0;
    while (!err && iz_unit_next_quant(u, &m)) {
        fill_ready(f, unit, &m, from);
        err = fill_codes(f, unit, u, &m, from);
    }
    return err;
}

static void fill_scales(struct filling *f, const struct iz_unit *u)
{
    struct iz_quant_matrix m = {0};
    while (iz_unit_next_quant(u, &m)) {
        float mean = iz_quant_mean(f->sum + m.group, m.n);
        struct iz_quant_groups own = own_of(f, &m);
        for (int64_t g = own.first, first; g < own.last; g++) {
            int64_t at = g - f->own.first,
                    n = iz_unit_quant_group(u, g, &first);
            if (!f->ready[at])
                iz_quant_scales(f->format, group_at(f, g),
                                f->scale + at * IZ_QUANT_SCALES, n, mean);
        }
    }
}

static int filling_open(struct filling *f, struct iz_engine *e, int unit)
{
    const struct iz_unit_memory *g = &e->unit[unit];
    const struct iz_plan_quant *q = &g->plan->quant;
    char *held = g->quant->param;
    size_t bytes = (size_t)iz_quant_bytes(q->format);
    size_t shard = 4 * (size_t)q->words.shard / bytes;
    bool on_gpu = held && iz_bounce_on_gpu(e, g->quant->param_home);
    iz_access_let_go(e);
    *f = (struct filling){
        .format = q->format,
        .group = on_gpu ? calloc(shard, bytes)
                 : held ? held
                        : e->staging[IZ_STAGING_PARAM].buffer[0].p,
        .on_gpu = on_gpu,
        .scale = malloc(shard * IZ_QUANT_SCALES * sizeof(float)),
        .values = malloc(RUN * IZ_QUANT_GROUP * sizeof(float)),
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
    const struct iz_unit *u = &e->model->unit[unit];
    struct filling f;
    if (!e->unit[unit].plan->quant.n)
        return 0;
    int err = filling_open(&f, e, unit);
    if (!err)
        err = fill_matrices(&f, unit, u, from);
    err = iz_agree(e->coll, err);
    if (!err && e->plan.ranks > 1)
        iz_coll_all_gather(e->coll, f.sum, f.shard * (int64_t)sizeof(double),
                           "scales of quantised parameters");
    if (!err)
        fill_scales(&f, u);
    if (!err)
        store(&f, e, unit);
    if (f.on_gpu)
        free(f.group);
    free(f.scale);
    free(f.values);
    free(f.ready);
    free(f.sum);
    return err;
}
