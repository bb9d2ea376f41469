/* SPDX-License-Identifier: Apache-2.0 */
/* Where the bytes of a run live: allocates what the plan says, registers it
 * with StarPU. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "codelets/device.h"
#include "codelets/flat.h"
#include "runtime/engine.h"

static int64_t size_of(enum iz_dtype t)
{
    return iz_dtype_bytes(t);
}

static void *take(struct iz_engine *e, enum iz_tier tier, enum iz_class c,
                  int64_t bytes)
{
    return iz_memory_take(e->memory, tier, c, bytes);
}

/* What StarPU knows an address by. */
static uintptr_t known_as(const struct iz_engine *e, const void *p)
{
    struct iz_shadow s = iz_memory_shadow(e->memory);
    const char *c = p;
    if (c >= s.base && c < s.base + s.bytes)
        return (uintptr_t)(s.shadow + (c - s.base));
    return (uintptr_t)p;
}

static starpu_data_handle_t variable(struct iz_engine *e, void *p,
                                     int64_t bytes, enum iz_datum d, int x)
{
    starpu_data_handle_t h;
    starpu_variable_data_register(&h, STARPU_MAIN_RAM, known_as(e, p),
                                  (size_t)bytes);
    iz_trace_datum(h, d, x);
    return h;
}

static void unregister(starpu_data_handle_t *h)
{
    if (*h)
        starpu_data_unregister(*h);
    *h = NULL;
}

/* ---- groups ---- */

static enum iz_tier tier_of(enum iz_home h)
{
    return h == IZ_HOME_CPU ? IZ_TIER_CPU : IZ_TIER_DEVICE;
}

/* What host and device both touch is on the host. */
static enum iz_tier near_tier(const struct iz_engine *e)
{
    return e->plan.target.gpu ? IZ_TIER_CPU : IZ_TIER_DEVICE;
}

int64_t iz_homes_own(const struct iz_engine *e, const struct iz_group *g)
{
    bool shard_of_full = e->plan.params_full && !e->plan.states_full;
    return shard_of_full ? g->plan->shard * e->plan.rank : 0;
}

/* The same of the frozen ones, which lie behind the trained ones. */
static int64_t own_frozen(const struct iz_engine *e, const struct iz_group *g)
{
    bool shard_of_full = e->plan.params_full && !e->plan.states_full;
    int64_t first = shard_of_full ? g->plan->frozen.shard * e->plan.rank : 0;
    return first + (e->plan.params_full ? g->plan->padded : g->plan->shard);
}

static void piece_filter(void *parent, void *child,
                         struct starpu_data_filter *f, unsigned id,
                         unsigned parts)
{
    const struct starpu_vector_interface *v = parent;
    struct starpu_vector_interface *w = child;
    const struct iz_chunk *k = (const struct iz_chunk *)f->filter_arg_ptr + id;
    (void)parts;
    size_t at = (size_t)k->param_first;
    *w = *v;
    w->nx = (uint32_t)k->count;
    w->allocsize = w->nx * v->elemsize;
    if (v->dev_handle) {
        w->ptr = v->ptr + at * v->elemsize;
        w->offset = v->offset + at * v->elemsize;
    }
}

/* StarPU switches between the whole and its pieces by itself: adam's chunks
 * write pieces side by side, fetch reads the whole. */
static int register_pieces(struct iz_engine *e, struct iz_group *g, int u)
{
    int n = g->plan->chunks;
    if (n == 0)
        return 0;
    if (n == 1 && g->plan->owned == iz_plan_held(&e->plan, g->plan)) {
        g->chunk[0].param_handle = g->param_handle;
        return 0;
    }
    g->piece = calloc((size_t)n, sizeof(*g->piece));
    if (!g->piece)
        return -ENOMEM;
    struct starpu_data_filter f = {.filter_func = piece_filter,
                                   .nchildren = (unsigned)n,
                                   .filter_arg_ptr = g->chunk};
    starpu_data_partition_plan(g->param_handle, &f, g->piece);
    for (int i = 0; i < n; i++) {
        g->chunk[i].param_handle = g->piece[i];
        iz_trace_datum(g->piece[i], IZ_DATUM_PIECE, u);
    }
    return 0;
}

