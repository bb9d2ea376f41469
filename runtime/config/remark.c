/* SPDX-License-Identifier: Apache-2.0 */
/* What of a config is odd in the run at hand, though it can be done: a schedule
 * that ends elsewhere, and keys that can have no effect: each situation once,
 * with the keys that have none there and the reason.  What can never have one
 * anywhere is in foreign.c. */
#include "runtime/config/keys.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#define ADAM "optimizer.params."
#define ZERO "zero_optimization."
#define STATES ZERO "offload_optimizer."
#define PARAMS ZERO "offload_param."
#define STAGE3 ZERO "stage3_"

struct at {
    const struct iz_config *c;
    const struct iz_setting *run;
};

static bool gives(const struct at *a, const char *key)
{
    return a->c->given[iz_key_find(iz_config_keys, key) - iz_config_keys];
}

static bool always(const struct at *a)
{
    return true;
}

static bool one_rank(const struct at *a)
{
    return a->run->ranks == 1;
}

static bool no_gpu(const struct at *a)
{
    return !a->run->gpu;
}

static bool has_gpu(const struct at *a)
{
    return a->run->gpu;
}

static bool fp32(const struct at *a)
{
    return a->c->dtype == IZ_F32;
}

static bool of_16_bits(const struct at *a)
{
    return a->c->dtype != IZ_F32;
}

static bool not_fp16(const struct at *a)
{
    return a->c->dtype != IZ_F16;
}

static bool scale_is_constant(const struct at *a)
{
    return a->c->fp16.loss_scale > 0;
}

static bool no_hysteresis(const struct at *a)
{
    return a->c->fp16.hysteresis == 1;
}

static bool warms_up(const struct at *a)
{
    return a->c->lr.kind == IZ_LR_WARMUP || a->c->lr.kind == IZ_LR_DECAY;
}

static bool other_rate(const struct at *a)
{
    return warms_up(a) && (gives(a, "scheduler.params.warmup_max_lr") ||
                           a->c->lr.warmup_max_lr != a->c->optimizer.lr);
}

static bool own_rates(const struct at *a)
{
    return gives(a, ADAM "muon_lr") && gives(a, ADAM "adam_lr");
}

static bool no_decay(const struct at *a)
{
    bool any = a->c->optimizer.weight_decay > 0;
    for (int i = 0; i < a->c->n_rules; i++)
        any |= a->c->rule[i].weight_decay > 0;
    return !any;
}

static bool no_own_decay(const struct at *a)
{
    return a->c->optimizer.weight_decay == 0;
}

static bool no_momentum(const struct at *a)
{
    return a->c->optimizer.momentum == 0;
}

static bool not_muon(const struct at *a)
{
    return !iz_optimizer(a->c->optimizer.type)->matrices;
}

static bool one_micro_batch(const struct at *a)
{
    return a->c->grad_accum == 1;
}

static bool one_backward(const struct at *a)
{
    return one_micro_batch(a) && a->run->slices == 1;
}

static bool in_chunks(const struct at *a)
{
    return a->run->chunks;
}

static bool short_samples(const struct at *a)
{
    return !a->run->chunks && a->c->run.sequence_chunk > 0;
}

static bool broad(const struct at *a)
{
    return a->c->run.schedule == IZ_BREADTH_FIRST;
}

static bool states_stay(const struct at *a)
{
    return a->c->zero.optimizer.home == IZ_HOME_NONE;
}

static bool states_not_on_host(const struct at *a)
{
    return a->c->zero.optimizer.home != IZ_HOME_CPU;
}

static bool states_not_on_disk(const struct at *a)
{
    return a->c->zero.optimizer.home != IZ_HOME_NVME;
}

static bool params_are(const struct at *a, enum iz_home h)
{
    return a->c->zero.param.home == h || a->c->zero.param.frozen - 1 == (int)h;
}

static bool params_stay(const struct at *a)
{
    return !params_are(a, IZ_HOME_CPU) && !params_are(a, IZ_HOME_NVME);
}

static bool params_not_on_disk(const struct at *a)
{
    return !params_are(a, IZ_HOME_NVME);
}

static bool nothing_updated_on_disk(const struct at *a)
{
    return states_not_on_disk(a) && a->c->zero.param.home != IZ_HOME_NVME;
}

static bool no_disk(const struct at *a)
{
    return states_not_on_disk(a) && params_not_on_disk(a) &&
           !a->c->boundary_path[0];
}

static bool not_gathered(const struct at *a)
{
    return !a->run->gathers;
}

static bool ring_given(const struct at *a)
{
    return a->c->run.ring > 0;
}

static bool boundaries_stay(const struct at *a)
{
    return no_gpu(a) && !a->c->boundary_path[0];
}

static bool no_adapters(const struct at *a)
{
    return a->c->lora.rank == 0;
}

