/* SPDX-License-Identifier: Apache-2.0 */
/* What units own: parameters, gradients and states in memory or in files. */
#include "runtime/engine/alloc.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "codelets/flat/flat.h"

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
static int register_pieces(struct iz_engine *e, struct iz_unit_memory *g, int u)
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
        iz_handle_name(g->piece[i], IZ_DATUM_PIECE, u);
    }
    return 0;
}

/* A buffer of so many parameters; NULL with what is wrong in *err, or where
 * there are none. */
static char *open_buffer(struct iz_engine *e, starpu_data_handle_t *h,
                         enum iz_datum d, int u, int64_t held, int *err)
{
    int64_t size = iz_dtype_bytes(e->plan.param_type);
    if (held > UINT32_MAX) {
        fprintf(stderr,
                "izar: %s: a rank would hold %lld of its parameters, StarPU "
                "counts to %u: use smaller units or more ranks\n",
                e->model->unit[u].name, (long long)held, UINT32_MAX);
        *err = -EINVAL;
        return NULL;
    }
    if (!held)
        return NULL;
    char *p = iz_memory_take(e->memory, iz_handle_datum_tier(&e->plan, d),
                             IZ_MEM_PARAM, held * size);
    if (!p) {
        *err = -ENOMEM;
        return NULL;
    }
    starpu_vector_data_register(h, STARPU_MAIN_RAM, iz_handle_address(e, p),
                                (uint32_t)held, (size_t)size);
    iz_handle_keep(e, *h, d, u);
    return p;
}

/* Where chunks of parameters are, in a buffer or in the file. */
static void place_chunks(struct iz_engine *e, int u, struct iz_chunk *k, int n,
                         enum iz_home home, char *buffer)
{
    int64_t size = iz_dtype_bytes(e->plan.param_type);
    for (int i = 0; i < n; i++) {
        k[i].param_home = home;
        if (home == IZ_HOME_NVME)
            k[i].param_handle = iz_handle_token(e, IZ_DATUM_PARAM, u);
        else
            k[i].param = buffer + k[i].param_first * size;
    }
}

static int open_params(struct iz_engine *e, struct iz_unit_memory *g, int u)
{
    const struct iz_plan_zero *z = &e->plan.zero;
    int err = 0;
    char *all = open_buffer(e, &g->param_handle, IZ_DATUM_PARAM, u,
                            iz_plan_held(&e->plan, g->plan), &err);
    char *frozen = all;
    if (!err && z->frozen_apart)
        frozen = open_buffer(e, &g->frozen_handle, IZ_DATUM_FROZEN, u,
                             iz_plan_held_apart(&e->plan, g->plan), &err);
    if (err)
        return err;
    place_chunks(e, u, g->chunk, g->plan->chunks, z->param_home, all);
    place_chunks(e, u, g->frozen, g->plan->frozen.chunks, z->frozen_home,
                 frozen);
    return z->param_home == IZ_HOME_NVME ? 0 : register_pieces(e, g, u);
}

static int open_quant(struct iz_engine *e, struct iz_unit_memory *g, int u)
{
    int64_t bytes = iz_plan_quant_held(&e->plan, g->plan);
    if (!bytes)
        return 0;
    if (e->plan.zero.frozen_home == IZ_HOME_NVME) {
        g->quant_handle = iz_handle_token(e, IZ_DATUM_QUANT, u);
        return 0;
    }
    g->quant = iz_handle_take(e, &g->quant_handle, IZ_DATUM_QUANT, u, bytes);
    return g->quant ? 0 : -ENOMEM;
}

static int open_copy(struct iz_engine *e, struct iz_unit_memory *g, int u)
{
    int64_t n = iz_plan_copied(&e->plan, g->plan);
    g->copied = -1;
    return n && !iz_handle_take(e, &g->copy_handle, IZ_DATUM_COPY, u,
                                n * iz_dtype_bytes(e->plan.param_type))
               ? -ENOMEM
               : 0;
}

static int open_states(struct iz_engine *e, struct iz_unit_memory *g, int u)
{
    for (int i = 0; i < g->plan->chunks; i++) {
        struct iz_chunk *k = &g->chunk[i];
        bool own = k->home == e->plan.zero.state_home;
        if (e->plan.zero.state_home == IZ_HOME_NVME) {
            k->state_handle = iz_handle_token(e, IZ_DATUM_STATE, u);
            continue;
        }
        k->state = iz_handle_take(
            e, &k->state_handle, own ? IZ_DATUM_STATE : IZ_DATUM_SPLIT_STATE, u,
            iz_plan_states(&e->plan, k->home, k->count, k->lacks).bytes);
        if (!k->state)
            return -ENOMEM;
    }
    return 0;
}

