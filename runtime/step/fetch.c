/* SPDX-License-Identifier: Apache-2.0 */
/* Where a unit's parameters come from: disk, the host, the other ranks, and the
 * ring that they are fetched into; see zero.h. */
#include "runtime/step/fetch.h"

#include <string.h>

#include "codelets/base/die.h"
#include "runtime/engine/buffers.h"
#include "runtime/step/disk.h"
#include "runtime/step/order.h"
#include "runtime/step/rows_move.h"
#include "runtime/step/zero.h"

/* Trained or frozen parameters: bytes of a shard, and where they begin in what
 * is fetched and in the whole. */
struct fetch_part {
    int64_t shard_bytes, from, at;
};

struct fetch_arg {
    struct iz_coll *coll;
    struct fetch_part part[2];
    int parts;
    int rank, ranks;
    bool gpu;
    const char *unit;
};

static char *own(const struct fetch_arg *a, int i, void *whole)
{
    const struct fetch_part *p = &a->part[i];
    return (char *)whole + p->at + a->rank * p->shard_bytes;
}

/* buf: shard, whole.  The shard comes into its place. */
static void step_fetch_run_copy(struct iz_exec *x, void **buf, const void *arg)
{
    const struct fetch_arg *a = arg;
    for (int i = 0; i < a->parts; i++)
        iz_buffer_copy(x, own(a, i, buf[1]), (char *)buf[0] + a->part[i].from,
                       a->part[i].shard_bytes);
}

/* The parts of a whole, the own shards of which are at `mine` (NULL: in their
 * places). */
static void step_fetch_gather(struct iz_exec *x, const struct fetch_arg *a,
                              char *whole, char *mine)
{
    for (int i = 0; i < a->parts; i++) {
        const struct fetch_part *p = &a->part[i];
        char *from = mine ? mine + p->from : own(a, i, whole);
        if (a->gpu)
            iz_coll_gpu_all_gather(a->coll, x, whole + p->at, from,
                                   p->shard_bytes, a->unit);
        else
            iz_coll_all_gather(a->coll, whole + p->at, p->shard_bytes, a->unit);
    }
}

/* buf: whole. */
static void run_gather(struct iz_exec *x, void **buf, const void *arg)
{
    step_fetch_gather(x, arg, buf[0], NULL);
}

/* buf: shard, whole.  Both in one task of the comm worker. */
static void run_fetch(struct iz_exec *x, void **buf, const void *arg)
{
    const struct fetch_arg *a = arg;
    if (!a->gpu)
        step_fetch_run_copy(x, buf, arg);
    if (a->gpu || a->ranks > 1)
        step_fetch_gather(x, a, buf[1], buf[0]);
}

static void add_part(struct fetch_arg *a, int64_t bytes, int64_t from,
                     int64_t at)
{
    if (bytes)
        a->part[a->parts++] = (struct fetch_part){bytes, from, at};
}

/* Of the trained elements, of elem_bytes each. */
static struct fetch_arg fetch_arg(const struct iz_engine *e, int group,
                                  int64_t elem_bytes)
{
    struct fetch_arg a = {.coll = e->coll,
                          .rank = e->plan.rank,
                          .ranks = e->plan.ranks,
                          .gpu = e->plan.target.gpu,
                          .unit = iz_unit_name(e, group)};
    add_part(&a, e->group[group].plan->shard * elem_bytes, 0, 0);
    return a;
}

static void add_frozen(const struct iz_engine *e, int group,
                       struct fetch_arg *a)
{
    const struct iz_plan_group *g = e->group[group].plan;
    bool file = e->plan.zero.param_home == IZ_HOME_NVME;
    int64_t before = file ? g->chunk * g->chunks : g->shard;
    add_part(a, iz_param_bytes(e, g->frozen.shard), iz_param_bytes(e, before),
             iz_param_bytes(e, g->padded));
}

static int64_t shard_bytes(const struct fetch_arg *a)
{
    int64_t sum = 0;
    for (int i = 0; i < a->parts; i++)
        sum += a->part[i].shard_bytes;
    return sum;
}

/* What a gathering moves between host and GPU.  The host's collectives stage:
 * the whole goes up, and a shard that is on the GPU comes down before. */
