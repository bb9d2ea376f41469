/* SPDX-License-Identifier: Apache-2.0 */
/* Touched rows: their lists, and the ways of parameters and gradients; see
 * touched.h. */
#include "runtime/step/touched.h"

#include "codelets/base/die.h"
#include "codelets/base/int64.h"
#include "codelets/flat/touched_rows.h"
#include "runtime/engine/alloc.h"
#include "runtime/step/submit.h"

/* ---- lists ---- */

starpu_data_handle_t iz_touched_list(const struct iz_engine *e, int unit)
{
    return e->unit[unit].plan->rows ? e->touched.list[e->touched.now].handle
                                    : NULL;
}

struct iz_touched_in iz_touched_in(const struct iz_engine *e, int unit)
{
    const struct iz_plan_unit *g = e->unit[unit].plan;
    return (struct iz_touched_in){.units = e->plan.n_units,
                                  .unit = unit,
                                  .rank = e->plan.rank,
                                  .ranks = e->plan.ranks,
                                  .cols = g->cols,
                                  .shard = g->shard};
}

struct iz_touched iz_touched_get(const struct iz_touched_in *a,
                                 const void *list)
{
    return iz_touched_of(list, a->units, a->unit, a->cols);
}

int64_t iz_touched_first(const struct iz_touched_in *a,
                         const struct iz_touched *r, int rank)
{
    return iz_touched_packed(r, a->shard * rank);
}

void iz_touched_shards(const struct iz_touched_in *a,
                       const struct iz_touched *r, struct iz_coll *c,
                       int64_t elem_bytes)
{
    for (int k = 0; k <= a->ranks; k++)
        c->first[k] = iz_touched_first(a, r, k) * elem_bytes;
}

struct list_arg {
    const struct iz_data *data;
    const struct iz_model *model;
    struct iz_samples s;
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
    for (int64_t i = 0; i < a->s.n; i += a->batch) {
        int batch = (int)min64(a->batch, a->s.n - i);
        iz_data_batch(a->data, a->s.split, a->s.first + i, batch, input,
                      target);
        if (n + batch * m->table_reads > a->reads)
            iz_die("%s: more samples than there is room for", m->name);
        n += m->list_rows(m->self, batch, input, key + n);
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
    n = iz_touched_sort(key, more, n);
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

void iz_touched_begin(struct iz_engine *e, struct iz_samples s)
{
    const struct iz_plan *p = &e->plan;
    struct list_arg a = {.data = e->data,
                         .model = e->model,
                         .s = s,
                         .batch = p->samples,
                         .reads = p->touched.reads,
                         .rows = p->touched.rows};
    if (!p->touched.reads)
        return;
    e->touched.now = !e->touched.now;
    for (int u = 0; u < p->n_units; u++)
        e->unit[u].version += p->unit[u].rows > 0;
    struct iz_task t = iz_task_of(e, IZ_BATCH, IZ_ON_HOST, run_list, -1);
    iz_task_add(&t, e->touched.list[e->touched.now].handle, STARPU_W);
    iz_task_add(&t, e->touched.scratch.handle, STARPU_W);
    t.bytes = 16.0 * (double)p->touched.reads;
    iz_step_submit(e, &t, &a, sizeof(a));
}

/* ---- parameters and gradients ---- */

struct rows_arg {
    struct iz_touched_in in;
    struct iz_coll *coll;
    int64_t elem_bytes;
    _Atomic int64_t *fetched; /* counts the bytes; NULL: nobody does */
    const char *unit;
};

/* Touched rows of all ranks in `packed`: this rank's come from its shard at
 * `own` (NULL: they are there), then the others'. */
static void bring_rows(const struct rows_arg *a, const struct iz_touched *r,
                       void *packed, const void *own)
{
    int64_t begin = a->in.shard * a->in.rank;
    if (own)
        iz_touched_pack(r, begin, begin + a->in.shard, a->elem_bytes, packed,
                        own);
    if (a->in.ranks > 1) {
        iz_touched_shards(&a->in, r, a->coll, a->elem_bytes);
        iz_coll_all_gatherv(a->coll, packed, a->unit);
    }
    if (a->fetched)
        *a->fetched += iz_touched_elems(r) * a->elem_bytes;
}

/* buf: list, slot or whole accumulator, shard (not of an accumulator). */
static void run_rows(struct iz_exec *x, void **buf, const void *arg)
{
    const struct rows_arg *a = arg;
    struct iz_touched r = iz_touched_get(&a->in, buf[0]);
    bring_rows(a, &r, buf[1], a->fetched ? buf[2] : NULL);
}

/* buf: list, room for touched rows, parameters that are whole on every rank. */
static void run_publish(struct iz_exec *x, void **buf, const void *arg)
{
    const struct rows_arg *a = arg;
    struct iz_touched r = iz_touched_get(&a->in, buf[0]);
    int64_t own = a->in.shard * a->in.rank, end = own + a->in.shard;
    char *param = buf[2];
    bring_rows(a, &r, buf[1], param + own * a->elem_bytes);
    iz_touched_unpack(&r, 0, own, a->elem_bytes, param, buf[1]);
    iz_touched_unpack(&r, end, a->in.shard * a->in.ranks, a->elem_bytes,
                      param + end * a->elem_bytes, buf[1]);
}

/* Bytes: what the network moves at most, or a copy reads and writes.  fetched:
 * where parameters are counted, NULL of gradients. */
static void submit_rows(struct iz_engine *e, struct iz_task *t,
                        int64_t elem_bytes, _Atomic int64_t *fetched)
{
    int ranks = e->plan.ranks;
    struct rows_arg a = {iz_touched_in(e, t->unit), e->coll, elem_bytes,
                         fetched, iz_step_unit_name(e, t->unit)};
    t->bytes = (double)(e->plan.unit[t->unit].packed * elem_bytes) *
               (ranks > 1 ? (double)(ranks - 1) / ranks : 2);
    t->rate = ranks > 1 ? IZ_RATE_GATHER : 0;
    iz_step_submit(e, t, &a, sizeof(a));
}

void iz_touched_gather(struct iz_engine *e, enum iz_kind kind, int unit,
                       starpu_data_handle_t whole, starpu_data_handle_t shard,
                       int64_t elem_bytes)
{
    struct iz_task t = iz_task_of(e, kind, IZ_ON_COMM, run_rows, unit);
    iz_task_add(&t, iz_touched_list(e, unit), STARPU_R);
    iz_task_add(&t, whole, shard ? STARPU_W : STARPU_RW);
    iz_task_add(&t, shard, STARPU_R);
    submit_rows(e, &t, elem_bytes, shard ? &e->counts.fetched_bytes : NULL);
}

/* Through a buffer for the unit's gradient, which has been read by now. */
void iz_touched_publish(struct iz_engine *e, int unit)
{
    struct iz_task t = iz_task_of(e, IZ_FETCH, IZ_ON_COMM, run_publish, unit);
    iz_task_add(&t, iz_touched_list(e, unit), STARPU_R);
    iz_task_add(&t, iz_engine_next_grad(e, unit), STARPU_W);
    iz_task_add(&t, e->unit[unit].param_handle, STARPU_RW);
    submit_rows(e, &t, iz_step_param_bytes(e, 1), &e->counts.fetched_bytes);
}
