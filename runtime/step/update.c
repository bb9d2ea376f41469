/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizer: one task per chunk of a shard, where the chunk's states are,
 * and the way of the new parameters to where they are used.  See zero.h. */
#include "runtime/step/update.h"

#include <stdatomic.h>

#include "codelets/base/mix.h"
#include "runtime/engine/access.h"
#include "runtime/engine/buffers.h"
#include "runtime/engine/schedule.h"
#include "runtime/step/disk.h"
#include "runtime/step/rows_list.h"
#include "runtime/step/zero.h"

struct update_arg {
    struct iz_step step; /* lr, t and grad_scale come from the control, decay
                            from the segments */
    int64_t n, grad_first;
    const struct iz_segment *segment; /* of the group; of its elements, this */
    int64_t first;                    /* one is the chunk's first */
    enum iz_dtype grad_type, param_type;
    bool early; /* the scalars are those above; the control is not read */
    struct iz_state_layout states;
    uint64_t key;     /* of their rounding: seed and group */
    int param_buf;    /* the buffer with the parameters */
    int64_t param_at; /* its byte at which they begin */
    int control_buf;
    struct iz_touched_in rows;
    int at_rows;      /* buffer that lists the touched rows, 0: dense */
    bool whole_grads; /* those of all ranks' touched rows */
    _Atomic int64_t *updated;
};

/* Where the arrays of a chunk are. */
struct chunk_arrays {
    float *master;
    char *states;
    const char *grad;
    char *param; /* in another type than the master; NULL: there is none */
};

/* Elements from i on of the chunk, with their gradient at `grad`. */
static struct iz_update update_from(const struct update_arg *a,
                                    const struct chunk_arrays *p,
                                    const struct iz_step *step, int64_t i,
                                    const char *grad)
{
    const struct iz_state_layout *l = &a->states;
    struct iz_update u = {.optimizer = l->optimizer,
                          .type = l->type,
                          .g_type = a->grad_type,
                          .out_type = a->param_type,
                          .at = i,
                          .room = l->room,
                          .p = p->master + i,
                          .g = grad,
                          .key = iz_mix(a->key + (uint64_t)step->t * IZ_GOLDEN),
                          .first = a->first + i};

    for (int s = 0; s < l->states; s++)
        u.state[s] = p->states + l->at[s];
    if (p->param)
        u.out = p->param + i * iz_dtype_bytes(a->param_type);
    return u;
}

static struct iz_alike segment_span(const struct iz_step *step,
                                    const struct iz_segment *s)
{
    struct iz_step own = *step;

    own.hyper.lr *= s->lr_scale;
    own.hyper.weight_decay = s->weight_decay;
    return iz_alike_of(&own);
}

/* How the elements from i on of the chunk are updated, as far as one call takes
 * them: decay and rate change where one tensor ends and the next one begins.
 * Returns the number of spans.  *n: elements of their whole blocks. */
static int find_spans(const struct update_arg *a, const struct iz_step *step,
                      int64_t i, struct iz_alike *span, int64_t *n)
{
    const struct iz_segment *s = a->segment;
    int64_t end = i;
    int k = 0;

    for (; k < IZ_ALIKE_MAX && end < a->n; k++) {
        while (s->end <= a->first + end)
            s++;
        end = s->end - a->first < a->n ? s->end - a->first : a->n;
        span[k] = segment_span(step, s);
        span[k].end = end - i;
    }
    if (end < a->n)
        end -= end % IZ_MOMENT_BLOCK;
    *n = end - i;
    return k;
}

/* The bits of an element do not depend on where a call begins. */
static void update_dense(struct iz_exec *x, const struct update_arg *a,
                         const struct iz_step *step,
                         const struct chunk_arrays *p)
{
    int64_t grad_size = iz_dtype_bytes(a->grad_type);
    struct iz_alike span[IZ_ALIKE_MAX];
    struct iz_update u;

    for (int64_t i = 0; i < a->n; i += u.n) {
        u = update_from(a, p, step, i, p->grad + i * grad_size);
        u.span = span;
        u.spans = find_spans(a, step, i, span, &u.n);
        iz_buffer_update(x, &u);
    }
}

/* Touched rows alone.  A sparse table is one segment.  Its gradients are
 * packed. */
