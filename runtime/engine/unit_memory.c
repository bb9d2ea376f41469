/* SPDX-License-Identifier: Apache-2.0 */
/* What units own: parameters, gradients and states in memory or in files. */
#include "runtime/engine/alloc.h"

#include <assert.h>

#include "codelets/flat/flat.h"
#include "runtime/plan/matrices.h"
#include "runtime/plan/unit_sizes.h"

struct child_bytes {
    const struct iz_chunk *chunk;
    int64_t size; /* of an element */
};

static void child_filter(void *parent, void *child,
                         struct starpu_data_filter *f, unsigned id,
                         unsigned parts)
{
    const struct starpu_variable_interface *v = parent;
    struct starpu_variable_interface *w = child;
    const struct child_bytes *c = f->filter_arg_ptr;
    *w = *v;
    w->elemsize = (size_t)(c->chunk[id].count * c->size);
    if (v->dev_handle) {
        w->ptr += (size_t)(c->chunk[id].param_first * c->size);
        w->offset += (size_t)(c->chunk[id].param_first * c->size);
    }
}

/* StarPU switches between the whole and its children by itself: adam's chunks
 * write children side by side, fetch reads the whole. */
static void register_chunks(struct iz_engine *e, struct iz_unit_memory *g,
                            int u, int64_t held)
{
    int n = g->plan->chunks;
    if (n == 0)
        return;
    if (n == 1 && g->plan->owned == held) {
        g->chunk[0].param_handle = g->param_handle;
        return;
    }
    g->child = iz_engine_take(e, n, sizeof(*g->child));
    struct child_bytes c = {g->chunk, iz_dtype_bytes(e->plan.param_type)};
    struct starpu_data_filter f = {.filter_func = child_filter,
                                   .nchildren = (unsigned)n,
                                   .filter_arg_ptr = &c};
    starpu_data_partition_plan(g->param_handle, &f, g->child);
    for (int i = 0; i < n; i++) {
        g->chunk[i].param_handle = g->child[i];
        iz_handle_name(g->child[i], IZ_DATUM_PARAM_CHILD, u);
    }
}

static void place_chunks(struct iz_chunks k, char *p, int64_t size)
{
    for (int i = 0; i < k.n; i++)
        k.list[i].param = p + k.list[i].param_first * size;
}

void iz_unit_memory_params(struct iz_engine *e, const struct iz_place *a,
                           void *p)
{
    struct iz_unit_memory *g = &e->unit[a->of];
    bool quant = a->what == IZ_DATUM_QUANT;
    enum iz_unit_part part = quant                        ? IZ_PART_QUANT
                             : a->what == IZ_DATUM_FROZEN ? IZ_PART_FROZEN
                                                          : IZ_PART_TRAINED;
    struct iz_chunks k = iz_unit_chunks(g, part);
    int64_t size = quant ? 4 : iz_dtype_bytes(e->plan.param_type);
    if (!p) { /* no task writes what is quantised: one token is enough */
        k.list[a->index].param_at = a->at;
        k.list[a->index].param_handle =
            quant && a->index ? k.list[0].param_handle
                              : iz_handle_token(e, a->what, a->of);
        return;
    }
    starpu_data_handle_t *h = (starpu_data_handle_t *[]){
        &g->param_handle, &g->frozen_handle, &g->quant_handle}[part];
    *h = iz_handle_open(e, p, a->bytes, a->what, a->of);
    place_chunks(k, p, size);
    if (part != IZ_PART_TRAINED)
        return;
    if (!iz_plan_frozen_apart(&e->plan))
        place_chunks(iz_unit_chunks(g, IZ_PART_FROZEN), p, size);
    register_chunks(e, g, a->of, a->bytes / size);
}

