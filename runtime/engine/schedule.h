/* SPDX-License-Identifier: Apache-2.0 */
/* The scalars of a step as pure functions: learning rate, loss scale, clip
 * factor. Formulas are DeepSpeed's (lr_schedules.py, fp16/loss_scaler.py). */
#pragma once

#include "runtime/config/config.h"

/* Learning rate of the update with 0-based index `update` (skipped steps do not
 * count). */
double iz_lr(const struct iz_lr_config *lr, double base_lr, int64_t update);

struct iz_loss_scale {
    double scale; /* 1 when the run is not fp16 */
    int64_t iteration, last_overflow;
    int hysteresis_left; /* 0: the scale never changes */
};

void iz_loss_scale_init(struct iz_loss_scale *s, const struct iz_config *c);

/* After a step whose gradients did or did not overflow.  Returns -ERANGE when
 * the scale is already at its minimum and cannot shrink (the run must stop),
 * else 0. */
int iz_loss_scale_update(struct iz_loss_scale *s,
                         const struct iz_fp16_config *c, bool overflow);

/* Factor on gradients so that their norm is at most `max_norm` (0: 1).
 * DeepSpeed's rule: max_norm / (norm + 1e-6) when that is below 1. */
double iz_schedule_clip_factor(double norm, double max_norm);
