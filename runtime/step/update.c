/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizer: one task per chunk of a shard, where the chunk's states are,
 * and the way of the new parameters to where they are used.  See update.h. */
#include "runtime/step/update.h"

#include <stdlib.h>

#include "codelets/base/int64.h"
#include "codelets/base/mix.h"
#include "codelets/base/take.h"
#include "runtime/engine/alloc.h"
#include "runtime/plan/split.h"
#include "runtime/step/chunk_update.h"
#include "runtime/step/disk.h"
#include "runtime/step/matrices.h"
#include "runtime/step/move.h"
#include "runtime/step/submit.h"
#include "runtime/step/touched.h"

/* A chunk on its way through the optimizer. */
struct chunk_pass {
    struct iz_engine *e;
    int unit;
    struct iz_chunk *k;
    struct iz_matrix_buffer *matrices; /* of the unit; NULL: it has none */
    struct iz_chunk_update a;
    struct iz_access grad;
    starpu_data_handle_t state, param; /* param NULL: in a.in.param */
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
        .rows = iz_touched_in(e, unit),
        .whole_grads = e->plan.zero.grad.whole,
        .updated = &e->update_order.updated};
    a.step.hyper.lr = iz_lr(&e->config->lr, o->lr, e->counts.updates);
    return a;
}

#define BEFORE_PASSES 4000

static void submit_update(struct chunk_pass *u)
{
    struct iz_engine *e = u->e;
    const struct iz_chunk *k = u->k;
    const struct iz_plan_unit *p = e->unit[u->unit].plan;
    struct iz_chunk_update *a = &u->a;
    int64_t n = p->rows ? min64(p->packed, k->count) : k->count;
    int64_t lacks = p->rows ? 0 : k->lacks;
    struct iz_task t = iz_task_of(
        e, IZ_ADAM, k->home == IZ_HOME_NONE ? IZ_ON_COMPUTE : IZ_ON_HOST,
        iz_chunk_update, u->unit);
    t.priority_offset =
        iz_step_updates_first(e) ? BEFORE_PASSES : iz_step_in_order(u->unit);
    t.bytes = iz_state_traffic(&e->plan, n, lacks);
    t.moments = u->a.along ? 0 : (double)n;
    t.moment_type = a->states.type;
    iz_task_add(&t, u->grad.handle, u->grad.mode);
    iz_task_add(&t, u->state, STARPU_RW);
    /* A 16-bit copy is overwritten, an fp32 master updated; a skipped step
     * leaves both as they are, so never a plain STARPU_W. */
    if (u->param)
        a->in.param = iz_task_add(&t, u->param, STARPU_RW);
    if (!a->early)
        a->in.control = iz_task_add(&t, e->scalar.control_handle, STARPU_R);
    if (a->rows.cols)
        a->in.rows = iz_task_add(&t, iz_touched_list(e, u->unit), STARPU_R);
    if (u->a.along) {
        a->updated = NULL;
        iz_matrices_add(e, u->unit, k, u->matrices, &t);
    } else if (u->matrices) {
        if (iz_matrices_elems(e, u->unit, k))
            a->in.matrix = iz_task_add(
                &t, u->matrices->handle[iz_matrices_side(e, k)], STARPU_R);
        iz_task_add(&t, u->matrices->chunk[k - e->unit[u->unit].chunk],
                    STARPU_W);
    }
    iz_step_submit(e, &t, a, sizeof(*a));
}

/* ---- chunks ---- */

/* What is read: the piece of the accumulator with the chunk's gradient, or in
 * the last pass over matrices their updates. */
static void take_grad(struct chunk_pass *u)
{
    const struct iz_unit_memory *g = &u->e->unit[u->unit];
    int64_t i = g->plan->pieces > 1 ? u->k->first / g->plan->piece : 0;
    u->grad = (struct iz_access){g->grad_handle[0][i], STARPU_R};
    u->a.grad_first -= i * g->plan->piece;
    if (!u->a.along)
        return;
    u->grad.handle = u->matrices->handle[iz_matrices_side(u->e, u->k)];
    u->a.grad_type = IZ_F32;
    u->a.grad_first = u->a.first;
}

/* A task that copies between host and GPU for an update. */
static struct iz_task copy_task(const struct chunk_pass *u, enum iz_where where)
{
    struct iz_task t = iz_task_of(
        u->e, where == IZ_ON_H2D ? IZ_FETCH : IZ_OFFLOAD, where, NULL, u->unit);
    t.priority_offset = iz_step_in_order(u->unit);
    return t;
}

/* Copies a chunk's parameters from their home to where they begin in a buffer
 * or, `written`, back.  A pass writes those of matrices or the others, and to
 * join the halves of a master the first one reads all. */
