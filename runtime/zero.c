/* SPDX-License-Identifier: Apache-2.0 */
/* ZeRO as submissions: which task brings a unit's parameters, takes its
 * gradient and updates it.  The stage has already become data in the plan: what
 * is whole on every rank and what is a shard. */
#include <assert.h>
#include <string.h>

#include "codelets/adamw.h"
#include "codelets/die.h"
#include "codelets/flat.h"
#include "runtime/engine.h"

static int64_t param_bytes(const struct iz_engine *e, int64_t n)
{
    return n * iz_dtype_bytes(e->plan.param_type);
}

static const char *unit_name(const struct iz_engine *e, int group)
{
    return e->model->unit[group].name;
}

/* Small numbers that put the units which are needed first in front, and less
 * than the distance between the priorities of kinds. */
static int in_order(int group)
{
    enum { LAST = 900 };
    return group < LAST ? -group : -LAST;
}

/* ---- disk ---- */

struct io_arg {
    struct iz_nvme *file;
    int64_t offset, bytes;
    int64_t at; /* byte in the buffer */
};

static void run_load(struct iz_exec *x, void **buf, const void *arg)
{
    const struct io_arg *a = arg;
    (void)x;
    iz_nvme_read(a->file, (char *)buf[0] + a->at, a->offset, a->bytes);
}

static void run_store(struct iz_exec *x, void **buf, const void *arg)
{
    const struct io_arg *a = arg;
    (void)x;
    iz_nvme_write(a->file, (char *)buf[0] + a->at, a->offset, a->bytes);
}

/* The token stands for the region of the file: STARPU_R to read it, STARPU_W to
 * write it, so that a load waits for the store before it. */
static void submit_io(struct iz_engine *e, enum iz_kind kind, int group,
                      starpu_data_handle_t buffer,
                      enum starpu_data_access_mode mode,
                      starpu_data_handle_t token, struct io_arg a)
{
    iz_submit(e->graph,
              &(struct iz_task){
                  .kind = kind,
                  .where = IZ_ON_IO,
                  .run = kind == IZ_LOAD ? run_load : run_store,
                  .arg = &a,
                  .arg_bytes = sizeof(a),
                  .data = {{buffer, mode},
                           {token, kind == IZ_LOAD ? STARPU_R : STARPU_W}},
                  .urgency = in_order(group),
                  .bytes = (double)a.bytes,
                  .unit = group,
                  .step = (int)e->step});
}

/* ---- fetch ---- */

struct fetch_arg {
    struct iz_coll *coll;
    int64_t shard_bytes;
    int rank, ranks;
    const char *unit;
};

static void run_fetch(struct iz_exec *x, void **buf, const void *arg)
{
    const struct fetch_arg *a = arg;
    (void)x;
    memcpy((char *)buf[1] + a->rank * a->shard_bytes, buf[0],
           (size_t)a->shard_bytes);
    if (a->ranks > 1)
        iz_coll_all_gather(a->coll, buf[1], a->shard_bytes, a->unit);
}

static void run_gather(struct iz_exec *x, void **buf, const void *arg)
{
    const struct fetch_arg *a = arg;
    (void)x;
    iz_coll_all_gather(a->coll, buf[0], a->shard_bytes, a->unit);
}

static struct fetch_arg fetch_arg(const struct iz_engine *e, int group,
                                  int64_t elem_bytes)
{
    return (struct fetch_arg){.coll = e->coll,
                              .shard_bytes =
                                  e->group[group].plan->shard * elem_bytes,
                              .rank = e->plan.rank,
                              .ranks = e->plan.ranks,
                              .unit = unit_name(e, group)};
}

/* Shards on disk first come into a staging buffer, chunk by chunk. */
static starpu_data_handle_t load_shard(struct iz_engine *e, int group)
{
    struct iz_group *g = &e->group[group];
    struct iz_stage *s = &e->param_stage[e->next_param_stage];
    e->next_param_stage = (e->next_param_stage + 1) % e->plan.param_stages;
    for (int i = 0; i < g->plan->chunks; i++) {
        struct io_arg a = {.file = e->param_file,
                           .offset = g->chunk[i].param_at,
                           .bytes = param_bytes(e, g->plan->chunk),
                           .at = param_bytes(e, g->chunk[i].first)};
        submit_io(e, IZ_LOAD, group, s->handle, i ? STARPU_RW : STARPU_W,
                  g->chunk[i].param_handle, a);
    }
    return s->handle;
}

