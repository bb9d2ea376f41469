/* SPDX-License-Identifier: Apache-2.0 */
/* Allocation of all that the plan says; see alloc.h. */
#include "runtime/engine/alloc.h"

#include <errno.h>
#include <stdlib.h>

#include "codelets/gpu/device.h"

/* ---- staging ---- */

static int open_staging(struct iz_engine *e)
{
    for (int k = 0; k < IZ_STAGINGS; k++) {
        const struct iz_plan_staging *p = &e->plan.staging[k];
        enum iz_datum d = k == IZ_STAGING_SPLIT   ? IZ_DATUM_SPLIT_STAGING
                          : k == IZ_STAGING_QUANT ? IZ_DATUM_QUANT_STAGING
                                                  : IZ_DATUM_STAGING;
        struct iz_staging *s = calloc((size_t)p->n + 1, sizeof(*s));
        e->staging[k].buffer = s;
        if (!s)
            return -ENOMEM;
        for (int i = 0; i < p->n; i++) {
            s[i].p = iz_handle_take(e, &s[i].handle, d, i, p->bytes);
            if (!s[i].p)
                return -ENOMEM;
        }
    }
    return 0;
}

/* Lists of touched rows, and what it takes to make one. */
static int open_rows(struct iz_engine *e)
{
    struct iz_touched_lists *t = &e->touched;
    int64_t list = iz_plan_list_bytes(&e->plan);
    int64_t scratch = iz_plan_list_scratch_bytes(&e->plan, e->model);
    bool ok = !list ||
              iz_handle_take(e, &t->scratch.handle, IZ_DATUM_BATCH, 2, scratch);
    for (int i = 0; list && ok && i < 2; i++)
        ok = iz_handle_take(e, &t->list[i].handle, IZ_DATUM_BATCH, i, list);
    return ok ? 0 : -ENOMEM;
}

/* ---- matrices ---- */

static starpu_data_handle_t *open_tokens(struct iz_engine *e, int n, int x)
{
    starpu_data_handle_t *h = calloc((size_t)n, sizeof(starpu_data_handle_t));
    for (int i = 0; h && i < n; i++)
        h[i] = iz_handle_token(e, IZ_DATUM_MATRIX_PART, x);
    return h;
}

static int open_matrices(struct iz_engine *e)
{
    const struct iz_plan_matrices *p = &e->plan.matrices;
    struct iz_matrix_buffer *b = calloc((size_t)p->buffers + 1, sizeof(*b));
    e->matrices.buffer = b;
    for (int i = 0; b && i < p->buffers; i++) {
        b[i].chunk = open_tokens(e, p->chunks, i);
        b[i].matrix = open_tokens(e, p->most, i);
        if (!b[i].chunk || !b[i].matrix)
            return -ENOMEM;
        for (int s = 0; s < IZ_SIDES; s++)
            if ((s == IZ_ABOVE ? p->above : p->below) &&
                !iz_handle_take(e, &b[i].handle[s],
                                s == IZ_ABOVE ? IZ_DATUM_MATRIX_ABOVE
                                              : IZ_DATUM_MATRIX,
                                i, p->elems * (int64_t)sizeof(float)))
                return -ENOMEM;
    }
    return b ? 0 : -ENOMEM;
}

static void close_matrices(struct iz_engine *e)
{
    struct iz_matrix_buffer *b = e->matrices.buffer;
    for (int i = 0; b && i < e->plan.matrices.buffers; i++) {
        free(b[i].chunk);
        free(b[i].matrix);
    }
    free(b);
}

/* ---- rings and tracks ---- */

static int open_slots(struct iz_engine *e, struct iz_slot **out, int n,
                      int64_t bytes, enum iz_datum d)
{
    struct iz_slot *s = calloc((size_t)n + 1, sizeof(*s));
    *out = s;
    for (int i = 0; s && i < n; i++) {
        s[i].unit = -1;
        if (!iz_handle_take(e, &s[i].handle, d, i, bytes))
            return -ENOMEM;
    }
    return s ? 0 : -ENOMEM;
}

static int open_rings(struct iz_engine *e)
{
    int64_t size = iz_dtype_bytes(e->plan.param_type);
    int64_t sum = iz_dtype_bytes(e->plan.grad_type);
    e->ring = calloc((size_t)e->plan.n_rings, sizeof(*e->ring));
    for (int i = 0; e->ring && i < e->plan.n_rings; i++) {
        const struct iz_plan_ring *r = &e->plan.ring[i];
        if (open_slots(e, &e->ring[i].param, r->params, r->elems * size,
                       IZ_DATUM_GATHERED) ||
            open_slots(e, &e->ring[i].grad, r->grads, r->grad_elems * size,
                       IZ_DATUM_UNIT_GRAD) ||
            open_slots(e, &e->ring[i].sum, r->sums, r->sum_elems * sum,
                       IZ_DATUM_RING_SUM))
            return -ENOMEM;
    }
    if (!e->ring)
        return -ENOMEM;
    return open_slots(e, &e->boundaries.slot, e->plan.act.boundary_slots,
                      iz_plan_boundary_room(&e->plan), IZ_DATUM_RAISED);
}

