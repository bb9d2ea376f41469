/* SPDX-License-Identifier: Apache-2.0 */
/* The optimizer: one task per chunk of a shard, where the chunk's states are,
 * and the way of the new parameters to where they are used.  See zero.h. */
#include <stdatomic.h>

#include "codelets/base/mix.h"
#include "runtime/step/zero.h"

struct adam_arg {
    struct iz_adam adam; /* lr, t and grad_scale come from the control, decay
                            from the segments */
    int64_t n, grad_first;
    const struct iz_segment *segment; /* of the group; of its elements, this */
    int64_t first;                    /* one is the chunk's first */
    enum iz_dtype grad_type, param_type;
    bool separate_master;
    bool early; /* the scalars are those above; the control is not read */
    enum iz_moment_type moments;
    uint64_t key;       /* of their rounding: seed and group */
    int64_t state_room; /* elements that each array of the chunk has room for */
    int param_buf;      /* the buffer with the parameters */
    int64_t param_at;   /* its byte at which they begin */
    int control_buf;
    struct iz_rows_in rows;
    int at_rows;      /* buffer that lists the touched rows, 0: dense */
    bool whole_grads; /* those of all ranks' touched rows */
    _Atomic int64_t *updated;
};

/* Where the arrays of a chunk are. */
struct adam_arrays {
    float *master, *m, *v;
    const char *grad;
    char *param; /* in another type than the master; NULL: there is none */
};

/* Decay and rate change where one tensor ends and the next one begins.  The
 * bits of an element do not depend on where a call begins. */
static void update_segments(struct iz_exec *x, const struct adam_arg *a,
                            const struct iz_adam *step,
                            const struct adam_arrays *p)
{
    const struct iz_segment *s = a->segment;
    int64_t grad_size = iz_dtype_bytes(a->grad_type);
    int64_t param_size = iz_dtype_bytes(a->param_type);

    for (int64_t i = 0, end; i < a->n; i = end, s++) {
        struct iz_adam adam = *step;

        while (s->end <= a->first + i)
            s++;
        end = s->end - a->first < a->n ? s->end - a->first : a->n;
        adam.lr *= s->lr_scale;
        adam.weight_decay = s->weight_decay;
        iz_buffer_adam(x, &adam, end - i, p->master + i, p->m + i, p->v + i,
                       p->grad + i * grad_size, a->grad_type,
                       p->param ? p->param + i * param_size : NULL,
                       a->param_type);
    }
}

static uint64_t narrow_key(const struct adam_arg *a, const struct iz_adam *step)
{
    return iz_mix(a->key + (uint64_t)step->t * IZ_GOLDEN);
}

/* m and v of the chunk, one behind the other. */
static void narrow_moments(const struct adam_arg *a,
                           const struct adam_arrays *p, struct iz_moments *out)
{
    int64_t bytes = iz_moment_bytes(a->moments, a->state_room);

    out[0] = (struct iz_moments){p->m, a->moments, IZ_MOMENT_M, a->state_room};
    out[1] = (struct iz_moments){(char *)p->m + bytes, a->moments, IZ_MOMENT_V,
                                 a->state_room};
}

/* How the elements from i on of the chunk are updated, as far as one call takes
 * them; returns the number of spans.  *n: elements of their whole blocks. */
static int find_spans(const struct adam_arg *a, const struct iz_adam *step,
                      int64_t i, struct iz_adam_span *span, int64_t *n)
{
    const struct iz_segment *s = a->segment;
    int64_t end = i;
    int k = 0;

    for (; k < IZ_ADAM_SPANS && end < a->n; k++) {
        struct iz_adam adam = *step;

        while (s->end <= a->first + end)
            s++;
        end = s->end - a->first < a->n ? s->end - a->first : a->n;
        adam.lr *= s->lr_scale;
        adam.weight_decay = s->weight_decay;
        span[k] = (struct iz_adam_span){iz_adam_consts_of(&adam), end - i};
    }
    if (end < a->n)
        end -= end % IZ_MOMENT_BLOCK;
    *n = end - i;
    return k;
}

