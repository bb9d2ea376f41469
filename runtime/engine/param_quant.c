/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised parameters where they live; see param_quant.h. */
#include "runtime/engine/param_quant.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/die.h"
#include "codelets/base/int64.h"
#include "runtime/comm/coll.h"
#include "runtime/engine/bounce.h"
#include "runtime/plan/unit_sizes.h"

enum { RUN = 64 }; /* groups that are filled at a time */

/* ---- parts ---- */

static enum iz_quant quant_of(const struct iz_engine *e, int unit)
{
    return e->unit[unit].plan->quant.format;
}

static int64_t group_bytes(const struct iz_engine *e, int unit)
{
    return iz_quant_bytes(quant_of(e, unit));
}

/* This rank's groups [first, last). */
struct groups {
    int64_t first, last;
};

static struct groups own_groups(const struct iz_engine *e, int unit)
{
    const struct iz_plan_quant *p = &e->unit[unit].plan->quant;
    int64_t first = min64(p->shard * e->plan.rank, p->groups);
    return (struct groups){first, min64(first + p->shard, p->groups)};
}

struct iz_owned iz_param_quant_values(const struct iz_engine *e, int unit)
{
    const struct iz_plan_unit *p = e->unit[unit].plan;
    const struct iz_unit *u = &e->model->unit[unit];
    struct groups g = own_groups(e, unit);
    struct iz_owned q = {
        .array = IZ_QUANT_VALUES, .n = p->quant.n, .at = p->n + p->frozen.n};
    iz_unit_quant_group(u, g.first, &q.first);
    iz_unit_quant_group(u, g.last, &q.last);
    q.begin = q.first;
    q.end = q.last;
    return q;
}

struct iz_owned iz_param_quant_words(const struct iz_engine *e, int unit)
{
    struct groups g = own_groups(e, unit);
    int64_t words = group_bytes(e, unit) / 4;
    int64_t first = g.first * words, last = g.last * words;
    return (struct iz_owned){.array = IZ_QUANT_WORDS,
                             .n = e->unit[unit].plan->quant.groups * words,
                             .first = first,
                             .last = last,
                             .begin = first,
                             .end = last};
}

/* ---- where they live ---- */

int64_t iz_param_quant_own(const struct iz_engine *e, int unit)
{
    return e->plan.zero.param.whole
               ? iz_plan_quant_shard(e->unit[unit].plan) * e->plan.rank
               : 0;
}

void iz_param_quant_move(struct iz_engine *e, int unit, int64_t from,
                         char *host, int64_t n, bool put)
{
    const struct iz_unit_memory *g = &e->unit[unit];
    char *own = g->quant + iz_param_quant_own(e, unit);
    int64_t filed = iz_plan_quant_filed(g->plan);
    for (int64_t k; n > 0; from += k, host += k, n -= k) {
        int64_t at = from / IZ_QUANT_BUFFER_BYTES * IZ_QUANT_BUFFER_BYTES;
        int64_t bytes = min64(filed - at, IZ_QUANT_BUFFER_BYTES);
        char *buffer = own + at;
        k = min64(at + bytes - from, n);
        if (!g->quant) {
            buffer = e->staging[IZ_STAGING_PARAM].buffer[0].p;
            iz_nvme_read(e->file.param, buffer, g->quant_at + at, bytes);
        }
        iz_bounce_move(e, g->quant ? e->plan.zero.frozen.home : IZ_HOME_CPU,
                       buffer + (from - at), host, k, put);
        if (!g->quant && put)
            iz_nvme_write(e->file.param, buffer, g->quant_at + at, bytes);
    }
}

/* The groups that elements [from, from + n) lie in. */
static struct groups groups_of(const struct iz_unit *u, int64_t from, int64_t n)
{
    struct iz_quant_matrix m = {0};
    struct groups g = {-1, 0};
    while (iz_unit_next_quant(u, &m)) {
        int64_t first = max64(from - m.first, 0);
        int64_t last = min64(from + n - m.first, m.n);
        if (first >= last)
            continue;
        if (g.first < 0)
            g.first = m.group + first / IZ_QUANT_GROUP;
        g.last = m.group + iz_quant_groups(last);
    }
    return g;
}

