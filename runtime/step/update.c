/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizer: one task per chunk of a shard, where the chunk's states are,
 * and the way of the new parameters to where they are used.  See update.h. */
#include "runtime/step/update.h"

#include <stdlib.h>

#include "codelets/base/int64.h"
#include "codelets/base/mix.h"
#include "codelets/base/take.h"
#include "runtime/engine/alloc.h"
#include "runtime/plan/matrices.h"
#include "runtime/plan/split.h"
#include "runtime/step/chunk_update.h"
#include "runtime/step/disk.h"
#include "runtime/step/matrices.h"
#include "runtime/step/move.h"
#include "runtime/step/submit.h"
#include "runtime/step/touched.h"

/* The buffers of a unit's matrices, and the pass over its chunks. */
struct passes {
    struct iz_matrix_buffer *matrices; /* NULL: it has none */
    bool along;
};

static struct iz_chunk_update update_arg(struct iz_engine *e, int unit,
                                         const struct iz_chunk *k)
{
    const struct iz_hyper *o = &e->config->optimizer;
    const struct iz_plan_unit *p = e->unit[unit].plan;
    int64_t tasks = (int64_t)e->plan.micro_batches * e->plan.slices;
    bool shard_of_full = e->plan.zero.grad.whole && !e->plan.zero.state.whole;
    struct iz_chunk_update a = {
        .step = {.hyper = *o,
                 .t = e->counts.updates + 1,
                 .grad_scale = (float)(1.0 / (double)(tasks * e->plan.ranks))},
        .n = k->count,
        .grad_first =
            p->rows ? 0
                    : k->first + (shard_of_full ? p->shard * e->plan.rank : 0),
        .plan = &e->plan,
        .unit = p,
        .segment = e->unit[unit].segment,
        .first = iz_chunk_first(e, unit, k),
        .grad_type = e->plan.grad_type,
        .param_type = e->plan.param_type,
        .early = e->plan.zero.early,
        .states = iz_chunk_states(e, unit, k),
        .key = iz_mix(iz_mix_text(iz_mix(e->config->run.seed), "moments") +
                      (uint64_t)unit),
        .in = {.param = 2, .control = 3},
        .rows = iz_touched_in(e, unit),
        .whole_grads = e->plan.zero.grad.whole,
        .updated = &e->update_order.updated};
    a.step.hyper.lr = iz_lr(&e->config->lr, o->lr, e->counts.updates);
    return a;
}

#define BEFORE_PASSES 4000

/* param NULL: in the buffer of one of the others. */
static void submit_update(struct iz_engine *e, int unit,
                          const struct iz_chunk *k, struct iz_chunk_update *a,
                          struct iz_access grad, starpu_data_handle_t state,
                          starpu_data_handle_t param, const struct passes *pass)
{
    const struct iz_plan_unit *p = e->unit[unit].plan;
    int64_t n = p->rows ? min64(p->packed, k->count) : k->count;
    int64_t lacks = p->rows ? 0 : k->lacks;
    struct iz_task t = iz_task_of(
        e, IZ_ADAM, k->home == IZ_HOME_NONE ? IZ_ON_COMPUTE : IZ_ON_HOST,
        pass->along    ? iz_chunk_update_along
        : a->rows.cols ? iz_chunk_update_rows
                       : iz_chunk_update_all,
        unit);
    t.urgency =
        iz_step_updates_first(e) ? BEFORE_PASSES : iz_step_in_order(unit);
    t.bytes = iz_state_traffic(&e->plan, n, lacks);
    t.moments = pass->along ? 0 : (double)n;
    t.moment_type = a->states.type;
    iz_task_add(&t, grad.handle, grad.mode);
    iz_task_add(&t, state, STARPU_RW);
    /* A 16-bit copy is overwritten, an fp32 master updated; a skipped step
     * leaves both as they are, so never a plain STARPU_W. */
    iz_task_add(&t, param, STARPU_RW);
    if (!a->early)
        iz_task_add(&t, e->scalar.control_handle, STARPU_R);
    if (a->rows.cols)
        a->in.rows = iz_task_add(&t, iz_touched_list(e, unit), STARPU_R);
    if (pass->along) {
        iz_matrices_add(e, unit, k, pass->matrices, &t);
    } else if (pass->matrices) {
        int64_t i = k - e->unit[unit].chunk;
        bool in = iz_matrices_in(e, unit, k);
        a->in.matrix =
            in ? iz_task_add(&t, pass->matrices->handle[iz_matrices_side(e, k)],
                             STARPU_R)
               : 0;
        iz_task_add(&t, pass->matrices->chunk[i], STARPU_W);
        if (in)
            a->updated = NULL;
    }
    iz_step_submit(e, &t, a, sizeof(*a));
}

