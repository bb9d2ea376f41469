/* SPDX-License-Identifier: Apache-2.0 */
/* The rules between keys: what follows from what, and what cannot be together.
 * A rule says nothing about a key that already has a fault of its own. */
#include "runtime/config/keys.h"
#include "runtime/formats/peft.h"

#include <assert.h>
#include <string.h>

/* DeepSpeed's rule: any two give the third; one alone means one micro-batch. */
static void resolve_batch(struct iz_config_file *file, struct iz_faults *f,
                          int64_t ranks)
{
    int64_t t = file->c.train_batch_size;
    int64_t m = file->micro_batch, g = file->grad_accum;
    file->c.cut_auto =
        t && !m && !g &&
        (*iz_config_given(file, "train_micro_batch_size_per_gpu") ==
             IZ_GIVEN_AUTO ||
         *iz_config_given(file, "gradient_accumulation_steps") ==
             IZ_GIVEN_AUTO);
    if (iz_config_bad(file, "train_batch_size|train_micro_batch_size_per_gpu|"
                            "gradient_accumulation_steps"))
        return;
    if (t == 0 && m == 0 &&
        (*iz_config_given(file, "train_micro_batch_size_per_gpu") ==
             IZ_GIVEN_AUTO ||
         *iz_config_given(file, "train_batch_size") == IZ_GIVEN_AUTO))
        m = 8; /* as of TrainingArguments */
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
    if (m > IZ_BATCH_MAX || g > IZ_BATCH_MAX || t != m * g * ranks)
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
    file->micro_batch = file->c.micro_batch = (int)m;
    file->grad_accum = file->c.grad_accum = (int)g;
}

void iz_config_cut(struct iz_config *c, int micro_batches)
{
    c->micro_batch = c->micro_batch * c->grad_accum / micro_batches;
    c->grad_accum = micro_batches;
    if (c->grad_accum_open)
        c->grad_accum_fp32 = micro_batches > 1;
}

static void check_attention(struct iz_faults *f, const char *key,
                            enum iz_attention_by by, const struct iz_config *c)
{
    if (by == IZ_ATTENTION_CUDNN && c->dtype == IZ_F32)
        iz_fault(f, key,
                 "cudnn, but parameters are fp32, which cuDNN would round: set "
                 "bf16.enabled or fp16.enabled, or use own");
    if (by == IZ_ATTENTION_CUDNN && c->data.apart)
        iz_fault(f, key,
                 "cudnn, but data.document_end is %d, and cuDNN's attention "
                 "does not keep documents apart: use own",
                 c->data.document_end);
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
    if (iz_config_bad(file, "bf16.enabled|fp16.enabled"))
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
    check_attention(f, "run.gpu_attention", c->run.gpu_attention, c);
    check_attention(f, "run.gpu_attention_backward",
                    c->run.gpu_attention_backward, c);
    c->grad_accum_open = c->cut_auto && accum == 0 && c->dtype != IZ_F32;
    c->grad_accum_fp32 = c->dtype == IZ_F32 || accum == 1 + IZ_F32 ||
                         (accum == 0 && c->grad_accum > 1);
}

static void check_offload(struct iz_config_file *file, struct iz_faults *f,
                          const char *section,
                          const struct iz_offload_config *o)
{
    char key[IZ_KEY_NAME_MAX];
    snprintf(key, sizeof(key), "zero_optimization.%s.nvme_path", section);
    bool all = o->home == IZ_HOME_NVME, frozen = o->frozen - 1 == IZ_HOME_NVME;
    if ((all || frozen) && !o->nvme_path[0] && !iz_config_bad(file, key))
        iz_fault(f, key, "missing, and %s.%sdevice is nvme", section,
                 all ? "" : "frozen_");
}

static void check_frozen(struct iz_config_file *file, struct iz_faults *f)
{
    const struct iz_zero_config *z = &file->c.zero;
    static const char key[] = "zero_optimization.offload_param.frozen_device";
    if (!z->param.frozen || iz_config_bad(file, "zero_optimization.stage"))
        return;
    if (z->stage != 3)
        iz_fault(f, key, "needs zero_optimization.stage 3, found %d", z->stage);
    else if (z->hpz_partition > 1)
        iz_fault(f, key,
                 "zero_optimization.zero_hpz_partition_size is %d: a group's "
                 "copy holds what is trained and what is frozen together; set "
                 "null, or groups of 1",
                 z->hpz_partition);
}