void iz_param_quant_get(struct iz_engine *e, int unit, int64_t from, float *out,
                        int64_t n)
{
    const struct iz_unit *u = &e->model->unit[unit];
    enum iz_dtype type = e->plan.param_type;
    struct groups g = groups_of(u, from, n);
    int64_t size = group_bytes(e, unit), bytes = (g.last - g.first) * size,
            first;
    int64_t own = own_groups(e, unit).first;
    float values[IZ_QUANT_GROUP];
    char *group = malloc((size_t)bytes);
    if (!group)
        iz_die("%s: no memory to read quantised parameters", u->name);
    iz_param_quant_move(e, unit, (g.first - own) * size, group, bytes, false);
    for (int64_t i = g.first, k; n > 0; i++, from += k, out += k, n -= k) {
        int64_t count = iz_unit_quant_group(u, i, &first);
        k = min64(first + count - from, n);
        iz_quant_load(quant_of(e, unit), values, type,
                      group + (i - g.first) * size, count);
        iz_cast(out, IZ_F32,
                (char *)values + (from - first) * iz_dtype_bytes(type), type,
                k);
    }
    free(group);
}

/* ---- quantising ---- */

/* What a unit passes through: the groups of this rank and their scales, none
 * of those that are ready; and the sums of the scales of all ranks' groups. */
struct filling {
    enum iz_quant format;
    char *group;
    float *scale, *values;
    bool *ready;
    double *sum;
    struct groups own;
    bool on_gpu; /* the groups are a buffer's, and go to a GPU */
};

/* Group g of the unit. */
static char *group_at(const struct filling *f, int64_t g)
{
    return f->group + (g - f->own.first) * iz_quant_bytes(f->format);
}

/* Those of a matrix that are this rank's. */
static struct groups own_of(const struct filling *f,
                            const struct iz_quant_matrix *m)
{
    return (struct groups){max64(m->group, f->own.first),
                           min64(m->group + m->groups, f->own.last)};
}

static void fill_ready(struct filling *f, int unit,
                       const struct iz_quant_matrix *m,
                       const struct iz_quant_source *from)
{
    struct groups own = own_of(f, m);
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
    struct groups own = own_of(f, m);
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
        struct groups own = own_of(f, &m);
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
    size_t shard = (size_t)g->plan->quant.shard;
    size_t all = shard * (size_t)e->plan.ranks;
    char *own = g->quant + iz_param_quant_own(e, unit);
    bool on_gpu = g->quant && iz_bounce_on_gpu(e, e->plan.zero.frozen.home);
    *f = (struct filling){
        .format = quant_of(e, unit),
        .group = on_gpu     ? calloc(shard, (size_t)group_bytes(e, unit))
                 : g->quant ? own
                            : e->staging[IZ_STAGING_PARAM].buffer[0].p,
        .on_gpu = on_gpu,
        .scale = malloc(shard * IZ_QUANT_SCALES * sizeof(float)),
        .values = malloc(RUN * IZ_QUANT_GROUP * sizeof(float)),
        .ready = calloc(shard, sizeof(bool)),
        .sum = calloc(all, sizeof(double)),
        .own = own_groups(e, unit)};
    return f->group && f->scale && f->values && f->ready && f->sum ? 0
                                                                   : -ENOMEM;
}

int iz_param_quant_fill(struct iz_engine *e, int unit,
                        const struct iz_quant_source *from)
{
    const struct iz_unit_memory *g = &e->unit[unit];
    const struct iz_unit *u = &e->model->unit[unit];
    int64_t filed = iz_plan_quant_filed(g->plan);
    struct filling f;
    if (!g->plan->quant.n)
        return 0;
    int err = filling_open(&f, e, unit);
    if (!err && !g->quant)
        memset(f.group, 0, (size_t)filed);
    if (!err)
        err = fill_matrices(&f, unit, u, from);
    err = iz_agree(e->coll, err);
    if (!err && e->plan.ranks > 1)
        iz_coll_all_gather(e->coll, f.sum,
                           g->plan->quant.shard * (int64_t)sizeof(double),
                           "scales of quantised parameters");
    if (!err)
        fill_scales(&f, u);
    if (!err && f.on_gpu)
        iz_param_quant_move(e, unit, 0, f.group, iz_plan_quant_shard(g->plan),
                            true);
    for (int64_t at = 0; at < filed && !err && !g->quant;
         at += IZ_QUANT_BUFFER_BYTES)
        iz_nvme_write(e->file.param, f.group + at, g->quant_at + at,
                      min64(filed - at, IZ_QUANT_BUFFER_BYTES));
    if (f.on_gpu)
        free(f.group);
    free(f.scale);
    free(f.values);
    free(f.ready);
    free(f.sum);
    return err;
}
