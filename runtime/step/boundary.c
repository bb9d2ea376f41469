/* SPDX-License-Identifier: Apache-2.0 */
/* Activations between units whose home is not where units are computed: the
 * host of a GPU (cpu_checkpointing), or a file.  Forward writes a boundary into
 * a slot, a copy takes it home before the slot is given to another, and a copy
 * brings it back ahead of the backward that recomputes from it.  As for
 * parameters, the order of uses is known and the write-after-read dependency on
 * a slot limits how far copies run ahead. */
#include "runtime/step/boundary.h"

#include <limits.h>

#include "codelets/base/die.h"
#include "runtime/engine/alloc.h"
#include "runtime/plan/unit_sizes.h"
#include "runtime/step/disk.h"
#include "runtime/step/move.h"
#include "runtime/step/submit.h"

/* A boundary of a pass is a content: unit * tracks + track.  A call is a
 * position of the pass: visit * tracks + track, with visits as in
 * iz_step_pass_unit. */

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

/* Between a slot of the GPU and a buffer of the host. */
static void boundary_copy(struct iz_engine *e, bool back, int unit,
                          starpu_data_handle_t slot, starpu_data_handle_t host)
{
    struct iz_stretch all = {
        .bytes = iz_plan_boundary_bytes(&e->plan, e->model, unit)};
    struct iz_move m = {.n = 1, .list = &all};
    struct iz_task t = iz_task_of(e, back ? IZ_FETCH : IZ_OFFLOAD,
                                  back ? IZ_ON_H2D : IZ_ON_D2H, NULL, unit);
    m.to = iz_task_add(&t, back ? slot : host, STARPU_W);
    m.from = iz_task_add(&t, back ? host : slot, STARPU_R);
    iz_move(e, &t, m);
}

/* Between a buffer of the host and the file; the token is the content's region
 * there. */
static void boundary_io(struct iz_engine *e, bool back, int unit, int track,
                        starpu_data_handle_t host, starpu_data_handle_t token)
{
    enum { BEFORE_UPDATES = 1 }; /* in the order of submission */
    struct iz_io a = {.file = e->file.boundary,
                      .offset = e->track[track].boundary_at[unit],
                      .bytes = iz_plan_boundary_room(&e->plan),
                      .priority_offset = BEFORE_UPDATES};
    iz_disk_io(e, back ? IZ_LOAD : IZ_STORE, unit, host,
               back ? STARPU_W : STARPU_R, token, a);
}

/* Between a slot and the content's home. */
static void boundary_move(struct iz_engine *e, bool back, int content,
                          const struct iz_slot *slot)
{
    int unit = content / e->boundaries.tracks;
    int track = content % e->boundaries.tracks;
    starpu_data_handle_t home = e->track[track].boundary_handle[unit];
    bool file = e->plan.act.boundary_home == IZ_HOME_NVME;
    bool passes = iz_plan_boundaries_pass(&e->plan);
    starpu_data_handle_t host =
        !passes ? slot->handle
        : file  ? iz_engine_next_staging(e, IZ_STAGING_BOUNDARY)->handle
                : home;
    if (file && back)
        boundary_io(e, back, unit, track, host, home);
    if (passes)
        boundary_copy(e, back, unit, slot->handle, host);
    if (file && !back)
        boundary_io(e, back, unit, track, host, home);
}

/* The slot whose content is read last after position `from`. */
static struct iz_slot *last_used(const struct iz_engine *e, int from)
{
    struct iz_slot *best = NULL;
    int best_use = -1;
    for (int i = 0; i < e->plan.act.boundary_slots && best_use < NEVER; i++) {
        struct iz_slot *s = &e->boundaries.slot[i];
        int use = s->unit < 0 ? NEVER : next_use(e, s->unit, from);
        if (use > best_use) {
            best = s;
            best_use = use;
        }
    }
    return best;
}

/* NULL: the content is at home. */
static struct iz_slot *slot_of(const struct iz_engine *e, int content)
{
    for (int i = 0; i < e->plan.act.boundary_slots; i++)
        if (e->boundaries.slot[i].unit == content)
            return &e->boundaries.slot[i];
    return NULL;
}

void iz_boundary_begin(struct iz_engine *e, int tracks, bool training)
{
    e->boundaries.tracks = tracks;
    e->boundaries.training = training;
    for (int i = 0; i < e->plan.act.boundary_slots; i++)
        e->boundaries.slot[i].unit = -1;
}

starpu_data_handle_t iz_boundary_written(struct iz_engine *e, int unit,
                                         int track)
{
    int at = unit * e->boundaries.tracks + track; /* content and position */
    if (!e->plan.act.boundary_slots)
        return e->track[track].boundary_handle[unit];
    struct iz_slot *s = last_used(e, at);
    if (s->unit >= 0 && next_use(e, s->unit, at) != NEVER)
        boundary_move(e, false, s->unit, s);
    s->unit = at;
    return s->handle;
}

starpu_data_handle_t iz_boundary_read(struct iz_engine *e, int unit, int track)
{
    if (!e->plan.act.boundary_slots)
        return e->track[track].boundary_handle[unit];
    const struct iz_slot *s = slot_of(e, unit * e->boundaries.tracks + track);
    if (!s)
        iz_die("%s's boundary is used before it was brought up",
               e->model->unit[unit].name);
    return s->handle;
}

/* Every call of a pass's second half reads one boundary for the last time, so
 * there is always a slot in time for the next one that is missing. */
void iz_boundary_ahead(struct iz_engine *e, int unit, int track)
{
    int units = e->model->n_units, tracks = e->boundaries.tracks;
    int from = (2 * units - 2 - unit) * tracks + track + 1;
    if (!e->plan.act.boundary_slots)
        return;
    /* The last unit with a backward reads one, but for the first unit. */
    int below = e->plan.first_trained > 1 ? e->plan.first_trained - 1 : 0;
    for (int j = from; j < (2 * units - 2 - below) * tracks; j++) {
        int reads = iz_step_pass_unit(e, j / tracks) - 1;
        int content = reads * tracks + j % tracks;
        if (slot_of(e, content))
            continue;
        struct iz_slot *s = last_used(e, from);
        if (s->unit >= 0 && next_use(e, s->unit, from) != NEVER)
            return;
        boundary_move(e, true, content, s);
        s->unit = content;
    }
}
