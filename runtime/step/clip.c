/* SPDX-License-Identifier: Apache-2.0 */
/* The scalars of a step: mean loss, gradient norm, clipping, loss scale,
 * learning rate.  One task per step that every rank executes with the same
 * numbers in the same order, so that all come to the same decision. */
#include "runtime/step/clip.h"

#include <assert.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/die.h"
#include "codelets/base/take.h"
#include "runtime/step/submit.h"
#include "runtime/step/update_order.h"

struct control_arg {
    struct iz_engine *e;
    int64_t step, samples; /* of an evaluation */
    bool empty;
};

static void put_event(struct iz_engine *e, const struct iz_event *v)
{
    int64_t n = atomic_load(&e->events.put);
    e->events.at[n % IZ_EVENTS] = *v;
    atomic_store(&e->events.put, n + 1);
    sem_post(&e->events.ready);
}

/* All ranks' numbers, in rank order, `per` each; own ones are `own`. */
static const double *step_clip_gather(struct iz_engine *e, const double *own,
                                      int per)
{
    assert(per <= e->plan.n_units + IZ_CLIP_SCALARS + IZ_AUX);
    memcpy(e->scalar.gathered + e->plan.rank * per, own,
           (size_t)per * sizeof(*own));
    if (e->plan.ranks > 1)
        iz_coll_gather_doubles(e->coll, e->scalar.gathered, per,
                               "step scalars");
    return e->scalar.gathered;
}

static double sum_ranks(const struct iz_engine *e, const double *all, int per,
                        int i)
{
    double sum = 0;
    for (int r = 0; r < e->plan.ranks; r++)
        sum += all[r * per + i];
    return sum;
}

/* DeepSpeed's rule in fp16: a gradient that is not finite skips the step and
 * shrinks the scale.  In other types it is an error of the run. */
static void decide(struct iz_engine *e, struct iz_event *v, double norm2)
{
    struct iz_control *c = &e->scalar.control;
    bool fp16 = e->config->dtype == IZ_F16;
    bool finite = isfinite(norm2);
    c->skip = !finite || c->failed;
    if (fp16 && !c->failed &&
        iz_loss_scale_update(&c->scale, &e->config->fp16, !finite))
        v->failure = IZ_SCALE_AT_MINIMUM;
    if (!fp16 && (!finite || !isfinite(v->loss)))
        v->failure = IZ_LOSS_NOT_FINITE;
    if (v->failure)
        c->skip = c->failed = true;
    v->skipped = c->skip;
}

static void clip(struct iz_engine *e, struct iz_event *v, const double *all,
                 int per)
{
    struct iz_control *c = &e->scalar.control;
    double tasks =
        (double)(e->plan.micro_batches * e->plan.slices) * e->plan.ranks;
    double divisor = tasks * c->scale.scale, norm2 = 0;
    for (int u = 0; u < e->plan.n_units; u++)
        norm2 += sum_ranks(e, all, per, 2 + u);
    v->loss = sum_ranks(e, all, per, 0) / tasks;
    v->grad_norm = sqrt(norm2) / divisor;
    decide(e, v, norm2);
    if (!v->targets)
        v->loss = NAN;
    if (c->skip)
        return;
    c->lr = v->lr;
    c->grad_scale =
        iz_schedule_clip_factor(v->grad_norm, e->config->gradient_clipping) /
        divisor;
    c->updates++;
}

/* Moves what was told to `own`, if anybody tells. */
static void take_told(double *own, struct iz_aux *aux)
{
    if (!aux)
        return;
    memcpy(own, aux, sizeof(*aux));
    *aux = IZ_AUX_NOTHING;
}

static void hear_told(const struct iz_engine *e, struct iz_aux *out,
                      const double *all, int per)
{
    *out = IZ_AUX_NOTHING;
    for (int r = 0; r < e->plan.ranks; r++) {
        struct iz_aux t;
        memcpy(&t, all + (int64_t)r * per, sizeof(t));
        iz_aux_add(out, &t);
    }
}

/* A commit in two phases: with the scalars of every step each rank tells how
 * far its file is, so in the event of the same step all learn that all files
 * are on the disk. */
static int64_t hear_sealed(const struct iz_engine *e, const double *all,
                           int per)
{
    int64_t step = (int64_t)all[0];
    for (int r = 0; r < e->plan.ranks; r++) {
        int64_t s = (int64_t)all[r * per];
        if (s < 0)
            return -1;
        if (s != step)
            step = 0;
    }
    return step;
}

/* buf: control, scale, sum of losses, then the sums of squares of all units;
 * what is told, if anything is. */
