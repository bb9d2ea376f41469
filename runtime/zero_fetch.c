/* SPDX-License-Identifier: Apache-2.0 */
/* Where a unit's parameters come from: disk, the host, the other ranks, and the
 * ring that they are fetched into; see zero.h. */
#include <string.h>

#include "codelets/die.h"
#include "runtime/zero.h"

struct iz_stage *iz_zero_stage(struct iz_stage *all, int *next, int n)
{
    struct iz_stage *s = &all[*next];
    *next = (*next + 1) % n;
    return s;
}

/* ---- disk ---- */

static void run_load(struct iz_exec *x, void **buf, const void *arg)
{
    const struct iz_io *a = arg;
    (void)x;
    iz_nvme_read(a->file, (char *)buf[0] + a->at, a->offset, a->bytes);
}

static void run_store(struct iz_exec *x, void **buf, const void *arg)
{
    const struct iz_io *a = arg;
    (void)x;
    iz_nvme_write(a->file, (char *)buf[0] + a->at, a->offset, a->bytes);
}

void iz_zero_io(struct iz_engine *e, enum iz_kind kind, int group,
                starpu_data_handle_t buffer, enum starpu_data_access_mode mode,
                starpu_data_handle_t token, struct iz_io a)
{
    iz_submit(e->graph,
              &(struct iz_task){
                  .kind = kind,
                  .where = IZ_ON_IO,
                  .run = kind == IZ_LOAD ? run_load : run_store,
                  .arg = &a,
                  .arg_bytes = sizeof(a),
                  .data = {{buffer, mode},
                           {token, kind == IZ_LOAD ? STARPU_R : STARPU_W}},
                  .urgency = iz_in_order(group),
                  .bytes = (double)a.bytes,
                  .unit = group,
                  .step = (int)e->step});
}

/* ---- fetch ---- */

struct fetch_arg {
    struct iz_coll *coll;
    int64_t shard_bytes;
    int rank, ranks;
    bool gpu;
    const char *unit;
};

static char *own(const struct fetch_arg *a, void *whole)
{
    return (char *)whole + a->rank * a->shard_bytes;
}

/* buf: shard, whole.  The shard comes into its place. */
static void run_copy(struct iz_exec *x, void **buf, const void *arg)
{
    const struct fetch_arg *a = arg;
    iz_buffer_copy(x, own(a, buf[1]), buf[0], a->shard_bytes);
}

/* buf: whole. */
static void run_gather(struct iz_exec *x, void **buf, const void *arg)
{
    const struct fetch_arg *a = arg;
    if (a->gpu)
        iz_coll_gpu_all_gather(a->coll, x, buf[0], own(a, buf[0]),
                               a->shard_bytes, a->unit);
    else
        iz_coll_all_gather(a->coll, buf[0], a->shard_bytes, a->unit);
}

/* buf: shard, whole.  Both in one task of the lane. */
static void run_fetch(struct iz_exec *x, void **buf, const void *arg)
{
    const struct fetch_arg *a = arg;
    if (a->gpu) {
        iz_coll_gpu_all_gather(a->coll, x, buf[1], buf[0], a->shard_bytes,
                               a->unit);
        return;
    }
    run_copy(x, buf, arg);
    if (a->ranks > 1)
        iz_coll_all_gather(a->coll, buf[1], a->shard_bytes, a->unit);
}

static struct fetch_arg fetch_arg(const struct iz_engine *e, int group,
                                  int64_t elem_bytes)
{
    return (struct fetch_arg){.coll = e->coll,
                              .shard_bytes =
                                  e->group[group].plan->shard * elem_bytes,
                              .rank = e->plan.rank,
                              .ranks = e->plan.ranks,
                              .gpu = e->plan.target.gpu,
                              .unit = iz_unit_name(e, group)};
}

void iz_zero_gather(struct iz_engine *e, enum iz_kind kind, int group,
                    starpu_data_handle_t whole, int64_t elem_bytes)
{
    struct fetch_arg a = fetch_arg(e, group, elem_bytes);
    double bytes = (double)a.shard_bytes * (e->plan.ranks - 1);
    iz_submit(e->graph, &(struct iz_task){.kind = kind,
                                          .where = IZ_ON_LANE,
                                          .run = run_gather,
                                          .arg = &a,
                                          .arg_bytes = sizeof(a),
                                          .bytes = bytes,
                                          .gathers = true,
                                          .data = {{whole, STARPU_RW}},
                                          .unit = group,
                                          .step = (int)e->step});
}