static void update_rows(struct iz_exec *x, const struct update_arg *a,
                        const struct iz_step *step,
                        const struct chunk_arrays *p, const void *list)
{
    int64_t grad_size = iz_dtype_bytes(a->grad_type);
    struct iz_touched r = iz_touched_get(&a->rows, list);
    struct iz_touched_piece t = {0};
    struct iz_alike span = segment_span(step, a->segment);
    int64_t packed =
        a->whole_grads ? 0 : iz_touched_first(&a->rows, &r, a->rows.rank);

    while (iz_touched_next(&r, a->first, a->first + a->n, &t)) {
        struct iz_update u =
            update_from(a, p, step, t.flat - a->first,
                        p->grad + (t.packed - packed) * grad_size);

        u.n = t.n;
        u.span = &span;
        u.spans = 1;
        iz_buffer_update(x, &u);
    }
}

/* buf: gradient, state, parameters (unless staged with one of those), control,
 * list of touched rows. */
static void run_update(struct iz_exec *x, void **buf, const void *arg)
{
    const struct update_arg *a = arg;
    struct iz_step step = a->step;
    if (!a->early) {
        const struct iz_control *c = buf[a->control_buf];
        if (c->skip)
            return;
        step.hyper.lr = c->lr;
        step.t = c->updates;
        step.grad_scale = (float)c->grad_scale;
    }
    char *param = (char *)buf[a->param_buf] + a->param_at;
    struct chunk_arrays p = {
        .master = a->states.master ? buf[1] : (float *)param,
        .states = buf[1],
        .grad = (char *)buf[0] + a->grad_first * iz_dtype_bytes(a->grad_type),
        .param = a->states.master ? param : NULL};
    if (a->at_rows)
        update_rows(x, a, &step, &p, buf[a->at_rows]);
    else
        update_dense(x, a, &step, &p);
    atomic_fetch_add(a->updated, 1);
}

static struct update_arg update_arg(struct iz_engine *e, int group,
                                    const struct iz_chunk *k)
{
    const struct iz_hyper *o = &e->config->optimizer;
    const struct iz_plan_group *p = e->group[group].plan;
    int64_t tasks = (int64_t)e->plan.micro_batches * e->plan.slices;
    bool shard_of_full = e->plan.zero.grads_full && !e->plan.zero.states_full;
    struct update_arg a = {
        .step = {.hyper = *o,
                 .t = e->updates + 1,
                 .grad_scale = (float)(1.0 / (double)(tasks * e->plan.ranks))},
        .n = k->count,
        .grad_first =
            p->rows ? 0
                    : k->first + (shard_of_full ? p->shard * e->plan.rank : 0),
        .segment = e->group[group].segment,
        .first = iz_chunk_first(e, group, k),
        .grad_type = e->plan.grad_type,
        .param_type = e->plan.param_type,
        .early = e->plan.early,
        .states = iz_chunk_states(e, group, k),
        .key = iz_mix(iz_mix_text(iz_mix(e->config->run.seed), "moments") +
                      (uint64_t)group),
        .param_buf = 2,
        .control_buf = 3,
        .rows = iz_touched_in(e, group),
        .whole_grads = e->plan.zero.grads_full,
        .updated = &e->update_order.updated};

    a.step.hyper.lr = iz_lr(&e->config->lr, o->lr, e->updates);
    return a;
}

/* Of n elements of a group those that are updated. */
static int64_t touched_at_most(const struct iz_engine *e, int group, int64_t n)
{
    const struct iz_plan_group *p = e->group[group].plan;

    return p->rows && p->packed < n ? p->packed : n;
}

/* The parameters are in buffer i, `at` bytes in, which the task has anyway. */
static void stage_params(struct update_arg *a, int i, int64_t at)
{
    a->param_buf = i;
    a->param_at = at;
    a->control_buf = 2;
}

/* What adam works on; param NULL: staged with one of the others. */
struct update_data {
    struct iz_access grad;
    starpu_data_handle_t state, param;
};

#define BEFORE_PASSES 4000