static int open_params(struct iz_engine *e, struct iz_group *g, int u)
{
    int64_t size = size_of(e->plan.param_type);
    if (e->plan.param_home == IZ_HOME_NVME) {
        for (int i = 0; i < g->plan->chunks; i++) {
            starpu_void_data_register(&g->chunk[i].param_handle);
            iz_trace_datum(g->chunk[i].param_handle, IZ_DATUM_PARAM, u);
        }
        for (int i = 0; i < g->plan->frozen.chunks; i++) {
            starpu_void_data_register(&g->frozen[i].param_handle);
            iz_trace_datum(g->frozen[i].param_handle, IZ_DATUM_PARAM, u);
        }
        return 0;
    }
    int64_t held = iz_plan_held(&e->plan, g->plan);
    if (held > UINT32_MAX) {
        fprintf(stderr,
                "izar: %s: a rank would hold %lld of its parameters, StarPU "
                "counts to %u: use smaller units or more ranks\n",
                e->model->unit[u].name, (long long)held, UINT32_MAX);
        return -EINVAL;
    }
    g->param = take(e, tier_of(e->plan.param_home), IZ_MEM_PARAM, held * size);
    if (!g->param)
        return -ENOMEM;
    starpu_vector_data_register(&g->param_handle, STARPU_MAIN_RAM,
                                known_as(e, g->param), (uint32_t)held,
                                (size_t)size);
    iz_trace_datum(g->param_handle, IZ_DATUM_PARAM, u);
    return register_pieces(e, g, u);
}

static int open_states(struct iz_engine *e, struct iz_group *g, int u)
{
    bool disk = e->plan.state_home == IZ_HOME_NVME;
    for (int i = 0; i < g->plan->chunks; i++) {
        struct iz_chunk *k = &g->chunk[i];
        if (disk) {
            starpu_void_data_register(&k->state_handle);
            iz_trace_datum(k->state_handle, IZ_DATUM_STATE, u);
            continue;
        }
        int64_t bytes = iz_plan_state_bytes(&e->plan, k->home, k->count);
        k->state = take(e, tier_of(k->home), IZ_MEM_STATE, bytes);
        if (!k->state)
            return -ENOMEM;
        k->state_handle =
            variable(e, k->state, bytes,
                     k->home == e->plan.state_home ? IZ_DATUM_STATE
                                                   : IZ_DATUM_SPLIT_STATE,
                     u);
    }
    return 0;
}

/* Memory with a handle, if it has bytes. */
static int open_piece(struct iz_engine *e, starpu_data_handle_t *h,
                      enum iz_tier tier, enum iz_class c, int64_t bytes,
                      enum iz_datum d, int u)
{
    void *p = bytes ? take(e, tier, c, bytes) : NULL;
    if (!bytes)
        return 0;
    if (!p)
        return -ENOMEM;
    *h = variable(e, p, bytes, d, u);
    return 0;
}

static int open_grads(struct iz_engine *e, struct iz_group *g, int u)
{
    int64_t apart = iz_plan_grads_apart(&e->plan, g->plan);
    int64_t n = iz_plan_grads(&e->plan, g->plan) - apart;
    int64_t size = size_of(e->plan.grad_type);
    enum iz_tier tier = iz_plan_grad_tier(&e->plan);
    int r = 0;
    for (int i = 0; !r && i <= g->plan->split_accum; i++) {
        r = open_piece(e, &g->grad_handle[i], tier, IZ_MEM_GRAD, n * size,
                       IZ_DATUM_GRAD, u);
        if (!r)
            r = open_piece(e, &g->grad_apart_handle[i], IZ_TIER_DEVICE,
                           IZ_MEM_GRAD, apart * size, IZ_DATUM_SPLIT_GRAD, u);
    }
    if (!r)
        r = open_piece(e, &g->block_sums_handle, near_tier(e), IZ_MEM_BATCH,
                       8 * iz_norm_blocks(apart), IZ_DATUM_BLOCK_SUMS, u);
    if (r)
        return r;
    g->norm2 = e->scalars + u;
    g->norm2_handle =
        variable(e, g->norm2, sizeof(*g->norm2), IZ_DATUM_SQUARES, u);
    return 0;
}

/* Chunks of so many elements over the owned ones, the first of which is `own`
 * in the group's parameters; NULL: no memory. */
static struct iz_chunk *open_chunks(int64_t chunk, int64_t owned, int64_t own)
{
    int64_t n = (owned + chunk - 1) / chunk;
    struct iz_chunk *c = calloc((size_t)n + 1, sizeof(*c));
    for (int64_t i = 0; c && i < n; i++) {
        int64_t first = i * chunk, left = owned - first;
        c[i].first = first;
        c[i].count = left < chunk ? left : chunk;
        c[i].param_first = own + first;
        c[i].filed = chunk;
    }
    return c;
}

