/* SPDX-License-Identifier: Apache-2.0 */
/* Where a unit's parameters come from: disk, the host, the other ranks, and the
 * ring that they are fetched into; see fetch.h. */
#include "runtime/step/fetch.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/die.h"
#include "codelets/base/int64.h"
#include "codelets/buffer/flat_buffer.h"
#include "codelets/gpu/device.h"
#include "runtime/engine/alloc.h"
#include "runtime/engine/param_quant.h"
#include "runtime/plan/unit_sizes.h"
#include "runtime/step/disk.h"
#include "runtime/step/move.h"
#include "runtime/step/submit.h"
#include "runtime/step/touched.h"

/* ---- the order of uses ---- */

/* A pass has fewer than 2U visits, and a visit at most two uses. */
static void list_uses(struct iz_engine *e, bool training, struct iz_uses *uses)
{
    int units = e->model->n_units;
    int *p = iz_engine_take(e, units * 16, sizeof(*p));
    *uses = (struct iz_uses){.unit = p,
                             .visit = p + 4 * units,
                             .after = p + 8 * units,
                             .item = p + 12 * units,
                             .first = p + 14 * units,
                             .next = p + 15 * units,
                             .visits = units};
    if (training)
        uses->visits += units - 1 - e->plan.first_trained;
    for (int i = 0; i < uses->visits; i++) {
        int u = iz_step_pass_unit(e, i), tied = e->model->unit[u].tied_unit;
        uses->item[i] = uses->n;
        for (int k = 0; k < 1 + (tied >= 0); k++) {
            uses->visit[uses->n] = i;
            uses->unit[uses->n++] = k ? tied : u;
        }
    }
    uses->item[uses->visits] = uses->n;
    for (int u = 0; u < units; u++)
        uses->first[u] = uses->n;
    for (int i = uses->n - 1; i >= 0; i--) {
        uses->after[i] = uses->first[uses->unit[i]];
        uses->first[uses->unit[i]] = i;
    }
}

void iz_fetch_open(struct iz_engine *e)
{
    list_uses(e, true, &e->uses.training);
    list_uses(e, false, &e->uses.forward);
}

/* ---- from where it lives into a slot ---- */

/* The shards of the trained elements, of elem_bytes each, and of the frozen
 * ones, from one buffer; in groups of one rank all of them are there. */
static struct iz_move shards_of(const struct iz_engine *e, int unit, int group,
                                int64_t elem_bytes, bool trained, bool frozen,
                                struct iz_stretch s[2])
{
    const struct iz_plan_unit *p = e->unit[unit].plan;
    bool file = e->plan.zero.param.home == IZ_HOME_NVME;
    int64_t shard = p->padded / group;
    int64_t before = !trained ? 0 : file ? p->chunk * p->chunks : shard;
    s[0] = (struct iz_stretch){.bytes = trained ? shard * elem_bytes : 0};
    s[1] =
        (struct iz_stretch){p->padded * elem_bytes, before * elem_bytes,
                            frozen ? p->frozen.padded / group * elem_bytes : 0};
    return (struct iz_move){
        .n = 2, .list = s, .group = group, .gpu = e->plan.target.gpu};
}

/* shard: NULL if it is in its place in the whole. */
static void submit_move(struct iz_engine *e, enum iz_kind kind,
                        enum iz_where where, int unit,
                        starpu_data_handle_t whole, starpu_data_handle_t shard,
                        struct iz_move m)
{
    struct iz_task t = iz_task_of(e, kind, where, NULL, unit);
    int first = m.n > 1 && !m.list[0].bytes;
    bool behind = m.list[first].to > 0; /* what is there stays */
    m.to = iz_task_add(&t, whole, shard && !behind ? STARPU_W : STARPU_RW);
    m.from = iz_task_add(&t, shard, STARPU_R);
    iz_move(e, &t, m);
}

