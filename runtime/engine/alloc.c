/* SPDX-License-Identifier: Apache-2.0 */
#include "runtime/engine/alloc.h"

#include <errno.h>
#include <stdlib.h>

#include "codelets/gpu/device.h"

/* ---- arrays of handles, for the places to come ---- */

static starpu_data_handle_t *open_tokens(struct iz_engine *e, int n, int x)
{
    starpu_data_handle_t *h = iz_engine_take(e, n, sizeof(*h));
    for (int i = 0; i < n; i++)
        h[i] = iz_handle_token(e, IZ_DATUM_MATRIX_PART, x);
    return h;
}

static struct iz_slot *open_slots(struct iz_engine *e, int n)
{
    struct iz_slot *s = iz_engine_take(e, n, sizeof(*s));
    for (int i = 0; i < n; i++)
        s[i].unit = -1;
    return s;
}

static void open_arrays(struct iz_engine *e)
{
    const struct iz_plan *p = &e->plan;
    int units = p->n_units;
    for (int k = 0; k < IZ_STAGINGS; k++)
        e->staging[k].buffer =
            iz_engine_take(e, p->staging[k].n, sizeof(*e->staging[k].buffer));
    e->matrices.buffer =
        iz_engine_take(e, p->matrices.buffers, sizeof(*e->matrices.buffer));
    for (int i = 0; i < p->matrices.buffers; i++) {
        e->matrices.buffer[i].chunk = open_tokens(e, p->matrices.chunks, i);
        e->matrices.buffer[i].matrix = open_tokens(e, p->matrices.most, i);
    }
    e->ring = iz_engine_take(e, p->n_rings, sizeof(*e->ring));
    for (int i = 0; i < p->n_rings; i++)
        e->ring[i] = (struct iz_ring){.param = open_slots(e, p->ring[i].params),
                                      .grad = open_slots(e, p->ring[i].grads),
                                      .sum = open_slots(e, p->ring[i].sums)};
    e->boundaries.slot = open_slots(e, p->act.boundary_slots);
    e->track = iz_engine_take(e, p->tracks, sizeof(*e->track));
    for (struct iz_track *t = e->track; t < e->track + p->tracks; t++) {
        t->boundary_handle =
            iz_engine_take(e, units, sizeof(*t->boundary_handle));
        t->boundary_at = iz_engine_take(e, units, sizeof(*t->boundary_at));
        t->saved_handle = iz_engine_take(e, units, sizeof(*t->saved_handle));
    }
    e->scratch = iz_engine_take(e, p->tasks_at_once + p->target.workers,
                                sizeof(*e->scratch));
    e->scalar.gathered =
        iz_engine_take(e, p->ranks,
                       sizeof(*e->scalar.gathered) *
                           ((size_t)units + IZ_CLIP_SCALARS + IZ_AUX));
}

/* ---- scalars, parts of one place ---- */

/* Of the units, then of the tracks: losses, weights, what they tell. */
static void open_sums(struct iz_engine *e)
{
    double *loss = e->scalar.sums + e->plan.n_units;
    int64_t tracks = e->plan.tracks;
    for (int u = 0; u < e->plan.n_units; u++)
        e->unit[u].norm2_handle = iz_handle_open(
            e, e->scalar.sums + u, sizeof(double), IZ_DATUM_SQUARES, u);
    for (int b = 0; b < tracks; b++) {
        struct iz_track *t = &e->track[b];
        t->loss_handle =
            iz_handle_open(e, loss + b, sizeof(*loss), IZ_DATUM_SCALAR, b);
        t->weight_handle = iz_handle_open(e, loss + tracks + b, sizeof(*loss),
                                          IZ_DATUM_SCALAR, b);
        if (!iz_model_has_aux(e->model))
            continue;
        t->aux = (struct iz_aux *)(loss + 2 * tracks) + b;
        t->aux_handle =
            iz_handle_open(e, t->aux, sizeof(*t->aux), IZ_DATUM_SCALAR, b);
    }
}

static void open_scalars(struct iz_engine *e)
{
    struct iz_scalars *s = &e->scalar;
    s->control_handle =
        iz_handle_open(e, &s->control, sizeof(s->control), IZ_DATUM_SCALAR, 0);
    s->scale_handle = iz_handle_open(e, &s->loss_scale, sizeof(s->loss_scale),
                                     IZ_DATUM_SCALAR, 0);
    s->loss_handle = iz_handle_open(e, &s->loss_sum, sizeof(s->loss_sum),
                                    IZ_DATUM_SCALAR, 0);
    s->loss_tokens_handle = iz_handle_open(
        e, &s->loss_tokens, sizeof(s->loss_tokens), IZ_DATUM_SCALAR, 0);
    s->aux = IZ_AUX_NOTHING;
    if (iz_model_has_aux(e->model))
        s->aux_handle =
            iz_handle_open(e, &s->aux, sizeof(s->aux), IZ_DATUM_SCALAR, 0);
    open_sums(e);
}

int iz_alloc_open(struct iz_engine *e)
{
    bool real = e->plan.target.gpu && !e->simulated;
    e->bounce.stream = real ? iz_device_stream_open() : NULL;
    if (real && !e->bounce.stream)
        return -ENOMEM;
    iz_unit_memory_open(e);
    open_arrays(e);
    int r = iz_places_open(e);
    if (r)
        return r;
    open_scalars(e);
    return iz_memory_lock(e->memory);
}

void iz_alloc_close(struct iz_engine *e)
{
    iz_unit_memory_close(e);
    iz_handles_close(e);
    iz_coll_gpu_close(e->coll);
    iz_device_stream_close(e->bounce.stream);
    while (e->taken.n > 0)
        free(e->taken.list[--e->taken.n]);
    free(e->taken.list);
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
