/* SPDX-License-Identifier: Apache-2.0 */
/* Lists of touched rows; see rows_list.h. */
#include "runtime/step/rows_list.h"

#include "codelets/base/die.h"

starpu_data_handle_t iz_touched_list(const struct iz_engine *e, int group)
{
    return e->group[group].plan->rows ? e->touched.list[e->touched.now].handle
                                      : NULL;
}

struct iz_touched_in iz_touched_in(const struct iz_engine *e, int group)
{
    const struct iz_plan_group *g = e->group[group].plan;
    return (struct iz_touched_in){.units = e->plan.n_groups,
                                  .unit = group,
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

void iz_touched_parts(const struct iz_touched_in *a, const struct iz_touched *r,
                      struct iz_coll *c, int64_t unit)
{
    for (int k = 0; k <= a->ranks; k++)
        c->first[k] = iz_touched_first(a, r, k) * unit;
}

struct list_arg {
    const struct iz_data *data;
    const struct iz_model *model;
    struct iz_touched_samples s;
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

void iz_touched_begin(struct iz_engine *e, struct iz_touched_samples s)
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
    e->touched.now = !e->touched.now;
    for (int u = 0; u < p->n_groups; u++)
        e->group[u].version += p->group[u].rows > 0;
    iz_submit(e->graph,
              &(struct iz_task){
                  .kind = IZ_BATCH,
                  .where = IZ_ON_HOST,
                  .run = run_list,
                  .arg = &a,
                  .arg_bytes = sizeof(a),
                  .data = {{e->touched.list[e->touched.now].handle, STARPU_W},
                           {e->touched.scratch.handle, STARPU_W}},
                  .bytes = 16.0 * (double)p->step_reads,
                  .unit = -1,
                  .step = (int)e->step});
}
