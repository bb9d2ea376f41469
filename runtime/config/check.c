/* SPDX-License-Identifier: Apache-2.0 */
/* The rules between keys: what follows from what, and what cannot be together.
 * A rule says nothing about a key that already has a fault of its own. */
#include "runtime/config/keys.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#define BATCH_MAX 1000000 /* as in the table */

static enum iz_given *given(struct iz_config_file *file, const char *name)
{
    for (int i = 0; iz_config_keys[i].name; i++)
        if (strcmp(iz_config_keys[i].name, name) == 0)
            return &file->given[i];
    assert(!"a name in the table");
    return NULL;
}

static bool is_given(struct iz_config_file *file, const char *name)
{
    return *given(file, name) == IZ_GIVEN_VALUE;
}

static bool is_bad(struct iz_config_file *file, const char *name)
{
    return *given(file, name) == IZ_GIVEN_BAD;
}

/* DeepSpeed's rule: any two give the third; one alone means one micro-batch. */
static void resolve_batch(struct iz_config_file *file, struct iz_faults *f,
                          int64_t ranks)
{
    int64_t t = file->c.train_batch_size;
    int64_t m = file->micro_batch, g = file->grad_accum;

    if (is_bad(file, "train_batch_size") ||
        is_bad(file, "train_micro_batch_size_per_gpu") ||
        is_bad(file, "gradient_accumulation_steps"))
        return;
    if (t == 0 && m == 0) {
        iz_fault(f, "train_batch_size",
                 "missing: give it or train_micro_batch_size_per_gpu");
        return;
    }
    if (g == 0)
        g = t != 0 && m != 0 ? t / m / ranks : 1;
    if (m == 0)
        m = t / ranks / g;
    if (t == 0)
        t = m * g * ranks;
    if (m > BATCH_MAX || g > BATCH_MAX || t != m * g * ranks)
        iz_fault(f, "train_batch_size",
                 "%lld is not train_micro_batch_size_per_gpu %lld x "
                 "gradient_accumulation_steps %lld x %lld rank%s",
                 (long long)t, (long long)m, (long long)g, (long long)ranks,
                 ranks == 1 ? "" : "s");
    else if (file->c.run.slices && m % file->c.run.slices)
        iz_fault(f, "run.slices",
                 "%d does not divide train_micro_batch_size_per_gpu %lld",
                 file->c.run.slices, (long long)m);
    file->c.train_batch_size = t;
    file->c.micro_batch = (int)m;
    file->c.grad_accum = (int)g;
}

static void resolve_dtype(struct iz_config_file *file, struct iz_faults *f)
{
    struct iz_config *c = &file->c;
    static const char *const names[] = {"fp32", "bf16", "fp16"};
    int accum = file->grad_accum_dtype, comm = file->communication_dtype;

    c->dtype = file->bf16 ? IZ_BF16 : file->fp16 ? IZ_F16 : IZ_F32;
    if (file->bf16 && file->fp16) {
        iz_fault(f, "fp16.enabled",
                 "bf16.enabled and fp16.enabled are both "
                 "true; choose one");
        return;
    }
    if (is_bad(file, "bf16.enabled") || is_bad(file, "fp16.enabled"))
        return;
    if (accum > 1 + IZ_F32 && accum != 1 + (int)c->dtype)
        iz_fault(f, "data_types.grad_accum_dtype",
                 "%s, but parameters are %s; choose fp32 or %s",
                 names[accum - 1], names[c->dtype], names[c->dtype]);
    if (comm != 0 && comm != 1 + (int)c->dtype)
        iz_fault(f, "communication_data_type",
                 "%s, but gradients travel in the type of the parameters, %s; "
                 "remove the key",
                 names[comm - 1], names[c->dtype]);
    if (c->run.cpu_products == IZ_PRODUCTS_BF16 && c->dtype != IZ_BF16)
        iz_fault(f, "run.cpu_products",
                 "bf16, but parameters are %s; set bf16.enabled",
                 names[c->dtype]);
    if (c->run.gpu_attention == IZ_ATTENTION_CUDNN && c->dtype == IZ_F32)
        iz_fault(f, "run.gpu_attention",
                 "cudnn, but parameters are fp32, which cuDNN would round: set "
                 "bf16.enabled or fp16.enabled, or use own");
    c->grad_accum_fp32 = c->dtype == IZ_F32 || accum == 1 + IZ_F32 ||
                         (accum == 0 && c->grad_accum > 1);
}

