/* SPDX-License-Identifier: Apache-2.0 */
/* Buffers that no unit owns: staging, lists of rows, rings of gathered units
 * and of gradients, the tracks of micro-batches, scalars, collectives. */
#include "runtime/engine/buffers.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/engine/handle.h"
#include "runtime/engine/trace.h"

/* ---- staging ---- */

/* Lists of touched rows, and what it takes to make one. */
static int open_rows(struct iz_engine *e)
{
    struct iz_staging *s[] = {&e->touched.list[0], &e->touched.list[1],
                              &e->touched.scratch};
    int64_t list = iz_plan_list_bytes(&e->plan);
    for (int i = 0; list && i < 3; i++) {
        int64_t bytes =
            i < 2 ? list : iz_plan_list_scratch_bytes(&e->plan, e->model);
        s[i]->p =
            iz_memory_take(e->memory, iz_handle_tier(e), IZ_MEM_BATCH, bytes);
        if (!s[i]->p)
            return -ENOMEM;
        s[i]->handle = iz_handle_open(e, s[i]->p, bytes, IZ_DATUM_BATCH, i);
    }
    return 0;
}

static int open_staging(struct iz_engine *e)
{
    for (int k = 0; k < IZ_STAGINGS; k++) {
        const struct iz_plan_staging *p = &e->plan.staging[k];
        bool gpu = k == IZ_STAGING_SPLIT;
        enum iz_tier tier = gpu ? IZ_TIER_DEVICE : IZ_TIER_CPU;
        enum iz_datum d = gpu ? IZ_DATUM_SPLIT_STAGING : IZ_DATUM_STAGING;
        struct iz_staging *s = calloc((size_t)p->n + 1, sizeof(*s));
        e->staging[k].buffer = s;
        if (!s)
            return -ENOMEM;
        for (int i = 0; i < p->n; i++) {
            s[i].p = iz_memory_take(e->memory, tier, IZ_MEM_STAGING, p->bytes);
            if (!s[i].p)
                return -ENOMEM;
            s[i].handle = iz_handle_open(e, s[i].p, p->bytes, d, i);
        }
    }
    return 0;
}

static void close_staging(struct iz_engine *e)
{
    for (int k = 0; k < IZ_STAGINGS; k++) {
        struct iz_staging *s = e->staging[k].buffer;
        for (int i = 0; s && i < e->plan.staging[k].n; i++)
            iz_handle_close(&s[i].handle);
        free(s);
        e->staging[k].buffer = NULL;
    }
}

/* ---- rings and tracks ---- */

static struct iz_slot *open_slots(struct iz_engine *e, int n, int64_t bytes,
                                  enum iz_class class, enum iz_datum d)
{
    struct iz_slot *s = calloc((size_t)n + 1, sizeof(*s));
    for (int i = 0; s && i < n; i++) {
        s[i].group = -1;
        s[i].p = iz_memory_take(e->memory, IZ_TIER_DEVICE, class, bytes);
        if (!s[i].p)
            return s;
        s[i].handle = iz_handle_open(e, s[i].p, bytes, d, i);
    }
    return s;
}

static void close_slots(struct iz_slot **s, int n)
{
    for (int i = 0; *s && i < n; i++)
        iz_handle_close(&(*s)[i].handle);
    free(*s);
    *s = NULL;
}

static int open_rings(struct iz_engine *e)
{
    int64_t size = iz_dtype_bytes(e->plan.param_type);
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
    int n = e->plan.act.boundary_slots;
    e->boundaries.slot = open_slots(
        e, n, iz_dtype_bytes(e->plan.target.act) * e->plan.act.boundary_elems,
        IZ_MEM_BOUNDARY, IZ_DATUM_RAISED);
    bool slots = e->boundaries.slot && (!n || e->boundaries.slot[n - 1].handle);
    return e->ring && slots ? 0 : -ENOMEM;
}

static void close_rings(struct iz_engine *e)
{
    for (int i = 0; e->ring && i < e->plan.n_rings; i++) {
        close_slots(&e->ring[i].param, e->plan.ring[i].params);
        close_slots(&e->ring[i].grad, e->plan.ring[i].grads);
    }
    close_slots(&e->boundaries.slot, e->plan.act.boundary_slots);
    free(e->ring);
}