static void submit_fetch(struct iz_engine *e, int group, struct iz_slot *slot)
{
    struct iz_group *g = &e->group[group];
    starpu_data_handle_t shard = e->plan.param_home == IZ_HOME_NVME
                                     ? load_shard(e, group)
                                     : g->param_handle;
    struct fetch_arg a =
        fetch_arg(e, group, iz_dtype_bytes(e->plan.param_type));
    iz_submit(
        e->graph,
        &(struct iz_task){.kind = IZ_FETCH,
                          .where = IZ_ON_LANE,
                          .run = run_fetch,
                          .arg = &a,
                          .arg_bytes = sizeof(a),
                          .data = {{shard, STARPU_R}, {slot->handle, STARPU_W}},
                          .bytes = 2 * (double)param_bytes(e, g->plan->padded),
                          .unit = group,
                          .step = (int)e->step});
    slot->group = group;
    slot->version = g->version;
    slot->waiting = true;
    e->fetched_bytes += param_bytes(e, g->plan->padded);
}

static struct iz_slot *find_slot(struct iz_engine *e, int group)
{
    const struct iz_group *g = &e->group[group];
    struct iz_ring *r = &e->ring[g->plan->ring];
    for (int i = 0; i < e->plan.ring[g->plan->ring].params; i++)
        if (r->param[i].group == group && r->param[i].version == g->version)
            return &r->param[i];
    return NULL;
}

/* DeepSpeed's max_reuse_distance: what was used longer ago is fetched anew, but
 * what was fetched ahead is there for its use, however far away. */
static bool reusable(const struct iz_engine *e, const struct iz_slot *s)
{
    return s->waiting ||
           e->fetch_clock - s->used < e->config->zero.max_reuse_distance;
}

/* Position in u of the next use of a group at or after `from`; n if none. */
static int next_use(const struct iz_uses *u, int group, int from)
{
    int i = from;
    while (i < u->n && u->group[i] != group)
        i++;
    return i;
}

/* The slot whose content is needed last, but not before position j.  With the
 * order of uses known, this is Belady's optimal replacement. */
static struct iz_slot *victim(struct iz_engine *e, const struct iz_uses *u,
                              int from, int j)
{
    int ring = e->group[u->group[j]].plan->ring, best_use = j;
    struct iz_slot *best = NULL;
    for (int i = 0; i < e->plan.ring[ring].params; i++) {
        struct iz_slot *s = &e->ring[ring].param[i];
        if (s->group < 0 || s->version != e->group[s->group].version)
            return s;
        int use = next_use(u, s->group, from);
        if (use > best_use) {
            best = s;
            best_use = use;
        }
    }
    return best;
}

/* Everything before position `from` has been used: the clock counts elements.
 */
static void mark_used(struct iz_engine *e, const struct iz_uses *u, int from)
{
    if (from == 0)
        e->marked = 0;
    for (; e->marked < from; e->marked++) {
        int group = u->group[e->marked];
        struct iz_slot *s = find_slot(e, group);
        e->fetch_clock += e->group[group].plan->padded;
        if (!s)
            continue;
        s->waiting = false;
        s->used = e->fetch_clock;
    }
}

void iz_zero_fetch(struct iz_engine *e, const struct iz_uses *u, int from)
{
    if (!e->plan.fetch)
        return;
    mark_used(e, u, from);
    for (int j = from; j < u->n; j++) {
        struct iz_slot *s = find_slot(e, u->group[j]);
        if (s && (reusable(e, s) || next_use(u, u->group[j], from) < j))
            continue;
        if (!s)
            s = victim(e, u, from, j);
        if (!s)
            return;
        submit_fetch(e, u->group[j], s);
    }
}

starpu_data_handle_t iz_zero_param(struct iz_engine *e, int group)
{
    if (!e->plan.fetch)
        return e->group[group].param_handle;
    struct iz_slot *s = find_slot(e, group);
    if (!s)
        iz_die("%s is used before it was fetched", unit_name(e, group));
    return s->handle;
}