#define PARAMS "optimizer.params."

/* The entry of a key of optimizer.params in an optimizer, NULL: it has not this
 * one.  *is_param: whether it is such a key. */
static const struct iz_optimizer_param *
optimizer_param(const struct iz_optimizer *o, const char *name, bool *is_param)
{
    size_t n = strlen(PARAMS);

    *is_param = strncmp(name, PARAMS, n) == 0;
    return *is_param ? iz_optimizer_param(o, name + n) : NULL;
}

/* What the optimizer has not is refused, what it has its own default of gets
 * that. */
static void resolve_params(struct iz_config_file *file, struct iz_faults *f)
{
    const struct iz_optimizer *o = iz_optimizer(file->c.optimizer.type);

    for (int i = 0; iz_config_keys[i].name; i++) {
        struct iz_key k = iz_config_keys[i];
        bool is_param;
        const struct iz_optimizer_param *p =
            optimizer_param(o, k.name, &is_param);

        if (is_param && !p && file->given[i] == IZ_GIVEN_VALUE)
            iz_fault(f, k.name, "%s has no such parameter", o->type);
        if (p && p->fallback && file->given[i] == IZ_GIVEN_NOT) {
            k.fallback = p->fallback;
            iz_key_store_default(file, &k);
        }
    }
}

static void resolve_optimizer(struct iz_config_file *file, struct iz_faults *f)
{
    bool adamw_type = file->c.optimizer.type == IZ_OPTIMIZER_ADAMW;

    if (is_bad(file, "optimizer.type"))
        return;
    resolve_params(file, f);
    file->c.optimizer.adamw = adamw_type || file->adam_w_mode;
    if (adamw_type && !file->adam_w_mode)
        iz_fault(f, "optimizer.params.adam_w_mode",
                 "false contradicts type AdamW; write type Adam");
    if (file->torch_adam && file->c.optimizer.adamw &&
        *given(file, "optimizer.params.weight_decay") == IZ_GIVEN_NOT)
        iz_fault(f, "optimizer.params.torch_adam",
                 "write optimizer.params.weight_decay too: PyTorch's default "
                 "is 0.01 and DeepSpeed's 0");
}

/* Which scheduler has which parameter. */
static const struct {
    const char *name;
    bool warmup, decay, cosine;
} lr_params[] = {
    {"scheduler.params.warmup_min_lr", true, true, false},
    {"scheduler.params.warmup_max_lr", true, true, false},
    {"scheduler.params.warmup_num_steps", true, true, true},
    {"scheduler.params.warmup_type", true, true, true},
    {"scheduler.params.total_num_steps", false, true, true},
    {"scheduler.params.warmup_min_ratio", false, false, true},
    {"scheduler.params.cos_min_ratio", false, false, true},
};

#define N_LR_PARAMS (sizeof(lr_params) / sizeof(lr_params[0]))

static bool has_param(enum iz_lr_kind kind, size_t i)
{
    return (kind == IZ_LR_WARMUP && lr_params[i].warmup) ||
           (kind == IZ_LR_DECAY && lr_params[i].decay) ||
           (kind == IZ_LR_COSINE && lr_params[i].cosine);
}

static void check_lr_params(struct iz_config_file *file, struct iz_faults *f)
{
    static const char *const kinds[] = {"a constant rate", "WarmupLR",
                                        "WarmupDecayLR", "WarmupCosineLR"};
    enum iz_lr_kind kind = file->c.lr.kind;

    for (size_t i = 0; i < N_LR_PARAMS; i++) {
        enum iz_given g = *given(file, lr_params[i].name);
        if (!has_param(kind, i) && g != IZ_GIVEN_NOT && g != IZ_GIVEN_BAD)
            iz_fault(f, lr_params[i].name, "%s has no such parameter",
                     kinds[kind]);
    }
}