/* Shards on disk first come into a staging buffer, chunk by chunk. */
static starpu_data_handle_t load_shard(struct iz_engine *e, int group)
{
    struct iz_group *g = &e->group[group];
    struct iz_stage *s = iz_zero_stage(e->param_stage, &e->next_param_stage,
                                       e->plan.param_stages);
    for (int i = 0; i < g->plan->chunks; i++) {
        struct iz_io a = {.file = e->param_file,
                          .offset = g->chunk[i].param_at,
                          .bytes = iz_param_bytes(e, g->plan->chunk),
                          .at = iz_param_bytes(e, g->chunk[i].first)};
        iz_zero_io(e, IZ_LOAD, group, s->handle, i ? STARPU_RW : STARPU_W,
                   g->chunk[i].param_handle, a);
    }
    return s->handle;
}

static void submit_shard(struct iz_engine *e, int group, enum iz_where where,
                         starpu_data_handle_t shard, starpu_data_handle_t slot,
                         bool gathers)
{
    struct fetch_arg a =
        fetch_arg(e, group, iz_dtype_bytes(e->plan.param_type));
    /* What the link or the network moves; a copy within the host is both. */
    int parts = where == IZ_ON_UP   ? 1
                : e->plan.ranks > 1 ? e->plan.ranks - 1
                                    : 2;
    double bytes = (double)a.shard_bytes * parts;
    iz_submit(e->graph,
              &(struct iz_task){.kind = IZ_FETCH,
                                .where = where,
                                .run = gathers ? run_fetch : run_copy,
                                .arg = &a,
                                .arg_bytes = sizeof(a),
                                .data = {{shard, STARPU_R}, {slot, STARPU_W}},
                                .bytes = bytes,
                                .gathers = gathers && e->plan.ranks > 1,
                                .unit = group,
                                .step = (int)e->step});
}

/* To a GPU, a shard of the host goes up on a lane of its own: beside the
 * collectives of other units, if those are the GPUs' own. */
static void submit_fetch(struct iz_engine *e, int group, struct iz_slot *slot)
{
    const struct iz_plan *p = &e->plan;
    struct iz_group *g = &e->group[group];
    starpu_data_handle_t shard =
        p->param_home == IZ_HOME_NVME ? load_shard(e, group) : g->param_handle;
    bool from_host = p->target.gpu && p->param_home != IZ_HOME_NONE;
    bool alone = p->ranks == 1, nccl = p->target.nccl && !alone;
    if (from_host && (alone || nccl))
        submit_shard(e, group, IZ_ON_UP, shard, slot->handle, false);
    else
        submit_shard(e, group, IZ_ON_LANE, shard, slot->handle, true);
    if (from_host && nccl)
        iz_zero_gather(e, IZ_FETCH, group, slot->handle,
                       iz_dtype_bytes(p->param_type));
    slot->group = group;
    slot->version = g->version;
    slot->waiting = true;
    g->slot = slot;
    e->fetched_bytes += iz_param_bytes(e, g->plan->padded);
    if (p->target.gpu)
        e->up_bytes += iz_up_bytes(p, g->plan);
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
           e->fetch_clock - s->used < e->config->zero.max_reuse_distance;
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
        e->fetch_clock += e->group[group].plan->padded;
        if (!s)
            continue;
        s->waiting = false;
        s->used = e->fetch_clock;
    }
}

void iz_zero_fetch(struct iz_engine *e, const struct iz_uses *u, int from)
{
    if (!e->plan.fetch)
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
        int turn = iz_graph_turn(e->graph, iz_pass_turn(e, u->step[j]));
        submit_fetch(e, u->group[j], s);
        iz_graph_turn(e->graph, turn);
    }
}

starpu_data_handle_t iz_zero_param(struct iz_engine *e, int group)
{
    if (!e->plan.fetch)
        return e->group[group].param_handle;
    struct iz_slot *s = find_slot(e, group);
    if (!s)
        iz_die("%s is used before it was fetched", iz_unit_name(e, group));
    return s->handle;
}

/* Padding past a short last chunk is never touched: the pieces cover the owned
 * elements exactly, so only the part behind them needs the all-gather. */
void iz_zero_publish(struct iz_engine *e, int group)
{
    struct iz_group *g = &e->group[group];
    if (!e->plan.params_full || e->plan.states_full || e->plan.ranks == 1)
        return;
    iz_zero_gather(e, IZ_FETCH, group, g->param_handle,
                   iz_dtype_bytes(e->plan.param_type));
    e->fetched_bytes += iz_param_bytes(e, g->plan->padded);
}