static bool own_validation(const struct at *a)
{
    return a->c->data.val_path[0] != '\0';
}

static bool evaluates_once(const struct at *a)
{
    return a->c->run.eval_interval >= a->c->run.steps;
}

static bool saves_once(const struct at *a)
{
    const struct iz_run_config *r = &a->c->run;
    return r->save_interval == 0 || r->save_interval >= r->steps;
}

static bool saves_nothing(const struct at *a)
{
    return saves_once(a) && !a->c->run.save;
}

static bool waits_for_saves(const struct at *a)
{
    return !a->run->saves_beside;
}

static bool all_learnt(const struct at *a)
{
    return !a->run->masked;
}

static bool no_sample(const struct at *a)
{
    return a->c->run.sample_tokens == 0;
}

static bool no_export(const struct at *a)
{
    return a->c->run.export[0] == '\0';
}

static bool no_delay(const struct at *a)
{
    return a->c->run.inject_delay_us == 0;
}

static bool other_scheduler(const struct at *a)
{
    return getenv("STARPU_SCHED") != NULL;
}

/* Of two that hold for a key the first is told. */
static const struct {
    const char *why;
    bool (*is)(const struct at *a);
    const char *keys;
} idle[] = {
    {"it is that of the parameters", always, "communication_data_type"},
    {"the formula is one", always, ADAM "torch_adam"},
    {"the scheduler has its own rate", other_rate,
     ADAM "lr|" ADAM "muon_lr|" ADAM "adam_lr"},
    {"muon_lr and adam_lr replace it", own_rates, ADAM "lr"},
    {"nothing decays", no_decay, ADAM "adam_w_mode"},
    {"optimizer.params.weight_decay is 0", no_own_decay,
     "run.decay_matrices_only"},
    {"momentum is 0", no_momentum, ADAM "nesterov"},
    {"parameters are not fp16", not_fp16,
     "fp16.loss_scale|fp16.initial_scale_power|fp16.loss_scale_window|"
     "fp16.hysteresis|fp16.consecutive_hysteresis|fp16.min_loss_scale"},
    {"the loss scale is constant", scale_is_constant,
     "fp16.initial_scale_power|fp16.loss_scale_window|fp16.hysteresis|"
     "fp16.consecutive_hysteresis|fp16.min_loss_scale"},
    {"hysteresis is 1", no_hysteresis, "fp16.consecutive_hysteresis"},
    {"parameters are fp32", fp32,
     "data_types.grad_accum_dtype|run.cpu_products|run.gpu_attention|"
     "run.gpu_attention_backward"},
    {"parameters have 16 bits", of_16_bits, "run.tf32"},
    {"one backward makes a gradient", one_backward,
     "data_types.grad_accum_dtype"},
    {"one micro-batch a step", one_micro_batch,
     "run.schedule|run.parallel_micro_batches|run.sum_order"},
    {"blocks of some rows at a time repeat all", in_chunks, "run.recompute"},
    {"no sample is longer", short_samples, "run.sequence_chunk"},
    {"all micro-batches go together", broad, "run.parallel_micro_batches"},
    {"one rank", one_rank,
     ZERO "overlap_comm|run.comm|run.host_comm|run.sum_order|run.sum_group"},
    {"no GPU", no_gpu,
     "run.comm|run.gpu_attention|run.gpu_attention_backward|"
     "run.muon_products|run.gpu_logits_bytes|run.tf32|"
     "run.device_memory_limit_bytes|" STATES "ratio"},
    {"units are computed on a GPU", has_gpu,
     "run.cpu_kernels|run.cpu_products"},
    {"the optimizer has no matrices", not_muon, "run.muon_products"},
    {"states stay where they are used", states_stay, STATES "pin_memory"},
    {"states are not on the host", states_not_on_host, STATES "ratio"},
    {"states are not on nvme", states_not_on_disk, STATES "nvme_path"},
    {"nothing that is updated is on nvme", nothing_updated_on_disk,
     STATES "buffer_count"},
    {"parameters stay where they are used", params_stay, PARAMS "pin_memory"},
    {"parameters are not on nvme", params_not_on_disk,
     PARAMS "nvme_path|" PARAMS "buffer_count"},
    {"nothing is on nvme", no_disk, "run.nvme_checksum"},
    {"no parameters are gathered for a use", not_gathered,
     STAGE3 "prefetch_bucket_size|" STAGE3 "max_live_parameters|" STAGE3
            "max_reuse_distance|run.ring"},
    {"run.ring is the number", ring_given,
     STAGE3 "prefetch_bucket_size|" STAGE3 "max_live_parameters"},
    {"they are on the CPU anyway", boundaries_stay,
     "activation_checkpointing.cpu_checkpointing"},
    {"there are no adapters", no_adapters,
     "lora.alpha|lora.use_rslora|lora.use_dora|lora.rank_pattern|lora.alpha_"
     "pattern|"
     "lora.modules_to_save"},
    {"data.val_path is given", own_validation, "data.val_fraction"},
    {"only the end has a validation", evaluates_once, "run.eval_interval"},
    {"no sample lacks targets", all_learnt, "run.empty_steps"},
    {"nothing is saved", saves_nothing, "run.keep_last"},
    {"only the end has a save", saves_once,
     "run.save_interval|run.save_mode|run.save_buffers"},
    {"training waits for saves", waits_for_saves, "run.save_buffers"},
    {"nothing is generated", no_sample,
     "run.sample_prompt|run.sample_temperature"},
    {"nothing is exported", no_export,
     "run.export_dtype|run.export_shard_bytes|lora.export"},
    {"run.inject_delay_us is 0", no_delay, "run.inject_seed"},
    {"STARPU_SCHED is set", other_scheduler, "run.scheduler"},
};