/* The last boundary is used at once: it never goes elsewhere. */
static bool open_boundary(struct iz_engine *e, struct iz_track *t, int u)
{
    const struct iz_plan *p = &e->plan;
    int64_t bytes = iz_plan_boundary_bytes(p, e->model, u);
    if (p->act.boundary_slots && u + 2 == p->n_units)
        return true;
    if (p->act.boundary_home != IZ_HOME_NVME)
        return iz_handle_take(e, &t->boundary_handle[u], IZ_DATUM_BOUNDARY, u,
                              bytes);
    t->boundary_handle[u] = iz_handle_token(e, IZ_DATUM_BOUNDARY, u);
    return true;
}

static int open_track(struct iz_engine *e, int b)
{
    const struct iz_plan *p = &e->plan;
    struct iz_track *t = &e->track[b];
    int units = e->model->n_units;
    int64_t batch = iz_model_sample_bytes(e->model) * p->samples;
    int64_t d = iz_plan_boundary_room(p);
    double *loss = e->scalar.sums + p->n_units + b;
    t->batch = iz_handle_take(e, &t->batch_handle, IZ_DATUM_BATCH, b, batch);
    t->boundary_handle = calloc((size_t)units, sizeof(*t->boundary_handle));
    t->saved_handle = calloc((size_t)units, sizeof(*t->saved_handle));
    if (!t->batch || !t->boundary_handle || !t->saved_handle ||
        !iz_handle_take(e, &t->d_handle, IZ_DATUM_DY, b, d))
        return -ENOMEM;
    t->loss_handle = iz_handle_open(e, loss, sizeof(*loss), IZ_DATUM_SCALAR, b);
    t->weight_handle =
        iz_handle_open(e, loss + p->tracks, sizeof(*loss), IZ_DATUM_SCALAR, b);
    if (iz_model_tells(e->model)) {
        t->told = (struct iz_told *)(e->scalar.sums + p->n_units +
                                     2 * (int64_t)p->tracks) +
                  b;
        t->told_handle =
            iz_handle_open(e, t->told, sizeof(*t->told), IZ_DATUM_SCALAR, b);
    }
    for (int i = 0; i < 2 && e->model->preference; i++)
        if (!iz_handle_take(e, &t->reference_handle[i], IZ_DATUM_REFERENCE, i,
                            d))
            return -ENOMEM;
    for (int u = 0; u + 1 < units; u++) {
        int64_t saved = iz_plan_saved(p, e->model, u, p->unit[u].repeat);
        if (!open_boundary(e, t, u))
            return -ENOMEM;
        if (saved &&
            !iz_handle_take(e, &t->saved_handle[u], IZ_DATUM_SAVED, u, saved))
            return -ENOMEM;
    }
    return 0;
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

/* ---- scalars and collectives ---- */

static int open_scalars(struct iz_engine *e)
{
    struct iz_scalars *s = &e->scalar;
    int64_t logits = 4 * (int64_t)e->model->vocab;
    s->control_handle =
        iz_handle_open(e, &s->control, sizeof(s->control), IZ_DATUM_SCALAR, 0);
    s->scale_handle = iz_handle_open(e, &s->loss_scale, sizeof(s->loss_scale),
                                     IZ_DATUM_SCALAR, 0);
    s->loss_handle = iz_handle_open(e, &s->loss_sum, sizeof(s->loss_sum),
                                    IZ_DATUM_SCALAR, 0);
    s->learnt_handle =
        iz_handle_open(e, &s->learnt, sizeof(s->learnt), IZ_DATUM_SCALAR, 0);
    s->told = IZ_TOLD_NOTHING;
    if (iz_model_tells(e->model))
        s->told_handle =
            iz_handle_open(e, &s->told, sizeof(s->told), IZ_DATUM_SCALAR, 0);
    s->gathered =
        calloc((size_t)e->plan.ranks * ((size_t)e->plan.n_units + 8 + IZ_TOLD),
               sizeof(*s->gathered));
    e->seals.of = calloc((size_t)e->plan.ranks, sizeof(*e->seals.of));
    if (!s->gathered || !e->seals.of)
        return -ENOMEM;
    return logits && !iz_handle_take(e, &s->logits_handle, IZ_DATUM_BATCH, 0,
                                     logits)
               ? -ENOMEM
               : 0;
}

/* Buffers of the collectives; those of MPI are the library's own. */
static int open_comm(struct iz_engine *e)
{
    const struct iz_plan *p = &e->plan;
    bool through_host = p->comm.staging_bytes > 0;
    struct iz_coll_gpu g = {.nccl = p->target.nccl};
    if (p->ranks > 1 && !p->target.nccl)
        iz_memory_note(e->memory, iz_handle_tier(e), IZ_MEM_COMM,
                       p->bytes.b[iz_handle_tier(e)][IZ_MEM_COMM]);
    if (p->ranks == 1 || !p->target.gpu)
        return 0;
    g.buffer_bytes =
        through_host ? p->comm.staging_bytes : p->comm.exchange_bytes;
    g.buffer = iz_memory_take(
        e->memory, through_host ? IZ_TIER_CPU : IZ_TIER_DEVICE,
        through_host ? IZ_MEM_STAGING : IZ_MEM_COMM, g.buffer_bytes);
    return g.buffer ? iz_coll_gpu_open(e->coll, &g) : -ENOMEM;
}

int iz_alloc_open(struct iz_engine *e)
{
    static int (*const open[])(struct iz_engine *) = {
        iz_unit_memory_open, open_staging, open_matrices, open_rows,
        open_rings,          open_tracks,  open_scalars,  open_comm};
    const struct iz_plan *p = &e->plan;
    bool real = p->target.gpu && !e->simulated;
    int r = 0;
    e->scalar.sums = iz_memory_take(e->memory, iz_handle_tier(e), IZ_MEM_BATCH,
                                    iz_plan_sums_bytes(p, e->model));
    if (p->target.gpu)
        e->bounce.buffer = iz_memory_take(e->memory, IZ_TIER_CPU,
                                          IZ_MEM_STAGING, IZ_BOUNCE_BYTES);
    e->bounce.stream = real ? iz_device_stream_open() : NULL;
    if (!e->scalar.sums || (p->target.gpu && !e->bounce.buffer) ||
        (real && !e->bounce.stream))
        return -ENOMEM;
    for (int i = 0; i < (int)(sizeof(open) / sizeof(open[0])) && !r; i++)
        r = open[i](e);
    return r ? r : iz_memory_lock(e->memory);
}

void iz_alloc_close(struct iz_engine *e)
{
    iz_unit_memory_close(e);
    iz_handles_close(e);
    for (int i = 0; e->ring && i < e->plan.n_rings; i++) {
        free(e->ring[i].param);
        free(e->ring[i].grad);
        free(e->ring[i].sum);
    }
    free(e->ring);
    free(e->boundaries.slot);
    for (int b = 0; e->track && b < e->plan.tracks; b++) {
        free(e->track[b].boundary_handle);
        free(e->track[b].saved_handle);
    }
    free(e->track);
    for (int k = 0; k < IZ_STAGINGS; k++)
        free(e->staging[k].buffer);
    close_matrices(e);
    iz_coll_gpu_close(e->coll);
    free(e->scalar.gathered);
    free(e->seals.of);
    iz_device_stream_close(e->bounce.stream);
}

/* ---- the next one ---- */

struct iz_staging *iz_engine_next_staging(struct iz_engine *e,
                                          enum iz_staging_kind k)
{
    struct iz_staging_ring *r = &e->staging[k];
    struct iz_staging *s = &r->buffer[r->next];
    r->next = (r->next + 1) % e->plan.staging[k].n;
    return s;
}

struct iz_matrix_buffer *iz_engine_next_matrices(struct iz_engine *e)
{
    struct iz_matrix_ring *r = &e->matrices;
    struct iz_matrix_buffer *b = &r->buffer[r->next];
    r->next = (r->next + 1) % e->plan.matrices.buffers;
    return b;
}

static starpu_data_handle_t next_slot(const struct iz_slot *s, int *next, int n)
{
    const struct iz_slot *now = s + *next;
    *next = (*next + 1) % n;
    return now->handle;
}

starpu_data_handle_t iz_engine_next_grad(struct iz_engine *e, int unit)
{
    const struct iz_plan_unit *p = e->unit[unit].plan;
    struct iz_ring *r = &e->ring[p->ring];
    return p->direct
               ? e->unit[unit].grad_handle[0][0]
               : next_slot(r->grad, &r->next_grad, e->plan.ring[p->ring].grads);
}

starpu_data_handle_t iz_engine_next_sum(struct iz_engine *e, int unit)
{
    int ring = e->unit[unit].plan->ring;
    struct iz_ring *r = &e->ring[ring];
    return next_slot(r->sum, &r->next_sum, e->plan.ring[ring].sums);
}