static int open_layout(struct iz_engine *e, struct iz_group *g, int u)
{
    const struct iz_unit *unit = &e->model->unit[u];
    g->offset = calloc((size_t)unit->n_params + 1, sizeof(*g->offset));
    g->chunk = open_chunks(g->plan->chunk, g->plan->owned, iz_homes_own(e, g));
    g->frozen = open_chunks(g->plan->frozen.chunk, g->plan->frozen.owned,
                            own_frozen(e, g));
    g->segment = iz_rules_segments(unit);
    if (!g->offset || !g->chunk || !g->frozen || !g->segment)
        return -ENOMEM;
    for (int i = 0; i < g->plan->chunks; i++)
        g->chunk[i].home =
            i < g->plan->host_chunks ? e->plan.state_home : IZ_HOME_NONE;
    iz_unit_offsets(unit, g->plan->padded, g->offset);
    g->layout = (struct iz_unit_layout){.model = e->model,
                                        .unit = u,
                                        .offset = g->offset,
                                        .n = g->plan->padded};
    if (unit->tied_unit >= 0) {
        const struct iz_group *t = &e->group[unit->tied_unit];
        g->layout.tied_offset = t->offset[unit->tied_param];
        g->layout.tied_n = t->plan->padded;
    }
    return 0;
}

static int open_group(struct iz_engine *e, int u)
{
    struct iz_group *g = &e->group[u];
    g->plan = &e->plan.group[u];
    int r = open_layout(e, g, u);
    if (!r)
        r = open_params(e, g, u);
    if (!r)
        r = open_states(e, g, u);
    return r ? r : open_grads(e, g, u);
}

static void close_group(struct iz_group *g)
{
    if (g->piece)
        starpu_data_partition_clean(g->param_handle, (unsigned)g->plan->chunks,
                                    g->piece);
    for (int i = 0; g->chunk && i < g->plan->chunks; i++) {
        bool own = !g->piece && g->chunk[i].param_handle != g->param_handle;
        if (own)
            unregister(&g->chunk[i].param_handle);
        unregister(&g->chunk[i].state_handle);
    }
    for (int i = 0; g->frozen && i < g->plan->frozen.chunks; i++)
        unregister(&g->frozen[i].param_handle);
    unregister(&g->param_handle);
    unregister(&g->grad_handle[0]);
    unregister(&g->grad_handle[1]);
    unregister(&g->grad_apart_handle[0]);
    unregister(&g->grad_apart_handle[1]);
    unregister(&g->block_sums_handle);
    unregister(&g->norm2_handle);
    free(g->piece);
    free(g->chunk);
    free(g->frozen);
    free(g->segment);
    free(g->offset);
}

/* ---- disk ---- */

static int open_file(struct iz_engine *e, struct iz_nvme **f, const char *what,
                     const struct iz_offload_config *c, enum iz_class class,
                     int64_t bytes)
{
    char name[64];
    snprintf(name, sizeof(name), "izar-%d-rank%d-%s", (int)getpid(),
             e->plan.rank, what);
    int r = iz_nvme_open(f, c->nvme_path, name, bytes,
                         e->config->run.nvme_checksum);
    if (!r)
        iz_memory_note(e->memory, IZ_TIER_NVME, class, bytes);
    return r;
}

static int open_files(struct iz_engine *e)
{
    int64_t state = 0, param = 0, param_size = size_of(e->plan.param_type);
    for (int u = 0; u < e->plan.n_groups; u++) {
        const struct iz_plan_group *g = &e->plan.group[u];
        for (int i = 0; i < g->chunks; i++) {
            struct iz_chunk *k = &e->group[u].chunk[i];
            k->state_at = state;
            k->param_at = param;
            state += iz_plan_chunk_bytes(&e->plan, g);
            param += g->chunk * param_size;
        }
        for (int i = 0; i < g->frozen.chunks; i++) {
            e->group[u].frozen[i].param_at = param;
            param += g->frozen.chunk * param_size;
        }
    }
    int r = 0;
    if (e->plan.state_home == IZ_HOME_NVME)
        r = open_file(e, &e->state_file, "state", &e->config->zero.optimizer,
                      IZ_MEM_STATE, state);
    if (!r && e->plan.param_home == IZ_HOME_NVME)
        r = open_file(e, &e->param_file, "param", &e->config->zero.param,
                      IZ_MEM_PARAM, param);
    return r;
}