/* ---- chunks ---- */

/* The piece of the accumulator with a chunk's gradient, which is read; a: where
 * it begins there. */
static struct iz_access update_grad(const struct iz_engine *e, int unit,
                                    const struct iz_chunk *k,
                                    struct iz_chunk_update *a)
{
    const struct iz_unit_memory *g = &e->unit[unit];
    int64_t i = g->plan->pieces > 1 ? k->first / g->plan->piece : 0;
    a->grad_first -= i * g->plan->piece;
    return (struct iz_access){g->grad_handle[0][i], STARPU_R};
}

/* The last pass over matrices: what it reads in place of a gradient. */
static struct iz_access updates_of(const struct iz_engine *e,
                                   const struct iz_chunk *k,
                                   const struct passes *pass,
                                   struct iz_chunk_update *a)
{
    a->grad_type = IZ_F32;
    a->grad_first = a->first;
    return (struct iz_access){pass->matrices->handle[iz_matrices_side(e, k)],
                              STARPU_R};
}

/* A task that copies between host and GPU for an update. */
static struct iz_task copy_task(const struct iz_engine *e, enum iz_where where,
                                int unit)
{
    struct iz_task t = iz_task_of(e, where == IZ_ON_H2D ? IZ_FETCH : IZ_OFFLOAD,
                                  where, NULL, unit);
    t.urgency = iz_step_in_order(unit);
    return t;
}

/* Copies a chunk's parameters from their home to where they begin in a buffer
 * or, `written`, back.  A pass writes those of matrices or the others, and to
 * join the halves of a master the first one reads all. */
static void copy_params(struct iz_engine *e, int unit, const struct iz_chunk *k,
                        const struct passes *pass,
                        const struct iz_chunk_update *a, enum iz_where where,
                        bool written, struct iz_access buffer)
{
    const struct iz_segment *g = a->segment;
    bool parts = written ? pass->matrices != NULL : pass->along;
    int64_t size = iz_step_param_bytes(e, 1);
    struct iz_task t = copy_task(e, where, unit);
    int in = iz_task_add(&t, buffer.handle, buffer.mode);
    int home = iz_task_add(&t, k->param_handle, written ? STARPU_RW : STARPU_R);
    struct iz_move m = {.to = written ? home : in,
                        .from = written ? in : home,
                        .skips = written && !a->early};
    struct iz_stretch *list = NULL;
    int room = 0;
    for (int64_t i = 0, end; i < k->count; i = end) {
        int64_t at = a->param_at + i * size;
        while (parts && g->end <= a->first + i)
            g++;
        end = parts ? min64(g->end - a->first, k->count) : k->count;
        if (parts && g->by_matrix != pass->along)
            continue;
        list = iz_take_more(list, m.n, &room, sizeof(*list), "parts");
        list[m.n++] = (struct iz_stretch){
            written ? i * size : at, written ? at : i * size, (end - i) * size};
    }
    m.list = list;
    iz_move(e, &t, m);
    free(list);
}

/* A chunk of an offloaded optimizer whose states are on the GPU.  A gradient
 * that is on the host goes up into a buffer, behind which there is room for
 * parameters; new parameters that live on the host come down through one. */
