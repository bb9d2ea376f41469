/* SPDX-License-Identifier: Apache-2.0 */
/* The rules between keys: what follows from what, and what cannot be
 * together. */
#include "runtime/config/keys.h"
#include "runtime/formats/peft.h"

#include <assert.h>
#include <string.h>

#define ZERO "zero_optimization."
#define STATES ZERO "offload_optimizer."
#define PARAMS ZERO "offload_param."

/* DeepSpeed's rule: any two give the third; one alone means one micro-batch. */
static void resolve_batch(struct iz_config_file *file, struct iz_faults *f,
                          int64_t ranks)
{
    int64_t t = file->c.train_batch_size;
    int64_t m = file->micro_batch, g = file->grad_accum;
    bool micro = iz_config_auto(file, "train_micro_batch_size_per_gpu");
    bool accum = iz_config_auto(file, "gradient_accumulation_steps");
    file->c.cut_auto = t && !m && !g && (micro || accum);
    if (iz_config_bad(file, "train_batch_size|train_micro_batch_size_per_gpu|"
                            "gradient_accumulation_steps"))
        return;
    if (t == 0 && m == 0 && (micro || iz_config_auto(file, "train_batch_size")))
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
    if (m > IZ_BATCH_MAX || g > IZ_BATCH_MAX)
        iz_fault(f, "train_batch_size", "%lld: %s would be %lld, more than %d",
                 (long long)t,
                 m > g ? "train_micro_batch_size_per_gpu"
                       : "gradient_accumulation_steps",
                 (long long)(m > g ? m : g), (int)IZ_BATCH_MAX);
    else if (t != m * g * ranks)
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
    c->micro_batch =
        (int)((int64_t)c->micro_batch * c->grad_accum / micro_batches);
    c->grad_accum = micro_batches;
    if (c->grad_accum_open)
        c->grad_accum_fp32 = micro_batches > 1;
}

static void resolve_dtype(struct iz_config_file *file, struct iz_faults *f)
{
    struct iz_config *c = &file->c;
    const struct iz_run_config *run = &c->run;
    int accum = file->grad_accum_dtype, comm = file->communication_dtype;
    static const char rounds[] =
        "{}, but parameters are {dtype}, which cuDNN would round: set "
        "bf16.enabled or fp16.enabled, or use own";
    static const char apart[] =
        "{}, but data.document_end is {data.document_end}, and cuDNN's "
        "attention does not keep documents apart: use own";
    bool forward = run->gpu_attention == IZ_ATTENTION_CUDNN;
    bool backward = run->gpu_attention_backward == IZ_ATTENTION_CUDNN;
    c->dtype = file->bf16 ? IZ_BF16 : file->fp16 ? IZ_F16 : IZ_F32;
    if (file->bf16 && file->fp16) {
        iz_fault(f, "fp16.enabled",
                 "bf16.enabled and fp16.enabled are both "
                 "true; choose one");
        return;
    }
    const struct iz_conflict rows[] = {
        {accum > 1 + IZ_F32 && accum != 1 + (int)c->dtype,
         "data_types.grad_accum_dtype",
         "{}, but parameters are {dtype}; choose fp32 or {dtype}"},
        {comm != 0 && comm != 1 + (int)c->dtype, "communication_data_type",
         "{}, but gradients travel in the type of the parameters, {dtype}; "
         "remove the key"},
        {run->cpu_products == IZ_PRODUCTS_BF16 && c->dtype != IZ_BF16,
         "run.cpu_products",
         "{}, but parameters are {dtype}; set bf16.enabled"},
        {run->master == IZ_MASTER_REMAINDER && c->dtype != IZ_BF16,
         "run.master",
         "{}, but parameters are {dtype}: the master of a bf16 parameter alone "
         "has 16 bits more; set bf16.enabled"},
        {forward && c->dtype == IZ_F32, "run.gpu_attention", rounds},
        {forward && c->data.apart, "run.gpu_attention", apart},
        {backward && c->dtype == IZ_F32, "run.gpu_attention_backward", rounds},
        {backward && c->data.apart, "run.gpu_attention_backward", apart},
    };
    iz_conflicts_tell(file, f, rows, sizeof(rows) / sizeof(rows[0]));
    c->grad_accum_open = accum == 0 && c->dtype != IZ_F32;
    c->grad_accum_fp32 = c->dtype == IZ_F32 || accum == 1 + IZ_F32 ||
                         (accum == 0 && c->grad_accum > 1);
}