/* The same update with m and v kept in fewer bytes. */
static void update_narrow(struct iz_exec *x, const struct adam_arg *a,
                          const struct iz_adam *step,
                          const struct adam_arrays *p)
{
    int64_t grad_size = iz_dtype_bytes(a->grad_type);
    int64_t param_size = iz_dtype_bytes(a->param_type);
    struct iz_moments moment[2];
    struct iz_adam_span span[IZ_ADAM_SPANS];

    narrow_moments(a, p, moment);
    for (int64_t i = 0, n; i < a->n; i += n) {
        int spans = find_spans(a, step, i, span, &n);

        iz_buffer_adam_narrow(
            x, &(struct iz_adam_narrow){
                   .n = n,
                   .at = i,
                   .p = p->master + i,
                   .m = moment[0],
                   .v = moment[1],
                   .g = p->grad + i * grad_size,
                   .out = p->param ? p->param + i * param_size : NULL,
                   .g_type = a->grad_type,
                   .out_type = a->param_type,
                   .key = narrow_key(a, step),
                   .first = a->first + i,
                   .span = span,
                   .spans = spans});
    }
}

/* ---- touched rows alone ---- */

/* Elements whose m and v are fp32 at a time. */
enum { TILE = 256 };

/* Elements [i, i + n) of the chunk, their gradient at `grad`; m and v are
 * narrow: the others of their blocks are rounded to what they were. */
static void update_narrow_piece(const struct adam_arg *a,
                                const struct iz_adam_consts *c,
                                const struct iz_moments *moments, uint64_t key,
                                const struct adam_arrays *p, int64_t i,
                                int64_t n, const char *grad)
{
    int64_t grad_size = iz_dtype_bytes(a->grad_type);
    int64_t param_size = iz_dtype_bytes(a->param_type);
    float m[TILE], v[TILE];

    for (int64_t end = i + n, k; i < end; i += k) {
        int64_t from = i / IZ_MOMENT_BLOCK * IZ_MOMENT_BLOCK;
        int64_t room = (end - from + IZ_MOMENT_BLOCK - 1) / IZ_MOMENT_BLOCK *
                       IZ_MOMENT_BLOCK;

        room = room < TILE ? room : TILE;
        k = (end < from + room ? end : from + room) - i;
        iz_moment_load(m, &moments[0], from, room);
        iz_moment_load(v, &moments[1], from, room);
        iz_adam_piece(c, k, p->master + i, m + (i - from), v + (i - from), grad,
                      a->grad_type, p->param ? p->param + i * param_size : NULL,
                      a->param_type);
        iz_moment_store(&moments[0], from, m, room, key, a->first + from);
        iz_moment_store(&moments[1], from, v, room, key, a->first + from);
        grad += k * grad_size;
    }
}

/* A sparse table is one segment.  Its gradients are packed. */
static void update_rows(const struct adam_arg *a, const struct iz_adam *step,
                        const struct adam_arrays *p, const void *list)
{
    int64_t grad_size = iz_dtype_bytes(a->grad_type);
    int64_t param_size = iz_dtype_bytes(a->param_type);
    uint64_t key = narrow_key(a, step);
    struct iz_rows r = iz_rows_get(&a->rows, list);
    struct iz_rows_piece t = {0};
    int64_t packed =
        a->whole_grads ? 0 : iz_rows_first(&a->rows, &r, a->rows.rank);
    struct iz_adam adam = *step;
    struct iz_adam_consts c;
    struct iz_moments moments[2];

    adam.lr *= a->segment->lr_scale;
    adam.weight_decay = a->segment->weight_decay;
    c = iz_adam_consts_of(&adam);
    narrow_moments(a, p, moments);
    while (iz_rows_next(&r, a->first, a->first + a->n, &t)) {
        int64_t i = t.flat - a->first;
        const char *grad = p->grad + (t.packed - packed) * grad_size;

        if (a->moments != IZ_MOMENT_F32)
            update_narrow_piece(a, &c, moments, key, p, i, t.n, grad);
        else
            iz_adam_piece(
                &c, t.n, p->master + i, p->m + i, p->v + i, grad, a->grad_type,
                p->param ? p->param + i * param_size : NULL, a->param_type);
    }
}