static void submit_update(struct iz_engine *e, int group,
                          const struct iz_chunk *k, struct update_arg *a,
                          const struct update_data *on)
{
    int64_t n = touched_at_most(e, group, k->count);
    struct iz_task t = {
        .kind = IZ_ADAM,
        .where = k->home == IZ_HOME_NONE ? IZ_ON_COMPUTE : IZ_ON_HOST,
        .run = run_update,
        .arg = a,
        .arg_bytes = sizeof(*a),
        .urgency = iz_updates_first(e) ? BEFORE_PASSES : iz_in_order(group),
        .bytes = iz_state_traffic(&e->plan, n),
        .unit = group,
        .step = (int)e->step};
    struct iz_access *d = t.data;
    *d++ = on->grad;
    *d++ = (struct iz_access){on->state, STARPU_RW};
    /* A 16-bit copy is overwritten, an fp32 master updated; a skipped step
     * leaves both as they are, so never a plain STARPU_W. */
    if (on->param)
        *d++ = (struct iz_access){on->param, STARPU_RW};
    if (!a->early)
        *d++ = (struct iz_access){e->scalar.control_handle, STARPU_R};
    if (a->rows.cols) {
        a->at_rows = (int)(d - t.data);
        *d++ = (struct iz_access){iz_touched_list(e, group), STARPU_R};
    }
    iz_submit(e->graph, &t);
}

/* ---- between host and GPU ---- */

struct copy_arg {
    int64_t from, bytes;
    bool always; /* in a step that is skipped, too: the control is not read */
};

/* buf: from, to, control. */
static void step_update_run_copy(struct iz_exec *x, void **buf, const void *arg)
{
    const struct copy_arg *a = arg;
    if (a->always || !((const struct iz_control *)buf[2])->skip)
        iz_buffer_copy(x, buf[1], (char *)buf[0] + a->from, a->bytes);
}

static void submit_copy(struct iz_engine *e, int group, enum iz_where where,
                        starpu_data_handle_t from, struct iz_access to,
                        const struct copy_arg *a)
{
    bool up = where == IZ_ON_UP;
    iz_submit(
        e->graph,
        &(struct iz_task){
            .kind = up ? IZ_FETCH : IZ_OFFLOAD,
            .where = where,
            .run = step_update_run_copy,
            .arg = a,
            .arg_bytes = sizeof(*a),
            .data = {{from, STARPU_R},
                     to,
                     {a->always ? NULL : e->scalar.control_handle, STARPU_R}},
            .urgency = iz_in_order(group),
            .bytes = (double)a->bytes,
            .unit = group,
            .step = (int)e->step});
    *(up ? &e->counts.up_bytes : &e->counts.down_bytes) += a->bytes;
}

/* Parameters that live on the GPU, updated by the host. */
static void submit_up(struct iz_engine *e, int group, const struct iz_chunk *k,
                      starpu_data_handle_t stage)
{
    struct copy_arg a = {.bytes = iz_param_bytes(e, k->count),
                         .always = e->plan.early};
    submit_copy(e, group, IZ_ON_UP, stage,
                (struct iz_access){k->param_handle, STARPU_RW}, &a);
}

/* What adam writes the new parameters of a chunk to. */
static starpu_data_handle_t param_out(struct iz_engine *e,
                                      const struct iz_chunk *k)
{
    if (!e->plan.zero.params_up)
        return k->param_handle;
    return iz_next_staging(e, IZ_STAGING_UPDATE)->handle;
}

/* ---- chunks ---- */

static struct iz_access host_grad(const struct iz_engine *e, int group)
{
    return (struct iz_access){e->group[group].grad_handle[0], STARPU_R};
}

static starpu_data_handle_t split_stage(struct iz_engine *e)
{
    return iz_next_staging(e, IZ_STAGING_SPLIT)->handle;
}

/* A chunk of an offloaded optimizer whose states and gradient are on the GPU:
 * new parameters that live on the host come down through a buffer. */
static void update_apart(struct iz_engine *e, int group,
                         const struct iz_chunk *k)
{
    const struct iz_group *g = &e->group[group];
    bool down = e->plan.zero.param_home != IZ_HOME_NONE;
    starpu_data_handle_t param = down ? split_stage(e) : k->param_handle;
    struct update_arg a = update_arg(e, group, k);
    struct copy_arg copy = {.bytes = iz_param_bytes(e, k->count),
                            .always = a.early};
    a.grad_first -= iz_plan_host_elems(g->plan);
    submit_update(
        e, group, k, &a,
        &(struct update_data){.grad = {g->grad_apart_handle[0], STARPU_R},
                              .state = k->state_handle,
                              .param = param});
    if (down)
        submit_copy(e, group, IZ_ON_DOWN, param,
                    (struct iz_access){k->param_handle, STARPU_RW}, &copy);
}

/* The same where the gradient is on the host: it goes up into a buffer, behind
 * which there is room for those parameters. */
