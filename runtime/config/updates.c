/* SPDX-License-Identifier: Apache-2.0 */
/* Rules between the keys of optimizers, schedulers and loss scales: which type
 * has which parameter, and what follows from what. */
#include "runtime/config/keys.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define OPTIMIZER "optimizer.params."
#define SCHEDULER "scheduler.params."

/* The name of its type. */
static const char *lr_name(const struct iz_lr_config *lr, char name[32])
{
    iz_text_word(name, 32, IZ_LR_TYPES, (int)lr->kind);
    return lr->kind == IZ_LR_CONST ? "a constant rate" : name;
}

static bool is_in(const char *key, const char *section)
{
    return strncmp(key, section, strlen(section)) == 0;
}

bool iz_config_has_param(const struct iz_config *c, const char *key)
{
    char type[32];
    if (is_in(key, OPTIMIZER))
        return iz_optimizer_param(iz_optimizer(c->optimizer.type),
                                  key + strlen(OPTIMIZER)) != NULL;
    lr_name(&c->lr, type);
    return iz_key_applies(type, iz_key_find(iz_config_keys, key)->types);
}

/* Refuses the parameters that the chosen type has not. */
static void check_params(struct iz_config_file *file, struct iz_faults *f,
                         const char *section, const char *type)
{
    for (int i = 0; iz_config_keys[i].name; i++) {
        const char *key = iz_config_keys[i].name;
        bool wanted =
            file->given[i] == IZ_GIVEN_VALUE || file->given[i] == IZ_GIVEN_AUTO;
        if (wanted && is_in(key, section) &&
            !iz_config_has_param(&file->c, key))
            iz_fault(f, key, "%s has no such parameter", type);
    }
}

/* Sets the parameters that are not given and of which the optimizer has its own
 * default. */
static void resolve_defaults(struct iz_config_file *file,
                             const struct iz_optimizer *o)
{
    for (const struct iz_optimizer_param *p = o->param; p->key; p++) {
        char name[IZ_KEY_NAME_MAX];
        snprintf(name, sizeof(name), OPTIMIZER "%s", p->key);
        struct iz_key k = *iz_key_find(iz_config_keys, name);
        if (!p->fallback || *iz_config_given(file, name) != IZ_GIVEN_NOT)
            continue;
        k.fallback = p->fallback;
        iz_key_store_default(file, &k);
    }
}

/* muon_lr and adam_lr replace lr; the scheduler's rate is Muon's. */
static void resolve_muon(struct iz_config_file *file)
{
    struct iz_hyper *o = &file->c.optimizer;
    if (!iz_config_gives(file, OPTIMIZER "adam_lr"))
        o->adam_lr = o->lr;
    if (iz_config_gives(file, OPTIMIZER "muon_lr"))
        o->lr = file->muon_lr;
    o->adam_rate = o->lr > 0 ? o->adam_lr / o->lr : 1;
}

static void resolve_optimizer(struct iz_config_file *file, struct iz_faults *f)
{
    struct iz_config *c = &file->c;
    if (iz_config_bad(file, "optimizer.type"))
        return;
    const struct iz_optimizer *o = iz_optimizer(c->optimizer.type);
    check_params(file, f, OPTIMIZER, o->type);
    resolve_defaults(file, o);
    c->optimizer.adamw =
        c->optimizer.type == IZ_OPTIMIZER_ADAMW || file->adam_w_mode;
    if (o->matrices)
        resolve_muon(file);
    for (int i = 0; i < c->n_rules && !o->matrices; i++)
        if (c->rule[i].given[IZ_RULE_MUON])
            iz_fault(f, "parameters",
                     "rule %d has use_muon, and optimizer.type is %s", i,
                     o->type);
}