/* buf: gradient, state, parameters (unless staged with one of those), control,
 * list of touched rows. */
static void run_adam(struct iz_exec *x, void **buf, const void *arg)
{
    const struct adam_arg *a = arg;
    struct iz_adam adam = a->adam;
    if (!a->early) {
        const struct iz_control *c = buf[a->control_buf];
        if (c->skip)
            return;
        adam.lr = c->lr;
        adam.t = c->updates;
        adam.grad_scale = (float)c->grad_scale;
    }
    float *state = buf[1];
    char *param = (char *)buf[a->param_buf] + a->param_at;
    float *m = a->separate_master ? state + a->state_room : state;
    struct adam_arrays p = {
        .master = a->separate_master ? state : (float *)param,
        .m = m,
        .v = m + a->state_room, /* where m is fp32 */
        .grad = (char *)buf[0] + a->grad_first * iz_dtype_bytes(a->grad_type),
        .param = a->separate_master ? param : NULL};
    if (a->at_rows)
        update_rows(a, &adam, &p, buf[a->at_rows]);
    else if (a->moments == IZ_MOMENT_F32)
        update_segments(x, a, &adam, &p);
    else
        update_narrow(x, a, &adam, &p);
    atomic_fetch_add(a->updated, 1);
}

static struct adam_arg adam_arg(struct iz_engine *e, int group,
                                const struct iz_chunk *k)
{
    const struct iz_optimizer_config *o = &e->config->optimizer;
    const struct iz_plan_group *p = e->group[group].plan;
    int64_t tasks = (int64_t)e->plan.micro_batches * e->plan.slices;
    bool shard_of_full = e->plan.grads_full && !e->plan.states_full;
    return (struct adam_arg){
        .adam = {.lr = iz_lr(&e->config->lr, o->lr, e->updates),
                 .beta1 = o->beta1,
                 .beta2 = o->beta2,
                 .eps = o->eps,
                 .adamw = o->adamw,
                 .bias_correction = o->bias_correction,
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
        .separate_master = iz_plan_arrays(&e->plan, k->home) == 3,
        .early = iz_control_early(e->config),
        .moments = e->plan.moments,
        .key = iz_mix(iz_mix_text(iz_mix(e->config->run.seed), "moments") +
                      (uint64_t)group),
        .state_room = k->state ? k->count : p->chunk,
        .param_buf = 2,
        .control_buf = 3,
        .rows = iz_rows_in(e, group),
        .whole_grads = e->plan.grads_full,
        .updated = &e->turns.updated};
}

/* Of n elements of a group those that are updated. */
static int64_t touched_at_most(const struct iz_engine *e, int group, int64_t n)
{
    const struct iz_plan_group *p = e->group[group].plan;

    return p->rows && p->packed < n ? p->packed : n;
}

/* The parameters are in buffer i, `at` bytes in, which the task has anyway. */
static void stage_params(struct adam_arg *a, int i, int64_t at)
{
    a->param_buf = i;
    a->param_at = at;
    a->control_buf = 2;
}

/* What adam works on; param NULL: staged with one of the others. */
struct adam_data {
    struct iz_access grad;
    starpu_data_handle_t state, param;
};

#define BEFORE_PASSES 4000

static void submit_adam(struct iz_engine *e, int group,
                        const struct iz_chunk *k, struct adam_arg *a,
                        const struct adam_data *on)
{
    int64_t n = touched_at_most(e, group, k->count);
    struct iz_task t = {
        .kind = IZ_ADAM,
        .where = k->home == IZ_HOME_NONE ? IZ_ON_COMPUTE : IZ_ON_HOST,
        .run = run_adam,
        .arg = a,
        .arg_bytes = sizeof(*a),
        .urgency = iz_updates_first(e) ? BEFORE_PASSES : iz_in_order(group),
        .bytes = 12.0 * (double)n +
                 4.0 * (double)iz_moment_bytes(e->plan.moments, n),
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
        *d++ = (struct iz_access){e->control_handle, STARPU_R};
    if (a->rows.cols) {
        a->at_rows = (int)(d - t.data);
        *d++ = (struct iz_access){iz_rows_list(e, group), STARPU_R};
    }
    iz_submit(e->graph, &t);
}

/* ---- between host and GPU ---- */

struct copy_arg {
    int64_t from, bytes;
    bool always; /* in a step that is skipped, too: the control is not read */
};

/* buf: from, to, control. */
static void run_copy(struct iz_exec *x, void **buf, const void *arg)
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
    iz_submit(e->graph,
              &(struct iz_task){
                  .kind = up ? IZ_FETCH : IZ_OFFLOAD,
                  .where = where,
                  .run = run_copy,
                  .arg = a,
                  .arg_bytes = sizeof(*a),
                  .data = {{from, STARPU_R},
                           to,
                           {a->always ? NULL : e->control_handle, STARPU_R}},
                  .urgency = iz_in_order(group),
                  .bytes = (double)a->bytes,
                  .unit = group,
                  .step = (int)e->step});
    *(up ? &e->up_bytes : &e->down_bytes) += a->bytes;
}

/* Parameters that live on the GPU, updated by the host. */
static void submit_up(struct iz_engine *e, int group, const struct iz_chunk *k,
                      starpu_data_handle_t stage)
{
    struct copy_arg a = {.bytes = iz_param_bytes(e, k->count),
                         .always = iz_control_early(e->config)};
    submit_copy(e, group, IZ_ON_UP, stage,
                (struct iz_access){k->param_handle, STARPU_RW}, &a);
}

/* What adam writes the new parameters of a chunk to. */
static starpu_data_handle_t param_out(struct iz_engine *e,
                                      const struct iz_chunk *k)
{
    if (!e->plan.params_up)
        return k->param_handle;
    return iz_zero_stage(e->update_stage, &e->next_update_stage,
                         e->plan.update_stages)
        ->handle;
}

/* ---- chunks ---- */

/* The arrays of a chunk's states in the file. */
static int state_arrays(const struct iz_plan *p, const struct iz_plan_group *g,
                        struct iz_io_array *out)
{
    int64_t at = 0;
    int n = 0;

    if (iz_plan_arrays(p, p->state_home) == 3) {
        out[n++] = (struct iz_io_array){at, 4, 1};
        at += 4 * g->chunk;
    }
    for (int i = 0; i < 2; i++) {
        int bytes = p->moments == IZ_MOMENT_F32    ? 4
                    : p->moments == IZ_MOMENT_BF16 ? 2
                                                   : 1;
        out[n++] = (struct iz_io_array){at, bytes, 1};
        if (p->moments == IZ_MOMENT_FP8)
            out[n++] = (struct iz_io_array){at + g->chunk, 1, IZ_MOMENT_BLOCK};
        at += iz_moment_bytes(p->moments, g->chunk);
    }
    return n;
}

static struct iz_access host_grad(const struct iz_engine *e, int group)
{
    return (struct iz_access){e->group[group].grad_handle[0], STARPU_R};
}

static starpu_data_handle_t split_stage(struct iz_engine *e)
{
    return iz_zero_stage(e->split_stage, &e->next_split_stage,
                         e->plan.split_stages)
        ->handle;
}

/* A chunk of an offloaded optimizer whose states and gradient are on the GPU:
 * new parameters that live on the host come down through a buffer. */
static void update_apart(struct iz_engine *e, int group,
                         const struct iz_chunk *k)
{
    const struct iz_group *g = &e->group[group];
    bool down = e->plan.param_home != IZ_HOME_NONE;
    starpu_data_handle_t param = down ? split_stage(e) : k->param_handle;
    struct adam_arg a = adam_arg(e, group, k);
    struct copy_arg copy = {.bytes = iz_param_bytes(e, k->count),
                            .always = a.early};
    a.grad_first -= iz_plan_host_elems(g->plan);
    submit_adam(e, group, k, &a,
                &(struct adam_data){.grad = {g->grad_apart_handle[0], STARPU_R},
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
    bool down = e->plan.param_home != IZ_HOME_NONE;
    starpu_data_handle_t stage = split_stage(e);
    struct adam_arg a = adam_arg(e, group, k);
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
    submit_adam(
        e, group, k, &a,
        &(struct adam_data){.grad = {stage, down ? STARPU_RW : STARPU_R},
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
    struct iz_stage *s =
        iz_zero_stage(e->state_stage, &e->next_state_stage, p->state_stages);
    bool state_disk = p->state_home == IZ_HOME_NVME;
    bool param_disk = p->param_home == IZ_HOME_NVME;
    int64_t state_bytes = state_disk ? iz_plan_chunk_bytes(p, g->plan) : 0;
    struct iz_io state = {.file = e->state_file,
                          .offset = k->state_at,
                          .bytes = state_bytes,
                          .first = iz_chunk_first(e, group, k),
                          .count = k->count,
                          .urgency = IZ_IN_TURNS};
    struct iz_io param = {.file = e->param_file,
                          .offset = k->param_at,
                          .bytes = iz_param_bytes(e, g->plan->chunk),
                          .at = state_bytes,
                          .first = state.first,
                          .count = k->count,
                          .array = {{0, iz_param_bytes(e, 1), 1}},
                          .arrays = 1,
                          .urgency = IZ_IN_TURNS};
    state.arrays = state_arrays(p, g->plan, state.array);
    /* A 16-bit copy is loaded too: a skipped step must store what it found. */
    if (state_disk)
        iz_zero_io(e, IZ_LOAD, group, s->handle, STARPU_W, k->state_handle,
                   state);
    if (param_disk)
        iz_zero_io(e, IZ_LOAD, group, s->handle,
                   state_disk ? STARPU_RW : STARPU_W, k->param_handle, param);
    struct adam_arg a = adam_arg(e, group, k);
    starpu_data_handle_t out = param_disk ? NULL : param_out(e, k);
    struct adam_data on = {host_grad(e, group), s->handle, out};
    if (param_disk && state_disk)
        stage_params(&a, 1, state_bytes);
    else if (param_disk)
        on = (struct adam_data){on.grad, k->state_handle, s->handle};
    submit_adam(e, group, k, &a, &on);
    if (state_disk)
        iz_zero_io(e, IZ_STORE, group, s->handle, STARPU_R, k->state_handle,
                   state);
    if (param_disk)
        iz_zero_io(e, IZ_STORE, group, s->handle, STARPU_R, k->param_handle,
                   param);
    if (p->params_up)
        submit_up(e, group, k, out);
}

void iz_zero_update(struct iz_engine *e, int group)
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
        if (k->home != e->plan.state_home) {
            (e->plan.grads_apart ? update_apart : update_on_gpu)(e, group, k);
            continue;
        }
        struct adam_arg a = adam_arg(e, group, k);
        starpu_data_handle_t out = param_out(e, k);
        submit_adam(
            e, group, k, &a,
            &(struct adam_data){host_grad(e, group), k->state_handle, out});
        if (e->plan.params_up)
            submit_up(e, group, k, out);
    }
    g->version++;
}