/* Lists of touched rows, and what it takes to make one. */
static int open_rows(struct iz_engine *e)
{
    struct iz_stage *s[] = {&e->row_list[0], &e->row_list[1], &e->row_scratch};
    int64_t list = iz_plan_list_bytes(&e->plan);
    for (int i = 0; list && i < 3; i++) {
        int64_t bytes =
            i < 2 ? list : iz_plan_list_scratch_bytes(&e->plan, e->model);
        s[i]->p = take(e, near_tier(e), IZ_MEM_BATCH, bytes);
        if (!s[i]->p)
            return -ENOMEM;
        s[i]->handle = variable(e, s[i]->p, bytes, IZ_DATUM_BATCH, i);
    }
    return 0;
}

static struct iz_stage *open_stages(struct iz_engine *e, enum iz_tier tier,
                                    int n, int64_t bytes)
{
    enum iz_datum d =
        tier == IZ_TIER_CPU ? IZ_DATUM_STAGE : IZ_DATUM_SPLIT_STAGE;
    struct iz_stage *s = calloc((size_t)n + 1, sizeof(*s));
    for (int i = 0; s && i < n; i++) {
        s[i].p = take(e, tier, IZ_MEM_STAGING, bytes);
        if (!s[i].p)
            return s;
        s[i].handle = variable(e, s[i].p, bytes, d, i);
    }
    return s;
}

static void close_stages(struct iz_stage **s, int n)
{
    for (int i = 0; *s && i < n; i++)
        unregister(&(*s)[i].handle);
    free(*s);
    *s = NULL;
}

/* ---- rings and lanes ---- */

static struct iz_slot *open_slots(struct iz_engine *e, int n, int64_t bytes,
                                  enum iz_class class, enum iz_datum d)
{
    struct iz_slot *s = calloc((size_t)n + 1, sizeof(*s));
    for (int i = 0; s && i < n; i++) {
        s[i].group = -1;
        s[i].p = take(e, IZ_TIER_DEVICE, class, bytes);
        if (!s[i].p)
            return s;
        s[i].handle = variable(e, s[i].p, bytes, d, i);
    }
    return s;
}

static void close_slots(struct iz_slot **s, int n)
{
    for (int i = 0; *s && i < n; i++)
        unregister(&(*s)[i].handle);
    free(*s);
    *s = NULL;
}

static int open_rings(struct iz_engine *e)
{
    int64_t size = size_of(e->plan.param_type);
    e->ring = calloc((size_t)e->plan.n_rings, sizeof(*e->ring));
    for (int i = 0; e->ring && i < e->plan.n_rings; i++) {
        const struct iz_plan_ring *r = &e->plan.ring[i];
        e->ring[i].param = open_slots(e, r->params, r->elems * size,
                                      IZ_MEM_RING, IZ_DATUM_GATHERED);
        e->ring[i].grad = open_slots(e, r->grads, r->grad_elems * size,
                                     IZ_MEM_GRAD_RING, IZ_DATUM_UNIT_GRAD);
        if (!e->ring[i].param || !e->ring[i].grad ||
            (r->params && !e->ring[i].param[r->params - 1].handle) ||
            (r->grads && !e->ring[i].grad[r->grads - 1].handle))
            return -ENOMEM;
    }
    int n = e->plan.boundary_slots;
    e->boundaries.slot =
        open_slots(e, n, size_of(e->plan.target.act) * e->plan.boundary_elems,
                   IZ_MEM_BOUNDARY, IZ_DATUM_RAISED);
    bool slots = e->boundaries.slot && (!n || e->boundaries.slot[n - 1].handle);
    return e->ring && slots ? 0 : -ENOMEM;
}

/* The last one is used at once: it never goes to the host. */
static int open_boundary(struct iz_engine *e, struct iz_lane *l, int u)
{
    const struct iz_plan *p = &e->plan;
    int64_t bytes = iz_plan_boundary_bytes(p, e->model, u);
    if (p->boundary_slots && u + 2 == e->model->n_units)
        return 0;
    l->boundary[u] = take(e, p->boundaries_down ? IZ_TIER_CPU : IZ_TIER_DEVICE,
                          IZ_MEM_BOUNDARY, bytes);
    if (!l->boundary[u])
        return -ENOMEM;
    l->boundary_handle[u] =
        variable(e, l->boundary[u], bytes, IZ_DATUM_BOUNDARY, u);
    return 0;
}