static void update_on_gpu(struct iz_engine *e, int unit,
                          const struct iz_chunk *k, const struct passes *pass)
{
    const struct iz_unit_memory *g = &e->unit[unit];
    bool down = e->plan.zero.param.home != IZ_HOME_NONE;
    bool apart = e->plan.zero.grads_apart || pass->along;
    starpu_data_handle_t staging = NULL;
    struct iz_chunk_update a = update_arg(e, unit, k);
    int64_t size = iz_dtype_bytes(a.grad_type);
    struct iz_access grad = {g->grad_apart_handle[0], STARPU_R};
    if (down || !apart)
        staging = iz_engine_next_staging(e, IZ_STAGING_SPLIT)->handle;
    if (pass->along) {
        grad = updates_of(e, k, pass, &a);
    } else if (apart) {
        a.grad_first -= iz_plan_host_elems(g->plan);
    } else {
        struct iz_task t = copy_task(e, IZ_ON_H2D, unit);
        struct iz_stretch all = {.bytes = k->count * size};
        struct iz_move m = {.n = 1, .list = &all};
        m.from = iz_task_add(&t, update_grad(e, unit, k, &a).handle, STARPU_R);
        m.to = iz_task_add(&t, staging, STARPU_W);
        all.from = a.grad_first * size;
        iz_move(e, &t, m);
        grad = (struct iz_access){staging, down ? STARPU_RW : STARPU_R};
        a.grad_first = 0;
    }
    if (down && !apart) { /* parameters behind the gradient */
        a.in.param = 0;
        a.param_at = g->plan->chunk * size;
        a.in.control = 2;
    }
    if (down && a.states.lower)
        copy_params(e, unit, k, pass, &a, IZ_ON_H2D, false,
                    (struct iz_access){staging, apart ? STARPU_W : STARPU_RW});
    submit_update(e, unit, k, &a, grad, k->state_handle,
                  !down   ? k->param_handle
                  : apart ? staging
                          : NULL,
                  pass);
    if (down)
        copy_params(e, unit, k, pass, &a, IZ_ON_D2H, true,
                    (struct iz_access){staging, STARPU_R});
}

/* Loads or stores what a pass over a chunk uses of what it has on disk, through
 * one staging buffer that holds [state arrays][parameters].  Where there are
 * matrices, masters and states are regions of their own: the first pass over
 * nothing but matrices leaves masters and parameters alone, and the last one
 * has no states. */
static void move_chunk(struct iz_engine *e, int unit, struct iz_chunk *k,
                       enum iz_kind kind, starpu_data_handle_t staging,
                       const struct iz_chunk_update *a, bool along)
{
    bool in = iz_matrices_in(e, unit, k);
    int64_t masters = in ? a->states.at[0] : 0;
    const struct iz_plan_unit *p = e->unit[unit].plan;
    bool load = kind == IZ_LOAD;
    enum starpu_data_access_mode mode = load ? STARPU_W : STARPU_R;
    struct iz_io io = {.file = e->file.state,
                       .offset = k->state_at,
                       .bytes = k->state_bytes,
                       .first = a->first,
                       .count = k->count,
                       .urgency = IZ_BY_SUBMISSION};
    if (e->plan.zero.state.home == IZ_HOME_NVME) {
        io.arrays = in ? 0 : iz_state_list(&a->states, io.array);
        if (masters && !a->still) {
            io.bytes = masters;
            iz_disk_io(e, kind, unit, staging, mode, k->state_handle, io);
            mode = load ? STARPU_RW : STARPU_R;
        }
        io.at = masters;
        io.offset = k->state_at + masters;
        io.bytes = k->state_bytes - masters;
        if (!along) {
            iz_disk_io(e, kind, unit, staging, mode, k->state_handle, io);
            mode = load ? STARPU_RW : STARPU_R;
        }
        io.at = k->state_bytes;
    }
    if (e->plan.zero.param.home != IZ_HOME_NVME || a->still)
        return;
    io.file = e->file.param;
    io.offset = k->param_at;
    io.bytes = iz_step_param_bytes(e, p->chunk);
    io.array[0] = (struct iz_state_bytes){0, iz_step_param_bytes(e, 1), 1};
    io.arrays = 1;
    iz_disk_io(e, kind, unit, staging, mode, k->param_handle, io);
}