static void count_link(struct iz_engine *e, const struct fetch_arg *a,
                       bool from_host)
{
    const struct iz_plan *p = &e->plan;
    bool staged = p->ranks > 1 && !p->target.nccl;
    if (!p->target.gpu)
        return;
    if (staged || from_host)
        e->counts.up_bytes += shard_bytes(a) * (staged ? p->ranks : 1);
    if (staged && !from_host)
        e->counts.down_bytes += shard_bytes(a);
}

static void submit_gather(struct iz_engine *e, enum iz_kind kind, int group,
                          starpu_data_handle_t whole, const struct fetch_arg *a)
{
    if (!a->parts)
        return;
    iz_submit(e->graph,
              &(struct iz_task){
                  .kind = kind,
                  .where = IZ_ON_COMM,
                  .run = run_gather,
                  .arg = a,
                  .arg_bytes = sizeof(*a),
                  .bytes = (double)(shard_bytes(a) * (e->plan.ranks - 1)),
                  .gathers = true,
                  .data = {{whole, STARPU_RW}},
                  .unit = group,
                  .step = (int)e->step});
    count_link(e, a, false);
}

void iz_fetch_gather(struct iz_engine *e, enum iz_kind kind, int group,
                     starpu_data_handle_t whole, int64_t elem_bytes)
{
    struct fetch_arg a = fetch_arg(e, group, elem_bytes);
    if (e->group[group].plan->rows) {
        iz_touched_gather(e, kind, group, whole, elem_bytes);
        return;
    }
    submit_gather(e, kind, group, whole, &a);
}

static struct fetch_arg param_arg(const struct iz_engine *e, int group)
{
    struct fetch_arg a =
        fetch_arg(e, group, iz_dtype_bytes(e->plan.param_type));
    add_frozen(e, group, &a);
    return a;
}

/* n chunks of a file into a staging buffer from element `at` on. */
static void load_chunks(struct iz_engine *e, int group, struct iz_staging *s,
                        const struct iz_chunk *k, int n, int64_t at)
{
    for (int i = 0; i < n; i++) {
        struct iz_io a = {.file = e->param_file,
                          .offset = k[i].param_at,
                          .bytes = iz_param_bytes(e, k[i].filed),
                          .at = iz_param_bytes(e, at + k[i].first),
                          .first = iz_chunk_first(e, group, &k[i]),
                          .count = k[i].count,
                          .array = {{0, iz_param_bytes(e, 1), 1}},
                          .arrays = 1};
        iz_disk_io(e, IZ_LOAD, group, s->handle, at || i ? STARPU_RW : STARPU_W,
                   k[i].param_handle, a);
    }
}

/* Shards on disk first come into a staging buffer, chunk by chunk. */
static starpu_data_handle_t load_shard(struct iz_engine *e, int group)
{
    struct iz_group *g = &e->group[group];
    struct iz_staging *s = iz_next_staging(e, IZ_STAGING_PARAM);
    load_chunks(e, group, s, g->chunk, g->plan->chunks, 0);
    load_chunks(e, group, s, g->frozen, g->plan->frozen.chunks,
                g->plan->chunk * g->plan->chunks);
    return s->handle;
}

static void submit_shard(struct iz_engine *e, int group, enum iz_where where,
                         starpu_data_handle_t shard, starpu_data_handle_t slot,
                         bool gathers)
{
    struct fetch_arg a = param_arg(e, group);
    /* What the link or the network moves; a copy within the host is both. */
    int parts = where == IZ_ON_UP   ? 1
                : e->plan.ranks > 1 ? e->plan.ranks - 1
                                    : 2;
    iz_submit(e->graph, &(struct iz_task){
                            .kind = IZ_FETCH,
                            .where = where,
                            .run = gathers ? run_fetch : step_fetch_run_copy,
                            .arg = &a,
                            .arg_bytes = sizeof(a),
                            .data = {{shard, STARPU_R}, {slot, STARPU_W}},
                            .bytes = (double)(shard_bytes(&a) * parts),
                            .gathers = gathers && e->plan.ranks > 1,
                            .unit = group,
                            .step = (int)e->step});
    count_link(e, &a, e->plan.zero.param_home != IZ_HOME_NONE);
}

/* To a GPU, a shard of the host goes up on a mover of its own: beside the
 * collectives of other units, if those are the GPUs' own. */
