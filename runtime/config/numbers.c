/* SPDX-License-Identifier: Apache-2.0 */
/* Numbers that are good alone and absurd in what they are for, or beside
 * others. */
#include "runtime/config/keys.h"

#include <math.h>
#include <stdio.h>

static void check_scale(struct iz_config_file *file, struct iz_faults *f)
{
    const struct iz_fp16_config *p = &file->c.fp16;
    if (p->loss_scale > 0 && p->loss_scale < 0x1p-20)
        iz_fault(f, "fp16.loss_scale",
                 "%.3g leaves nothing of a gradient in fp16; 0: dynamic",
                 p->loss_scale);
    if (file->fp16 && p->loss_scale == 0 &&
        ldexp(1, p->initial_scale_power) < p->min_loss_scale)
        iz_fault(f, "fp16.min_loss_scale",
                 "%.15g is above the first scale, 2 to the power of "
                 "fp16.initial_scale_power %d",
                 p->min_loss_scale, p->initial_scale_power);
}

static void check_warmup(struct iz_config_file *file, struct iz_faults *f)
{
    const struct iz_lr_config *lr = &file->c.lr;
    if (iz_lr_is_own(lr) && lr->warmup_min_lr > lr->warmup_max_lr &&
        !iz_config_bad(file, "scheduler.params.warmup_max_lr"))
        iz_fault(f, "scheduler.params.warmup_min_lr",
                 "%.15g, but warmup_max_lr is %.15g: the rate would fall, and "
                 "no warm-up does that",
                 lr->warmup_min_lr, lr->warmup_max_lr);
}

/* Decoupled decay takes its part of a weight away, which must not be all. */
static void check_decay(struct iz_config_file *file, struct iz_faults *f)
{
    const struct iz_config *c = &file->c;
    double rate = iz_lr_is_own(&c->lr)
                      ? c->lr.warmup_max_lr
                      : fmax(c->optimizer.lr, c->optimizer.adam_lr);
    bool decoupled =
        c->optimizer.type != IZ_OPTIMIZER_ADAM || file->adam_w_mode;
    for (int i = -1; i < c->n_rules && decoupled; i++) {
        const struct iz_rule *r = i < 0 ? NULL : &c->rule[i];
        double decay = r ? r->weight_decay : c->optimizer.weight_decay;
        double scale = r && r->given[IZ_RULE_LR] ? r->lr_scale : 1;
        char key[64] = "optimizer.params.weight_decay";
        if (r)
            snprintf(key, sizeof(key), "parameters[%d].weight_decay", i);
        if (rate * scale * decay >= 1)
            iz_fault(f, key,
                     "%.15g times the rate is %.3g: a step would take all of "
                     "a weight away, or more",
                     decay, rate * scale * decay);
    }
}

void iz_config_check_numbers(struct iz_config_file *file, struct iz_faults *f)
{
    check_scale(file, f);
    if (iz_config_bad(file, "scheduler.type") ||
        iz_config_bad(file, "optimizer.type"))
        return;
    check_warmup(file, f);
    check_decay(file, f);
}