static void update_on_gpu(struct iz_engine *e, int group,
                          const struct iz_chunk *k)
{
    bool down = e->plan.zero.param_home != IZ_HOME_NONE;
    starpu_data_handle_t stage = split_stage(e);
    struct update_arg a = update_arg(e, group, k);
    int64_t size = iz_dtype_bytes(a.grad_type);
    struct copy_arg grad = {
        .from = a.grad_first * size, .bytes = k->count * size, .always = true};
    struct copy_arg param = {.from = e->group[group].plan->chunk * size,
                             .bytes = iz_param_bytes(e, k->count),
                             .always = a.early};
    submit_copy(e, group, IZ_ON_UP, e->group[group].grad_handle[0],
                (struct iz_access){stage, STARPU_W}, &grad);
    a.grad_first = 0;
    if (down)
        stage_params(&a, 0, param.from);
    submit_update(
        e, group, k, &a,
        &(struct update_data){.grad = {stage, down ? STARPU_RW : STARPU_R},
                              .state = k->state_handle,
                              .param = down ? NULL : k->param_handle});
    if (down)
        submit_copy(e, group, IZ_ON_DOWN, stage,
                    (struct iz_access){k->param_handle, STARPU_RW}, &param);
}

/* A chunk with anything on disk: load, update, store through one staging buffer
 * that holds [state arrays][parameters]. */
static void update_on_disk(struct iz_engine *e, int group, struct iz_chunk *k)
{
    struct iz_group *g = &e->group[group];
    const struct iz_plan *p = &e->plan;
    struct update_arg a = update_arg(e, group, k);
    struct iz_staging *s = iz_next_staging(e, IZ_STAGING_STATE);
    bool state_disk = p->zero.state_home == IZ_HOME_NVME;
    bool param_disk = p->zero.param_home == IZ_HOME_NVME;
    int64_t state_bytes = state_disk ? iz_plan_chunk_bytes(p, g->plan) : 0;
    struct iz_io state = {.file = e->state_file,
                          .offset = k->state_at,
                          .bytes = state_bytes,
                          .first = iz_chunk_first(e, group, k),
                          .count = k->count,
                          .urgency = IZ_BY_SUBMISSION};
    struct iz_io param = {.file = e->param_file,
                          .offset = k->param_at,
                          .bytes = iz_param_bytes(e, g->plan->chunk),
                          .at = state_bytes,
                          .first = state.first,
                          .count = k->count,
                          .array = {{0, iz_param_bytes(e, 1), 1}},
                          .arrays = 1,
                          .urgency = IZ_BY_SUBMISSION};
    state.arrays = iz_state_list(&a.states, state.array);
    /* A 16-bit copy is loaded too: a skipped step must store what it found. */
    if (state_disk)
        iz_disk_io(e, IZ_LOAD, group, s->handle, STARPU_W, k->state_handle,
                   state);
    if (param_disk)
        iz_disk_io(e, IZ_LOAD, group, s->handle,
                   state_disk ? STARPU_RW : STARPU_W, k->param_handle, param);
    starpu_data_handle_t out = param_disk ? NULL : param_out(e, k);
    struct update_data on = {host_grad(e, group), s->handle, out};
    if (param_disk && state_disk)
        stage_params(&a, 1, state_bytes);
    else if (param_disk)
        on = (struct update_data){on.grad, k->state_handle, s->handle};
    submit_update(e, group, k, &a, &on);
    if (state_disk)
        iz_disk_io(e, IZ_STORE, group, s->handle, STARPU_R, k->state_handle,
                   state);
    if (param_disk)
        iz_disk_io(e, IZ_STORE, group, s->handle, STARPU_R, k->param_handle,
                   param);
    if (p->zero.params_up)
        submit_up(e, group, k, out);
}

void iz_update_group(struct iz_engine *e, int group)
{
    struct iz_group *g = &e->group[group];
    bool disk = iz_on_disk(e);
    if (!g->plan->n)
        return;
    for (int i = 0; i < g->plan->chunks; i++) {
        struct iz_chunk *k = &g->chunk[i];
        if (disk) {
            update_on_disk(e, group, k);
            continue;
        }
        if (k->home != e->plan.zero.state_home) {
            (e->plan.zero.grads_apart ? update_apart : update_on_gpu)(e, group,
                                                                      k);
            continue;
        }
        struct update_arg a = update_arg(e, group, k);
        starpu_data_handle_t out = param_out(e, k);
        submit_update(
            e, group, k, &a,
            &(struct update_data){host_grad(e, group), k->state_handle, out});
        if (e->plan.zero.params_up)
            submit_up(e, group, k, out);
    }
    g->version++;
}