void iz_unit_memory_pieces(struct iz_engine *e, const struct iz_place *a,
                           void *p)
{
    struct iz_unit_memory *g = &e->unit[a->of];
    bool sums = a->what == IZ_DATUM_BLOCK_SUMS;
    starpu_data_handle_t *h =
        sums ? g->block_sums_handle : g->grad_handle[a->index];
    char *at = p;
    for (int i = 0; i < g->plan->pieces + sums; i++) {
        int64_t n = iz_plan_piece(&e->plan, g->plan, i);
        int64_t bytes = sums ? iz_norm2_blocks(n) * (int64_t)sizeof(double)
                             : n * iz_dtype_bytes(e->plan.grad_type);
        if (bytes)
            h[i] = iz_handle_open(e, at, bytes, a->what, a->of);
        at += bytes;
    }
    assert(at == (char *)p + a->bytes);
}

/* Chunks of so many elements over the owned ones, the first of which is `own`
 * in the unit's parameters. */
static struct iz_chunk *open_chunks(struct iz_engine *e, int64_t chunk,
                                    int64_t owned, int64_t own)
{
    int64_t n = (owned + chunk - 1) / chunk;
    struct iz_chunk *c = iz_engine_take(e, n, sizeof(*c));
    for (int64_t i = 0; i < n; i++) {
        int64_t first = i * chunk, left = owned - first;
        c[i].first = first;
        c[i].count = left < chunk ? left : chunk;
        c[i].param_first = own + first;
        c[i].param_bytes = chunk * iz_dtype_bytes(e->plan.param_type);
    }
    return c;
}

/* A full buffer holds every rank's shard of the trained parameters, and behind
 * them of the frozen ones. */
static void open_layout(struct iz_engine *e, struct iz_unit_memory *g, int u)
{
    const struct iz_unit *unit = &e->model->unit[u];
    const struct iz_plan_unit *p = g->plan = &e->plan.unit[u];
    const struct iz_plan_zero *z = &e->plan.zero;
    const struct iz_plan_frozen *words = &p->quant.words;
    int rank = z->param.whole && !z->state.whole ? e->plan.rank : 0;
    g->offset = iz_engine_take(e, unit->n_params, sizeof(*g->offset));
    g->chunk = open_chunks(e, p->chunk, p->owned, p->shard * rank);
    g->frozen =
        open_chunks(e, p->frozen.chunk, p->frozen.owned,
                    p->frozen.shard * rank + (iz_plan_frozen_apart(&e->plan) ? 0
                                              : z->param.whole ? p->padded
                                                               : p->shard));
    g->quant = open_chunks(e, words->chunk, words->owned,
                           z->param.whole ? words->shard * e->plan.rank : 0);
    g->segment = iz_engine_own(e, iz_rules_segments(unit));
    for (int i = 0; i < p->chunks; i++) {
        g->chunk[i].home = i < p->host_chunks ? z->state.home : IZ_HOME_NONE;
        g->chunk[i].param_home = z->param.home;
        g->chunk[i].lacks = iz_plan_chunk_lacks(&e->plan, p, i);
        g->chunk[i].state_bytes = iz_plan_chunk_bytes(&e->plan, p, i);
    }
    for (int i = 0; i < p->frozen.chunks; i++)
        g->frozen[i].param_home = z->frozen.home;
    for (int i = 0; i < words->chunks; i++) {
        g->quant[i].param_home = z->frozen.home;
        g->quant[i].param_bytes = 4 * iz_plan_quant_filed(p, i);
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
}

void iz_unit_memory_open(struct iz_engine *e)
{
    e->unit = iz_engine_take(e, e->plan.n_units, sizeof(*e->unit));
    for (int u = 0; u < e->plan.n_units; u++)
        open_layout(e, &e->unit[u], u);
}

void iz_unit_memory_close(struct iz_engine *e)
{
    for (int u = 0; e->unit && u < e->plan.n_units; u++) {
        struct iz_unit_memory *g = &e->unit[u];
        if (g->child)
            starpu_data_partition_clean(g->param_handle,
                                        (unsigned)g->plan->chunks, g->child);
    }
    iz_nvme_close(&e->file.state);
    iz_nvme_close(&e->file.param);
    iz_nvme_close(&e->file.boundary);
}
