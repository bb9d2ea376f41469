/* SPDX-License-Identifier: Apache-2.0 */
/* What a config leaves to the plan is chosen by the predicted time of a step;
 * see choose.h. */
#include "runtime/plan/choose.h"

#include <errno.h>
#include <math.h>

#include "runtime/plan/fit.h"
#include "runtime/plan/forecast.h"

#define GAIN 0.999 /* a larger part for the GPU has to save as much */

/* Of the forward's flops, what a plan may recompute more to have room for
 * cuDNN's scratch.  A block of a 7B at 2048 tokens saves 0.05 of its forward's
 * time by cuDNN's forward, and twice that by its backward. */
#define RECOMPUTED_MORE 0.02

static bool agreed(const struct iz_plan_for *f, bool ok)
{
    return f->all ? f->all(f->arg, ok) : ok;
}

/* The host's part from all down: of parts that are as good the GPU has less in
 * its memory.  Each rank compares its own times, and all have to find one
 * better; so they choose the same. */
static double choose_ratio(struct iz_config *c, const struct iz_plan_for *f)
{
    double *ratio = &c->zero.optimizer.ratio, best = INFINITY, chosen = 1;
    bool divides = f->target->gpu && iz_plan_may_split(c);
    if (!c->zero.optimizer.ratio_auto)
        return iz_plan_try(f, c, true).step_s;
    for (int i = IZ_RATIO_STEPS; i >= (divides ? 0 : IZ_RATIO_STEPS); i--) {
        *ratio = (double)i / IZ_RATIO_STEPS;
        double s = iz_plan_try(f, c, true).step_s;
        if (!agreed(f, s < GAIN * best))
            continue;
        best = s;
        chosen = *ratio;
    }
    *ratio = chosen;
    return best;
}

static double choose_order(struct iz_config *c, const struct iz_plan_for *f)
{
    struct iz_config first = *c;
    bool open = c->run.sum_order == IZ_SUM_AUTO && f->ranks > 1;
    c->run.sum_order = iz_sum_choose(c, f->target->gpu);
    double s = choose_ratio(c, f);
    if (!open || c->run.sum_order == IZ_SUM_RANKS_FIRST ||
        agreed(f, isfinite(s)))
        return s;
    struct iz_config local = *c;
    *c = first;
    c->run.sum_order = IZ_SUM_RANKS_FIRST;
    s = choose_ratio(c, f);
    if (!agreed(f, isfinite(s)))
        *c = local;
    return s;
}

/* Micro-batches of one sample each, or pair, or number of slices. */
static int most_micros(const struct iz_config *c)
{
    int slices = c->run.slices ? c->run.slices : 1;
    return c->micro_batch * c->grad_accum / (c->data.group * slices);
}

static void choose_cut(struct iz_config *c, const struct iz_plan_for *f)
{
    struct iz_config open = *c, best = *c;
    int most = c->cut_auto ? most_micros(c) : 1;
    double s = INFINITY;
    for (int micros = 1; micros <= most; micros++) {
        if (most % micros)
            continue;
        if (c->cut_auto)
            iz_config_cut(c, micros);
        double now = choose_order(c, f);
        if (micros == 1 || agreed(f, now < s)) {
            s = now;
            best = *c;
        }
        *c = open;
    }
    *c = best;
}

/* All rows of a sample if that fits, else so many that the step is shortest; a
 * step that may be cut has the most micro-batches. */
static void choose_chunk(struct iz_config *c, const struct iz_plan_for *f)
{
    struct iz_config d = *c;
    int64_t *rows = &d.run.sequence_chunk;
    double best = INFINITY;
    if (*rows)
        return;
    if (c->cut_auto)
        iz_config_cut(&d, most_micros(c));
    c->run.sequence_chunk = *rows = IZ_CHUNK_OFF;
    if (agreed(f, isfinite(iz_plan_try(f, &d, true).step_s)))
        return;
    for (int64_t n = IZ_CHUNK_LEAST; n < f->model->tokens; n *= 2) {
        *rows = n;
        double s = iz_plan_try(f, &d, true).step_s;
        if (!agreed(f, isfinite(s) && s * GAIN <= best))
            continue;
        best = s;
        c->run.sequence_chunk = n;
    }
}

