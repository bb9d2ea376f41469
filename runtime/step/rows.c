/* SPDX-License-Identifier: Apache-2.0 */
/* Sparse tables: which rows a step touches, and the ways of parameters and
 * gradients that move only those.  Every rank reads the samples of all ranks,
 * so that all know the same rows and nobody has to be asked.  See zero.h. */
#include <string.h>

#include "codelets/base/die.h"
#include "runtime/step/zero.h"

starpu_data_handle_t iz_rows_list(const struct iz_engine *e, int group)
{
    return e->group[group].plan->rows ? e->row_list[e->row_turn].handle : NULL;
}

struct iz_rows_in iz_rows_in(const struct iz_engine *e, int group)
{
    const struct iz_plan_group *g = e->group[group].plan;
    return (struct iz_rows_in){.units = e->plan.n_groups,
                               .unit = group,
                               .rank = e->plan.rank,
                               .ranks = e->plan.ranks,
                               .cols = g->cols,
                               .shard = g->shard};
}

struct iz_rows iz_rows_get(const struct iz_rows_in *a, const void *list)
{
    return iz_rows_of(list, a->units, a->unit, a->cols);
}

int64_t iz_rows_first(const struct iz_rows_in *a, const struct iz_rows *r,
                      int rank)
{
    return iz_rows_packed(r, a->shard * rank);
}

void iz_rows_parts(const struct iz_rows_in *a, const struct iz_rows *r,
                   struct iz_coll *c, int64_t unit)
{
    for (int k = 0; k <= a->ranks; k++)
        c->first[k] = iz_rows_first(a, r, k) * unit;
}

/* ---- which rows ---- */

struct list_arg {
    const struct iz_data *data;
    const struct iz_model *model;
    struct iz_row_samples s;
    int batch; /* samples at a time */
    int64_t reads, rows;
};

/* Drops what is read of tables that are dense. */
static int64_t keep_sparse(const struct iz_model *m, uint64_t *key, int64_t n)
{
    int64_t kept = 0;
    for (int64_t i = 0; i < n; i++)
        if (m->unit[key[i] >> 32].param[0].sparse)
            key[kept++] = key[i];
    return kept;
}

/* All that the samples read; returns how many. */
static int64_t read_keys(const struct list_arg *a, uint64_t *key, char *input)
{
    const struct iz_model *m = a->model;
    char *target = input + a->batch * m->input_bytes;
    int64_t n = 0;
    for (int r = 0; r < a->s.times; r++)
        for (int64_t i = 0; i < a->s.n; i += a->batch) {
            iz_data_batch(a->data, a->s.split, a->s.first + r * a->s.stride + i,
                          a->batch, input, target);
            if (n + (int64_t)a->batch * m->table_reads > a->reads)
                iz_die("%s: more samples than there is room for", m->name);
            n += m->list_rows(m->self, a->batch, input, key + n);
        }
    return keep_sparse(m, key, n);
}

/* buf: list, scratch: keys, keys, samples. */
static void run_list(struct iz_exec *x, void **buf, const void *arg)
{
    const struct list_arg *a = arg;
    uint64_t *key = buf[1], *more = key + a->reads;
    int64_t n = read_keys(a, key, (char *)(more + a->reads));
    int64_t *first = buf[0];
    int32_t *row = (int32_t *)(first + a->model->n_units + 1);
    int unit = 0;
    (void)x;
    n = iz_rows_sort(key, more, n);
    if (n > a->rows)
        iz_die("%s lists more rows than its tables have", a->model->name);
    first[0] = 0;
    for (int64_t i = 0; i < n; i++) {
        while (unit < (int)(key[i] >> 32))
            first[++unit] = i;
        row[i] = (int32_t)(key[i] & INT32_MAX);
    }
    while (unit < a->model->n_units)
        first[++unit] = n;
}

void iz_rows_begin(struct iz_engine *e, struct iz_row_samples s)
{
    const struct iz_plan *p = &e->plan;
    struct list_arg a = {.data = e->data,
                         .model = e->model,
                         .s = s,
                         .batch = p->samples,
                         .reads = p->step_reads,
                         .rows = p->step_rows};
    if (!p->step_reads)
        return;
    e->row_turn = !e->row_turn;
    for (int u = 0; u < p->n_groups; u++)
        e->group[u].version += p->group[u].rows > 0;
    iz_submit(
        e->graph,
        &(struct iz_task){.kind = IZ_BATCH,
                          .where = IZ_ON_HOST,
                          .run = run_list,
                          .arg = &a,
                          .arg_bytes = sizeof(a),
                          .data = {{e->row_list[e->row_turn].handle, STARPU_W},
                                   {e->row_scratch.handle, STARPU_W}},
                          .bytes = 16.0 * (double)p->step_reads,
                          .unit = -1,
                          .step = (int)e->step});
}

/* ---- parameters ---- */

struct rows_arg {
    struct iz_rows_in in;
    struct iz_coll *coll;
    int64_t elem_bytes;
    _Atomic int64_t *fetched; /* counts the bytes; NULL: nobody does */
    const char *unit;
};