/* A schedule that ends elsewhere than the run, and a rate of nothing. */
static void remark_rate(const struct iz_config *c, FILE *out)
{
    static const char line[] =
        "config: scheduler.params.%s is %lld and %s %lld: %s\n";
    const struct iz_lr_config *lr = &c->lr;
    long long steps = c->run.steps, warm = lr->warmup_num_steps;
    long long total = lr->total_num_steps;
    bool ends = iz_config_has_param(c, "scheduler.params.total_num_steps");
    bool own = lr->kind == IZ_LR_WARMUP || lr->kind == IZ_LR_DECAY;
    if ((own ? lr->warmup_max_lr : c->optimizer.lr) == 0 && steps)
        fprintf(out, "config: %s is 0: no step moves a weight\n",
                own ? "scheduler.params.warmup_max_lr" : "optimizer.params.lr");
    if (lr->kind != IZ_LR_CONST && steps && warm > steps)
        fprintf(out, line, "warmup_num_steps", warm, "run.steps", steps,
                "the rate is still rising at the end");
    else if (ends && warm >= total)
        fprintf(out, line, "warmup_num_steps", warm, "total_num_steps", total,
                "the rate rises to the end of the schedule, and falls at once");
    if (ends && total < steps)
        fprintf(out, line, "total_num_steps", total, "run.steps", steps,
                lr->kind == IZ_LR_DECAY || lr->kind == IZ_LR_HF_LINEAR
                    ? "the rate is 0 from there on"
                    : "the schedule is over before the run");
}

static void remark_samples(const struct iz_config *c, int64_t samples,
                           FILE *out)
{
    if (samples && c->train_batch_size > samples)
        fprintf(out,
                "config: train_batch_size is %lld and there are %lld samples: "
                "a step has some of them several times\n",
                (long long)c->train_batch_size, (long long)samples);
}

/* Keys that one reason has follow one another. */
struct telling {
    FILE *out;
    const char *why; /* NULL: nothing was told yet */
};

static void tell_idle(struct telling *t, const char *section, const char *key,
                      const char *why)
{
    if (!t->why)
        fputs("config: without effect here: ", t->out);
    else if (t->why == why)
        fputs(", ", t->out);
    else
        fprintf(t->out, " (%s); ", t->why);
    fprintf(t->out, "%s%s", section, key);
    t->why = why;
}

static void remark_idle(const struct iz_config *c,
                        const struct iz_section *model,
                        const struct iz_setting *run, FILE *out)
{
    const struct at a = {c, run};
    struct telling t = {out, NULL};
    bool told[IZ_CONFIG_KEYS_MAX] = {false};
    for (size_t i = 0; i < sizeof(idle) / sizeof(idle[0]); i++) {
        char key[IZ_KEY_NAME_MAX];
        if (!idle[i].is(&a))
            continue;
        for (int k = 0; iz_text_word(key, sizeof(key), idle[i].keys, k); k++) {
            const struct iz_key *row = iz_key_find(iz_config_keys, key);
            assert(row); /* of the table */
            if (!c->given[row - iz_config_keys] || told[row - iz_config_keys])
                continue;
            tell_idle(&t, "", key, idle[i].why);
            told[row - iz_config_keys] = true;
        }
    }
    for (const struct iz_key *k = model->keys; model->idle && k->name; k++) {
        const char *why = c->model_given[k - model->keys]
                              ? model->idle(model->target, k->name)
                              : NULL;
        if (why)
            tell_idle(&t, "model.", k->name, why);
    }
    if (t.why)
        fprintf(out, " (%s)\n", t.why);
}

void iz_config_remark(const struct iz_config *c, const struct iz_section *model,
                      const struct iz_setting *run, FILE *out)
{
    remark_rate(c, out);
    remark_samples(c, run->samples, out);
    remark_idle(c, model, run, out);
}
