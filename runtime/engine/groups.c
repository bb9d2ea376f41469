/* SPDX-License-Identifier: Apache-2.0 */
/* What units own: parameters, gradients and states in memory or in files. */
#include "runtime/engine/groups.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "codelets/flat/flat.h"
#include "runtime/engine/access.h"
#include "runtime/engine/handle.h"
#include "runtime/engine/trace.h"

static enum iz_tier tier_of(enum iz_home h)
{
    return h == IZ_HOME_CPU ? IZ_TIER_CPU : IZ_TIER_DEVICE;
}

int64_t iz_groups_own(const struct iz_engine *e, const struct iz_group *g)
{
    bool shard_of_full = e->plan.zero.params_full && !e->plan.zero.states_full;
    return shard_of_full ? g->plan->shard * e->plan.rank : 0;
}

/* The same of the frozen ones, which lie behind the trained ones. */
static int64_t own_frozen(const struct iz_engine *e, const struct iz_group *g)
{
    bool shard_of_full = e->plan.zero.params_full && !e->plan.zero.states_full;
    int64_t first = shard_of_full ? g->plan->frozen.shard * e->plan.rank : 0;
    return first +
           (e->plan.zero.params_full ? g->plan->padded : g->plan->shard);
}

static void piece_filter(void *parent, void *child,
                         struct starpu_data_filter *f, unsigned id,
                         unsigned parts)
{
    const struct starpu_vector_interface *v = parent;
    struct starpu_vector_interface *w = child;
    const struct iz_chunk *k = (const struct iz_chunk *)f->filter_arg_ptr + id;
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
    int64_t size = iz_dtype_bytes(e->plan.param_type);
    if (e->plan.zero.param_home == IZ_HOME_NVME) {
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
    g->param = iz_memory_take(e->memory, tier_of(e->plan.zero.param_home),
                              IZ_MEM_PARAM, held * size);
    if (!g->param)
        return -ENOMEM;
    starpu_vector_data_register(&g->param_handle, STARPU_MAIN_RAM,
                                iz_handle_address(e, g->param), (uint32_t)held,
                                (size_t)size);
    iz_trace_datum(g->param_handle, IZ_DATUM_PARAM, u);
    return register_pieces(e, g, u);
}

static int open_states(struct iz_engine *e, struct iz_group *g, int u)
{
    bool disk = e->plan.zero.state_home == IZ_HOME_NVME;
    for (int i = 0; i < g->plan->chunks; i++) {
        struct iz_chunk *k = &g->chunk[i];
        if (disk) {
            starpu_void_data_register(&k->state_handle);
            iz_trace_datum(k->state_handle, IZ_DATUM_STATE, u);
            continue;
        }
        int64_t bytes = iz_plan_states(&e->plan, k->home, k->count).bytes;
        k->state =
            iz_memory_take(e->memory, tier_of(k->home), IZ_MEM_STATE, bytes);
        if (!k->state)
            return -ENOMEM;
        k->state_handle = iz_handle_open(e, k->state, bytes,
                                         k->home == e->plan.zero.state_home
                                             ? IZ_DATUM_STATE
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
    void *p = bytes ? iz_memory_take(e->memory, tier, c, bytes) : NULL;
    if (!bytes)
        return 0;
    if (!p)
        return -ENOMEM;
    *h = iz_handle_open(e, p, bytes, d, u);
    return 0;
}

static int open_grads(struct iz_engine *e, struct iz_group *g, int u)
{
    int64_t apart = iz_plan_grads_apart(&e->plan, g->plan);
    int64_t n = iz_plan_grads(&e->plan, g->plan) - apart;
    int64_t size = iz_dtype_bytes(e->plan.grad_type);
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
        r = open_piece(e, &g->block_sums_handle, iz_handle_tier(e),
                       IZ_MEM_BATCH, 8 * iz_norm_blocks(apart),
                       IZ_DATUM_BLOCK_SUMS, u);
    if (r)
        return r;
    g->norm2 = e->scalars + u;
    g->norm2_handle =
        iz_handle_open(e, g->norm2, sizeof(*g->norm2), IZ_DATUM_SQUARES, u);
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
    g->chunk = open_chunks(g->plan->chunk, g->plan->owned, iz_groups_own(e, g));
    g->frozen = open_chunks(g->plan->frozen.chunk, g->plan->frozen.owned,
                            own_frozen(e, g));
    g->segment = iz_rules_segments(unit);
    if (!g->offset || !g->chunk || !g->frozen || !g->segment)
        return -ENOMEM;
    for (int i = 0; i < g->plan->chunks; i++)
        g->chunk[i].home =
            i < g->plan->host_chunks ? e->plan.zero.state_home : IZ_HOME_NONE;
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
            iz_handle_close(&g->chunk[i].param_handle);
        iz_handle_close(&g->chunk[i].state_handle);
    }
    for (int i = 0; g->frozen && i < g->plan->frozen.chunks; i++)
        iz_handle_close(&g->frozen[i].param_handle);
    iz_handle_close(&g->param_handle);
    iz_handle_close(&g->grad_handle[0]);
    iz_handle_close(&g->grad_handle[1]);
    iz_handle_close(&g->grad_apart_handle[0]);
    iz_handle_close(&g->grad_apart_handle[1]);
    iz_handle_close(&g->block_sums_handle);
    iz_handle_close(&g->norm2_handle);
    free(g->piece);
    free(g->chunk);
    free(g->frozen);
    free(g->segment);
    free(g->offset);
}

/* ---- disk ---- */

static int engine_groups_open_file(struct iz_engine *e, struct iz_nvme **f,
                                   const char *what,
                                   const struct iz_offload_config *c,
                                   enum iz_class class, int64_t bytes)
{
    char name[64];
    snprintf(name, sizeof(name), "izar-%d-rank%d-%s", (int)getpid(),
             e->plan.rank, what);
    int r = e->simulated ? 0
                         : iz_nvme_open(f, c->nvme_path, name, bytes,
                                        e->config->run.nvme_checksum);
    if (!r)
        iz_memory_note(e->memory, IZ_TIER_NVME, class, bytes);
    return r;
}

static int open_files(struct iz_engine *e)
{
    int64_t state = 0, param = 0,
            param_size = iz_dtype_bytes(e->plan.param_type);
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
    if (e->plan.zero.state_home == IZ_HOME_NVME)
        r = engine_groups_open_file(e, &e->state_file, "state",
                                    &e->config->zero.optimizer, IZ_MEM_STATE,
                                    state);
    if (!r && e->plan.zero.param_home == IZ_HOME_NVME)
        r = engine_groups_open_file(e, &e->param_file, "param",
                                    &e->config->zero.param, IZ_MEM_PARAM,
                                    param);
    return r;
}

int iz_groups_open(struct iz_engine *e)
{
    int r = 0;
    e->group = calloc((size_t)e->plan.n_groups, sizeof(*e->group));
    if (!e->group)
        return -ENOMEM;
    for (int u = 0; u < e->plan.n_groups && !r; u++)
        r = open_group(e, u);
    return r ? r : open_files(e);
}

void iz_groups_close(struct iz_engine *e)
{
    for (int u = 0; e->group && u < e->plan.n_groups; u++)
        close_group(&e->group[u]);
    iz_nvme_close(&e->state_file);
    iz_nvme_close(&e->param_file);
    free(e->group);
}