/* n handles whose memory follows one another; one of no bytes is none. */
static bool take_pieces(struct iz_engine *e, starpu_data_handle_t *handle,
                        enum iz_datum d, int u, const int64_t *bytes, int n)
{
    int64_t all = 0;
    for (int i = 0; i < n; i++)
        all += bytes[i];
    if (!all)
        return true;
    char *p = iz_memory_take(e->memory, iz_handle_datum_tier(&e->plan, d),
                             iz_datum_infos[d].class, all);
    for (int i = 0; p && i < n; p += bytes[i++])
        if (bytes[i])
            handle[i] = iz_handle_open(e, p, bytes[i], d, u);
    return p;
}

static int open_grads(struct iz_engine *e, struct iz_unit_memory *g, int u)
{
    const struct iz_plan_unit *p = g->plan;
    int64_t apart = iz_plan_grads_apart(&e->plan, p);
    int64_t size = iz_dtype_bytes(e->plan.grad_type);
    int64_t own = iz_plan_own_sum(&e->plan, p);
    int64_t piece[IZ_PIECES_MAX + 1], sums[IZ_PIECES_MAX + 1];
    bool squared = iz_plan_squared(&e->plan, p), ok = true;
    for (int i = 0; i <= p->pieces; i++) {
        int64_t n = iz_plan_piece(&e->plan, p, i);
        piece[i] = n * size;
        sums[i] = squared ? iz_norm2_blocks(n) * (int64_t)sizeof(double) : 0;
    }
    for (int i = 0; ok && i <= p->split_accum; i++) {
        ok = (i && e->plan.zero.sums_near) ||
             take_pieces(e, g->grad_handle[i], IZ_DATUM_GRAD, u, piece,
                         p->pieces);
        if (ok && apart)
            ok = iz_handle_take(e, &g->grad_apart_handle[i],
                                IZ_DATUM_SPLIT_GRAD, u, apart * size);
        if (ok && own)
            ok = iz_handle_take(e, &g->sum_handle[i], IZ_DATUM_OWN_SUM, u,
                                own * size);
    }
    if (ok)
        ok = take_pieces(e, g->block_sums_handle, IZ_DATUM_BLOCK_SUMS, u, sums,
                         p->pieces + 1);
    g->norm2_handle = iz_handle_open(e, e->scalar.sums + u, sizeof(double),
                                     IZ_DATUM_SQUARES, u);
    return ok ? 0 : -ENOMEM;
}

/* Chunks of so many elements over the owned ones, the first of which is `own`
 * in the unit's parameters; NULL: no memory. */
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

/* A full buffer holds every rank's shard of the trained parameters, and behind
 * them of the frozen ones. */
static int open_layout(struct iz_engine *e, struct iz_unit_memory *g, int u)
{
    const struct iz_unit *unit = &e->model->unit[u];
    const struct iz_plan_unit *p = g->plan;
    const struct iz_plan_zero *z = &e->plan.zero;
    int rank = z->params_full && !z->states_full ? e->plan.rank : 0;
    g->offset = calloc((size_t)unit->n_params + 1, sizeof(*g->offset));
    g->chunk = open_chunks(p->chunk, p->owned, p->shard * rank);
    g->frozen =
        open_chunks(p->frozen.chunk, p->frozen.owned,
                    p->frozen.shard * rank + (z->frozen_apart  ? 0
                                              : z->params_full ? p->padded
                                                               : p->shard));
    g->segment = iz_rules_segments(unit);
    if (!g->offset || !g->chunk || !g->frozen || !g->segment)
        return -ENOMEM;
    for (int i = 0; i < p->chunks; i++) {
        g->chunk[i].home = i < p->host_chunks ? z->state_home : IZ_HOME_NONE;
        g->chunk[i].lacks = iz_plan_chunk_lacks(&e->plan, p, i);
        g->chunk[i].state_bytes = iz_plan_chunk_bytes(&e->plan, p, i);
    }
    int64_t from[IZ_PARTS] = {0, p->padded, p->padded + p->frozen.padded};
    iz_unit_offsets(unit, from, g->offset);
    g->layout = (struct iz_unit_layout){
        .model = e->model, .unit = u, .offset = g->offset, .n = p->padded};
    if (unit->tied_unit >= 0) {
        const struct iz_unit_memory *t = &e->unit[unit->tied_unit];
        int r = iz_unit_reference(&e->model->unit[unit->tied_unit],
                                  unit->tied_param);
        g->layout.tied_offset = t->offset[unit->tied_param];
        g->layout.tied_reference = t->offset[r];
        g->layout.tied_n = t->plan->padded;
    }
    return 0;
}