static void submit_fetch(struct iz_engine *e, int group, struct iz_slot *slot)
{
    const struct iz_plan *p = &e->plan;
    struct iz_group *g = &e->group[group];
    starpu_data_handle_t shard = p->zero.param_home == IZ_HOME_NVME
                                     ? load_shard(e, group)
                                     : g->param_handle;
    bool from_host = p->target.gpu && p->zero.param_home != IZ_HOME_NONE;
    bool alone = p->ranks == 1, nccl = p->target.nccl && !alone;
    if (g->plan->rows)
        iz_touched_fetch(e, group, shard, slot->handle);
    else if (from_host && (alone || nccl))
        submit_shard(e, group, IZ_ON_UP, shard, slot->handle, false);
    else
        submit_shard(e, group, IZ_ON_COMM, shard, slot->handle, true);
    if (from_host && nccl) {
        struct fetch_arg a = param_arg(e, group);
        submit_gather(e, IZ_FETCH, group, slot->handle, &a);
    }
    slot->group = group;
    slot->version = g->version;
    slot->waiting = true;
    g->slot = slot;
    if (!g->plan->rows)
        e->counts.fetched_bytes += iz_param_bytes(e, iz_plan_gathered(g->plan));
}

static struct iz_slot *find_slot(struct iz_engine *e, int group)
{
    const struct iz_group *g = &e->group[group];
    struct iz_slot *s = g->slot;
    return s && s->group == group && s->version == g->version ? s : NULL;
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
    int ring = e->group[u->group[j]].plan->ring, best_use = j;
    struct iz_slot *best = NULL;
    for (int i = 0; i < e->plan.ring[ring].params; i++) {
        struct iz_slot *s = &e->ring[ring].param[i];
        if (s->group < 0 || s->version != e->group[s->group].version)
            return s;
        int use = u->next[s->group];
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
        e->marked = 0;
        memcpy(u->next, u->first, (size_t)e->plan.n_groups * sizeof(*u->next));
    }
    for (; e->marked < from; e->marked++) {
        int group = u->group[e->marked];
        struct iz_slot *s = find_slot(e, group);
        u->next[group] = u->after[e->marked];
        e->counts.fetch_clock += iz_plan_gathered(e->group[group].plan);
        if (!s)
            continue;
        s->waiting = false;
        s->used = e->counts.fetch_clock;
    }
}

void iz_fetch_ahead(struct iz_engine *e, const struct iz_uses *u, int from)
{
    if (!e->plan.zero.fetch)
        return;
    mark_used(e, u, from);
    for (int j = from; j < u->n; j++) {
        struct iz_slot *s = find_slot(e, u->group[j]);
        if (s && (reusable(e, s) || u->next[u->group[j]] < j))
            continue;
        if (!s)
            s = victim(e, u, j);
        if (!s)
            return;
        /* A fetch belongs to the use that it serves. */
        int position =
            iz_graph_position(e->graph, iz_order_position(e, u->step[j]));
        submit_fetch(e, u->group[j], s);
        iz_graph_position(e->graph, position);
    }
}

starpu_data_handle_t iz_fetch_param(struct iz_engine *e, int group)
{
    if (!e->plan.zero.fetch)
        return e->group[group].param_handle;
    struct iz_slot *s = find_slot(e, group);
    if (!s)
        iz_die("%s is used before it was fetched", iz_unit_name(e, group));
    return s->handle;
}

/* Padding past a short last chunk is never touched: the pieces cover the owned
 * elements exactly, so only the part behind them needs the all-gather. */
void iz_fetch_publish(struct iz_engine *e, int group, bool frozen)
{
    struct iz_group *g = &e->group[group];
    struct fetch_arg a =
        fetch_arg(e, group, iz_dtype_bytes(e->plan.param_type));
    if (!e->plan.zero.params_full || e->plan.zero.states_full ||
        e->plan.ranks == 1)
        return;
    if (g->plan->rows && !frozen) {
        iz_touched_publish(e, group);
        return;
    }
    if (frozen)
        add_frozen(e, group, &a);
    submit_gather(e, IZ_FETCH, group, g->param_handle, &a);
    e->counts.fetched_bytes += iz_param_bytes(e, g->plan->padded);
}