static int open_boundaries(struct iz_engine *e, struct iz_lane *l)
{
    int units = e->model->n_units;
    l->boundary = calloc((size_t)units, sizeof(*l->boundary));
    l->boundary_handle = calloc((size_t)units, sizeof(*l->boundary_handle));
    l->saved = calloc((size_t)units, sizeof(*l->saved));
    l->saved_handle = calloc((size_t)units, sizeof(*l->saved_handle));
    if (!l->boundary || !l->boundary_handle || !l->saved || !l->saved_handle)
        return -ENOMEM;
    for (int u = 0; u + 1 < units; u++) {
        bool kept = !e->plan.recompute && u >= e->plan.first_trained;
        int64_t saved = kept ? e->plan.cost[u].save_bytes : 0;
        if (open_boundary(e, l, u))
            return -ENOMEM;
        if (!saved)
            continue;
        l->saved[u] = take(e, IZ_TIER_DEVICE, IZ_MEM_SAVED, saved);
        if (!l->saved[u])
            return -ENOMEM;
        l->saved_handle[u] = variable(e, l->saved[u], saved, IZ_DATUM_SAVED, u);
    }
    return 0;
}

static int open_lane(struct iz_engine *e, int b)
{
    struct iz_lane *l = &e->lane[b];
    int64_t batch =
        (e->model->input_bytes + e->model->target_bytes) * e->plan.samples;
    int64_t d = size_of(e->plan.target.act) * e->plan.boundary_elems;
    l->batch = take(e, near_tier(e), IZ_MEM_BATCH, batch);
    l->d = take(e, IZ_TIER_DEVICE, IZ_MEM_BOUNDARY, d);
    if (!l->batch || !l->d)
        return -ENOMEM;
    l->batch_handle = variable(e, l->batch, batch, IZ_DATUM_BATCH, b);
    l->d_handle = variable(e, l->d, d, IZ_DATUM_DY, b);
    l->loss = e->scalars + e->plan.n_groups + b;
    l->loss_handle = variable(e, l->loss, sizeof(*l->loss), IZ_DATUM_SCALAR, b);
    l->weight = l->loss + e->plan.lanes;
    l->weight_handle =
        variable(e, l->weight, sizeof(*l->weight), IZ_DATUM_SCALAR, b);
    return open_boundaries(e, l);
}

static void close_lane(struct iz_engine *e, struct iz_lane *l)
{
    for (int u = 0; l->saved_handle && u < e->model->n_units; u++) {
        unregister(&l->boundary_handle[u]);
        unregister(&l->saved_handle[u]);
    }
    unregister(&l->batch_handle);
    unregister(&l->d_handle);
    unregister(&l->loss_handle);
    unregister(&l->weight_handle);
    free(l->boundary);
    free(l->boundary_handle);
    free(l->saved);
    free(l->saved_handle);
}

static int open_scalars(struct iz_engine *e)
{
    e->control_handle =
        variable(e, &e->control, sizeof(e->control), IZ_DATUM_SCALAR, 0);
    e->scale_handle =
        variable(e, &e->loss_scale, sizeof(e->loss_scale), IZ_DATUM_SCALAR, 0);
    e->loss_handle =
        variable(e, &e->loss_sum, sizeof(e->loss_sum), IZ_DATUM_SCALAR, 0);
    e->learnt_handle =
        variable(e, &e->learnt, sizeof(e->learnt), IZ_DATUM_SCALAR, 0);
    e->gathered = calloc((size_t)(e->plan.ranks * (e->plan.n_groups + 6)),
                         sizeof(*e->gathered));
    int64_t logits = 4 * (int64_t)e->model->vocab;
    e->logits = take(e, near_tier(e), IZ_MEM_BATCH, logits);
    e->sealed_by = calloc((size_t)e->plan.ranks, sizeof(*e->sealed_by));
    if (!e->gathered || !e->logits || !e->sealed_by)
        return -ENOMEM;
    if (logits)
        e->logits_handle = variable(e, e->logits, logits, IZ_DATUM_BATCH, 0);
    return 0;
}