/* On the host, or where everything is.  With anything on disk: load, update,
 * store.  A 16-bit copy is loaded too: a skipped step must store what it found.
 * Parameters that live on the GPU go up through a buffer, and come down into it
 * before if they are the upper halves of their masters. */
static void update_chunk(struct iz_engine *e, int unit, struct iz_chunk *k,
                         const struct passes *pass)
{
    const struct iz_plan *p = &e->plan;
    struct iz_chunk_update a = update_arg(e, unit, k);
    struct iz_access grad =
        pass->along ? updates_of(e, k, pass, &a) : update_grad(e, unit, k, &a);
    starpu_data_handle_t state = k->state_handle, param = k->param_handle;
    starpu_data_handle_t staging = NULL;
    bool state_disk = p->zero.state.home == IZ_HOME_NVME;
    bool param_disk = p->zero.param.home == IZ_HOME_NVME;
    a.still =
        iz_step_on_disk(e) && !pass->along && iz_matrices_alone(e, unit, k);
    if (state_disk || param_disk) {
        staging = iz_engine_next_staging(e, IZ_STAGING_STATE)->handle;
        move_chunk(e, unit, k, IZ_LOAD, staging, &a, pass->along);
    }
    if (state_disk)
        state = staging;
    if (param_disk && state_disk) { /* parameters behind the states */
        a.in.param = 1;
        a.param_at = k->state_bytes;
        a.in.control = 2;
        param = NULL;
    } else if (param_disk) {
        param = staging;
    } else if (iz_plan_params_to_gpu(p)) {
        param = iz_engine_next_staging(e, IZ_STAGING_UPDATE)->handle;
    }
    if (iz_plan_params_to_gpu(p) && a.states.lower)
        copy_params(e, unit, k, pass, &a, IZ_ON_D2H, false,
                    (struct iz_access){param, STARPU_W});
    submit_update(e, unit, k, &a, grad, state, param, pass);
    if (staging)
        move_chunk(e, unit, k, IZ_STORE, staging, &a, pass->along);
    if (iz_plan_params_to_gpu(p))
        copy_params(e, unit, k, pass, &a, IZ_ON_H2D, true,
                    (struct iz_access){param, STARPU_R});
}

/* By the side that has its states, of an offloaded optimizer. */
static void update_by_side(struct iz_engine *e, int unit, struct iz_chunk *k,
                           const struct passes *pass)
{
    if (!iz_step_on_disk(e) && k->home != e->plan.zero.state.home)
        update_on_gpu(e, unit, k, pass);
    else
        update_chunk(e, unit, k, pass);
}

void iz_update_unit(struct iz_engine *e, int unit)
{
    struct iz_unit_memory *g = &e->unit[unit];
    if (!g->plan->n)
        return;
    struct passes pass = {.matrices = iz_matrices_begin(e, unit)};
    for (int i = 0; i < g->plan->chunks; i++)
        update_by_side(e, unit, &g->chunk[i], &pass);
    if (!pass.matrices) {
        g->version++;
        return;
    }
    iz_matrices_update(e, unit, pass.matrices);
    iz_update_end(e);
    e->matrices.held = pass.matrices;
    e->matrices.held_unit = unit;
    if (e->plan.ranks == 1)
        iz_update_end(e);
}

void iz_update_end(struct iz_engine *e)
{
    struct passes pass = {.matrices = e->matrices.held, .along = true};
    int unit = e->matrices.held_unit;
    struct iz_unit_memory *g = &e->unit[unit];
    if (!pass.matrices)
        return;
    iz_matrices_back(e, unit, pass.matrices);
    for (int i = 0; i < g->plan->chunks; i++)
        if (iz_matrices_in(e, unit, &g->chunk[i]))
            update_by_side(e, unit, &g->chunk[i], &pass);
    g->version++;
    e->matrices.held = NULL;
}

bool iz_update_held(const struct iz_engine *e, int unit)
{
    return e->matrices.held && e->matrices.held_unit == unit;
}