static void resolve_scheduler(struct iz_config_file *file, struct iz_faults *f)
{
    struct iz_lr_config *lr = &file->c.lr;
    enum iz_given total = *given(file, "scheduler.params.total_num_steps");

    if (is_bad(file, "scheduler.type"))
        return;
    check_lr_params(file, f);
    lr->log_warmup = file->warmup_type == 0;
    if (!is_given(file, "scheduler.params.warmup_max_lr"))
        lr->warmup_max_lr =
            lr->kind == IZ_LR_DECAY ? 0.001 : file->c.optimizer.lr;
    if (lr->kind != IZ_LR_DECAY && lr->kind != IZ_LR_COSINE)
        return;
    if (total == IZ_GIVEN_NOT)
        iz_fault(f, "scheduler.params.total_num_steps",
                 "missing; \"auto\" takes run.steps");
    if (total == IZ_GIVEN_AUTO)
        lr->total_num_steps = file->c.run.steps > 0 ? file->c.run.steps : 1;
}

static void check_fp16(struct iz_config_file *file, struct iz_faults *f)
{
    const struct iz_fp16_config *p = &file->c.fp16;

    if (file->fp16 && p->loss_scale == 0 &&
        ldexp(1, p->initial_scale_power) < p->min_loss_scale)
        iz_fault(f, "fp16.min_loss_scale",
                 "%.15g is above the first scale, 2 to the power of "
                 "fp16.initial_scale_power %d",
                 p->min_loss_scale, p->initial_scale_power);
}

static void check_offload(struct iz_faults *f, const char *section,
                          const struct iz_offload_config *o)
{
    char key[IZ_CONFIG_NAME_MAX];

    snprintf(key, sizeof(key), "zero_optimization.%s.nvme_path", section);
    if (o->home == IZ_HOME_NVME && o->nvme_path[0] == '\0')
        iz_fault(f, key, "missing, and %s.device is nvme", section);
}

/* What a GPU and the host can share between them. */
static void check_ratio(struct iz_config_file *file, struct iz_faults *f)
{
    const struct iz_config *c = &file->c;
    static const char section[] = "zero_optimization.offload_optimizer.ratio";
    double ratio = c->zero.optimizer.ratio;

    if (is_bad(file, "zero_optimization.offload_optimizer.device") ||
        is_bad(file, "zero_optimization.offload_param.device"))
        return;
    if (c->zero.optimizer.home != IZ_HOME_CPU)
        iz_fault(f, section,
                 "%.15g divides an optimizer that is offloaded to cpu, "
                 "offload_optimizer.device is %s",
                 ratio,
                 c->zero.optimizer.home == IZ_HOME_NVME ? "nvme" : "none");
    else if (c->zero.param.home == IZ_HOME_NVME)
        iz_fault(f, section,
                 "%.15g needs offload_param.device none or cpu, found nvme",
                 ratio);
    else if (c->run.device == IZ_DEVICE_CPU)
        iz_fault(f, section, "%.15g leaves chunks to a GPU, run.device is cpu",
                 ratio);
}

static void check_zero(struct iz_config_file *file, struct iz_faults *f)
{
    const struct iz_zero_config *z = &file->c.zero;
    bool stage_known = !is_bad(file, "zero_optimization.stage");

    if (stage_known && z->param.home != IZ_HOME_NONE && z->stage != 3)
        iz_fault(f, "zero_optimization.offload_param.device",
                 "needs zero_optimization.stage 3, found %d", z->stage);
    if (stage_known && z->optimizer.home != IZ_HOME_NONE && z->stage < 1)
        iz_fault(f, "zero_optimization.offload_optimizer.device",
                 "needs zero_optimization.stage 1, 2 or 3, found 0");
    if (!is_bad(file, "zero_optimization.offload_optimizer.nvme_path"))
        check_offload(f, "offload_optimizer", &z->optimizer);
    if (!is_bad(file, "zero_optimization.offload_param.nvme_path"))
        check_offload(f, "offload_param", &z->param);
    if (z->optimizer.ratio < 1)
        check_ratio(file, f);
    if (!z->contiguous_gradients)
        iz_fault(f, "zero_optimization.contiguous_gradients",
                 "false is not supported. Gradients of a unit are always one "
                 "flat buffer; set true");
}