static void copy_params(const struct chunk_pass *u, enum iz_where where,
                        bool written, starpu_data_handle_t buffer,
                        enum starpu_data_access_mode mode)
{
    const struct iz_chunk_update *a = &u->a;
    const struct iz_segment *g = a->segment;
    bool parts = written ? u->matrices != NULL : u->a.along;
    int64_t size = iz_step_param_bytes(u->e, 1), n = u->k->count;
    struct iz_task t = copy_task(u, where);
    int in = iz_task_add(&t, buffer, mode);
    int home =
        iz_task_add(&t, u->k->param_handle, written ? STARPU_RW : STARPU_R);
    struct iz_move m = {.to = written ? home : in,
                        .from = written ? in : home,
                        .skips = written && !a->early};
    struct iz_stretch *list = NULL;
    int room = 0;
    for (int64_t i = 0, end; i < n; i = end) {
        int64_t at = a->param_at + i * size;
        while (parts && g->end <= a->first + i)
            g++;
        end = parts ? min64(g->end - a->first, n) : n;
        if (parts && g->by_matrix != u->a.along)
            continue;
        list = iz_take_more(list, m.n, &room, sizeof(*list), "parts");
        list[m.n++] = (struct iz_stretch){
            written ? i * size : at, written ? at : i * size, (end - i) * size};
    }
    m.list = list;
    iz_move(u->e, &t, m);
    free(list);
}

/* Of an offloaded optimizer whose states of this chunk are on the GPU.  A
 * gradient that is on the host goes up into a buffer, behind which there is
 * room for parameters; new parameters that live on the host come down through
 * one. */
static void update_on_gpu(struct chunk_pass *u)
{
    struct iz_engine *e = u->e;
    const struct iz_unit_memory *g = &e->unit[u->unit];
    bool down = e->plan.zero.param.home != IZ_HOME_NONE;
    bool apart = e->plan.zero.grads_apart || u->a.along;
    starpu_data_handle_t staging = NULL;
    if (down || !apart)
        staging = iz_engine_next_staging(e, IZ_STAGING_SPLIT)->handle;
    if (apart && !u->a.along) {
        u->grad = (struct iz_access){g->grad_apart_handle[0], STARPU_R};
        u->a.grad_first -= iz_plan_host_elems(g->plan);
    } else {
        take_grad(u);
    }
    if (!apart) {
        int64_t size = iz_dtype_bytes(u->a.grad_type);
        struct iz_task t = copy_task(u, IZ_ON_H2D);
        struct iz_stretch all = {.bytes = u->k->count * size};
        struct iz_move m = {.n = 1, .list = &all};
        all.from = u->a.grad_first * size;
        m.from = iz_task_add(&t, u->grad.handle, STARPU_R);
        m.to = iz_task_add(&t, staging, STARPU_W);
        iz_move(e, &t, m);
        u->grad = (struct iz_access){staging, down ? STARPU_RW : STARPU_R};
        u->a.grad_first = 0;
        u->a.param_at = down ? g->plan->chunk * size : 0;
    }
    if (down)
        u->param = apart ? staging : NULL; /* behind the gradient */
    if (down && u->a.states.lower)
        copy_params(u, IZ_ON_H2D, false, staging, apart ? STARPU_W : STARPU_RW);
    submit_update(u);
    if (down)
        copy_params(u, IZ_ON_D2H, true, staging, STARPU_R);
}

/* Loads or stores what a pass over a chunk uses of what it has on disk, through
 * one staging buffer that holds [state arrays][parameters].  Where there are
 * matrices, masters and states are regions of their own: the first pass over
 * nothing but matrices leaves masters and parameters alone, and the last one
 * has no states. */