void iz_fetch_gather(struct iz_engine *e, enum iz_kind kind, int unit,
                     starpu_data_handle_t whole, int64_t elem_bytes)
{
    struct iz_stretch s[2];
    if (e->unit[unit].plan->rows)
        iz_touched_gather(e, kind, unit, whole, NULL, elem_bytes);
    else
        submit_move(
            e, kind, IZ_ON_COMM, unit, whole, NULL,
            shards_of(e, unit, e->plan.zero.group, elem_bytes, true, false, s));
}

/* Brings what lives together from its home into a slot.  To a GPU, a shard of
 * the host goes up on a mover of its own: beside the collectives of other
 * units, if those are the GPUs' own.  The GPU copies what is whole there. */
static void bring(struct iz_engine *e, int unit, starpu_data_handle_t slot,
                  enum iz_home home, starpu_data_handle_t shard,
                  struct iz_move m)
{
    bool gpu = e->plan.target.gpu, many = m.group > 1;
    m.from_host = home != IZ_HOME_NONE;
    bool up = gpu && m.from_host && (!many || e->plan.target.nccl);
    bool on_device = gpu && !m.from_host && !many;
    submit_move(e, IZ_FETCH,
                up          ? IZ_ON_H2D
                : on_device ? IZ_ON_COMPUTE
                            : IZ_ON_COMM,
                unit, slot, shard, m);
    if (up && many)
        submit_move(e, IZ_FETCH, IZ_ON_COMM, unit, slot, NULL, m);
}

/* The chunks of a part from their file into a staging buffer, from byte `at`
 * on; returns the byte behind them. */
static int64_t load_chunks(struct iz_engine *e, int unit, struct iz_staging *s,
                           enum iz_unit_part part, int64_t at)
{
    struct iz_chunks k = iz_unit_chunks(&e->unit[unit], part);
    int bytes = part == IZ_PART_QUANT ? 4 : (int)iz_step_param_bytes(e, 1);
    for (int i = 0; i < k.n; i++) {
        const struct iz_chunk *c = &k.list[i];
        struct iz_io a = {.file = e->file.param,
                          .offset = c->param_at,
                          .bytes = c->param_bytes,
                          .at = at,
                          .first = iz_chunk_first(e, unit, c),
                          .count = c->count,
                          .array = {{0, bytes, 1}},
                          .arrays = part == IZ_PART_TRAINED};
        iz_disk_io(e, IZ_LOAD, unit, s->handle, at ? STARPU_RW : STARPU_W,
                   c->param_handle, a);
        at += c->param_bytes;
    }
    return at;
}

/* What is on disk first comes into a staging buffer, chunk by chunk; NULL:
 * nothing is. */
static starpu_data_handle_t load_shard(struct iz_engine *e, int unit)
{
    const struct iz_plan_zero *z = &e->plan.zero;
    struct iz_unit_memory *g = &e->unit[unit];
    bool frozen = z->frozen.home == IZ_HOME_NVME;
    int64_t at = 0;
    if (!iz_plan_filed(&e->plan, g->plan) && !(frozen && g->plan->quant.n))
        return NULL;
    struct iz_staging *s = iz_engine_next_staging(e, IZ_STAGING_PARAM);
    if (z->param.home == IZ_HOME_NVME)
        at = load_chunks(e, unit, s, IZ_PART_TRAINED, at);
    if (frozen)
        at = load_chunks(e, unit, s, IZ_PART_FROZEN, at);
    if (frozen)
        load_chunks(e, unit, s, IZ_PART_QUANT, at);
    return s->handle;
}

/* Renews the group's copy where the unit has changed since: just before it is
 * needed.  The collectives of a whole model at once would be in the way of its
 * first fetches, which wait for no updates but their own.  Frozen parameters
 * are copied once. */