/* Padding past a short last chunk is never touched: the pieces cover the owned
 * elements exactly, so only the part behind them needs the all-gather. */
void iz_zero_publish(struct iz_engine *e, int group)
{
    struct iz_group *g = &e->group[group];
    if (!e->plan.params_full || e->plan.states_full || e->plan.ranks == 1)
        return;
    struct fetch_arg a =
        fetch_arg(e, group, iz_dtype_bytes(e->plan.param_type));
    iz_submit(e->graph,
              &(struct iz_task){.kind = IZ_FETCH,
                                .where = IZ_ON_LANE,
                                .run = run_gather,
                                .arg = &a,
                                .arg_bytes = sizeof(a),
                                .data = {{g->param_handle, STARPU_RW}},
                                .unit = group,
                                .step = (int)e->step});
    e->fetched_bytes += param_bytes(e, g->plan->padded);
}

/* ---- reduce ---- */

starpu_data_handle_t iz_zero_grad(struct iz_engine *e, int group)
{
    const struct iz_plan_group *p = e->group[group].plan;
    if (p->direct)
        return e->group[group].grad_handle[0];
    struct iz_ring *r = &e->ring[p->ring];
    struct iz_slot *s = &r->grad[r->next_grad];
    r->next_grad = (r->next_grad + 1) % e->plan.ring[p->ring].grads;
    return s->handle;
}

struct reduce_arg {
    struct iz_coll *coll;
    int64_t shard;
    int64_t own; /* first element of this rank's part of the accumulator */
    int ranks, slots;
    bool accumulate;
    enum iz_dtype wire, type;
    const char *unit;
};

/* buf[0]: accumulator; buf[1...]: the slices' contributions. */
static void run_reduce(struct iz_exec *x, void **buf, const void *arg)
{
    const struct reduce_arg *a = arg;
    int64_t n = a->shard * a->ranks;
    char *out = (char *)buf[0] + a->own * iz_dtype_bytes(a->type);
    (void)x;
    if (a->ranks == 1) {
        iz_flat_sum(out, a->type, a->accumulate, (const void *const *)&buf[1],
                    a->slots, a->wire, n);
        return;
    }
    if (a->slots > 1)
        iz_flat_sum(buf[1], a->wire, false, (const void *const *)&buf[1],
                    a->slots, a->wire, n);
    iz_coll_reduce_scatter(a->coll, out, a->type, a->accumulate, buf[1],
                           a->wire, a->shard, a->unit);
}

/* The gradient was written in place: the accumulator is the contribution. */
static void run_reduce_direct(struct iz_exec *x, void **buf, const void *arg)
{
    const struct reduce_arg *a = arg;
    (void)x;
    iz_coll_reduce_scatter(a->coll,
                           (char *)buf[0] + a->own * iz_dtype_bytes(a->wire),
                           a->wire, false, buf[0], a->wire, a->shard, a->unit);
}

void iz_zero_reduce(struct iz_engine *e, int group, int use,
                    const starpu_data_handle_t *slot, int slots)
{
    struct iz_group *g = &e->group[group];
    bool direct = g->plan->direct, many = e->plan.ranks > 1;
    int acc = g->plan->split_accum ? use : 0;
    bool first = g->contributions[acc]++ == 0;
    if (direct && !many)
        return;
    struct reduce_arg a = {
        .coll = e->coll,
        .shard = g->plan->shard,
        .own = e->plan.grads_full ? g->plan->shard * e->plan.rank : 0,
        .ranks = e->plan.ranks,
        .slots = slots,
        .accumulate = !first,
        .wire = e->plan.param_type,
        .type = e->plan.grad_type,
        .unit = unit_name(e, group)};
    struct iz_access more[IZ_SLICES_MAX];
    assert(slots <= IZ_SLICES_MAX);
    for (int i = 0; i < slots; i++)
        more[i] =
            (struct iz_access){slot[i], i || !many ? STARPU_R : STARPU_RW};
    iz_submit(
        e->graph,
        &(struct iz_task){
            .kind = IZ_REDUCE,
            .where = IZ_ON_LANE,
            .run = direct ? run_reduce_direct : run_reduce,
            .arg = &a,
            .arg_bytes = sizeof(a),
            .data = {{g->grad_handle[acc],
                      first && !direct && !e->plan.grads_full ? STARPU_W
                                                              : STARPU_RW}},
            .more = more,
            .n_more = direct ? 0 : slots,
            .urgency = in_order(group) - (many ? 0 : 3500),
            .bytes = 3 * (double)param_bytes(e, g->plan->padded),
            .unit = group,
            .step = (int)e->step});
}