static struct rows_arg rows_arg(struct iz_engine *e, int group,
                                int64_t elem_bytes)
{
    return (struct rows_arg){.in = iz_rows_in(e, group),
                             .coll = e->coll,
                             .elem_bytes = elem_bytes,
                             .unit = iz_unit_name(e, group)};
}

/* Of all touched rows in `packed` this rank's part is there; the others'. */
static void gather(const struct rows_arg *a, const struct iz_rows *r,
                   void *packed)
{
    iz_rows_parts(&a->in, r, a->coll, a->elem_bytes);
    iz_coll_all_gather_parts(a->coll, packed, a->unit);
}

/* This rank's part of the rows, from its shard at `from` into its place. */
static void pack_own(const struct rows_arg *a, const struct iz_rows *r,
                     void *packed, const void *from)
{
    int64_t begin = a->in.shard * a->in.rank;
    iz_rows_pack(r, begin, begin + a->in.shard, a->elem_bytes, packed, from);
}

static void count(const struct rows_arg *a, const struct iz_rows *r)
{
    if (a->fetched)
        *a->fetched += iz_rows_elems(r) * a->elem_bytes;
}

/* buf: list, shard, slot. */
static void run_fetch(struct iz_exec *x, void **buf, const void *arg)
{
    const struct rows_arg *a = arg;
    struct iz_rows r = iz_rows_get(&a->in, buf[0]);
    (void)x;
    pack_own(a, &r, buf[2], buf[1]);
    if (a->in.ranks > 1)
        gather(a, &r, buf[2]);
    count(a, &r);
}

/* buf: list, whole accumulator of touched rows. */
static void run_gather(struct iz_exec *x, void **buf, const void *arg)
{
    const struct rows_arg *a = arg;
    struct iz_rows r = iz_rows_get(&a->in, buf[0]);
    (void)x;
    gather(a, &r, buf[1]);
}

/* buf: list, parameters that are whole on every rank, room for touched rows. */
static void run_publish(struct iz_exec *x, void **buf, const void *arg)
{
    const struct rows_arg *a = arg;
    struct iz_rows r = iz_rows_get(&a->in, buf[0]);
    int64_t own = a->in.shard * a->in.rank, end = own + a->in.shard;
    char *param = buf[1];
    (void)x;
    pack_own(a, &r, buf[2], param + own * a->elem_bytes);
    gather(a, &r, buf[2]);
    iz_rows_unpack(&r, 0, own, a->elem_bytes, param, buf[2]);
    iz_rows_unpack(&r, end, a->in.shard * a->in.ranks, a->elem_bytes,
                   param + end * a->elem_bytes, buf[2]);
    count(a, &r);
}

/* What the network moves at most, or a copy reads and writes. */
static void submit(struct iz_engine *e, int group, struct iz_task t,
                   const struct rows_arg *a)
{
    const struct iz_plan_group *g = e->group[group].plan;
    int ranks = e->plan.ranks;
    t.where = IZ_ON_LANE;
    t.arg = a;
    t.arg_bytes = sizeof(*a);
    t.bytes = (double)(g->packed * a->elem_bytes) *
              (ranks > 1 ? (double)(ranks - 1) / ranks : 2);
    t.gathers = ranks > 1;
    t.unit = group;
    t.step = (int)e->step;
    iz_submit(e->graph, &t);
}

void iz_rows_fetch(struct iz_engine *e, int group, starpu_data_handle_t shard,
                   starpu_data_handle_t slot)
{
    struct rows_arg a = rows_arg(e, group, iz_dtype_bytes(e->plan.param_type));
    a.fetched = &e->fetched_bytes;
    submit(e, group,
           (struct iz_task){.kind = IZ_FETCH,
                            .run = run_fetch,
                            .data = {{iz_rows_list(e, group), STARPU_R},
                                     {shard, STARPU_R},
                                     {slot, STARPU_W}}},
           &a);
}

void iz_rows_gather(struct iz_engine *e, enum iz_kind kind, int group,
                    starpu_data_handle_t whole, int64_t elem_bytes)
{
    struct rows_arg a = rows_arg(e, group, elem_bytes);
    submit(e, group,
           (struct iz_task){.kind = kind,
                            .run = run_gather,
                            .data = {{iz_rows_list(e, group), STARPU_R},
                                     {whole, STARPU_RW}}},
           &a);
}

/* Through a buffer for the unit's gradient, which has been read by now. */
void iz_rows_publish(struct iz_engine *e, int group)
{
    struct rows_arg a = rows_arg(e, group, iz_dtype_bytes(e->plan.param_type));
    a.fetched = &e->fetched_bytes;
    submit(e, group,
           (struct iz_task){.kind = IZ_FETCH,
                            .run = run_publish,
                            .data = {{iz_rows_list(e, group), STARPU_R},
                                     {e->group[group].param_handle, STARPU_RW},
                                     {iz_zero_grad(e, group), STARPU_W}}},
           &a);
}