/* The last one is used at once: it never goes to the host. */
static int open_boundary(struct iz_engine *e, struct iz_track *l, int u)
{
    const struct iz_plan *p = &e->plan;
    int64_t bytes = iz_plan_boundary_bytes(p, e->model, u);
    if (p->act.boundary_slots && u + 2 == e->model->n_units)
        return 0;
    l->boundary[u] = iz_memory_take(
        e->memory, p->act.boundaries_down ? IZ_TIER_CPU : IZ_TIER_DEVICE,
        IZ_MEM_BOUNDARY, bytes);
    if (!l->boundary[u])
        return -ENOMEM;
    l->boundary_handle[u] =
        iz_handle_open(e, l->boundary[u], bytes, IZ_DATUM_BOUNDARY, u);
    return 0;
}

static int open_boundaries(struct iz_engine *e, struct iz_track *l)
{
    int units = e->model->n_units;
    l->boundary = calloc((size_t)units, sizeof(*l->boundary));
    l->boundary_handle = calloc((size_t)units, sizeof(*l->boundary_handle));
    l->saved = calloc((size_t)units, sizeof(*l->saved));
    l->saved_handle = calloc((size_t)units, sizeof(*l->saved_handle));
    if (!l->boundary || !l->boundary_handle || !l->saved || !l->saved_handle)
        return -ENOMEM;
    for (int u = 0; u + 1 < units; u++) {
        bool kept = !e->plan.act.recompute && u >= e->plan.first_trained;
        int64_t saved = kept ? e->plan.cost[u].save_bytes : 0;
        if (open_boundary(e, l, u))
            return -ENOMEM;
        if (!saved)
            continue;
        l->saved[u] =
            iz_memory_take(e->memory, IZ_TIER_DEVICE, IZ_MEM_SAVED, saved);
        if (!l->saved[u])
            return -ENOMEM;
        l->saved_handle[u] =
            iz_handle_open(e, l->saved[u], saved, IZ_DATUM_SAVED, u);
    }
    return 0;
}

static int open_track(struct iz_engine *e, int b)
{
    struct iz_track *l = &e->track[b];
    int64_t batch =
        (e->model->input_bytes + e->model->target_bytes) * e->plan.samples;
    int64_t d = iz_dtype_bytes(e->plan.target.act) * e->plan.act.boundary_elems;
    l->batch =
        iz_memory_take(e->memory, iz_handle_tier(e), IZ_MEM_BATCH, batch);
    l->d = iz_memory_take(e->memory, IZ_TIER_DEVICE, IZ_MEM_BOUNDARY, d);
    if (!l->batch || !l->d)
        return -ENOMEM;
    l->batch_handle = iz_handle_open(e, l->batch, batch, IZ_DATUM_BATCH, b);
    l->d_handle = iz_handle_open(e, l->d, d, IZ_DATUM_DY, b);
    l->loss = e->scalars + e->plan.n_groups + b;
    l->loss_handle =
        iz_handle_open(e, l->loss, sizeof(*l->loss), IZ_DATUM_SCALAR, b);
    l->weight = l->loss + e->plan.tracks;
    l->weight_handle =
        iz_handle_open(e, l->weight, sizeof(*l->weight), IZ_DATUM_SCALAR, b);
    return open_boundaries(e, l);
}

static int open_tracks(struct iz_engine *e)
{
    int r = 0;
    e->track = calloc((size_t)e->plan.tracks, sizeof(*e->track));
    if (!e->track)
        return -ENOMEM;
    for (int b = 0; b < e->plan.tracks && !r; b++)
        r = open_track(e, b);
    return r;
}

static void close_track(struct iz_engine *e, struct iz_track *l)
{
    for (int u = 0; l->saved_handle && u < e->model->n_units; u++) {
        iz_handle_close(&l->boundary_handle[u]);
        iz_handle_close(&l->saved_handle[u]);
    }
    iz_handle_close(&l->batch_handle);
    iz_handle_close(&l->d_handle);
    iz_handle_close(&l->loss_handle);
    iz_handle_close(&l->weight_handle);
    free(l->boundary);
    free(l->boundary_handle);
    free(l->saved);
    free(l->saved_handle);
}