/* What a GPU and the host can share between them. */
static void check_ratio(struct iz_config_file *file, struct iz_faults *f)
{
    const struct iz_config *c = &file->c;
    static const char section[] = "zero_optimization.offload_optimizer.ratio";
    double ratio = c->zero.optimizer.ratio;
    if (iz_config_bad(file, "zero_optimization.offload_optimizer.device|"
                            "zero_optimization.offload_param.device"))
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

static void check_copies(struct iz_config_file *file, struct iz_faults *f)
{
    const struct iz_zero_config *z = &file->c.zero;
    static const char key[] = "zero_optimization.zero_hpz_partition_size";
    if (z->hpz_partition <= 1 ||
        iz_config_bad(file, "zero_optimization.stage|"
                            "zero_optimization.offload_param.device"))
        return;
    if (z->stage != 3)
        iz_fault(f, key,
                 "%d needs zero_optimization.stage 3, found %d: there every "
                 "rank has all parameters anyway",
                 z->hpz_partition, z->stage);
    else if (z->param.home == IZ_HOME_NVME)
        iz_fault(f, key,
                 "%d needs offload_param.device none or cpu, found nvme: a "
                 "copy in memory is larger than the shards that memory has no "
                 "room for",
                 z->hpz_partition);
}

static void check_base(struct iz_config_file *file, struct iz_faults *f)
{
    int group = file->c.zero.hpz_partition;
    if (file->c.base_dtype && group > 1)
        iz_fault(f, "model.base_dtype",
                 "%s, and zero_optimization.zero_hpz_partition_size is %d: "
                 "copies of quantised parameters are not built; set it to 1",
                 iz_quant_name(file->c.base_dtype), group);
}

static void check_zero(struct iz_config_file *file, struct iz_faults *f)
{
    const struct iz_zero_config *z = &file->c.zero;
    bool stage_known = !iz_config_bad(file, "zero_optimization.stage");
    if (stage_known && z->param.home != IZ_HOME_NONE && z->stage != 3)
        iz_fault(f, "zero_optimization.offload_param.device",
                 "needs zero_optimization.stage 3, found %d", z->stage);
    if (stage_known && z->optimizer.home != IZ_HOME_NONE && z->stage < 1)
        iz_fault(f, "zero_optimization.offload_optimizer.device",
                 "needs zero_optimization.stage 1, 2 or 3, found 0");
    check_offload(file, f, "offload_optimizer", &z->optimizer);
    check_offload(file, f, "offload_param", &z->param);
    check_frozen(file, f);
    check_copies(file, f);
    check_base(file, f);
    if (z->optimizer.ratio < 1)
        check_ratio(file, f);
    file->c.zero.optimizer.ratio_auto =
        *iz_config_given(file, "zero_optimization.offload_optimizer.ratio") ==
        IZ_GIVEN_AUTO;
}

static void resolve_run(struct iz_config_file *file, struct iz_faults *f)
{
    struct iz_run_config *run = &file->c.run;
    if (run->output[0] == '\0')
        iz_fault(f, "run.output", "is empty: name a directory");
    if (iz_config_gives(file, "steps_per_print") &&
        iz_config_gives(file, "run.log_interval") &&
        file->steps_per_print != run->log_interval)
        iz_fault(f, "steps_per_print",
                 "%lld, but run.log_interval is %lld; give one of them",
                 (long long)file->steps_per_print,
                 (long long)run->log_interval);
    if (iz_config_gives(file, "steps_per_print"))
        run->log_interval = file->steps_per_print;
    if (run->save_mode == IZ_SAVE_ASYNC && run->nvme_checksum &&
        (file->c.zero.optimizer.home == IZ_HOME_NVME ||
         file->c.zero.param.home == IZ_HOME_NVME ||
         file->c.zero.param.frozen - 1 == IZ_HOME_NVME))
        iz_fault(f, "run.save_mode",
                 "async reads parts of what run.nvme_checksum checks as a "
                 "whole; use auto or sync");
    if (run->save_mode == IZ_SAVE_ASYNC && run->state_dtype != IZ_MOMENT_F32 &&
        file->c.zero.optimizer.home == IZ_HOME_NVME)
        iz_fault(f, "run.save_mode",
                 "async cannot read states of run.state_dtype from nvme; use "
                 "auto or sync");
    if (run->save_mode == IZ_SAVE_ASYNC && run->master == IZ_MASTER_REMAINDER)
        iz_fault(f, "run.save_mode",
                 "async cannot put the two halves of run.master together; use "
                 "auto or sync");
    if (run->master == IZ_MASTER_REMAINDER && file->c.dtype != IZ_BF16)
        iz_fault(f, "run.master",
                 "remainder, but parameters are %s: the master of a bf16 "
                 "parameter alone has 16 bits more; set bf16.enabled",
                 iz_dtype_name(file->c.dtype));
    if (run->eval_interval > 0 && run->eval_batches == 0 &&
        !iz_config_bad(file, "run.eval_batches"))
        iz_fault(f, "run.eval_interval",
                 "%lld, but run.eval_batches is 0: nothing to evaluate",
                 (long long)run->eval_interval);
}

static void check_boundaries(struct iz_config_file *file, struct iz_faults *f)
{
    if (file->c.boundary_path[0] && !file->c.cpu_checkpointing)
        iz_fault(f, "activation_checkpointing.nvme_path",
                 "%s, but activation_checkpointing.cpu_checkpointing is "
                 "false: all stays where units are computed",
                 file->c.boundary_path);
}

/* A number of the file beside that of the config; 0: the config has none. */
static void compare_number(struct iz_faults *f, const char *path,
                           const char *key, double ours, const char *name,
                           double theirs)
{
    if (ours != 0 && ours != theirs)
        iz_fault(f, key, "%g, but in %s %s is %g", ours, path, name, theirs);
}

static void peft_fault(void *arg, const char *what)
{
    iz_fault(arg, "lora.import", "%s", what);
}

/* Takes rank and alpha from the folder of lora.import, if there is one; what
 * the config says of them must be the same. */
static void resolve_import(struct iz_config_file *file, struct iz_faults *f)
{
    struct iz_lora_config *l = &file->c.lora;
    char path[IZ_PATH_MAX + 32];
    struct iz_peft p;
    if (l->import[0] == '\0')
        return;
    snprintf(path, sizeof(path), "%s/" IZ_PEFT_CONFIG, l->import);
    if (!iz_peft_read(&p, path, peft_fault, f, f->err)) {
        iz_fault(f, "lora.import", "%s cannot be imported", l->import);
        return;
    }
    compare_number(f, path, "lora.rank", l->rank, "r", p.rank);
    compare_number(f, path, "lora.alpha", l->alpha, "lora_alpha", p.alpha);
    if (l->use_rslora && !p.use_rslora)
        iz_fault(f, "lora.use_rslora", "true, but %s has no use_rslora", path);
    if (strcmp(l->rank_pattern, "{}") || strcmp(l->alpha_pattern, "{}"))
        iz_fault(f, "lora.rank_pattern",
                 "those of %s apply, with "
                 "lora.alpha_pattern: give none",
                 path);
    if (l->use_dora && !p.use_dora)
        iz_fault(f, "lora.use_dora", "true, but %s has no use_dora", path);
    if (l->modules_to_save[0])
        iz_fault(f, "lora.modules_to_save",
                 "those of %s apply: give none, or "
                 "train others by `parameters`",
                 path);
    l->use_dora = p.use_dora;
    l->ties = p.ties;
    l->use_rslora = p.use_rslora;
    l->rank = p.rank;
    l->alpha = p.alpha;
    l->gate_up = p.gate_up;
    l->down = p.down;
}

static void resolve_lora(struct iz_config_file *file, struct iz_faults *f)
{
    struct iz_lora_config *l = &file->c.lora;
    if (iz_config_bad(file, "lora.rank|lora.targets|lora.import"))
        return;
    if (l->rank > 0 && !l->import[0] &&
        l->targets[strspn(l->targets, " ,")] == '\0')
        iz_fault(f, "lora.targets", "missing, and lora.rank is %d", l->rank);
    if (l->rank == 0 && l->targets[0] != '\0')
        iz_fault(f, "lora.targets", "there are no adapters: lora.rank is 0");
    if (l->rank == 0 && l->dropout > 0)
        iz_fault(f, "lora.dropout", "there are no adapters: lora.rank is 0");
    if (l->rank == 0 && l->export != IZ_LORA_MERGED)
        iz_fault(f, "lora.export", "there are no adapters: lora.rank is 0");
    if (l->use_dora && l->dropout > 0)
        iz_fault(f, "lora.dropout", "%g, but lora.use_dora is true: set 0",
                 l->dropout);
    if (l->alpha == 0)
        l->alpha = l->rank;
}

static void resolve_loss(struct iz_config_file *file, struct iz_faults *f)
{
    const struct iz_config *c = &file->c;
    bool pairs = c->loss.type != IZ_LOSS_TARGETS;
    int slices = c->run.slices ? c->run.slices : 1;
    if (iz_config_bad(file, "loss.type"))
        return;
    file->c.data.pairs = pairs;
    if (!pairs && (c->loss.sft != 0 || c->loss.beta != IZ_LOSS_BETA))
        iz_fault(f, c->loss.sft != 0 ? "loss.sft" : "loss.beta",
                 "%.15g, but loss.type: cross_entropy has none",
                 c->loss.sft != 0 ? c->loss.sft : c->loss.beta);
    if (!pairs)
        return;
    if (c->lora.import[0])
        iz_fault(
            f, "lora.import",
            "%s: the reference of loss.type is the model without "
            "adapters, not with those: merge them first (docs/finetune.md)",
            c->lora.import);
    if (c->data.bytes)
        iz_fault(f, "data.bytes",
                 "true, but loss.type needs shards of pairs, which "
                 "tools/tokenize --preferences writes");
    if (c->data.document_end >= 0)
        iz_fault(f, "data.document_end",
                 "%d, but with loss.type each text is a sample of its own: "
                 "leave it out",
                 c->data.document_end);
    if (c->micro_batch % (2 * slices))
        iz_fault(f, "train_micro_batch_size_per_gpu",
                 "%d, but loss.type takes texts in pairs: use a multiple of "
                 "2%s",
                 c->micro_batch, slices > 1 ? " run.slices" : "");
}

void iz_config_resolve(struct iz_config_file *file, struct iz_faults *f,
                       int ranks)
{
    assert(ranks > 0);
    file->c.data.apart = file->c.data.document_end >= 0;
    resolve_import(file, f);
    if (file->c.zero.sub_group_size == 0)
        iz_key_store_default(
            file,
            iz_key_find(iz_config_keys, "zero_optimization.sub_group_size"));
    resolve_batch(file, f, ranks);
    resolve_dtype(file, f); /* after the batch: the accumulator follows it */
    iz_config_resolve_updates(file, f);
    iz_config_check_numbers(file, f);
    check_zero(file, f);
    resolve_run(file, f);
    check_boundaries(file, f);
    resolve_lora(file, f);
    resolve_loss(file, f);
}

void iz_config_unresolve(struct iz_config_file *file, const struct iz_config *c)
{
    *file = (struct iz_config_file){
        .c = *c,
        .micro_batch = c->micro_batch,
        .grad_accum = c->grad_accum,
        .bf16 = c->dtype == IZ_BF16,
        .fp16 = c->dtype == IZ_F16,
        .grad_accum_dtype = 1 + (int)(c->grad_accum_fp32 ? IZ_F32 : c->dtype),
        .adam_w_mode = c->optimizer.adamw,
        .muon_lr = c->optimizer.lr,
        .warmup_type = c->lr.log_warmup ? 0 : 1,
        .min_lr_ratio = c->lr.min_ratio};
    for (int i = 0; iz_config_keys[i].name; i++)
        file->given[i] = iz_config_has_param(c, iz_config_keys[i].name)
                             ? IZ_GIVEN_VALUE
                             : IZ_GIVEN_NOT;
    /* They only repeat others, and an override of those would contradict. */
    *iz_config_given(file, "steps_per_print") = IZ_GIVEN_NOT;
    *iz_config_given(file, "communication_data_type") = IZ_GIVEN_NOT;
}
