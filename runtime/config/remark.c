/* SPDX-License-Identifier: Apache-2.0 */
/* What of a config is odd in the run at hand, though it can be done: a schedule
 * that ends elsewhere, and keys that can have no effect: each situation once,
 * with the keys that have none there and the reason.  What can never have one
 * anywhere is in foreign.c. */
#include "runtime/config/keys.h"

#include <assert.h>
#include <stdlib.h>

#define ADAM "optimizer.params."
#define ZERO "zero_optimization."
#define STATES ZERO "offload_optimizer."
#define PARAMS ZERO "offload_param."
#define STAGE3 ZERO "stage3_"

/* A schedule that ends elsewhere than the run, and a rate of nothing. */
static void remark_rate(const struct iz_config *c, FILE *out)
{
    static const char line[] =
        "config: scheduler.params.%s is %lld and %s %lld: %s\n";
    const struct iz_lr_config *lr = &c->lr;
    long long steps = c->run.steps, warm = lr->warmup_num_steps;
    long long total = lr->total_num_steps;
    bool ends = iz_config_has_param(c, "scheduler.params.total_num_steps");
    bool own = iz_lr_is_own(lr);
    if ((own ? lr->warmup_max_lr : c->optimizer.lr) == 0 && steps)
        fprintf(out, "config: %s is 0: no step moves a weight\n",
                own ? "scheduler.params.warmup_max_lr" : "optimizer.params.lr");
    if (lr->kind != IZ_LR_CONST && steps && warm > steps)
        fprintf(out, line, "warmup_num_steps", warm, "run.steps", steps,
                "the rate is still rising at the end");
    else if (ends && warm >= total)
        fprintf(out, line, "warmup_num_steps", warm, "total_num_steps", total,
                "the rate rises to the end of the schedule, and falls at once");
    bool to_0 = lr->kind == IZ_LR_HF_LINEAR ||
                (lr->kind == IZ_LR_DECAY && lr->warmup_min_lr == 0);
    if (ends && total < steps)
        fprintf(out, line, "total_num_steps", total, "run.steps", steps,
                to_0 ? "the rate is 0 from there on"
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

/* What has an effect in the run at hand, and what was told of it. */
struct remark {
    const struct iz_config *c;
    const struct iz_setting *run;
    FILE *out;
    const char *why; /* of the last key; NULL: nothing was told yet */
    bool told[IZ_CONFIG_KEYS_MAX];
};

/* Where it is so, these keys have no effect. */
struct idle {
    bool is;
    const char *why, *keys;
};

/* Keys that one reason has follow one another. */
static void tell_idle(struct remark *r, const char *section, const char *key,
                      const char *why)
{
    if (!r->why)
        fputs("config: without effect here: ", r->out);
    else if (r->why == why)
        fputs(", ", r->out);
    else
        fprintf(r->out, " (%s); ", r->why);
    fprintf(r->out, "%s%s", section, key);
    r->why = why;
}

/* Of two that hold for a key the first is told. */
static void tell_all(struct remark *r, const struct idle *idle, size_t n)
{
    char key[IZ_KEY_NAME_MAX];
    for (size_t i = 0; i < n; i++)
        for (int k = 0;
             idle[i].is && iz_text_word(key, sizeof(key), idle[i].keys, k);
             k++) {
            const struct iz_key *row = iz_key_find(iz_config_keys, key);
            assert(row); /* of the table */
            if (!r->c->given[row - iz_config_keys] ||
                r->told[row - iz_config_keys])
                continue;
            tell_idle(r, "", key, idle[i].why);
            r->told[row - iz_config_keys] = true;
        }
}

static bool gives(const struct iz_config *c, const char *key)
{
    return c->given[iz_key_find(iz_config_keys, key) - iz_config_keys];
}

static void remark_updates(struct remark *r)
{
    const struct iz_config *c = r->c;
    const struct iz_lr_config *lr = &c->lr;
    bool decays = c->optimizer.weight_decay > 0;
    for (int i = 0; i < c->n_rules; i++)
        decays |= c->rule[i].weight_decay > 0;
    const struct idle idle[] = {
        {true, "it is that of the parameters", "communication_data_type"},
        {true, "the formula is one", ADAM "torch_adam"},
        {iz_lr_is_own(lr) && (gives(c, "scheduler.params.warmup_max_lr") ||
                              lr->warmup_max_lr != c->optimizer.lr),
         "the scheduler has its own rate",
         ADAM "lr|" ADAM "muon_lr|" ADAM "adam_lr"},
        {gives(c, ADAM "muon_lr") && gives(c, ADAM "adam_lr"),
         "muon_lr and adam_lr replace it", ADAM "lr"},
        {!decays, "nothing decays", ADAM "adam_w_mode"},
        {c->optimizer.weight_decay == 0, "optimizer.params.weight_decay is 0",
         "run.decay_matrices_only"},
        {c->optimizer.momentum == 0, "momentum is 0", ADAM "nesterov"},
        {c->dtype != IZ_F16, "parameters are not fp16",
         "fp16.loss_scale|fp16.initial_scale_power|fp16.loss_scale_window|"
         "fp16.hysteresis|fp16.consecutive_hysteresis|fp16.min_loss_scale"},
        {c->fp16.loss_scale > 0, "the loss scale is constant",
         "fp16.initial_scale_power|fp16.loss_scale_window|fp16.hysteresis|"
         "fp16.consecutive_hysteresis|fp16.min_loss_scale"},
        {c->fp16.hysteresis == 1, "hysteresis is 1",
         "fp16.consecutive_hysteresis"},
    };
    tell_all(r, idle, sizeof(idle) / sizeof(idle[0]));
}

/* Of what is computed, by whom and in which order. */
static void remark_steps(struct remark *r)
{
    const struct iz_config *c = r->c;
    const struct iz_setting *run = r->run;
    const struct idle idle[] = {
        {c->dtype == IZ_F32, "parameters are fp32",
         "data_types.grad_accum_dtype|run.cpu_products|run.gpu_attention|"
         "run.gpu_attention_backward"},
        {c->dtype != IZ_F32, "parameters have 16 bits", "run.tf32"},
        {c->grad_accum == 1 && run->slices == 1,
         "one backward makes a gradient", "data_types.grad_accum_dtype"},
        {c->grad_accum == 1, "one micro-batch a step",
         "run.schedule|run.parallel_micro_batches|run.sum_order"},
        {!run->chunks && c->run.sequence_chunk > 0, "no sample is longer",
         "run.sequence_chunk"},
        {c->run.schedule == IZ_BREADTH_FIRST, "all micro-batches go together",
         "run.parallel_micro_batches"},
        {run->ranks == 1, "one rank",
         ZERO
         "overlap_comm|run.comm|run.host_comm|run.sum_order|run.sum_group"},
        {!run->gpu, "no GPU",
         "run.comm|run.gpu_attention|run.gpu_attention_backward|"
         "run.muon_products|run.gpu_logits_bytes|run.tf32|"
         "run.device_memory_limit_bytes|" STATES "ratio"},
        {run->gpu, "units are computed on a GPU",
         "run.cpu_kernels|run.cpu_products"},
        {!iz_optimizer(c->optimizer.type)->matrices,
         "the optimizer has no matrices", "run.muon_products"},
    };
    tell_all(r, idle, sizeof(idle) / sizeof(idle[0]));
}

static void remark_homes(struct remark *r)
{
    const struct iz_config *c = r->c;
    enum iz_home states = c->zero.optimizer.home, params = c->zero.param.home;
    int frozen = c->zero.param.frozen - 1;
    bool disk = params == IZ_HOME_NVME || frozen == IZ_HOME_NVME;
    bool host = params == IZ_HOME_CPU || frozen == IZ_HOME_CPU;
    bool boundaries = c->boundary_path[0];
    const struct idle idle[] = {
        {states == IZ_HOME_NONE, "states stay where they are used",
         STATES "pin_memory"},
        {states != IZ_HOME_CPU, "states are not on the host", STATES "ratio"},
        {states != IZ_HOME_NVME, "states are not on nvme", STATES "nvme_path"},
        {states != IZ_HOME_NVME && params != IZ_HOME_NVME,
         "nothing that is updated is on nvme", STATES "buffer_count"},
        {!host && !disk, "parameters stay where they are used",
         PARAMS "pin_memory"},
        {!disk, "parameters are not on nvme",
         PARAMS "nvme_path|" PARAMS "buffer_count"},
        {states != IZ_HOME_NVME && !disk && !boundaries, "nothing is on nvme",
         "run.nvme_checksum"},
        {!r->run->gathers, "no parameters are gathered for a use",
         STAGE3 "prefetch_bucket_size|" STAGE3 "max_live_parameters|" STAGE3
                "max_reuse_distance|run.ring"},
        {c->run.ring > 0, "run.ring is the number",
         STAGE3 "prefetch_bucket_size|" STAGE3 "max_live_parameters"},
        {!r->run->gpu && !boundaries, "they are on the CPU anyway",
         "activation_checkpointing.cpu_checkpointing"},
    };
    tell_all(r, idle, sizeof(idle) / sizeof(idle[0]));
}

/* Of what a run reads and leaves. */
static void remark_files(struct remark *r)
{
    const struct iz_config *c = r->c;
    const struct iz_run_config *run = &c->run;
    bool once = !run->save_interval || run->save_interval >= run->steps;
    const struct idle idle[] = {
        {!c->lora.rank, "there are no adapters",
         "lora.alpha|lora.use_rslora|lora.use_dora|lora.rank_pattern|"
         "lora.alpha_pattern|lora.modules_to_save"},
        {c->data.val_path[0], "data.val_path is given", "data.val_fraction"},
        {run->eval_interval >= run->steps, "only the end has a validation",
         "run.eval_interval"},
        {!r->run->masked, "no sample lacks targets", "run.empty_steps"},
        {once && !run->save, "nothing is saved",
         "run.keep_last|run.save_interval|run.save_mode|run.save_buffers"},
        {once, "only the end has a save",
         "run.save_interval|run.save_mode|run.save_buffers"},
        {!r->run->saves_beside, "training waits for saves", "run.save_buffers"},
        {!run->sample_tokens, "nothing is generated",
         "run.sample_prompt|run.sample_temperature"},
        {!run->export[0], "nothing is exported",
         "run.export_dtype|run.export_shard_bytes|lora.export"},
        {!run->inject_delay_us, "run.inject_delay_us is 0", "run.inject_seed"},
        {getenv("STARPU_SCHED"), "STARPU_SCHED is set", "run.scheduler"},
    };
    tell_all(r, idle, sizeof(idle) / sizeof(idle[0]));
}

static void remark_model(struct remark *r, const struct iz_section *model)
{
    for (const struct iz_key *k = model->keys; model->idle && k->name; k++) {
        const char *why = r->c->model_given[k - model->keys]
                              ? model->idle(model->target, k->name)
                              : NULL;
        if (why)
            tell_idle(r, "model.", k->name, why);
    }
}

void iz_config_remark(const struct iz_config *c, const struct iz_section *model,
                      const struct iz_setting *run, FILE *out)
{
    struct remark r = {.c = c, .run = run, .out = out};
    remark_rate(c, out);
    remark_samples(c, run->samples, out);
    remark_updates(&r);
    remark_steps(&r);
    remark_homes(&r);
    remark_files(&r);
    remark_model(&r, model);
    if (r.why)
        fprintf(out, " (%s)\n", r.why);
}