static void check_zero(struct iz_config_file *file, struct iz_faults *f)
{
    const struct iz_config *c = &file->c;
    const struct iz_zero_config *z = &c->zero;
    enum iz_home states = z->optimizer.home, params = z->param.home;
    bool frozen = z->param.frozen;
    bool frozen_disk = z->param.frozen - 1 == IZ_HOME_NVME;
    bool copies = z->hpz_partition > 1;
    bool divided = z->optimizer.ratio < 1, of_host = states == IZ_HOME_CPU;
    const struct iz_conflict rows[] = {
        {params != IZ_HOME_NONE && z->stage != 3, PARAMS "device",
         "needs zero_optimization.stage 3, found {zero_optimization.stage}"},
        {states != IZ_HOME_NONE && z->stage < 1, STATES "device",
         "needs zero_optimization.stage 1, 2 or 3, found "
         "{zero_optimization.stage}"},
        {states == IZ_HOME_NVME && !z->optimizer.nvme_path[0],
         STATES "nvme_path",
         "missing, and offload_optimizer.device is "
         "{zero_optimization.offload_optimizer.device}"},
        {params == IZ_HOME_NVME && !z->param.nvme_path[0], PARAMS "nvme_path",
         "missing, and offload_param.device is "
         "{zero_optimization.offload_param.device}"},
        {params != IZ_HOME_NVME && frozen_disk && !z->param.nvme_path[0],
         PARAMS "nvme_path",
         "missing, and offload_param.frozen_device is "
         "{zero_optimization.offload_param.frozen_device}"},
        {frozen && z->stage != 3, PARAMS "frozen_device",
         "needs zero_optimization.stage 3, found {zero_optimization.stage}"},
        {frozen && z->stage == 3 && copies, PARAMS "frozen_device",
         "zero_optimization.zero_hpz_partition_size is "
         "{zero_optimization.zero_hpz_partition_size}: a group's copy holds "
         "what is trained and what is frozen together; set null, or groups of "
         "1"},
        {copies && z->stage != 3, ZERO "zero_hpz_partition_size",
         "{} needs zero_optimization.stage 3, found {zero_optimization.stage}: "
         "there every rank has all parameters anyway"},
        {copies && z->stage == 3 && params == IZ_HOME_NVME,
         ZERO "zero_hpz_partition_size",
         "{} needs offload_param.device none or cpu, found "
         "{zero_optimization.offload_param.device}: a copy in memory is larger "
         "than the shards that memory has no room for"},
        {copies && c->base_dtype, "model.base_dtype",
         "{}, and zero_optimization.zero_hpz_partition_size is "
         "{zero_optimization.zero_hpz_partition_size}: copies of quantised "
         "parameters are not built; set it to 1"},
        {divided && !of_host, STATES "ratio",
         "{} divides an optimizer that is offloaded to cpu, "
         "offload_optimizer.device is "
         "{zero_optimization.offload_optimizer.device}"},
        {divided && of_host && params == IZ_HOME_NVME, STATES "ratio",
         "{} needs offload_param.device none or cpu, found "
         "{zero_optimization.offload_param.device}"},
        {divided && of_host && c->run.device == IZ_DEVICE_CPU, STATES "ratio",
         "{} leaves chunks to a GPU, run.device is {run.device}"},
    };
    iz_conflicts_tell(file, f, rows, sizeof(rows) / sizeof(rows[0]));
    file->c.zero.optimizer.ratio_auto = iz_config_auto(file, STATES "ratio");
}