static void move_chunk(const struct chunk_pass *u, enum iz_kind kind,
                       starpu_data_handle_t staging)
{
    struct iz_engine *e = u->e;
    const struct iz_chunk *k = u->k;
    const struct iz_chunk_update *a = &u->a;
    bool in = iz_matrices_elems(e, u->unit, k), load = kind == IZ_LOAD;
    int64_t masters = in ? a->states.at[0] : 0;
    enum starpu_data_access_mode mode = load ? STARPU_W : STARPU_R;
    struct iz_io io = {.file = e->file.state,
                       .offset = k->state_at,
                       .bytes = k->state_bytes,
                       .first = a->first,
                       .count = k->count,
                       .priority_offset = IZ_BY_SUBMISSION};
    if (e->plan.zero.state.home == IZ_HOME_NVME) {
        io.arrays = in ? 0 : iz_state_list(&a->states, io.array);
        if (masters && !a->still) {
            io.bytes = masters;
            iz_disk_io(e, kind, u->unit, staging, mode, k->state_handle, io);
            mode = load ? STARPU_RW : STARPU_R;
        }
        io.at = masters;
        io.offset = k->state_at + masters;
        io.bytes = k->state_bytes - masters;
        if (!u->a.along) {
            iz_disk_io(e, kind, u->unit, staging, mode, k->state_handle, io);
            mode = load ? STARPU_RW : STARPU_R;
        }
        io.at = k->state_bytes;
    }
    if (e->plan.zero.param.home != IZ_HOME_NVME || a->still)
        return;
    io.file = e->file.param;
    io.offset = k->param_at;
    io.bytes = k->param_bytes;
    io.array[0] = (struct iz_state_bytes){0, iz_step_param_bytes(e, 1), 1};
    io.arrays = 1;
    iz_disk_io(e, kind, u->unit, staging, mode, k->param_handle, io);
}

/* On the host, or where everything is.  With anything on disk: load, update,
 * store.  A 16-bit copy is loaded too: a skipped step must store what it found.
 * Parameters that live on the GPU go up through a buffer, and come down into it
 * before if they are the upper halves of their masters. */
static void update_chunk(struct chunk_pass *u)
{
    struct iz_engine *e = u->e;
    bool state_disk = e->plan.zero.state.home == IZ_HOME_NVME;
    bool param_disk = e->plan.zero.param.home == IZ_HOME_NVME;
    bool up = iz_plan_params_to_gpu(&e->plan);
    starpu_data_handle_t staging = NULL;
    take_grad(u);
    u->a.still = (state_disk || param_disk) && !u->a.along &&
                 iz_matrices_elems(e, u->unit, u->k) == u->k->count;
    if (state_disk || param_disk) {
        staging = iz_engine_next_staging(e, IZ_STAGING_STATE)->handle;
        move_chunk(u, IZ_LOAD, staging);
    }
    if (state_disk)
        u->state = staging;
    if (param_disk && state_disk) { /* parameters behind the states */
        u->a.in.param = 1;
        u->a.param_at = u->k->state_bytes;
        u->param = NULL;
    } else if (param_disk) {
        u->param = staging;
    } else if (up) {
        u->param = iz_engine_next_staging(e, IZ_STAGING_UPDATE)->handle;
    }
    if (up && u->a.states.lower)
        copy_params(u, IZ_ON_D2H, false, u->param, STARPU_W);
    submit_update(u);
    if (staging)
        move_chunk(u, IZ_STORE, staging);
    if (up)
        copy_params(u, IZ_ON_H2D, true, u->param, STARPU_R);
}

/* All chunks or, along, those with matrices: each by the side that has its
 * states, of an offloaded optimizer. */
static void update_chunks(struct iz_engine *e, int unit,
                          struct iz_matrix_buffer *matrices, bool along)
{
    struct iz_unit_memory *g = &e->unit[unit];
    for (struct iz_chunk *k = g->chunk; k < g->chunk + g->plan->chunks; k++) {
        if (along && !iz_matrices_elems(e, unit, k))
            continue;
        struct chunk_pass u = {.e = e,
                               .unit = unit,
                               .k = k,
                               .matrices = matrices,
                               .a = update_arg(e, unit, k),
                               .state = k->state_handle,
                               .param = k->param_handle};
        u.a.along = along;
        if (!iz_step_on_disk(e) && k->home != e->plan.zero.state.home)
            update_on_gpu(&u);
        else
            update_chunk(&u);
    }
}

void iz_update_unit(struct iz_engine *e, int unit)
{
    struct iz_unit_memory *g = &e->unit[unit];
    if (!g->plan->n)
        return;
    struct iz_matrix_buffer *matrices = iz_matrices_begin(e, unit);
    update_chunks(e, unit, matrices, false);
    if (!matrices) {
        g->version++;
        return;
    }
    iz_matrices_update(e, unit, matrices);
    iz_update_end(e);
    e->matrices.held = matrices;
    e->matrices.held_unit = unit;
    if (e->plan.ranks == 1)
        iz_update_end(e);
}

void iz_update_end(struct iz_engine *e)
{
    struct iz_matrix_buffer *matrices = e->matrices.held;
    int unit = e->matrices.held_unit;
    if (!matrices)
        return;
    iz_matrices_back(e, unit, matrices);
    update_chunks(e, unit, matrices, true);
    e->unit[unit].version++;
    e->matrices.held = NULL;
}

bool iz_update_held(const struct iz_engine *e, int unit)
{
    return e->matrices.held && e->matrices.held_unit == unit;
}