static void refresh_secondary(struct iz_engine *e, int unit)
{
    const struct iz_plan *p = &e->plan;
    struct iz_unit_memory *g = &e->unit[unit];
    const struct iz_plan_unit *u = g->plan;
    bool all = !g->secondary_version;
    if (!g->secondary_handle || g->secondary_version == g->version + 1)
        return;
    struct iz_stretch s[2] = {
        {.bytes = iz_step_param_bytes(e, u->shard)},
        {iz_step_param_bytes(e, u->padded / p->zero.group),
         iz_step_param_bytes(e, u->shard),
         iz_step_param_bytes(e, u->frozen.shard)}};
    struct iz_move m = {.n = 1 + all,
                        .list = s,
                        .group = p->zero.group,
                        .refreshes = true,
                        .gpu = p->target.gpu &&
                               p->zero.param.home == IZ_HOME_NONE};
    struct iz_task t = iz_task_of(e, IZ_FETCH, IZ_ON_COMM, NULL, unit);
    m.to = iz_task_add(&t, g->secondary_handle, all ? STARPU_W : STARPU_RW);
    m.from = iz_task_add(&t, g->param_handle, STARPU_R);
    iz_move(e, &t, m);
    g->secondary_version = g->version + 1;
}

struct dequantize_arg {
    const struct iz_unit *unit;
    int64_t from; /* bytes before the groups in their buffer */
    int64_t at;   /* and before the values in the slot */
    enum iz_dtype type;
    enum iz_quant format;
    const struct iz_quant_source *source; /* NULL: the groups */
    int index;                            /* of the unit, for that */
    char *pinned;
};

/* Values of a matrix as a source has them, to `out` in the slot; to that of a
 * GPU, by one task at a time, through the pinned buffer. */
static void put_values(struct iz_exec *x, const struct dequantize_arg *a,
                       char *out, const struct iz_quant_matrix *m)
{
    enum { RUN = 1 << 16 };
    static_assert(RUN * sizeof(float) <= IZ_BOUNCE_BYTES, "a run of values");
    float *values = malloc(RUN * sizeof(*values));
    int64_t size = iz_dtype_bytes(a->type);
    if (!values)
        iz_die("%s: no memory for its values", a->unit->name);
    for (int64_t i = 0, n; i < m->n; i += n) {
        char *to = x->stream ? a->pinned : out + i * size;
        n = min64(m->n - i, RUN);
        if (a->source->read(a->source->arg, a->index, m->first + i, values, n))
            iz_die("%s: its values cannot be read any more", a->unit->name);
        iz_cast_params(to, a->type, values, n);
        if (!x->stream)
            continue;
        iz_device_copy(x->stream, out + i * size, to, n * size);
        iz_device_wait(x->stream);
    }
    free(values);
}

/* The next matrices, as one: those of whole groups follow one another, and
 * experts are many. */
static bool next_run(const struct iz_unit *u, struct iz_quant_matrix *m)
{
    bool any = iz_unit_next_quant(u, m);
    struct iz_quant_matrix next = *m;
    while (any && m->n % IZ_QUANT_GROUP == 0 && iz_unit_next_quant(u, &next)) {
        m->param = next.param;
        m->stacked = next.stacked;
        m->n += next.n;
        m->groups += next.groups;
    }
    return any;
}

/* buf: slot, groups. */
static void run_dequantize(struct iz_exec *x, void **buf, const void *arg)
{
    const struct dequantize_arg *a = arg;
    const char *g = (char *)buf[1] + a->from;
    struct iz_quant_matrix m = {0};
    while (a->source && iz_unit_next_quant(a->unit, &m))
        put_values(x, a,
                   (char *)buf[0] + a->at + m.first * iz_dtype_bytes(a->type),
                   &m);
    while (!a->source && next_run(a->unit, &m))
        iz_buffer_quant(x, a->format,
                        (char *)buf[0] + a->at +
                            m.first * iz_dtype_bytes(a->type),
                        a->type, g + m.group * iz_quant_bytes(a->format), m.n);
}

/* All groups of a unit, of which a rank's shard begins at byte `from`. */
static struct iz_move groups_of(const struct iz_engine *e, int unit,
                                int64_t from, struct iz_stretch *s)
{
    const struct iz_plan_frozen *words = &e->unit[unit].plan->quant.words;
    *s = (struct iz_stretch){.from = from, .bytes = 4 * words->shard};
    return (struct iz_move){
        .n = 1, .list = s, .group = e->plan.ranks, .gpu = e->plan.target.gpu};
}