static void resolve_scheduler(struct iz_config_file *file, struct iz_faults *f)
{
    struct iz_lr_config *lr = &file->c.lr;
    char name[32];
    if (iz_config_bad(file, "scheduler.type"))
        return;
    check_params(file, f, SCHEDULER, lr_name(lr, name));
    lr->log_warmup = file->warmup_type == 0;
    if (lr->kind == IZ_LR_HF_WSD)
        lr->min_ratio = file->min_lr_ratio;
    bool own = lr->kind == IZ_LR_DECAY &&
               !iz_config_auto(file, SCHEDULER "warmup_max_lr");
    if (!iz_config_gives(file, SCHEDULER "warmup_max_lr"))
        lr->warmup_max_lr = own ? 0.001 : file->c.optimizer.lr;
    enum iz_given steps = *iz_config_given(file, SCHEDULER "warmup_num_steps");
    bool hf = lr->kind >= IZ_LR_HF_CONSTANT;
    if (steps == IZ_GIVEN_NOT || (hf && steps == IZ_GIVEN_AUTO))
        lr->warmup_num_steps = hf ? 0 : 1000;
    if (iz_config_auto(file, SCHEDULER "total_num_steps"))
        lr->total_num_steps = file->c.run.steps > 0 ? file->c.run.steps : 1;
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
    if (iz_config_bad(file, "scheduler.type|optimizer.type"))
        return;
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

static void check_updates(struct iz_config_file *file, struct iz_faults *f)
{
    const struct iz_config *c = &file->c;
    const struct iz_hyper *o = &c->optimizer;
    const struct iz_lr_config *lr = &c->lr;
    const struct iz_fp16_config *p = &c->fp16;
    enum iz_given decay = *iz_config_given(file, OPTIMIZER "weight_decay");
    enum iz_given total = *iz_config_given(file, SCHEDULER "total_num_steps");
    bool ends = iz_config_has_param(c, SCHEDULER "total_num_steps");
    bool muon = iz_optimizer(o->type)->matrices &&
                !iz_config_bad(file, OPTIMIZER "lr|" OPTIMIZER "muon_lr");
    bool own = iz_lr_is_own(lr), wsd = lr->kind == IZ_LR_HF_WSD;
    const struct iz_conflict rows[] = {
        {muon && o->lr == 0 && o->adam_lr > 0, OPTIMIZER "muon_lr",
         "{}, but adam_lr is {optimizer.params.adam_lr}: freeze the matrices "
         "by a rule of parameters"},
        {muon && o->adam_lr != o->lr && own, OPTIMIZER "adam_lr",
         "{}, muon_lr is {optimizer.params.lr}, and {scheduler.type} has one "
         "rate for all: use WarmupCosineLR, or one lr"},
        {o->type == IZ_OPTIMIZER_ADAMW && !file->adam_w_mode,
         OPTIMIZER "adam_w_mode",
         "{} contradicts type {optimizer.type}; write type Adam"},
        {file->torch_adam && o->adamw && decay == IZ_GIVEN_NOT,
         OPTIMIZER "torch_adam",
         "write optimizer.params.weight_decay too: PyTorch's default is 0.01 "
         "and DeepSpeed's 0"},
        {ends && total == IZ_GIVEN_NOT, SCHEDULER "total_num_steps",
         "missing; \"auto\" takes run.steps"},
        {own && lr->warmup_min_lr > lr->warmup_max_lr,
         SCHEDULER "warmup_min_lr",
         "{}, but warmup_max_lr is {scheduler.params.warmup_max_lr}: the rate "
         "would fall, and no warm-up does that"},
        /* What transformers refuses, or would compute something else from. */
        {lr->kind == IZ_LR_HF_POLYNOMIAL && lr->end_lr >= o->lr,
         SCHEDULER "lr_end",
         "{} is not below optimizer.params.lr, {optimizer.params.lr}"},
        {wsd && !lr->decay_steps, SCHEDULER "num_decay_steps", "missing"},
        {wsd && lr->decay_steps &&
             lr->warmup_num_steps + lr->decay_steps > lr->total_num_steps,
         SCHEDULER "num_decay_steps",
         "{} and a warm-up of {scheduler.params.warmup_num_steps} are more "
         "than total_num_steps, {scheduler.params.total_num_steps}"},
        {p->loss_scale > 0 && p->loss_scale < 0x1p-20, "fp16.loss_scale",
         "{} leaves nothing of a gradient in fp16; 0: dynamic"},
        {file->fp16 && p->loss_scale == 0 &&
             ldexp(1, p->initial_scale_power) < p->min_loss_scale,
         "fp16.min_loss_scale",
         "{} is above the first scale, 2 to the power of "
         "fp16.initial_scale_power {fp16.initial_scale_power}"},
    };
    iz_conflicts_tell(file, f, rows, sizeof(rows) / sizeof(rows[0]));
}

void iz_config_resolve_updates(struct iz_config_file *file, struct iz_faults *f)
{
    resolve_optimizer(file, f);
    resolve_scheduler(file, f);
    check_updates(file, f);
    check_decay(file, f);
}
