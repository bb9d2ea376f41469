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
#include "runtime/step/order.h"
#include "runtime/step/submit.h"
#include "runtime/step/touched.h"

/* A part of a unit's parameters: bytes of a shard, and where they begin in what
 * is fetched and in the whole. */
struct fetch_part {
    int64_t shard_bytes, from, at;
};

/* Shards of the ranks of a group, which is all of them if there are no copies.
 */
struct fetch_arg {
    struct iz_coll *coll;
    struct fetch_part part[2];
    int parts, rank, group; /* rank: in its group */
    int64_t shard_bytes;    /* of all parts */
    bool gpu, gathers;
    bool apart;     /* the shard is not in its place in the whole */
    bool from_host; /* and its home is no GPU */
    const char *unit;
};

/* buf: whole, shard if it is apart.  Both in one task of the comm worker. */
static void run_fetch(struct iz_exec *x, void **buf, const void *arg)
{
    const struct fetch_arg *a = arg;
    for (int i = 0; i < a->parts; i++) {
        const struct fetch_part *p = &a->part[i];
        char *whole = (char *)buf[0] + p->at;
        char *place = whole + a->rank * p->shard_bytes;
        const char *own = a->apart ? (char *)buf[1] + p->from : place;
        if (a->gathers && a->gpu) {
            iz_coll_gpu_all_gather(a->coll, x, whole, own, p->shard_bytes,
                                   a->group, a->unit);
            continue;
        }
        if (a->apart)
            iz_buffer_copy(x, place, own, p->shard_bytes);
        if (a->gathers)
            iz_coll_all_gather_among(a->coll, whole, p->shard_bytes, a->group,
                                     a->unit);
    }
}

static void add_fetched(struct fetch_arg *a, int64_t shard_bytes, int64_t from,
                        int64_t at)
{
    if (shard_bytes)
        a->part[a->parts++] = (struct fetch_part){shard_bytes, from, at};
    a->shard_bytes += shard_bytes;
}

/* Of the trained elements, of elem_bytes each, and the frozen ones, from one
 * buffer; in groups of one rank all of them are there. */
static struct fetch_arg fetch_arg(const struct iz_engine *e, int unit,
                                  int group, int64_t elem_bytes, bool trained,
                                  bool frozen)
{
    const struct iz_plan_unit *p = e->unit[unit].plan;
    bool file = e->plan.zero.param.home == IZ_HOME_NVME;
    int64_t shard = p->padded / group;
    int64_t before = !trained ? 0 : file ? p->chunk * p->chunks : shard;
    struct fetch_arg a = {.coll = e->coll,
                          .rank = e->plan.rank % group,
                          .group = group,
                          .gpu = e->plan.target.gpu,
                          .unit = iz_step_unit_name(e, unit)};
    if (trained)
        add_fetched(&a, shard * elem_bytes, 0, 0);
    if (frozen)
        add_fetched(&a, p->frozen.padded / group * elem_bytes,
                    before * elem_bytes, p->padded * elem_bytes);
    return a;
}

/* shard: NULL if it is in its place in the whole.  Counts what moves between
 * host and GPU: if a collective passes through the host, the whole goes
 * up, and a shard that is on the GPU comes down before. */
static void submit_parts(struct iz_engine *e, enum iz_kind kind,
                         enum iz_where where, int unit,
                         starpu_data_handle_t whole, starpu_data_handle_t shard,
                         struct fetch_arg *a)
{
    const struct iz_plan *p = &e->plan;
    bool many = p->ranks > 1, through_host = many && !p->target.nccl;
    bool from_host = shard && a->from_host;
    a->gathers = a->group > 1 && where == IZ_ON_COMM;
    through_host &= a->gathers;
    struct iz_task t = iz_task_of(e, kind, where, run_fetch, unit);
    if (!shard && !a->parts)
        return;
    a->apart = shard != NULL;
    if (a->gathers)
        t.rate = a->group < p->ranks ? IZ_RATE_GROUP : IZ_RATE_GATHER;
    /* What the link or the network moves; a copy within the host is both. */
    t.bytes = (double)(a->shard_bytes * (where == IZ_ON_H2D ? 1
                                         : a->gathers       ? a->group - 1
                                                            : 2));
    iz_task_add(&t, whole, shard && !a->part[0].at ? STARPU_W : STARPU_RW);
    iz_task_add(&t, shard, STARPU_R);
    iz_step_submit(e, &t, a, sizeof(*a));
    if (p->target.gpu && where == IZ_ON_COMM && (through_host || from_host))
        iz_step_count_link(e, a->shard_bytes * (through_host ? a->group : 1),
                           from_host ? 0 : a->shard_bytes);
}

void iz_fetch_gather(struct iz_engine *e, enum iz_kind kind, int unit,
                     starpu_data_handle_t whole, int64_t elem_bytes)
{
    struct fetch_arg a =
        fetch_arg(e, unit, e->plan.zero.group, elem_bytes, true, false);
    if (e->unit[unit].plan->rows)
        iz_touched_gather(e, kind, unit, whole, NULL, elem_bytes);
    else
        submit_parts(e, kind, IZ_ON_COMM, unit, whole, NULL, &a);
}