/* Large chunks pass fewer times over the head's weights and their gradient,
 * which by arithmetic saves less than memory for activations does. */
static void choose_logits(struct iz_config *c, const struct iz_plan_for *f)
{
    int64_t *bytes = &c->run.gpu_logits_bytes;
    bool ok = f->limit->device > IZ_LARGE_GPU_BYTES;
    struct iz_trial t[2];
    if (!f->target->gpu || *bytes)
        return;
    for (int i = 0; ok && i < 2; i++) {
        *bytes = i ? IZ_LOGITS_LARGE_BYTES : IZ_LOGITS_BYTES;
        t[i] = iz_plan_try(f, c, true);
    }
    ok = ok && isfinite(t[1].step_s) && t[1].recomputed <= t[0].recomputed &&
         t[1].sums_on_gpu == t[0].sums_on_gpu;
    *bytes = agreed(f, ok) ? IZ_LOGITS_LARGE_BYTES : IZ_LOGITS_BYTES;
}

/* Why attention is ours, whatever the config says; NULL: it may be cuDNN's. */
static const char *why_own(const struct iz_config *c,
                           const struct iz_plan_for *f)
{
    const char *why = iz_plan_not_cudnn(c, f->target->numerics.capability);
    return why || !f->target->gpu ? why : iz_plan_try(f, c, false).why_own;
}

/* cuDNN's where it can be and has room; own: why it cannot be, or NULL. */
static void choose_attention(struct iz_config *c, const struct iz_plan_for *f,
                             const char *own)
{
    enum iz_attention_by *by[] = {&c->run.gpu_attention,
                                  &c->run.gpu_attention_backward};
    for (int back = 0; f->target->gpu && back < 2; back++) {
        const char **why = &f->target->why_own[back];
        if (*by[back] != IZ_ATTENTION_AUTO)
            continue;
        *by[back] = IZ_ATTENTION_OWN;
        if ((*why = own))
            continue;
        struct iz_trial ours = iz_plan_try(f, c, true);
        *by[back] = IZ_ATTENTION_CUDNN;
        struct iz_trial its = iz_plan_try(f, c, true);
        if (agreed(f, its.attends && isfinite(its.step_s) &&
                          its.sums_on_gpu == ours.sums_on_gpu &&
                          its.recomputed <= ours.recomputed + RECOMPUTED_MORE))
            continue;
        *by[back] = IZ_ATTENTION_OWN;
        *why = isfinite(ours.step_s)
                   ? "the plan has no room for cuDNN's scratch"
                   : NULL;
    }
}

/* Attention that is open counts as cuDNN's, where it can be, until the rest is
 * chosen; there is room for it then, if there is with anything. */
void iz_plan_choose(struct iz_config *c, const struct iz_plan_for *f)
{
    enum iz_attention_by *by[] = {&c->run.gpu_attention,
                                  &c->run.gpu_attention_backward};
    enum iz_attention_by asked[] = {*by[0], *by[1]};
    choose_chunk(c, f);
    const char *own = why_own(c, f);
    for (int i = 0; i < 2; i++)
        if (f->target->gpu && !own && asked[i] == IZ_ATTENTION_AUTO)
            *by[i] = IZ_ATTENTION_CUDNN;
    choose_cut(c, f);
    choose_logits(c, f);
    for (int i = 0; i < 2; i++)
        *by[i] = asked[i];
    choose_attention(c, f, own);
}

static int make_plan(struct iz_plan *p, const struct iz_config *c,
                     const struct iz_plan_for *f)
{
    int s = iz_plan_make(p, c, f->model, f->ranks, f->rank, f->target);
    return agreed(f, s == 0) ? 0 : s ? s : -ECANCELED;
}

int iz_plan_complete(struct iz_plan *p, struct iz_config *c,
                     const struct iz_plan_for *f, int (*rates)(void *arg),
                     void *arg)
{
    int s = make_plan(p, c, f);
    if (s)
        return s;
    s = rates(arg);
    iz_plan_clear(p);
    if (!agreed(f, s == 0))
        return s ? s : -ECANCELED;
    iz_plan_choose(c, f);
    return make_plan(p, c, f);
}