static void resolve_run(struct iz_config_file *file, struct iz_faults *f)
{
    struct iz_run_config *run = &file->c.run;

    if (run->output[0] == '\0')
        iz_fault(f, "run.output", "is empty: name a directory");
    if (is_given(file, "steps_per_print") &&
        is_given(file, "run.log_interval") &&
        file->steps_per_print != run->log_interval)
        iz_fault(f, "steps_per_print",
                 "%lld, but run.log_interval is %lld; give one of them",
                 (long long)file->steps_per_print,
                 (long long)run->log_interval);
    if (is_given(file, "steps_per_print"))
        run->log_interval = file->steps_per_print;
    if (run->save_mode == IZ_SAVE_ASYNC && run->nvme_checksum &&
        (file->c.zero.optimizer.home == IZ_HOME_NVME ||
         file->c.zero.param.home == IZ_HOME_NVME))
        iz_fault(f, "run.save_mode",
                 "async reads parts of what run.nvme_checksum checks as a "
                 "whole; use auto or sync");
    if (run->save_mode == IZ_SAVE_ASYNC && run->state_dtype != IZ_MOMENT_F32 &&
        file->c.zero.optimizer.home == IZ_HOME_NVME)
        iz_fault(f, "run.save_mode",
                 "async cannot read states of run.state_dtype from nvme; use "
                 "auto or sync");
    if (run->eval_interval > 0 && run->eval_batches == 0 &&
        !is_bad(file, "run.eval_batches"))
        iz_fault(f, "run.eval_interval",
                 "%lld, but run.eval_batches is 0: nothing to evaluate",
                 (long long)run->eval_interval);
}

static void check_boundaries(struct iz_config_file *file, struct iz_faults *f)
{
    if (file->c.cpu_checkpointing && file->c.run.recompute == IZ_RECOMPUTE_NONE)
        iz_fault(f, "activation_checkpointing.cpu_checkpointing",
                 "true, but run.recompute none keeps all activations where "
                 "units are computed; choose full");
}

static void resolve_lora(struct iz_config_file *file, struct iz_faults *f)
{
    struct iz_lora_config *l = &file->c.lora;

    if (is_bad(file, "lora.rank") || is_bad(file, "lora.targets"))
        return;
    if (l->rank > 0 && l->targets[strspn(l->targets, " ,")] == '\0')
        iz_fault(f, "lora.targets", "missing, and lora.rank is %d", l->rank);
    if (l->rank == 0 && l->targets[0] != '\0')
        iz_fault(f, "lora.targets", "there are no adapters: lora.rank is 0");
    if (l->rank == 0 && l->export != IZ_LORA_MERGED)
        iz_fault(f, "lora.export", "there are no adapters: lora.rank is 0");
    if (l->alpha == 0)
        l->alpha = l->rank;
}

void iz_config_resolve(struct iz_config_file *file, struct iz_faults *f,
                       int ranks)
{
    assert(ranks > 0);
    resolve_batch(file, f, ranks);
    resolve_dtype(file, f); /* after the batch: the accumulator follows it */
    resolve_optimizer(file, f);
    resolve_scheduler(file, f);
    check_fp16(file, f);
    check_zero(file, f);
    check_boundaries(file, f);
    resolve_run(file, f);
    resolve_lora(file, f);
}

void iz_config_unresolve(struct iz_config_file *file, const struct iz_config *c)
{
    memset(file, 0, sizeof(*file));
    memcpy(&file->c, c, sizeof(*c));
    file->micro_batch = c->micro_batch;
    file->grad_accum = c->grad_accum;
    file->bf16 = c->dtype == IZ_BF16;
    file->fp16 = c->dtype == IZ_F16;
    file->grad_accum_dtype = 1 + (int)(c->grad_accum_fp32 ? IZ_F32 : c->dtype);
    file->adam_w_mode = c->optimizer.adamw;
    file->warmup_type = c->lr.log_warmup ? 0 : 1;
    for (int i = 0; iz_config_keys[i].name; i++)
        file->given[i] = IZ_GIVEN_VALUE;
    /* They only repeat others, and an override of those would contradict. */
    *given(file, "steps_per_print") = IZ_GIVEN_NOT;
    *given(file, "communication_data_type") = IZ_GIVEN_NOT;
    for (size_t i = 0; i < N_LR_PARAMS; i++)
        if (!has_param(c->lr.kind, i))
            *given(file, lr_params[i].name) = IZ_GIVEN_NOT;
    for (int i = 0; iz_config_keys[i].name; i++) {
        const struct iz_optimizer *o = iz_optimizer(c->optimizer.type);
        bool is_param;
        if (!optimizer_param(o, iz_config_keys[i].name, &is_param) && is_param)
            file->given[i] = IZ_GIVEN_NOT;
    }
}