/* Buffers of the collectives; those of MPI are the library's own. */
static int open_comm(struct iz_engine *e)
{
    const struct iz_plan *p = &e->plan;
    struct iz_coll_gpu g = {.nccl = p->target.nccl};
    if (p->ranks > 1 && !p->target.nccl)
        iz_memory_note(e->memory, near_tier(e), IZ_MEM_COMM,
                       p->bytes.b[near_tier(e)][IZ_MEM_COMM]);
    if (p->ranks == 1 || !p->target.gpu)
        return 0;
    if (p->comm_stage_bytes)
        g.buffer = take(e, IZ_TIER_CPU, IZ_MEM_STAGING,
                        g.buffer_bytes = p->comm_stage_bytes);
    else
        g.buffer = take(e, IZ_TIER_DEVICE, IZ_MEM_COMM,
                        g.buffer_bytes = p->exchange_bytes);
    return g.buffer ? iz_coll_gpu_open(e->coll, &g) : -ENOMEM;
}

int iz_homes_open(struct iz_engine *e)
{
    int r = 0;
    e->group = calloc((size_t)e->plan.n_groups, sizeof(*e->group));
    e->lane = calloc((size_t)e->plan.lanes, sizeof(*e->lane));
    e->scalars = take(e, near_tier(e), IZ_MEM_BATCH,
                      8 * ((int64_t)e->plan.n_groups + 2 * e->plan.lanes));
    if (e->plan.target.gpu) {
        e->bounce = take(e, IZ_TIER_CPU, IZ_MEM_STAGING, IZ_BOUNCE_BYTES);
        e->stream = iz_device_stream_open();
    }
    if (!e->group || !e->lane || !e->scalars ||
        (e->plan.target.gpu && (!e->bounce || !e->stream)))
        return -ENOMEM;
    for (int u = 0; u < e->plan.n_groups && !r; u++)
        r = open_group(e, u);
    if (!r)
        r = open_files(e);
    e->state_stage = open_stages(e, IZ_TIER_CPU, e->plan.state_stages,
                                 e->plan.state_stage_bytes);
    e->param_stage = open_stages(e, IZ_TIER_CPU, e->plan.param_stages,
                                 e->plan.param_stage_bytes);
    e->grad_stage = open_stages(e, IZ_TIER_CPU, e->plan.grad_stages,
                                e->plan.grad_stage_bytes);
    e->update_stage = open_stages(e, IZ_TIER_CPU, e->plan.update_stages,
                                  e->plan.update_stage_bytes);
    e->save_stage = open_stages(e, IZ_TIER_CPU, e->plan.save_stages,
                                e->plan.save_stage_bytes);
    e->split_stage = open_stages(e, IZ_TIER_DEVICE, e->plan.split_stages,
                                 e->plan.split_stage_bytes);
    if (!r)
        r = open_rows(e);
    if (!r)
        r = open_rings(e);
    for (int b = 0; b < e->plan.lanes && !r; b++)
        r = open_lane(e, b);
    if (!r)
        r = open_scalars(e);
    return r ? r : open_comm(e);
}

void iz_homes_close(struct iz_engine *e)
{
    for (int u = 0; e->group && u < e->plan.n_groups; u++)
        close_group(&e->group[u]);
    for (int i = 0; e->ring && i < e->plan.n_rings; i++) {
        close_slots(&e->ring[i].param, e->plan.ring[i].params);
        close_slots(&e->ring[i].grad, e->plan.ring[i].grads);
    }
    for (int b = 0; e->lane && b < e->plan.lanes; b++)
        close_lane(e, &e->lane[b]);
    unregister(&e->row_list[0].handle);
    unregister(&e->row_list[1].handle);
    unregister(&e->row_scratch.handle);
    close_slots(&e->boundaries.slot, e->plan.boundary_slots);
    close_stages(&e->state_stage, e->plan.state_stages);
    close_stages(&e->param_stage, e->plan.param_stages);
    close_stages(&e->grad_stage, e->plan.grad_stages);
    close_stages(&e->update_stage, e->plan.update_stages);
    close_stages(&e->split_stage, e->plan.split_stages);
    close_stages(&e->save_stage, e->plan.save_stages);
    iz_coll_gpu_close(e->coll);
    iz_device_stream_close(e->stream);
    unregister(&e->control_handle);
    unregister(&e->scale_handle);
    unregister(&e->loss_handle);
    unregister(&e->learnt_handle);
    unregister(&e->logits_handle);
    iz_nvme_close(&e->state_file);
    iz_nvme_close(&e->param_file);
    free(e->gathered);
    free(e->sealed_by);
    free(e->group);
    free(e->ring);
    free(e->lane);
}