static void resolve_run(struct iz_config_file *file, struct iz_faults *f)
{
    const struct iz_config *c = &file->c;
    struct iz_run_config *run = &file->c.run;
    bool async = run->save_mode == IZ_SAVE_ASYNC;
    bool states_disk = c->zero.optimizer.home == IZ_HOME_NVME;
    bool disk = states_disk || c->zero.param.home == IZ_HOME_NVME ||
                c->zero.param.frozen - 1 == IZ_HOME_NVME;
    bool prints = iz_config_gives(file, "steps_per_print");
    const struct iz_conflict rows[] = {
        {run->output[0] == '\0', "run.output", "is empty: name a directory"},
        {prints && iz_config_gives(file, "run.log_interval") &&
             file->steps_per_print != run->log_interval,
         "steps_per_print",
         "{}, but run.log_interval is {run.log_interval}; give one of them"},
        {async && run->nvme_checksum && disk, "run.save_mode",
         "{} reads parts of what run.nvme_checksum checks as a whole; use auto "
         "or sync"},
        {async && run->state_dtype != IZ_MOMENT_F32 && states_disk,
         "run.save_mode",
         "{} cannot read states of run.state_dtype from nvme; use auto or "
         "sync"},
        {async && run->master == IZ_MASTER_REMAINDER, "run.save_mode",
         "{} cannot put the two halves of run.master together; use auto or "
         "sync"},
        {run->eval_interval > 0 && run->eval_batches == 0, "run.eval_interval",
         "{}, but run.eval_batches is {run.eval_batches}: nothing to "
         "evaluate"},
        {c->boundary_path[0] && !c->cpu_checkpointing,
         "activation_checkpointing.nvme_path",
         "{}, but activation_checkpointing.cpu_checkpointing is "
         "{activation_checkpointing.cpu_checkpointing}: all stays where units "
         "are computed"},
    };
    iz_conflicts_tell(file, f, rows, sizeof(rows) / sizeof(rows[0]));
    if (prints)
        run->log_interval = file->steps_per_print;
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
    static const char none[] =
        "there are no adapters: lora.rank is {lora.rank}";
    bool known = !iz_config_bad(file, "lora.import");
    bool without = known && l->rank == 0 && !l->import[0];
    bool with = known && l->rank > 0;
    bool targets = l->import[0] || l->targets[strspn(l->targets, " ,")];
    const struct iz_conflict rows[] = {
        {with && !targets, "lora.targets",
         "missing, and lora.rank is {lora.rank}"},
        {without && l->targets[0], "lora.targets", none},
        {without && l->dropout > 0, "lora.dropout", none},
        {without && l->export != IZ_LORA_MERGED, "lora.export", none},
        {l->use_dora && l->dropout > 0, "lora.dropout",
         "{}, but lora.use_dora is {lora.use_dora}: set 0"},
    };
    iz_conflicts_tell(file, f, rows, sizeof(rows) / sizeof(rows[0]));
    if (l->alpha == 0)
        l->alpha = l->rank;
}

static void resolve_loss(struct iz_config_file *file, struct iz_faults *f)
{
    const struct iz_config *c = &file->c;
    static const char none[] = "{}, but loss.type: {loss.type} has none";
    bool pairs = c->loss.type != IZ_LOSS_TARGETS;
    int slices = c->run.slices ? c->run.slices : 1;
    const struct iz_conflict rows[] = {
        {!pairs && c->loss.sft != 0, "loss.sft", none},
        {!pairs && c->loss.beta != IZ_LOSS_BETA, "loss.beta", none},
        {pairs && c->lora.import[0], "lora.import",
         "{}: the reference of loss.type is the model without adapters, not "
         "with those: merge them first (docs/finetune.md)"},
        {pairs && c->data.bytes, "data.bytes",
         "{}, but loss.type needs shards of pairs, which tools/tokenize "
         "--preferences writes"},
        {pairs && c->data.document_end >= 0, "data.document_end",
         "{}, but with loss.type each text is a sample of its own: leave it "
         "out"},
        {pairs && c->micro_batch % (2 * slices),
         "train_micro_batch_size_per_gpu",
         slices > 1 ? "{}, but loss.type takes texts in pairs: use a multiple "
                      "of 2 run.slices"
                    : "{}, but loss.type takes texts in pairs: use a multiple "
                      "of 2"},
    };
    iz_conflicts_tell(file, f, rows, sizeof(rows) / sizeof(rows[0]));
    file->c.data.group = pairs ? 2 : 1;
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
    check_zero(file, f);
    resolve_run(file, f);
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