static int open_unit(struct iz_engine *e, int u)
{
    struct iz_unit_memory *g = &e->unit[u];
    g->plan = &e->plan.unit[u];
    int r = open_layout(e, g, u);
    if (!r)
        r = open_params(e, g, u);
    if (!r)
        r = open_quant(e, g, u);
    if (!r)
        r = open_copy(e, g, u);
    if (!r)
        r = open_states(e, g, u);
    return r ? r : open_grads(e, g, u);
}

static void close_unit(struct iz_unit_memory *g)
{
    if (g->piece)
        starpu_data_partition_clean(g->param_handle, (unsigned)g->plan->chunks,
                                    g->piece);
    free(g->piece);
    free(g->chunk);
    free(g->frozen);
    free(g->segment);
    free(g->offset);
}

/* ---- disk ---- */

static int open_tier_file(struct iz_engine *e, struct iz_nvme **f,
                          const char *what, const char *dir,
                          enum iz_class class, int64_t bytes)
{
    char name[64];
    int r = 0;
    if (!bytes)
        return 0;
    snprintf(name, sizeof(name), "izar-%d-rank%d-%s", (int)getpid(),
             e->plan.rank, what);
    if (!e->simulated)
        r = iz_nvme_open(f, dir, name, bytes, e->config->run.nvme_checksum);
    if (!r)
        iz_memory_note(e->memory, IZ_TIER_NVME, class, bytes);
    return r;
}

static int open_files(struct iz_engine *e)
{
    const struct iz_zero_config *z = &e->config->zero;
    int64_t size = iz_dtype_bytes(e->plan.param_type), state = 0, param = 0;
    for (int u = 0; u < e->plan.n_units; u++) {
        const struct iz_plan_unit *g = &e->plan.unit[u];
        for (int i = 0; i < g->chunks; i++) {
            struct iz_chunk *k = &e->unit[u].chunk[i];
            k->state_at = state;
            k->param_at = param;
            state += k->state_bytes;
            param += k->param ? 0 : g->chunk * size;
        }
        for (int i = 0; i < g->frozen.chunks; i++) {
            struct iz_chunk *k = &e->unit[u].frozen[i];
            k->param_at = param;
            param += k->param ? 0 : g->frozen.chunk * size;
        }
        e->unit[u].quant_at = param;
        param += e->unit[u].quant ? 0 : iz_plan_quant_filed(g);
    }
    if (z->optimizer.home != IZ_HOME_NVME)
        state = 0;
    int r = open_tier_file(e, &e->file.state, "state", z->optimizer.nvme_path,
                           IZ_MEM_STATE, state);
    if (!r)
        r = open_tier_file(e, &e->file.param, "param", z->param.nvme_path,
                           IZ_MEM_PARAM, param);
    return r ? r
             : open_tier_file(e, &e->file.boundary, "boundary",
                              e->config->boundary_path, IZ_MEM_BOUNDARY,
                              iz_plan_boundary_file(&e->plan));
}

int iz_unit_memory_open(struct iz_engine *e)
{
    int r = 0;
    e->unit = calloc((size_t)e->plan.n_units, sizeof(*e->unit));
    if (!e->unit)
        return -ENOMEM;
    for (int u = 0; u < e->plan.n_units && !r; u++)
        r = open_unit(e, u);
    return r ? r : open_files(e);
}

void iz_unit_memory_close(struct iz_engine *e)
{
    for (int u = 0; e->unit && u < e->plan.n_units; u++)
        close_unit(&e->unit[u]);
    iz_nvme_close(&e->file.state);
    iz_nvme_close(&e->file.param);
    iz_nvme_close(&e->file.boundary);
    free(e->unit);
}