/* Makes weights of what is quantised, in the slot behind the other parameters,
 * from where it lives, or from where it was loaded or gathered to. */
static void submit_dequantize(struct iz_engine *e, int unit,
                              struct iz_slot *slot, starpu_data_handle_t loaded)
{
    const struct iz_unit_memory *g = &e->unit[unit];
    const struct iz_plan *p = &e->plan;
    const struct iz_plan_unit *u = g->plan;
    struct iz_task t =
        iz_task_of(e, IZ_FETCH, p->target.gpu ? IZ_ON_COMPUTE : IZ_ON_HOST,
                   run_dequantize, unit);
    starpu_data_handle_t from = loaded ? loaded : g->quant_handle;
    struct dequantize_arg a = {
        .unit = &e->model->unit[unit],
        .from = loaded ? iz_step_param_bytes(e, iz_plan_filed(p, u)) : 0,
        .at = iz_step_param_bytes(e, u->padded + u->frozen.padded),
        .type = p->param_type,
        .format = u->quant.format,
        .source = e->quant_from,
        .index = unit,
        .pinned = e->bounce.buffer};
    if (!u->quant.n)
        return;
    if (p->staging[IZ_STAGING_QUANT].n) {
        struct iz_stretch s;
        struct iz_move m = groups_of(e, unit, a.from, &s);
        starpu_data_handle_t all =
            iz_engine_next_staging(e, IZ_STAGING_QUANT)->handle;
        bring(e, unit, all, p->zero.frozen.home, from, m);
        from = all;
        a.from = 0;
    }
    t.bytes = (double)(4 * u->quant.words.padded +
                       iz_step_param_bytes(e, u->quant.n));
    iz_task_add(&t, slot->handle, STARPU_RW);
    iz_task_add(&t, from, STARPU_R);
    iz_step_submit(e, &t, &a, sizeof(a));
    e->counts.fetched_bytes += 4 * u->quant.words.padded;
}

static void submit_fetch(struct iz_engine *e, int unit, struct iz_slot *slot)
{
    const struct iz_plan_zero *z = &e->plan.zero;
    struct iz_unit_memory *g = &e->unit[unit];
    int group = z->param.whole ? 1 : z->group;
    int64_t size = iz_step_param_bytes(e, 1);
    bool disk[2] = {z->param.home == IZ_HOME_NVME,
                    z->frozen.home == IZ_HOME_NVME};
    starpu_data_handle_t loaded =
        disk[0] || disk[1] ? load_shard(e, unit) : NULL;
    starpu_data_handle_t shard = disk[0]               ? loaded
                                 : g->secondary_handle ? g->secondary_handle
                                                       : g->param_handle;
    bool apart = iz_plan_frozen_apart(&e->plan);
    struct iz_stretch s[2];
    refresh_secondary(e, unit);
    if (g->plan->rows)
        iz_touched_gather(e, IZ_FETCH, unit, slot->handle, shard, size);
    else
        bring(e, unit, slot->handle, z->param.home, shard,
              shards_of(e, unit, group, size, true, !apart, s));
    if (apart)
        bring(e, unit, slot->handle, z->frozen.home,
              disk[1] ? loaded : g->frozen_handle,
              shards_of(e, unit, group, size, false, true, s));
    submit_dequantize(e, unit, slot, disk[1] ? loaded : NULL);
    slot->unit = unit;
    slot->version = g->version;
    slot->waiting = true;
    g->slot = slot;
    if (!g->plan->rows)
        e->counts.fetched_bytes += iz_step_param_bytes(
            e, iz_plan_gathered(g->plan) - g->plan->quant.n);
}

/* ---- which slot, and when ---- */

static struct iz_slot *find_slot(struct iz_engine *e, int unit)
{
    const struct iz_unit_memory *g = &e->unit[unit];
    struct iz_slot *s = g->slot;
    return s && s->unit == unit && s->version == g->version ? s : NULL;
}

