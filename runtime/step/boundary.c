/* SPDX-License-Identifier: Apache-2.0 */
/* Activations between units whose home is the host (cpu_checkpointing).
 * Forward writes a boundary into a slot of the GPU, a copy takes it down before
 * the slot is given to another, and a copy brings it up ahead of the backward
 * that recomputes from it.  As for parameters, the order of uses is known and
 * the write-after-read dependency on a slot limits how far copies run ahead. */
#include "runtime/step/boundary.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>

#include "codelets/base/die.h"
#include "codelets/gpu/flat_buffer.h"
#include "runtime/step/order.h"

/* A boundary of a pass is a content: unit * tracks + track.  A call is a
 * position of the pass: step * tracks + track, with steps as in iz_order_unit.
 */

#define NEVER INT_MAX

/* First position from `from` on that reads a content: the next unit's forward,
 * then its backward. */
static int next_use(const struct iz_engine *e, int content, int from)
{
    const struct iz_boundaries *k = &e->boundaries;
    int unit = content / k->tracks, track = content % k->tracks;
    int forward = (unit + 1) * k->tracks + track;
    int backward = (2 * e->model->n_units - 3 - unit) * k->tracks + track;
    if (forward >= from)
        return forward;
    bool trained = k->training && unit + 1 >= e->plan.first_trained;
    return trained && backward >= from ? backward : NEVER;
}

struct copy_arg {
    int64_t bytes;
};

/* buf: to, from. */
static void boundary_run_copy(struct iz_exec *x, void **buf, const void *arg)
{
    const struct copy_arg *a = arg;
    iz_buffer_copy(x, buf[0], buf[1], a->bytes);
}

static void submit_copy(struct iz_engine *e, enum iz_where where, int content,
                        starpu_data_handle_t to, starpu_data_handle_t from)
{
    int unit = content / e->boundaries.tracks;
    struct copy_arg a = {iz_plan_boundary_bytes(&e->plan, e->model, unit)};
    iz_submit(e->graph, &(struct iz_task){
                            .kind = where == IZ_ON_UP ? IZ_FETCH : IZ_OFFLOAD,
                            .where = where,
                            .run = boundary_run_copy,
                            .arg = &a,
                            .arg_bytes = sizeof(a),
                            .data = {{to, STARPU_W}, {from, STARPU_R}},
                            .bytes = (double)a.bytes,
                            .unit = unit,
                            .step = (int)e->step});
    if (where == IZ_ON_UP)
        e->counts.up_bytes += a.bytes;
    else
        e->counts.down_bytes += a.bytes;
}

static starpu_data_handle_t host(const struct iz_engine *e, int content)
{
    const struct iz_boundaries *k = &e->boundaries;
    return e->track[content % k->tracks].boundary_handle[content / k->tracks];
}

/* The slot whose content is read last after position `from`. */
static int last_used(const struct iz_engine *e, int from)
{
    const struct iz_boundaries *k = &e->boundaries;
    int best = 0, best_use = -1;
    for (int i = 0; i < e->plan.act.boundary_slots; i++) {
        int use = k->content[i] < 0 ? NEVER : next_use(e, k->content[i], from);
        if (use > best_use) {
            best = i;
            best_use = use;
        }
        if (use == NEVER)
            break;
    }
    return best;
}

static void boundary_put(struct iz_boundaries *k, int slot, int content)
{
    if (k->content[slot] >= 0)
        k->slot_of[k->content[slot]] = -1;
    k->content[slot] = content;
    k->slot_of[content] = slot;
}

void iz_boundary_begin(struct iz_engine *e, int tracks, bool training)
{
    struct iz_boundaries *k = &e->boundaries;
    k->tracks = tracks;
    k->training = training;
    for (int i = 0; i < e->plan.act.boundary_slots; i++)
        k->content[i] = -1;
    for (int c = 0;
         e->plan.act.boundary_slots && c < e->model->n_units * tracks; c++)
        k->slot_of[c] = -1;
}

starpu_data_handle_t iz_boundary_written(struct iz_engine *e, int unit,
                                         int track)
{
    struct iz_boundaries *k = &e->boundaries;
    int at = unit * k->tracks + track; /* the content and the position */
    if (!e->plan.act.boundary_slots)
        return e->track[track].boundary_handle[unit];
    int i = last_used(e, at), old = k->content[i];
    if (old >= 0 && next_use(e, old, at) != NEVER)
        submit_copy(e, IZ_ON_DOWN, old, host(e, old), k->slot[i].handle);
    boundary_put(k, i, at);
    return k->slot[i].handle;
}

starpu_data_handle_t iz_boundary_read(struct iz_engine *e, int unit, int track)
{
    const struct iz_boundaries *k = &e->boundaries;
    if (!e->plan.act.boundary_slots)
        return e->track[track].boundary_handle[unit];
    int i = k->slot_of[unit * k->tracks + track];
    if (i < 0)
        iz_die("%s's boundary is used before it was brought up",
               e->model->unit[unit].name);
    return k->slot[i].handle;
}

/* Every call of a pass's second half reads one boundary for the last time, so
 * there is always a slot in time for the next one that is missing. */
void iz_boundary_ahead(struct iz_engine *e, int unit, int track)
{
    struct iz_boundaries *k = &e->boundaries;
    int units = e->model->n_units;
    int from = (2 * units - 2 - unit) * k->tracks + track + 1;
    if (!e->plan.act.boundary_slots)
        return;
    /* The last unit with a backward reads one, but for the first unit. */
    int below = e->plan.first_trained > 1 ? e->plan.first_trained - 1 : 0;
    for (int j = from; j < (2 * units - 2 - below) * k->tracks; j++) {
        int reads = iz_order_unit(e, j / k->tracks) - 1;
        int content = reads * k->tracks + j % k->tracks;
        if (k->slot_of[content] >= 0)
            continue;
        int i = last_used(e, from), old = k->content[i];
        if (old >= 0 && next_use(e, old, from) != NEVER)
            return;
        submit_copy(e, IZ_ON_UP, content, k->slot[i].handle, host(e, content));
        boundary_put(k, i, content);
    }
}

int iz_boundary_open(struct iz_engine *e)
{
    struct iz_boundaries *k = &e->boundaries;
    size_t contents = (size_t)e->model->n_units * (size_t)e->plan.tracks;
    if (!e->plan.act.boundary_slots)
        return 0;
    k->content =
        calloc((size_t)e->plan.act.boundary_slots, sizeof(*k->content));
    k->slot_of = calloc(contents, sizeof(*k->slot_of));
    return k->content && k->slot_of ? 0 : -ENOMEM;
}

void iz_boundary_close(struct iz_engine *e)
{
    free(e->boundaries.content);
    free(e->boundaries.slot_of);
}