/* ---- norm ---- */

struct norm_arg {
    int64_t n, own;
    enum iz_dtype type;
    bool add; /* the tied use's accumulator comes on top */
};

/* buf: accumulator, sum of squares (double), tied accumulator. */
static void run_norm(struct iz_exec *x, void **buf, const void *arg)
{
    const struct norm_arg *a = arg;
    int64_t at = a->own * iz_dtype_bytes(a->type);
    (void)x;
    if (a->add)
        iz_flat_add((char *)buf[0] + at, a->type, (char *)buf[2] + at, a->type,
                    a->n);
    *(double *)buf[1] = iz_flat_norm2((char *)buf[0] + at, a->type, a->n);
}

static void gather_gradient(struct iz_engine *e, int group)
{
    struct fetch_arg a = fetch_arg(e, group, iz_dtype_bytes(e->plan.grad_type));
    iz_submit(
        e->graph,
        &(struct iz_task){.kind = IZ_REDUCE,
                          .where = IZ_ON_LANE,
                          .run = run_gather,
                          .arg = &a,
                          .arg_bytes = sizeof(a),
                          .data = {{e->group[group].grad_handle[0], STARPU_RW}},
                          .unit = group,
                          .step = (int)e->step});
}

void iz_zero_norm(struct iz_engine *e, int group)
{
    struct iz_group *g = &e->group[group];
    struct norm_arg a = {
        .n = g->plan->shard,
        .own = e->plan.grads_full ? g->plan->shard * e->plan.rank : 0,
        .type = e->plan.grad_type,
        .add = g->plan->split_accum};
    g->contributions[0] = g->contributions[1] = 0;
    iz_submit(e->graph,
              &(struct iz_task){
                  .kind = IZ_NORM,
                  .run = run_norm,
                  .arg = &a,
                  .arg_bytes = sizeof(a),
                  .data = {{g->grad_handle[0], a.add ? STARPU_RW : STARPU_R},
                           {g->norm2_handle, STARPU_W},
                           {a.add ? g->grad_handle[1] : NULL, STARPU_R}},
                  .bytes = (double)a.n * (double)iz_dtype_bytes(a.type),
                  .unit = group,
                  .step = (int)e->step});
    if (e->plan.states_full && e->plan.ranks > 1)
        gather_gradient(e, group);
}

/* ---- adam ---- */

struct adam_arg {
    struct iz_adam adam; /* lr, t and grad_scale come from the control */
    int64_t n, grad_first;
    enum iz_dtype grad_type, param_type;
    bool separate_master;
    bool early; /* the scalars are those above; the control is not read */
    int64_t state_floats; /* between the arrays of a staged chunk: its length */
    int64_t param_at;     /* byte in the staging buffer, -1: own buffer */
};

/* buf: gradient, state, parameters (unless staged with the state), control. */
static void run_adam(struct iz_exec *x, void **buf, const void *arg)
{
    const struct adam_arg *a = arg;
    struct iz_adam adam = a->adam;
    (void)x;
    if (!a->early) {
        const struct iz_control *c = buf[a->param_at < 0 ? 3 : 2];
        if (c->skip)
            return;
        adam.lr = c->lr;
        adam.t = c->updates;
        adam.grad_scale = (float)c->grad_scale;
    }
    float *state = buf[1];
    char *param = a->param_at < 0 ? buf[2] : (char *)buf[1] + a->param_at;
    const char *grad =
        (char *)buf[0] + a->grad_first * iz_dtype_bytes(a->grad_type);
    float *m = a->separate_master ? state + a->state_floats : state;
    float *v = m + a->state_floats;
    iz_adam_chunk(&adam, a->n, a->separate_master ? state : (float *)param, m,
                  v, grad, a->grad_type, a->separate_master ? param : NULL,
                  a->param_type);
}