/* DeepSpeed's max_reuse_distance: what was used longer ago is fetched anew, but
 * what was fetched ahead is there for its use, however far away. */
static bool reusable(const struct iz_engine *e, const struct iz_slot *s)
{
    return s->waiting ||
           e->counts.fetch_clock - s->used < e->config->zero.max_reuse_distance;
}

/* The slot whose content is needed last, but not before position j.  With the
 * order of uses known, this is Belady's optimal replacement. */
static struct iz_slot *victim(struct iz_engine *e, const struct iz_uses *u,
                              int j)
{
    int ring = e->unit[u->unit[j]].plan->ring, best_use = j;
    struct iz_slot *best = NULL;
    for (int i = 0; i < e->plan.ring[ring].params; i++) {
        struct iz_slot *s = &e->ring[ring].param[i];
        if (s->unit < 0 || s->version != e->unit[s->unit].version)
            return s;
        int use = u->next[s->unit];
        if (use > best_use) {
            best = s;
            best_use = use;
        }
    }
    return best;
}

/* Everything before position `from` has been used: the clock counts elements.
 */
static void mark_used(struct iz_engine *e, const struct iz_uses *u, int from)
{
    if (from == 0) {
        e->uses.marked = 0;
        memcpy(u->next, u->first, (size_t)e->plan.n_units * sizeof(*u->next));
    }
    for (; e->uses.marked < from; e->uses.marked++) {
        int unit = u->unit[e->uses.marked];
        struct iz_slot *s = find_slot(e, unit);
        u->next[unit] = u->after[e->uses.marked];
        e->counts.fetch_clock += iz_plan_gathered(e->unit[unit].plan);
        if (!s)
            continue;
        s->waiting = false;
        s->used = e->counts.fetch_clock;
    }
}

void iz_fetch_ahead(struct iz_engine *e, const struct iz_uses *u, int from)
{
    mark_used(e, u, from);
    for (int j = from; j < u->n; j++) {
        if (!iz_plan_fetches(&e->plan, e->unit[u->unit[j]].plan))
            continue;
        struct iz_slot *s = find_slot(e, u->unit[j]);
        if (s && (reusable(e, s) || u->next[u->unit[j]] < j))
            continue;
        if (!s)
            s = victim(e, u, j);
        if (!s)
            return;
        /* A fetch belongs to the use that it serves. */
        int position =
            iz_graph_position(e->graph, iz_step_pass_position(e, u->visit[j]));
        submit_fetch(e, u->unit[j], s);
        iz_graph_position(e->graph, position);
    }
}

starpu_data_handle_t iz_fetch_param(struct iz_engine *e, int unit)
{
    if (!iz_plan_fetches(&e->plan, e->unit[unit].plan))
        return e->unit[unit].param_handle;
    struct iz_slot *s = find_slot(e, unit);
    if (!s)
        iz_die("%s is used before it was fetched", iz_step_unit_name(e, unit));
    return s->handle;
}

void iz_fetch_publish(struct iz_engine *e, int unit, bool frozen)
{
    const struct iz_plan_zero *z = &e->plan.zero;
    struct iz_unit_memory *g = &e->unit[unit];
    struct iz_stretch s[2];
    if (frozen)
        g->secondary_version = 0;
    if (!z->param.whole || e->plan.ranks == 1)
        return;
    if (frozen &&
        g->quant_handle) /* each rank has made those of its shard alone */
        submit_move(e, IZ_FETCH, IZ_ON_COMM, unit, g->quant_handle, NULL,
                    groups_of(e, unit, 0, s));
    if (z->state.whole)
        return;
    if (g->plan->rows && !frozen) {
        iz_touched_publish(e, unit);
        return;
    }
    submit_move(e, IZ_FETCH, IZ_ON_COMM, unit, g->param_handle, NULL,
                shards_of(e, unit, z->group, iz_step_param_bytes(e, 1), true,
                          frozen, s));
    e->counts.fetched_bytes += iz_step_param_bytes(e, g->plan->padded);
}