/* n chunks of a file into a staging buffer from element `at` on. */
static void load_chunks(struct iz_engine *e, int unit, struct iz_staging *s,
                        const struct iz_chunk *k, int n, int64_t at)
{
    for (int i = 0; i < n; i++) {
        struct iz_io a = {.file = e->file.param,
                          .offset = k[i].param_at,
                          .bytes = iz_step_param_bytes(e, k[i].filed),
                          .at = iz_step_param_bytes(e, at + k[i].first),
                          .first = iz_chunk_first(e, unit, &k[i]),
                          .count = k[i].count,
                          .array = {{0, iz_step_param_bytes(e, 1), 1}},
                          .arrays = 1};
        iz_disk_io(e, IZ_LOAD, unit, s->handle, at || i ? STARPU_RW : STARPU_W,
                   k[i].param_handle, a);
    }
}

/* Quantised parameters follow the others in the buffer. */
static void load_quant(struct iz_engine *e, int unit, struct iz_staging *s)
{
    const struct iz_unit_memory *g = &e->unit[unit];
    int64_t filed = iz_plan_quant_filed(g->plan), n;
    for (int64_t i = 0; i < filed; i += n) {
        n = min64(filed - i, IZ_QUANT_PIECE);
        struct iz_io a = {
            .file = e->file.param,
            .offset = g->quant_at + i,
            .bytes = n,
            .at = iz_step_param_bytes(e, iz_plan_filed(&e->plan, g->plan)) + i};
        iz_disk_io(e, IZ_LOAD, unit, s->handle, STARPU_RW, g->quant_handle, a);
    }
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
    if (z->param.home == IZ_HOME_NVME) {
        load_chunks(e, unit, s, g->chunk, g->plan->chunks, 0);
        at = g->plan->chunk * g->plan->chunks;
    }
    if (frozen) {
        load_chunks(e, unit, s, g->frozen, g->plan->frozen.chunks, at);
        load_quant(e, unit, s);
    }
    return s->handle;
}

/* buf: copy, shard. */
static void run_copy(struct iz_exec *x, void **buf, const void *arg)
{
    const struct fetch_arg *a = arg;
    for (int i = 0; i < a->parts; i++) {
        const struct fetch_part *p = &a->part[i];
        char *copy = (char *)buf[0] + p->at;
        const char *own = (char *)buf[1] + p->from;
        if (a->gpu)
            iz_coll_gpu_refresh(a->coll, x, copy, own, p->shard_bytes, a->group,
                                a->unit);
        else
            iz_coll_refresh(a->coll, copy, own, p->shard_bytes, a->group,
                            a->unit);
    }
}

/* Renews the group's copy where the unit has changed since: just before it is
 * needed.  The collectives of a whole model at once would be in the way of its
 * first fetches, which wait for no updates but their own.  Frozen parameters
 * are copied once. */
static void refresh_secondary(struct iz_engine *e, int unit)
{
    const struct iz_plan *p = &e->plan;
    struct iz_unit_memory *g = &e->unit[unit];
    const struct iz_plan_unit *s = g->plan;
    int group = p->zero.group, share = p->ranks / group;
    bool all = g->copied < 0;
    struct fetch_arg a = {.coll = e->coll,
                          .group = group,
                          .gpu = p->target.gpu &&
                                 p->zero.param.home == IZ_HOME_NONE,
                          .unit = iz_step_unit_name(e, unit)};
    struct iz_task t = iz_task_of(e, IZ_FETCH, IZ_ON_COMM, run_copy, unit);
    if (!g->secondary_handle || g->copied == g->version)
        return;
    add_fetched(&a, iz_step_param_bytes(e, s->shard), 0, 0);
    if (all)
        add_fetched(&a, iz_step_param_bytes(e, s->frozen.shard),
                    iz_step_param_bytes(e, s->shard),
                    iz_step_param_bytes(e, s->padded / group));
    t.rate = IZ_RATE_COPY;
    t.bytes = (double)(a.shard_bytes * share);
    iz_task_add(&t, g->secondary_handle, all ? STARPU_W : STARPU_RW);
    iz_task_add(&t, g->param_handle, STARPU_R);
    iz_step_submit(e, &t, &a, sizeof(a));
    if (a.gpu && !p->target.nccl)
        iz_step_count_link(e, a.shard_bytes * share, a.shard_bytes);
    g->copied = g->version;
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

/* Brings all groups of a unit into a buffer, from this rank's shard of them:
 * from the other ranks, and to the GPU. */
static starpu_data_handle_t gather_quant(struct iz_engine *e, int unit,
                                         starpu_data_handle_t shard,
                                         int64_t from)
{
    const struct iz_plan *p = &e->plan;
    bool many = p->ranks > 1 && !p->zero.param.whole, gpu = p->target.gpu;
    bool up = gpu && p->zero.frozen.home != IZ_HOME_NONE;
    bool nccl = p->target.nccl && many;
    struct iz_staging *s = iz_engine_next_staging(e, IZ_STAGING_QUANT);
    struct fetch_arg a = {.coll = e->coll,
                          .rank = p->rank,
                          .group = p->ranks,
                          .gpu = gpu,
                          .from_host = p->zero.frozen.home != IZ_HOME_NONE,
                          .unit = iz_step_unit_name(e, unit)};
    add_fetched(&a, iz_plan_quant_shard(e->unit[unit].plan), from, 0);
    submit_parts(e, IZ_FETCH, up && (nccl || !many) ? IZ_ON_H2D : IZ_ON_COMM,
                 unit, s->handle, shard, &a);
    if (up && nccl)
        submit_parts(e, IZ_FETCH, IZ_ON_COMM, unit, s->handle, NULL, &a);
    return s->handle;
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
        from = gather_quant(e, unit, from, a.from);
        a.from = 0;
    }
    t.bytes = (double)(iz_plan_quant_whole(p, u) +
                       iz_step_param_bytes(e, u->quant.n));
    iz_task_add(&t, slot->handle, STARPU_RW);
    iz_task_add(&t, from, STARPU_R);
    iz_step_submit(e, &t, &a, sizeof(a));
    e->counts.fetched_bytes += iz_plan_quant_whole(p, u);
}