static struct adam_arg adam_arg(const struct iz_engine *e, int group,
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
                 .weight_decay = o->weight_decay,
                 .adamw = o->adamw,
                 .bias_correction = o->bias_correction,
                 .t = e->updates + 1,
                 .grad_scale = (float)(1.0 / (double)(tasks * e->plan.ranks))},
        .n = k->count,
        .grad_first = k->first + (shard_of_full ? p->shard * e->plan.rank : 0),
        .grad_type = e->plan.grad_type,
        .param_type = e->plan.param_type,
        .separate_master = e->plan.state_arrays == 3,
        .early = iz_control_early(e->config),
        .state_floats = k->state ? k->count : p->chunk,
        .param_at = -1};
}

static void submit_adam(struct iz_engine *e, int group,
                        const struct iz_chunk *k, const struct adam_arg *a,
                        starpu_data_handle_t state, starpu_data_handle_t param)
{
    struct iz_task t = {.kind = IZ_ADAM,
                        .run = run_adam,
                        .arg = a,
                        .arg_bytes = sizeof(*a),
                        .urgency = in_order(group),
                        .bytes = 28.0 * (double)k->count,
                        .unit = group,
                        .step = (int)e->step};
    struct iz_access *d = t.data;
    *d++ = (struct iz_access){e->group[group].grad_handle[0], STARPU_R};
    *d++ = (struct iz_access){state, STARPU_RW};
    /* A 16-bit copy is overwritten, an fp32 master updated; a skipped step
     * leaves both as they are, so never a plain STARPU_W. */
    if (param)
        *d++ = (struct iz_access){param, STARPU_RW};
    if (!a->early)
        *d++ = (struct iz_access){e->control_handle, STARPU_R};
    iz_submit(e->graph, &t);
}

/* A chunk with anything on disk: load, update, store through one staging buffer
 * that holds [state arrays][parameters]. */
static void update_on_disk(struct iz_engine *e, int group, struct iz_chunk *k)
{
    struct iz_group *g = &e->group[group];
    const struct iz_plan *p = &e->plan;
    struct iz_stage *s = &e->state_stage[e->next_state_stage];
    e->next_state_stage = (e->next_state_stage + 1) % p->state_stages;
    bool state_disk = p->state_home == IZ_HOME_NVME;
    bool param_disk = p->param_home == IZ_HOME_NVME;
    int64_t state_bytes = state_disk ? g->plan->chunk * 4 * p->state_arrays : 0;
    struct io_arg state = {
        .file = e->state_file, .offset = k->state_at, .bytes = state_bytes};
    struct io_arg param = {.file = e->param_file,
                           .offset = k->param_at,
                           .bytes = param_bytes(e, g->plan->chunk),
                           .at = state_bytes};
    /* A 16-bit copy is loaded too: a skipped step must store what it found. */
    if (state_disk)
        submit_io(e, IZ_LOAD, group, s->handle, STARPU_W, k->state_handle,
                  state);
    if (param_disk)
        submit_io(e, IZ_LOAD, group, s->handle,
                  state_disk ? STARPU_RW : STARPU_W, k->param_handle, param);
    struct adam_arg a = adam_arg(e, group, k);
    a.param_at = param_disk && state_disk ? state_bytes : -1;
    if (state_disk)
        submit_adam(e, group, k, &a, s->handle,
                    param_disk ? NULL : k->param_handle);
    else
        submit_adam(e, group, k, &a, k->state_handle, s->handle);
    if (state_disk)
        submit_io(e, IZ_STORE, group, s->handle, STARPU_R, k->state_handle,
                  state);
    if (param_disk)
        submit_io(e, IZ_STORE, group, s->handle, STARPU_R, k->param_handle,
                  param);
}

void iz_zero_update(struct iz_engine *e, int group)
{
    struct iz_group *g = &e->group[group];
    bool disk = e->plan.state_home == IZ_HOME_NVME ||
                e->plan.param_home == IZ_HOME_NVME;
    for (int i = 0; i < g->plan->chunks; i++) {
        struct iz_chunk *k = &g->chunk[i];
        if (disk) {
            update_on_disk(e, group, k);
            continue;
        }
        struct adam_arg a = adam_arg(e, group, k);
        submit_adam(e, group, k, &a, k->state_handle, k->param_handle);
    }
    g->version++;
}
