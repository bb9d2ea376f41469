/* SPDX-License-Identifier: Apache-2.0 */
/* The scalars of a step.  Everything is a function of its arguments: a resumed
 * run has the same scalars as one that was never stopped. */
#include "runtime/engine/schedule.h"

#include <errno.h>
#include <math.h>

static const double pi = 3.14159265358979323846;

/* Part of the warm-up done at iteration i < n, 0..1. */
static double warmup(const struct iz_lr_config *lr, int64_t i, int64_t n)
{
    if (lr->log_warmup)
        return log((double)(i + 1)) * (1.0 / log((double)n));
    return (double)i / (double)n;
}

/* Linear from 1 at iteration n to 0 at `total`, and 0 from there on. */
static double decay(int64_t i, int64_t n, int64_t total)
{
    double length = total - n > 1 ? (double)(total - n) : 1.0;
    double left = (double)(total - i) / length;
    return left > 0 ? left : 0;
}

/* Cosine from near 1 at iteration n to cos_min_ratio at total - 1, which stays.
 */
static double cosine(const struct iz_lr_config *lr, int64_t i, int64_t n)
{
    int64_t length = lr->total_num_steps - n;
    double done = (double)(i - n + 1) / (double)(length > 1 ? length : 1);
    double part = (1 + cos(pi * (done < 1 ? done : 1))) / 2;
    return lr->cos_min_ratio + (1 - lr->cos_min_ratio) * part;
}

static double cosine_lr(const struct iz_lr_config *lr, double base, int64_t i,
                        int64_t n)
{
    if (i < 0)
        return 0;
    if (i >= n)
        return base * cosine(lr, i, n);
    return base * (lr->warmup_min_ratio +
                   (1 - lr->warmup_min_ratio) * warmup(lr, i, n));
}

/* What is left of the rate after a part of its decay, 1..0. */
static double shape(const struct iz_lr_config *lr, enum iz_lr_shape s,
                    double done)
{
    if (s == IZ_LR_SHAPE_LINEAR)
        return 1 - done;
    return s == IZ_LR_SHAPE_SQRT ? 1 - sqrt(done)
                                 : (1 + cos(pi * 2 * lr->cycles * done)) / 2;
}

static double above_min(const struct iz_lr_config *lr, double part)
{
    part = lr->min_ratio + (1 - lr->min_ratio) * part;
    return part > 0 ? part : 0;
}

/* As transformers' optimization.py (5.24) has them: the factor of the rate of
 * update u, which grows linearly over the warm-up from 0. */
static double hf_part(const struct iz_lr_config *lr, double base, int64_t u)
{
    double n = (double)lr->warmup_num_steps, all = (double)lr->total_num_steps;
    double i = (double)u, done = (i - n) / fmax(1, all - n), part = 1;
    double stable = all - n - (double)lr->decay_steps, end;
    bool wsd = lr->kind == IZ_LR_HF_WSD;
    if (i < n)
        return wsd ? above_min(lr, i / n) : i / n;
    switch (lr->kind) {
    case IZ_LR_HF_LINEAR:
        return fmax(0, 1 - done);
    case IZ_LR_HF_COSINE:
    case IZ_LR_HF_COSINE_MIN:
        return above_min(lr, shape(lr, IZ_LR_SHAPE_COSINE, done));
    case IZ_LR_HF_POLYNOMIAL:
        end = lr->end_lr / base;
        return i > all ? end : end + (1 - end) * pow(1 - done, lr->power);
    case IZ_LR_HF_WSD:
        done = (i - n - stable) / fmax(1, (double)lr->decay_steps);
        if (done >= 1)
            return lr->min_ratio;
        return done < 0 ? 1 : above_min(lr, shape(lr, lr->decay_shape, done));
    default:
        return part;
    }
}

/* DeepSpeed's engine advances the scheduler after an update, and iteration
 * counts from 0 there: update u runs with the rate of iteration u - 1, and the
 * first one with the rate set before any iteration, which is warmup_min_lr, or
 * 0 for the cosine.  With the logarithm iteration 0 is still at the start (log
 * 1 = 0). */
double iz_lr(const struct iz_lr_config *lr, double base_lr, int64_t update)
{
    int64_t n = lr->warmup_num_steps > 2 ? lr->warmup_num_steps : 2;
    int64_t i = update - 1;
    double part = 1;
    if (lr->kind == IZ_LR_CONST)
        return base_lr;
    if (lr->kind >= IZ_LR_HF_CONSTANT)
        return base_lr * hf_part(lr, base_lr, update);
    if (lr->kind == IZ_LR_COSINE)
        return cosine_lr(lr, base_lr, i, n);
    if (i < 0)
        part = 0;
    else if (i < n)
        part = warmup(lr, i, n);
    else if (lr->kind == IZ_LR_DECAY)
        part = decay(i, n, lr->total_num_steps);
    return lr->warmup_min_lr + (lr->warmup_max_lr - lr->warmup_min_lr) * part;
}

/* hysteresis_left is 0 when the scale never changes: it is at least 1
 * otherwise. */
void iz_loss_scale_init(struct iz_loss_scale *s, const struct iz_config *c)
{
    *s = (struct iz_loss_scale){.scale = 1, .last_overflow = -1};
    if (c->dtype != IZ_F16)
        return;
    if (c->fp16.loss_scale > 0) {
        s->scale = c->fp16.loss_scale;
        return;
    }
    s->scale = ldexp(1, c->fp16.initial_scale_power);
    s->hysteresis_left = c->fp16.hysteresis;
}

/* Uses up the hysteresis first; its last unit stays, so that from then on every
 * overflow halves the scale until a step refills it. */
static int shrink(struct iz_loss_scale *s, const struct iz_fp16_config *c)
{
    if (s->hysteresis_left > 1) {
        s->hysteresis_left--;
    } else if (s->scale == c->min_loss_scale) {
        return -ERANGE;
    } else {
        s->scale /= 2;
        if (s->scale < c->min_loss_scale)
            s->scale = c->min_loss_scale;
    }
    return 0;
}

/* The window starts at the step after an overflow; DeepSpeed counts the steps
 * after that one, so the scale doubles at the (window + 1)-th good step. */
static void grow(struct iz_loss_scale *s, const struct iz_fp16_config *c)
{
    int64_t stable = s->iteration - s->last_overflow - 1;
    bool doubles = stable > 0 && stable % c->loss_scale_window == 0;
    if (doubles || c->consecutive_hysteresis)
        s->hysteresis_left = c->hysteresis;
    if (doubles)
        s->scale *= 2;
}

int iz_loss_scale_update(struct iz_loss_scale *s,
                         const struct iz_fp16_config *c, bool overflow)
{
    int rc = 0;
    if (overflow) {
        rc = s->hysteresis_left > 0 ? shrink(s, c) : 0;
        s->last_overflow = s->iteration;
    } else if (s->hysteresis_left > 0) {
        grow(s, c);
    }
    s->iteration++;
    return rc;
}

double iz_schedule_clip_factor(double norm, double max_norm)
{
    double factor = max_norm / (norm + 1e-6);
    return max_norm > 0 && factor < 1 ? factor : 1;
}
