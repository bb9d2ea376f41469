/* SPDX-License-Identifier: Apache-2.0 */
/* Allocation of all that the plan says; see alloc.h. */
#include "runtime/engine/alloc.h"

#include <errno.h>
#include <stdlib.h>

#include "codelets/gpu/device.h"

/* ---- arrays of handles, for the places to come ---- */

static int open_staging(struct iz_engine *e)
{
    for (int k = 0; k < IZ_STAGINGS; k++) {
        e->staging[k].buffer = calloc((size_t)e->plan.staging[k].n + 1,
                                      sizeof(*e->staging[k].buffer));
        if (!e->staging[k].buffer)
            return -ENOMEM;
    }
    return 0;
}

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
    }
    return b ? 0 : -ENOMEM;
}

static int open_slots(struct iz_slot **out, int n)
{
    struct iz_slot *s = calloc((size_t)n + 1, sizeof(*s));
    *out = s;
    for (int i = 0; s && i < n; i++)
        s[i].unit = -1;
    return s ? 0 : -ENOMEM;
}

static int open_rings(struct iz_engine *e)
{
    e->ring = calloc((size_t)e->plan.n_rings, sizeof(*e->ring));
    for (int i = 0; e->ring && i < e->plan.n_rings; i++) {
        const struct iz_plan_ring *r = &e->plan.ring[i];
        if (open_slots(&e->ring[i].param, r->params) ||
            open_slots(&e->ring[i].grad, r->grads) ||
            open_slots(&e->ring[i].sum, r->sums))
            return -ENOMEM;
    }
    return e->ring ? open_slots(&e->boundaries.slot, e->plan.act.boundary_slots)
                   : -ENOMEM;
}

static int open_tracks(struct iz_engine *e)
{
    size_t units = (size_t)e->model->n_units;
    e->track = calloc((size_t)e->plan.tracks, sizeof(*e->track));
    for (int b = 0; e->track && b < e->plan.tracks; b++) {
        struct iz_track *t = &e->track[b];
        t->boundary_handle = calloc(units, sizeof(*t->boundary_handle));
        t->boundary_at = calloc(units, sizeof(*t->boundary_at));
        t->saved_handle = calloc(units, sizeof(*t->saved_handle));
        if (!t->boundary_handle || !t->boundary_at || !t->saved_handle)
            return -ENOMEM;
    }
    return e->track ? 0 : -ENOMEM;
}

static int open_scratch(struct iz_engine *e)
{
    size_t n = (size_t)(e->plan.tasks_at_once + e->plan.target.workers);
    e->scratch = calloc(n, sizeof(*e->scratch));
    return e->scratch ? 0 : -ENOMEM;
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

static int open_scalars(struct iz_engine *e)
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
    s->gathered = calloc((size_t)e->plan.ranks *
                             ((size_t)e->plan.n_units + 4 + IZ_BALLOT + IZ_AUX),
                         sizeof(*s->gathered));
    open_sums(e);
    return s->gathered ? 0 : -ENOMEM;
}

int iz_alloc_open(struct iz_engine *e)
{
    static int (*const open[])(struct iz_engine *) = {
        iz_unit_memory_open, open_staging, open_matrices,  open_rings,
        open_tracks,         open_scratch, iz_places_open, open_scalars};
    bool real = e->plan.target.gpu && !e->simulated;
    int r = 0;
    e->bounce.stream = real ? iz_device_stream_open() : NULL;
    if (real && !e->bounce.stream)
        return -ENOMEM;
    for (int i = 0; i < (int)(sizeof(open) / sizeof(open[0])) && !r; i++)
        r = open[i](e);
    return r ? r : iz_memory_lock(e->memory);
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
        free(e->track[b].boundary_at);
        free(e->track[b].saved_handle);
    }
    free(e->track);
    free(e->scratch);
    for (int k = 0; k < IZ_STAGINGS; k++)
        free(e->staging[k].buffer);
    close_matrices(e);
    iz_coll_gpu_close(e->coll);
    free(e->scalar.gathered);
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