static void run_clip(struct iz_exec *x, void **buf, const void *arg)
{
    const struct control_arg *a = arg;
    struct iz_engine *e = a->e;
    const struct iz_control *c = &e->scalar.control;
    int order = 2 + e->plan.n_units, sealed = order + 2, late = sealed + 1;
    int *next = &e->update_order.next, aux = IZ_CLIP_SCALARS + e->plan.n_units;
    bool tells = iz_model_has_aux(e->model);
    int per = aux + (tells ? IZ_AUX : 0);
    double *own = iz_take(per, sizeof(*own), "the scalars of a step");
    own[0] = *(double *)buf[2];
    own[1] = e->events.stop ? atomic_load(e->events.stop) : 0;
    for (int u = 0; u < e->plan.n_units; u++)
        own[2 + u] = *(double *)buf[3 + u];
    iz_coll_tell_order(e->coll, own + order);
    own[sealed] = (double)atomic_load(&e->events.sealed);
    own[late] = a->empty ? *next : iz_update_order_late(e, *next);
    take_told(own + aux, tells ? buf[3 + e->plan.n_units] : NULL);
    const double *all = step_clip_gather(e, own, per);
    free(own);
    /* Before anything is made of what was gathered, or saved. */
    char who[256];
    if (!iz_coll_hear_order(e->coll, all + order, per, who, sizeof(who)))
        iz_die("step %lld: %s started other collectives than rank 0, or in "
               "another order",
               (long long)a->step, who);
    /* As of a step without any target that is left out: nothing counts it but
     * the event. */
    struct iz_event v = {
        .step = a->step,
        .samples = e->config->train_batch_size,
        .time_ns = iz_clock_ns(),
        .loss = NAN,
        .loss_scale = c->scale.scale,
        .lr = iz_lr(&e->config->lr, e->config->optimizer.lr, c->updates),
        .skipped = true};
    v.targets = e->events.targets[(a->step - 1) % IZ_EVENTS];
    v.stop = sum_ranks(e, all, per, 1) > 0;
    v.sealed = hear_sealed(e, all + sealed, per);
    if (tells)
        hear_told(e, &v.aux, all + aux, per);
    v.late = *next = iz_update_order_of_all(all + late, per, e->plan.ranks);
    if (!a->empty)
        clip(e, &v, all, per);
    *(float *)buf[1] = (float)c->scale.scale;
    *(double *)buf[2] = 0;
    put_event(e, &v);
}

void iz_clip_step(struct iz_engine *e, int64_t step, bool empty)
{
    struct control_arg a = {e, step, .samples = 0, .empty = empty};
    struct iz_task t = iz_task_of(e, IZ_CLIP, IZ_ON_COMM, run_clip, -1);
    iz_task_add(&t, e->scalar.control_handle, STARPU_RW);
    iz_task_add(&t, e->scalar.scale_handle, STARPU_W);
    iz_task_add(&t, e->scalar.loss_handle, STARPU_RW);
    for (int u = 0; u < e->plan.n_units; u++)
        iz_task_add(&t, e->unit[u].norm2_handle, STARPU_R);
    iz_task_add(&t, e->scalar.aux_handle, STARPU_RW);
    t.ends_step = true;
    iz_step_submit(e, &t, &a, sizeof(a));
}

/* buf: control (for the order of events), sum of losses, targets, what is told.
 */
static void run_eval(struct iz_exec *x, void **buf, const void *arg)
{
    const struct control_arg *a = arg;
    struct iz_engine *e = a->e;
    bool tells = iz_model_has_aux(e->model);
    int per = 1 + (tells ? IZ_AUX : 0);
    double own[1 + IZ_AUX] = {*(double *)buf[1]};
    take_told(own + 1, tells ? buf[3] : NULL);
    const double *all = step_clip_gather(e, own, per);
    struct iz_event v = {.eval = true, .step = a->step, .samples = a->samples};
    double targets = *(double *)buf[2];
    double n = e->config->data.group > 1 ? (double)(a->samples / 2) : targets;
    v.targets = (int64_t)targets;
    v.loss = n > 0 ? sum_ranks(e, all, per, 0) / n : NAN;
    if (tells)
        hear_told(e, &v.aux, all + 1, per);
    v.time_ns = iz_clock_ns();
    *(double *)buf[1] = 0;
    put_event(e, &v);
}

void iz_clip_eval(struct iz_engine *e, int64_t step, int64_t samples)
{
    struct control_arg a = {e, step, .samples = samples, .empty = false};
    struct iz_task t = iz_task_of(e, IZ_CLIP, IZ_ON_COMM, run_eval, -1);
    iz_task_add(&t, e->scalar.control_handle, STARPU_RW);
    iz_task_add(&t, e->scalar.loss_handle, STARPU_RW);
    iz_task_add(&t, e->scalar.loss_tokens_handle, STARPU_R);
    iz_task_add(&t, e->scalar.aux_handle, STARPU_RW);
    iz_step_submit(e, &t, &a, sizeof(a));
}