/* Brings what lives together from its home into a slot.  To a GPU, a shard of
 * the host goes up on a mover of its own: beside the collectives of other
 * units, if those are the GPUs' own.  What is whole on the GPU is copied there.
 */
static void bring(struct iz_engine *e, int unit, starpu_data_handle_t slot,
                  enum iz_home home, starpu_data_handle_t shard,
                  struct fetch_arg *a)
{
    const struct iz_plan *p = &e->plan;
    bool alone = p->ranks == 1, nccl = p->target.nccl && !alone;
    a->from_host = home != IZ_HOME_NONE;
    bool up = p->target.gpu && a->from_host && (alone || nccl);
    bool near =
        p->target.gpu && !a->from_host && (alone || p->zero.param.whole);
    if (!a->parts)
        return;
    submit_parts(e, IZ_FETCH,
                 up     ? IZ_ON_H2D
                 : near ? IZ_ON_COMPUTE
                        : IZ_ON_COMM,
                 unit, slot, shard, a);
    if (up && nccl)
        submit_parts(e, IZ_FETCH, IZ_ON_COMM, unit, slot, NULL, a);
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
    struct fetch_arg a =
        fetch_arg(e, unit, group, size, true, !iz_plan_frozen_apart(&e->plan));
    refresh_secondary(e, unit);
    if (g->plan->rows)
        iz_touched_gather(e, IZ_FETCH, unit, slot->handle, shard, size);
    else
        bring(e, unit, slot->handle, z->param.home, shard, &a);
    if (iz_plan_frozen_apart(&e->plan)) {
        a = fetch_arg(e, unit, group, size, false, true);
        bring(e, unit, slot->handle, z->frozen.home,
              disk[1] ? loaded : g->frozen_handle, &a);
    }
    submit_dequantize(e, unit, slot, disk[1] ? loaded : NULL);
    slot->unit = unit;
    slot->version = g->version;
    slot->waiting = true;
    g->slot = slot;
    if (!g->plan->rows)
        e->counts.fetched_bytes += iz_step_param_bytes(
            e, iz_plan_gathered(g->plan) - g->plan->quant.n);
}

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
            iz_graph_position(e->graph, iz_order_position(e, u->step[j]));
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

/* Each rank has made those of its shard alone. */
static void publish_quant(struct iz_engine *e, int unit)
{
    const struct iz_unit_memory *g = &e->unit[unit];
    const struct iz_plan *p = &e->plan;
    struct fetch_arg a = {.coll = e->coll,
                          .rank = p->rank,
                          .group = p->ranks,
                          .gpu = p->target.gpu,
                          .unit = iz_step_unit_name(e, unit)};
    add_fetched(&a, iz_plan_quant_shard(g->plan), 0, 0);
    if (p->zero.param.whole && p->ranks > 1 && g->quant)
        submit_parts(e, IZ_FETCH, IZ_ON_COMM, unit, g->quant_handle, NULL, &a);
}

/* Padding past a short last chunk is never touched: the pieces cover the owned
 * elements exactly, so only the part behind them needs the all-gather. */
void iz_fetch_publish(struct iz_engine *e, int unit, bool frozen)
{
    struct iz_unit_memory *g = &e->unit[unit];
    struct fetch_arg a = fetch_arg(e, unit, e->plan.zero.group,
                                   iz_step_param_bytes(e, 1), true, frozen);
    if (frozen)
        publish_quant(e, unit);
    if (!e->plan.zero.param.whole || e->plan.zero.state.whole ||
        e->plan.ranks == 1)
        return;
    if (g->plan->rows && !frozen) {
        iz_touched_publish(e, unit);
        return;
    }
    submit_parts(e, IZ_FETCH, IZ_ON_COMM, unit, g->param_handle, NULL, &a);
    e->counts.fetched_bytes += iz_step_param_bytes(e, g->plan->padded);
}