static int open_scalars(struct iz_engine *e)
{
    e->scalar.control_handle =
        iz_handle_open(e, &e->control, sizeof(e->control), IZ_DATUM_SCALAR, 0);
    e->scalar.scale_handle =
        iz_handle_open(e, &e->scalar.loss_scale, sizeof(e->scalar.loss_scale),
                       IZ_DATUM_SCALAR, 0);
    e->scalar.loss_handle = iz_handle_open(
        e, &e->scalar.loss_sum, sizeof(e->scalar.loss_sum), IZ_DATUM_SCALAR, 0);
    e->scalar.learnt_handle = iz_handle_open(
        e, &e->scalar.learnt, sizeof(e->scalar.learnt), IZ_DATUM_SCALAR, 0);
    e->scalar.gathered =
        calloc((size_t)(e->plan.ranks * (e->plan.n_groups + 8)),
               sizeof(*e->scalar.gathered));
    int64_t logits = 4 * (int64_t)e->model->vocab;
    e->scalar.logits =
        iz_memory_take(e->memory, iz_handle_tier(e), IZ_MEM_BATCH, logits);
    e->seals.of = calloc((size_t)e->plan.ranks, sizeof(*e->seals.of));
    if (!e->scalar.gathered || !e->scalar.logits || !e->seals.of)
        return -ENOMEM;
    if (logits)
        e->scalar.logits_handle =
            iz_handle_open(e, e->scalar.logits, logits, IZ_DATUM_BATCH, 0);
    return 0;
}

static void close_scalars(struct iz_engine *e)
{
    iz_handle_close(&e->scalar.control_handle);
    iz_handle_close(&e->scalar.scale_handle);
    iz_handle_close(&e->scalar.loss_handle);
    iz_handle_close(&e->scalar.learnt_handle);
    iz_handle_close(&e->scalar.logits_handle);
    free(e->scalar.gathered);
    free(e->seals.of);
}

/* Buffers of the collectives; those of MPI are the library's own. */
static int open_comm(struct iz_engine *e)
{
    const struct iz_plan *p = &e->plan;
    struct iz_coll_gpu g = {.nccl = p->target.nccl};
    if (p->ranks > 1 && !p->target.nccl)
        iz_memory_note(e->memory, iz_handle_tier(e), IZ_MEM_COMM,
                       p->bytes.b[iz_handle_tier(e)][IZ_MEM_COMM]);
    if (p->ranks == 1 || !p->target.gpu)
        return 0;
    if (p->comm_staging_bytes)
        g.buffer = iz_memory_take(e->memory, IZ_TIER_CPU, IZ_MEM_STAGING,
                                  g.buffer_bytes = p->comm_staging_bytes);
    else
        g.buffer = iz_memory_take(e->memory, IZ_TIER_DEVICE, IZ_MEM_COMM,
                                  g.buffer_bytes = p->exchange_bytes);
    return g.buffer ? iz_coll_gpu_open(e->coll, &g) : -ENOMEM;
}

int iz_buffers_open(struct iz_engine *e)
{
    int r = open_staging(e);
    if (!r)
        r = open_rows(e);
    if (!r)
        r = open_rings(e);
    if (!r)
        r = open_tracks(e);
    if (!r)
        r = open_scalars(e);
    return r ? r : open_comm(e);
}

void iz_buffers_close(struct iz_engine *e)
{
    close_rings(e);
    for (int b = 0; e->track && b < e->plan.tracks; b++)
        close_track(e, &e->track[b]);
    free(e->track);
    iz_handle_close(&e->touched.list[0].handle);
    iz_handle_close(&e->touched.list[1].handle);
    iz_handle_close(&e->touched.scratch.handle);
    close_staging(e);
    iz_coll_gpu_close(e->coll);
    close_scalars(e);
}

/* ---- the next one ---- */

struct iz_staging *iz_next_staging(struct iz_engine *e, enum iz_staging_kind k)
{
    struct iz_staging_ring *r = &e->staging[k];
    struct iz_staging *s = &r->buffer[r->next];
    r->next = (r->next + 1) % e->plan.staging[k].n;
    return s;
}

starpu_data_handle_t iz_next_grad(struct iz_engine *e, int group)
{
    const struct iz_plan_group *p = e->group[group].plan;
    if (p->direct)
        return e->group[group].grad_handle[0];
    struct iz_ring *r = &e->ring[p->ring];
    struct iz_slot *s = &r->grad[r->next_grad];
    r->next_grad = (r->next_grad + 1) % e->plan.ring[p->ring].grads;
    return s->handle;
}
