/* SPDX-License-Identifier: Apache-2.0 */
/* The keys that set something, in the order of docs/config.md and of the
 * effective config.  Names and defaults outside data and run are DeepSpeed's.
 */
#include "runtime/config/keys.h"

#include <limits.h>

/* Designated initializers, one line per kind of key.  The second column says
 * what another value means (enum iz_change); behind the sentence may stand what
 * only some keys have. */
#define KEY(name_, change_, type_, field, fallback_, ...)                      \
    .name = (name_), .change = IZ_CHANGE_##change_, .type = IZ_KEY_##type_,    \
    .offset = offsetof(struct iz_config_file, field),                          \
    .size = sizeof(((struct iz_config_file *)0)->field),                       \
    .fallback = (fallback_), .doc = __VA_ARGS__
#define ONE(type, name, change, field, fallback, ...)                          \
    {                                                                          \
        KEY(name, change, type, field, fallback, __VA_ARGS__)                  \
    }
#define BOOL(...) ONE(BOOL, __VA_ARGS__)
#define TEXT(...) ONE(STRING, __VA_ARGS__)
#define PATH(...) ONE(PATH, __VA_ARGS__)
#define LIST(...) ONE(LIST, __VA_ARGS__)
#define WORD(name, change, field, words_, fallback, ...)                       \
    {                                                                          \
        KEY(name, change, ENUM, field, fallback, __VA_ARGS__),                 \
            .words = (words_)                                                  \
    }
#define NUMBER(name, change, type, field, min_, max_, fallback, ...)           \
    {                                                                          \
        KEY(name, change, type, field, fallback, __VA_ARGS__), .min = (min_),  \
                                                               .max = (max_)   \
    }
#define MAP(name, change, field, min, max, doc)                                \
    NUMBER(name, change, MAP, field, min, max, "{}", doc)
/* "auto" is what transformers' Trainer replaces it by, the default of its
 * TrainingArguments (transformers, integrations/deepspeed.py): here our own,
 * which is the same, or none, and a rule between keys gives the value. */
#define AUTO .automatic = ""
#define KEPT(when) .kept = IZ_KEPT_##when
#define COUNT_MAX 1e15
#define HF_DECAYS                                                              \
    "linear|cosine|cosine_with_min_lr|polynomial|warmup_stable_decay"

const struct iz_key iz_config_keys[] = {
    NUMBER("train_batch_size", SAME, INT64, c.train_batch_size, 1, 1e18, "null",
           "Samples per step on all ranks = micro-batch x accumulation steps x "
           "ranks. Of these three keys, a missing one follows from the others.",
           AUTO),
    NUMBER("train_micro_batch_size_per_gpu", TOLD, INT64, micro_batch, 1,
           IZ_BATCH_MAX, "null",
           "Samples of one micro-batch, which is one chain of tasks on one "
           "rank. \"auto\" with train_batch_size: the plan chooses this key "
           "and the next one for the shortest step.",
           AUTO, KEPT(SAME_BATCH)),
    NUMBER("gradient_accumulation_steps", TOLD, INT64, grad_accum, 1,
           IZ_BATCH_MAX, "null",
           "Micro-batches per rank and step; 1 when only one of the other two "
           "is given.",
           AUTO),
    NUMBER("gradient_clipping", TOLD, DOUBLE, c.gradient_clipping, 0, 1e18,
           "1.0",
           "Upper limit of the norm of the whole gradient; 0: no clipping. 1.0 "
           "is DeepSpeed's default since 2026; before, it was 0.",
           AUTO),
    NUMBER("steps_per_print", FREE, INT64, steps_per_print, 1, COUNT_MAX,
           "null",
           "DeepSpeed's name for run.log_interval; if both are given they must "
           "agree."),
    WORD("communication_data_type", TOLD, communication_dtype,
         "null|fp32|bf16|fp16", "null",
         "Type of gradients between ranks. It is the type of the parameters "
         "here; any other is refused."),

    WORD("optimizer.type", SAME, c.optimizer.type, IZ_OPTIMIZER_TYPES,
         "\"AdamW\"",
         "Adam decouples the weight decay as AdamW does, unless adam_w_mode is "
         "false."),
    NUMBER("optimizer.params.lr", TOLD, DOUBLE, c.optimizer.lr, 0, 1e6, "0.001",
           "Learning rate, unless the scheduler sets it.",
           .automatic = "5e-05"),
    NUMBER("optimizer.params.muon_lr", TOLD, DOUBLE, muon_lr, 0, 1e6, "null",
           "Muon: rate of the matrices of blocks. null: lr."),
    NUMBER("optimizer.params.adam_lr", TOLD, DOUBLE, c.optimizer.adam_lr, 0,
           1e6, "null",
           "Muon: rate of everything else, which is AdamW's. null: lr."),
    NUMBER("optimizer.params.momentum", TOLD, DOUBLE, c.optimizer.momentum, 0,
           0.9999999, "0.95", "Muon: decay of the average of gradients."),
    BOOL("optimizer.params.nesterov", TOLD, c.optimizer.nesterov, "true",
         "Muon: Nesterov's momentum."),
    NUMBER("optimizer.params.ns_steps", TOLD, INT, c.optimizer.ns_steps, 1, 99,
           "5", "Muon: iterations of Newton-Schulz."),
    WORD("optimizer.params.ns_method", TOLD, c.optimizer.ns_method,
         IZ_NS_METHODS, "\"standard\"",
         "Muon: the iteration. gram, DeepSpeed's default, iterates on the "
         "square X X^T of a matrix that is not square: the same in real "
         "numbers, with fewer flops where one side is over 1.5 times the "
         "other."),
    WORD("optimizer.params.adjust_lr_fn", TOLD, c.optimizer.shape_scale,
         IZ_SHAPE_SCALES, "\"original\"",
         "Muon: what the update of a matrix [out, in] is multiplied by. "
         "original: sqrt(max(1, out/in)); match_rms_adamw: "
         "0.2 sqrt(max(out, in))."),
    NUMBER("optimizer.params.betas", TOLD, PAIR, c.optimizer.beta1, 0,
           0.9999999, "[0.9, 0.999]",
           "Decay of the first and of the second moment.", AUTO),
    NUMBER("optimizer.params.eps", TOLD, DOUBLE, c.optimizer.eps, 1e-15, 1,
           "1e-08",
           "Added to the root of the second moment; without it, an element "
           "that has no gradient would be 0 / 0. Moments below 1.2e-38 are 0: "
           "with a smaller eps, the smallest gradients would make huge steps.",
           AUTO),
    NUMBER("optimizer.params.weight_decay", TOLD, DOUBLE,
           c.optimizer.weight_decay, 0, 1e6, "0.0",
           "Weight decay of every parameter, including biases and norms, "
           "unless a rule of `parameters` sets another.",
           AUTO),
    BOOL("optimizer.params.adam_w_mode", TOLD, adam_w_mode, "true",
         "Decoupled weight decay. false needs type Adam and adds the decay to "
         "the gradient."),
    BOOL("optimizer.params.bias_correction", TOLD, c.optimizer.bias_correction,
         "true", "Divide the moments by 1 - beta^t."),
    BOOL("optimizer.params.torch_adam", TOLD, torch_adam, "false",
         "Has no effect on the formula. With AdamW, weight_decay must then be "
         "given, because PyTorch's default is 0.01 and DeepSpeed's is 0."),

    WORD("scheduler.type", TOLD, c.lr.kind, IZ_LR_TYPES, "null",
         "null: constant. DeepSpeed's three: as in its engine, the first "
         "update has the rate before the warm-up (warmup_min_lr; 0 for the "
         "cosine), and the second update has the rate of iteration 0. The "
         "others are those of transformers' Trainer: optimizer.params.lr after "
         "a warm-up from 0. Skipped steps do not count."),
    NUMBER("scheduler.params.warmup_min_lr", TOLD, DOUBLE, c.lr.warmup_min_lr,
           0, 1e6, "0.0", "Rate at the start of WarmupLR and WarmupDecayLR.",
           AUTO, .types = "WarmupLR|WarmupDecayLR"),
    NUMBER("scheduler.params.warmup_max_lr", TOLD, DOUBLE, c.lr.warmup_max_lr,
           0, 1e6, "null",
           "Rate after the warm-up. Default: optimizer.params.lr for WarmupLR, "
           "0.001 for WarmupDecayLR.",
           AUTO, .types = "WarmupLR|WarmupDecayLR"),
    NUMBER("scheduler.params.warmup_num_steps", TOLD, INT64,
           c.lr.warmup_num_steps, 0, COUNT_MAX, "null",
           "Updates of the warm-up. Default: 1000 for DeepSpeed's schedulers, "
           "0 for transformers'. DeepSpeed's count 0 and 1 as 2, because "
           "log(1) is 0 and the logarithmic warm-up divides by it.",
           .automatic = "1",
           .types = "WarmupLR|WarmupDecayLR|WarmupCosineLR|"
                    "constant_with_warmup|" HF_DECAYS),
    WORD("scheduler.params.warmup_type", TOLD, warmup_type, "log|linear",
         "\"log\"",
         "Growth during the warm-up: log(i + 1) / log(warmup_num_steps) or "
         "i / warmup_num_steps.",
         .types = "WarmupLR|WarmupDecayLR|WarmupCosineLR"),
    NUMBER("scheduler.params.total_num_steps", TOLD, INT64,
           c.lr.total_num_steps, 1, COUNT_MAX, "null",
           "Update at which a decay reaches 0 or its minimum; all that decay "
           "need it. \"auto\": run.steps.",
           AUTO, .types = "WarmupDecayLR|WarmupCosineLR|" HF_DECAYS),
    NUMBER("scheduler.params.warmup_min_ratio", TOLD, DOUBLE,
           c.lr.warmup_min_ratio, 0, 1, "0.0",
           "WarmupCosineLR: the warm-up starts at this fraction of "
           "optimizer.params.lr.",
           .types = "WarmupCosineLR"),
    NUMBER("scheduler.params.cos_min_ratio", TOLD, DOUBLE, c.lr.cos_min_ratio,
           0, 1, "0.0001",
           "WarmupCosineLR: the rate ends at this fraction of "
           "optimizer.params.lr.",
           .types = "WarmupCosineLR"),
    NUMBER("scheduler.params.num_cycles", TOLD, DOUBLE, c.lr.cycles, 0, 1e6,
           "0.5", "Waves of a cosine; 0.5: it falls once.",
           .types = "cosine|cosine_with_min_lr|warmup_stable_decay"),
    NUMBER("scheduler.params.min_lr_rate", TOLD, DOUBLE, c.lr.min_ratio, 0, 1,
           "0.0",
           "cosine_with_min_lr: the rate ends at this fraction of "
           "optimizer.params.lr.",
           .types = "cosine_with_min_lr"),
    NUMBER("scheduler.params.min_lr_ratio", TOLD, DOUBLE, min_lr_ratio, 0, 1,
           "0.0",
           "The same of warmup_stable_decay, whose warm-up begins there.",
           .types = "warmup_stable_decay"),
    NUMBER("scheduler.params.num_decay_steps", TOLD, INT64, c.lr.decay_steps, 1,
           COUNT_MAX, "null",
           "warmup_stable_decay, which needs it: updates of the decay at the "
           "end; the rate is constant before it.",
           .types = "warmup_stable_decay"),
    WORD("scheduler.params.decay_type", TOLD, c.lr.decay_shape,
         "linear|cosine|1-sqrt", "\"cosine\"", "Form of that decay.",
         .types = "warmup_stable_decay"),
    NUMBER("scheduler.params.lr_end", TOLD, DOUBLE, c.lr.end_lr, 0, 1e6, "1e-7",
           "polynomial: the last rate.", .types = "polynomial"),
    NUMBER("scheduler.params.power", TOLD, DOUBLE, c.lr.power, 0, 1e3, "1.0",
           "polynomial: the power of what is left.", .types = "polynomial"),

    BOOL("bf16.enabled", TOLD, bf16, "false",
         "Parameters and gradients in bfloat16; master weights and moments "
         "stay fp32.",
         AUTO),
    BOOL("fp16.enabled", TOLD, fp16, "false",
         "Parameters and gradients in half precision, with loss scaling; "
         "master weights stay fp32, and so do moments unless run.state_dtype "
         "sets another type.",
         AUTO),
    NUMBER("fp16.loss_scale", TOLD, DOUBLE, c.fp16.loss_scale, 0, 1e18, "0.0",
           "Constant loss scale; 0: dynamic."),
    NUMBER("fp16.initial_scale_power", TOLD, INT, c.fp16.initial_scale_power, 0,
           60, "16", "The dynamic scale starts at 2 to this power."),
    NUMBER("fp16.loss_scale_window", TOLD, INT, c.fp16.loss_scale_window, 1,
           1e9, "1000",
           "Steps without overflow after which the scale doubles."),
    NUMBER("fp16.hysteresis", TOLD, INT, c.fp16.hysteresis, 1, 1e9, "2",
           "Overflows before the scale is halved; each one skips its step."),
    BOOL("fp16.consecutive_hysteresis", TOLD, c.fp16.consecutive_hysteresis,
         "false",
         "true: every step without overflow refills the hysteresis. false: "
         "only a doubling of the scale does."),
    NUMBER(
        "fp16.min_loss_scale", TOLD, DOUBLE, c.fp16.min_loss_scale, 1e-6, 1e18,
        "1.0",
        "The run stops if the scale is this small and would have to shrink."),
    WORD("data_types.grad_accum_dtype", TOLD, grad_accum_dtype,
         "null|fp32|bf16|fp16", "null",
         "Type in which micro-batches are summed: fp32 or the type of the "
         "parameters. null: fp32 when there is more than one micro-batch."),

    NUMBER("zero_optimization.stage", FREE, INT, c.zero.stage, 0, 3, "0",
           "Sharded over the ranks are: 0 nothing, 1 optimizer states, 2 also "
           "gradients, 3 also parameters. With several micro-batches or slices "
           "1 and 2 are the same: gradients are sharded, or whole if "
           "run.sum_order needs them so."),
    WORD("zero_optimization.offload_optimizer.device", FREE,
         c.zero.optimizer.home, "none|cpu|nvme", "\"none\"",
         "Home of master weights and moments. Needs stage 1 or more, also "
         "for nvme (DeepSpeed: 3).",
         AUTO),
    LIST("zero_optimization.offload_optimizer.nvme_path", OWN,
         c.zero.optimizer.nvme_path, "null",
         "Folder of the files when device is nvme, or several on different "
         "disks, which share the bytes as their measured rates are."),
    BOOL("zero_optimization.offload_optimizer.pin_memory", FREE,
         c.zero.optimizer.pin_memory, "true",
         "Lock the host memory of this home, also without a GPU. A normal user "
         "needs a large enough `ulimit -l`, or must set false."),
    NUMBER("zero_optimization.offload_optimizer.buffer_count", FREE, INT,
           c.zero.optimizer.buffer_count, 1, 4096, "12",
           "Staging buffers between host and nvme, each of one chunk. With "
           "enough for two units, states are read before their gradients come "
           "(DeepSpeed: 4)."),
    NUMBER("zero_optimization.offload_optimizer.ratio", FREE, DOUBLE,
           c.zero.optimizer.ratio, 0, 1, "1.0",
           "Part of the optimizer's states that the host keeps and updates, in "
           "whole chunks; the GPU keeps and updates the rest. A value below 1 "
           "needs a GPU, device cpu, parameters not on nvme, and stage 1 or "
           "more (DeepSpeed: 3). \"auto\": chosen before step 0 for the "
           "shortest step; 1 where there is nothing to share.",
           AUTO),
    WORD("zero_optimization.offload_param.device", FREE, c.zero.param.home,
         "none|cpu|nvme", "\"none\"",
         "Home of the sharded parameters. Needs stage 3.", AUTO),
    WORD("zero_optimization.offload_param.frozen_device", FREE,
         c.zero.param.frozen, "null|none|cpu|nvme", "null",
         "Home of the frozen ones apart from what is trained: the base of "
         "adapters, the reference of pairs. Needs stage 3 and no groups with "
         "copies. null: the same as device."),
    LIST("zero_optimization.offload_param.nvme_path", OWN,
         c.zero.param.nvme_path, "null",
         "Folder of the files when device is nvme, or several."),
    BOOL("zero_optimization.offload_param.pin_memory", FREE,
         c.zero.param.pin_memory, "true",
         "Lock the host memory of this home, also without a GPU. A normal user "
         "needs a large enough `ulimit -l`, or must set false."),
    NUMBER("zero_optimization.offload_param.buffer_count", FREE, INT,
           c.zero.param.buffer_count, 1, 4096, "5",
           "Staging buffers between host and nvme, each of one shard of a "
           "unit."),
    NUMBER("zero_optimization.sub_group_size", FREE, INT64,
           c.zero.sub_group_size, 0, COUNT_MAX, "1000000000",
           "Elements of one chunk of optimizer states: one adam task. A chunk "
           "never spans two units. 0: the default.",
           AUTO),
    NUMBER("zero_optimization.zero_hpz_partition_size", FREE, INT,
           c.zero.hpz_partition, 1, 65536, "1",
           "So many consecutive ranks, best those of a host, have a copy of "
           "all parameters among them, and a unit is gathered from it without "
           "leaving them. The copy is renewed after every update. Needs stage "
           "3 and parameters not on nvme, and must divide the number of "
           "ranks; 1: no copies, and so are all ranks."),
    BOOL("zero_optimization.overlap_comm", FREE, c.zero.overlap_comm, "true",
         "Collectives run beside compute. DeepSpeed's default is true only "
         "for stage 3; the losses are the same bit for bit.",
         AUTO),
    NUMBER("zero_optimization.stage3_prefetch_bucket_size", FREE, INT64,
           c.zero.prefetch_bucket_size, 0, COUNT_MAX, "50000000",
           "Elements gathered ahead of their use. With "
           "stage3_max_live_parameters it sets the number of buffers of the "
           "ring, unless run.ring does.",
           AUTO),
    NUMBER("zero_optimization.stage3_max_live_parameters", FREE, INT64,
           c.zero.max_live_parameters, 0, COUNT_MAX, "1000000000",
           "Largest number of gathered elements; the ring never has less than "
           "a step needs.",
           AUTO),
    NUMBER("zero_optimization.stage3_max_reuse_distance", FREE, INT64,
           c.zero.max_reuse_distance, 0, COUNT_MAX, "1000000000",
           "A gathered unit that is still in the ring is used again if at most "
           "this many elements lie between its uses; 0: it is always gathered "
           "again.",
           AUTO),

    BOOL("activation_checkpointing.cpu_checkpointing", FREE,
         c.cpu_checkpointing, "false",
         "Keep each unit's input activation in host memory and copy it through "
         "a few GPU buffers. On the CPU it "
         "saves nothing, unless they go on to activation_checkpointing."
         "nvme_path."),
    LIST("activation_checkpointing.nvme_path", OWN, c.boundary_path, "null",
         "Existing directory, or several: what cpu_checkpointing takes out of "
         "the GPU's "
         "memory is kept in a file there, and not in host memory. On the CPU "
         "it is taken out of memory."),

    NUMBER("lora.rank", SAME, INT, c.lora.rank, 0, 4096, "0",
           "Rank of the adapters (LoRA); 0: none. With adapters all other "
           "parameters are frozen, unless a rule of `parameters` trains them."),
    NUMBER("lora.alpha", SAME, DOUBLE, c.lora.alpha, 0, 1e6, "0.0",
           "Adapters are multiplied by alpha / rank; 0 means alpha = rank."),
    BOOL("lora.use_rslora", SAME, c.lora.use_rslora, "false",
         "Multiply by alpha / sqrt(rank) instead (arXiv 2312.03732)."),
    BOOL("lora.use_dora", SAME, c.lora.use_dora, "false",
         "Outputs have trained magnitudes, too (arXiv 2402.09353)."),
    MAP("lora.rank_pattern", SAME, c.lora.rank_pattern, 1, 4096,
        "Other ranks, by names as in lora.targets: {\"q_proj\": 16}."),
    MAP("lora.alpha_pattern", SAME, c.lora.alpha_pattern, 1e-9, 1e6,
        "The same of alpha."),
    NUMBER(
        "lora.dropout", TOLD, DOUBLE, c.lora.dropout, 0, 0.999, "0.0",
        "In training, on a CPU: the probability with which an element of "
        "what an adapter reads is 0; the others are divided by 1 - dropout."),
    LIST(
        "lora.targets", TOLD, c.lora.targets, "\"\"",
        "Names of weights of linear layers, as in `parameters`, or of modules, "
        "as in PEFT (q_proj), separated by commas; \"*\": all of them."),
    LIST("lora.modules_to_save", TOLD, c.lora.modules_to_save, "\"\"",
         "Names of modules or of their tensors (embed_tokens, lm_head, norm) "
         "that are trained in full beside the adapters and saved with them."),
    PATH("lora.import", FREE, c.lora.import, "\"\"",
         "Folder of an adapter in the layout of PEFT to begin with. It sets "
         "lora.rank and lora.alpha and, unless there are lora.targets, which "
         "weights have an adapter."),
    WORD("lora.export", FREE, c.lora.export, "merged|adapter", "\"merged\"",
         "What run.export writes: the model with the adapters added to its "
         "weights, or the adapters alone in the layout of PEFT."),

    WORD(
        "loss.type", SAME, c.loss.type, "cross_entropy|dpo|ipo",
        "\"cross_entropy\"",
        "cross_entropy: the mean over the targets. dpo (arXiv 2305.18290), ipo "
        "(arXiv 2310.12036): samples are pairs of texts, of which one is to "
        "be preferred; the reference is the model as the training began, "
        "without adapters. See docs/finetune.md."),
    NUMBER("loss.beta", TOLD, DOUBLE, c.loss.beta, 1e-6, 1e6, "0.1",
           "Of dpo and ipo: how much a deviation from the reference costs."),
    NUMBER("loss.sft", TOLD, DOUBLE, c.loss.sft, 0, 1e6, "0.0",
           "Of dpo and ipo: weight of the cross entropy of the preferred "
           "texts, which is added."),

    LIST("data.path", FREE, c.data.path, "\"\"",
         "Training data: token shards (.bin with a header of 256 integers), "
         "with data.bytes any files, or the model's records. One file, a "
         "pattern (*.bin), or several separated by commas. See docs/data.md."),
    LIST("data.val_path", FREE, c.data.val_path, "\"\"",
         "Validation data, named in the same way; empty: the last "
         "val_fraction of data.path."),
    NUMBER("data.val_fraction", TOLD, DOUBLE, c.data.val_fraction, 0, 0.9,
           "0.05",
           "Part of data.path kept for validation when val_path is empty."),
    BOOL("data.bytes", SAME, c.data.bytes, "false",
         "The files are raw bytes: one token each, 0..255."),
    NUMBER("data.document_end", SAME, INT, c.data.document_end, -1, INT_MAX,
           "-1",
           "Token that ends a document. The documents of a sample then do not "
           "see each other: positions begin again at each, attention stays "
           "inside one, and the token behind its end is no target. Of models "
           "of text; attention on a GPU is then izar's own. -1: a sample is "
           "one text."),

    PATH("run.output", FREE, c.run.output, "\"out\"",
         "Folder for metrics, effective config and checkpoints."),
    NUMBER("run.steps", FREE, INT64, c.run.steps, 0, COUNT_MAX, "100",
           "Optimizer updates of the run."),
    BOOL(
        "run.decay_matrices_only", TOLD, c.run.decay_matrices, "false",
        "optimizer.params.weight_decay is of matrices and tables, and not of "
        "biases and the weights of norms, as with transformers' Trainer. Rules "
        "of `parameters` come after it."),
    WORD("run.empty_steps", TOLD, c.run.empty_steps, "update|skip",
         "\"update\"",
         "A step whose samples have no target, since masks exclude all. "
         "update: it is done as any other; its gradient is 0, so momentum and "
         "decay alone move the weights. skip: nothing is computed, moved or "
         "counted but the step and its samples; see docs/data.md."),
    NUMBER("run.seed", SAME, UINT64, c.run.seed, 0, 0x1p63, "1",
           "Seed of initial weights, batches and samples."),
    BOOL("run.save", FREE, c.run.save, "true",
         "Write a checkpoint at the end and when interrupted."),
    NUMBER("run.save_interval", FREE, INT64, c.run.save_interval, 0, COUNT_MAX,
           "0", "Steps between checkpoints; 0: only at the end."),
    WORD("run.save_mode", FREE, c.run.save_mode, "auto|async|sync", "\"auto\"",
         "While a checkpoint of save_interval is written, training goes on "
         "(async) or waits (sync). auto: sync if states are on nvme with "
         "nvme_checksum or state_dtype, or on a GPU with state_dtype, or if "
         "run.master is remainder; otherwise async. The losses are the same "
         "bit for bit."),
    NUMBER("run.save_buffers", FREE, INT, c.run.save_buffers, 1, 1e6, "8",
           "Buffers between states and the file of an asynchronous save, each "
           "of at most 4 MiB. With enough for all states, no update waits for "
           "the disk."),
    NUMBER("run.keep_last", FREE, INT, c.run.keep_last, 1, 1e6, "2",
           "Checkpoints kept; older ones are removed."),
    NUMBER("run.eval_interval", FREE, INT64, c.run.eval_interval, 0, COUNT_MAX,
           "0", "Steps between evaluations; 0: only at the end."),
    NUMBER("run.eval_batches", FREE, INT, c.run.eval_batches, 0, 1e9, "0",
           "An evaluation takes each sample of the validation data once, but "
           "no more than the first eval_batches times train_batch_size; 0: no "
           "evaluation."),
    NUMBER("run.sample_tokens", FREE, INT, c.run.sample_tokens, 0, 1e9, "0",
           "Tokens generated at the end; 0: none."),
    TEXT("run.sample_prompt", FREE, c.run.sample_prompt, "\"\"",
         "Text that the generated text continues."),
    NUMBER("run.sample_temperature", FREE, DOUBLE, c.run.sample_temperature, 0,
           1e6, "0.8",
           "Temperature of the samples; 0: always the most probable token."),
    TEXT("run.scheduler", FREE, c.run.scheduler, "\"prio\"",
         "StarPU's scheduler; STARPU_SCHED in the environment overrides it."),
    WORD("run.device", FREE, c.run.device, "auto|cuda|cpu", "\"auto\"",
         "Device that computes the units; auto: the GPU if this rank can have "
         "one, otherwise the CPU."),
    WORD("run.comm", FREE, c.run.comm, "auto|nccl|mpi", "\"auto\"",
         "Collectives between GPUs; mpi goes through pinned host memory, and "
         "then several ranks may share a GPU. auto: nccl if every rank has a "
         "GPU of its own."),
    WORD("run.host_comm", FREE, c.run.host_comm, "auto|memory|messages",
         "\"auto\"",
         "Collectives between ranks of one host. memory: each rank reads the "
         "buffers of the others where they are; refused if the system forbids "
         "it. messages: through MPI, as between hosts. auto: memory if the "
         "system allows it. The bits are the same."),
    TEXT("run.cpu_kernels", TOLD, c.run.cpu_kernels, "\"auto\"",
         "On a CPU: whose kernels make products of fp32. oneDNN; a processor's "
         "name in OpenBLAS, like SkylakeX or Haswell; BLAS: those that the "
         "library takes by itself. auto: the library's own, or else the first "
         "of oneDNN, SkylakeX and Haswell that has 0.95 of the best rate, as "
         "measured at the start with products like the model's. "
         "OPENBLAS_CORETYPE in the environment wins.",
         KEPT(ALL)),
    WORD("run.cpu_products", TOLD, c.run.cpu_products, "auto|fp32|bf16",
         "\"auto\"",
         "On a CPU, with parameters in bf16: fp32 widens weights before a "
         "product, bf16 rounds the other operand; sums are fp32. auto: bf16 if "
         "a quick measurement at the start shows that the model's products are "
         "faster with it. Muon's products are of this type too, unless "
         "ns_method is gram.",
         KEPT(OF_16_BITS)),
    WORD("run.gpu_attention", TOLD, c.run.gpu_attention, "auto|own|cudnn",
         "\"auto\"",
         "On a GPU, with 16-bit parameters: the kernel for the forward of "
         "attention, izar's own or cuDNN's. auto: cuDNN's from compute "
         "capability 9.0 on, where the library is found, has a kernel and the "
         "plan has room for its scratch, unless documents are kept apart, "
         "the model's attention has a window, a cap or sinks, or "
         "run.sequence_chunk is given; otherwise own. The config beside the "
         "output then has the choice.",
         KEPT(OF_16_BITS)),
    WORD("run.gpu_attention_backward", TOLD, c.run.gpu_attention_backward,
         "auto|own|cudnn", "\"auto\"",
         "The same for the backward of attention. cudnn: its kernels that have "
         "a fixed order; they take 2 bytes of the GPU's memory for each score "
         "of each head of a sample, which the plan counts, and do more samples "
         "at once where its scratch has room.",
         KEPT(OF_16_BITS)),
    WORD("run.muon_products", TOLD, c.run.muon_products, "auto|host|gpu",
         "\"auto\"",
         "Where units are computed on a GPU: which side makes the updates of "
         "Muon's matrices. host: its workers, in fp32, with the bits of a run "
         "on a CPU in fp32. gpu: products of bf16, of fp16 with ns_method "
         "gram, whose sums are fp32. auto: gpu.",
         KEPT(ALL)),
    NUMBER(
        "run.gpu_logits_bytes", TOLD, INT64, c.run.gpu_logits_bytes, 0,
        COUNT_MAX, "0",
        "On a GPU: bytes of fp32 logits that are computed at a time, at "
        "least 8 rows of them; the more, the fewer passes over the last "
        "layer's weights and their gradient. 0: 1 GiB if the plan may use "
        "more than 64 GiB of the GPU and recomputes nothing more for it, else "
        "256 MiB. Another number adds in another order.",
        KEPT(ALL)),
    {KEY("run.sequence_chunk", TOLD, COUNT, c.run.sequence_chunk, "\"off\"",
         "Rows of a sample that a block handles at a time, so that only the "
         "keys and values of a sample are whole, with what run.recompute "
         "keeps for the backward. off: all rows. auto: off if that fits, else "
         "what makes the shortest step. Another number adds the gradients of "
         "weights in another order.",
         KEPT(ALL)),
     .words = "auto|off", .min = 1, .max = COUNT_MAX},
    BOOL("run.tf32", TOLD, c.run.tf32, "false",
         "On a GPU: products of fp32 matrices may round their operands to "
         "tf32."),
    NUMBER("run.workers", OWN, INT, c.run.workers, 0, 4096, "0",
           "Compute workers of each rank; 0: its cores."),
    WORD("run.schedule", FREE, c.run.schedule, "depth_first|breadth_first",
         "\"depth_first\"",
         "depth_first: one micro-batch goes through all units before the next. "
         "breadth_first: one unit handles all micro-batches before the next "
         "unit, so parameters are fetched once per step and direction."),
    WORD("run.recompute", FREE, c.run.recompute, "none|widened|full|auto",
         "\"auto\"",
         "What backward recomputes of its unit's forward; it uses kept "
         "activations for the rest. full: all; widened: what makes the widest "
         "activations, which are not kept; none: nothing; auto: unit by unit "
         "as little as memory allows."),
    BOOL("run.overlap", FREE, c.run.overlap, "true",
         "false: barriers around the optimizer, for comparison. The losses "
         "are the same bit for bit."),
    NUMBER("run.in_flight", FREE, INT, c.run.in_flight, 1, 64, "2",
           "Largest number of steps that are submitted ahead."),
    NUMBER("run.parallel_micro_batches", FREE, INT,
           c.run.parallel_micro_batches, 0, IZ_BATCH_MAX, "0",
           "Micro-batches of a depth-first wave; 0: as many as the "
           "first rank has workers."),
    NUMBER("run.slices", TOLD, INT, c.run.slices, 0, 64, "0",
           "Tasks that a micro-batch is cut into, so that all workers have "
           "one; the number must divide the micro-batch. 0: the smallest "
           "number that occupies all workers of the first rank. "
           "Another number adds in another order.",
           KEPT(SAME_MICRO_BATCH)),
    WORD("run.sum_order", TOLD, c.run.sum_order, "auto|ranks_first|local_first",
         "\"auto\"",
         "On several ranks, with several micro-batches: ranks_first adds each "
         "micro-batch's gradient over the ranks; local_first adds a rank's "
         "micro-batches where they are computed, and the ranks once per step. "
         "In stage 3 local_first needs run.schedule breadth_first. auto: "
         "local_first, but ranks_first for depth_first in stage 3 or with an "
         "optimizer that a GPU offloads, and where only that fits. Another "
         "order has other bits.",
         KEPT(SAME_RANKS)),
    NUMBER("run.sum_group", TOLD, INT, c.run.sum_group, 0, 65536, "0",
           "Gradients are added within groups of so many consecutive ranks, "
           "then over the groups, so that between hosts each group sends one "
           "contribution, in the type of the parameters. It must divide the "
           "number of ranks; 1 or all of them: no groups. 0: the ranks of a "
           "host when the run began, or, if hosts are unequal, the largest "
           "number with no group on two hosts. Another number has other "
           "bits.",
           KEPT(SAME_RANKS)),
    NUMBER("run.ring", FREE, INT, c.run.ring, 0, IZ_BATCH_MAX, "0",
           "Buffers of gathered units; 0: computed from zero_optimization."),
    BOOL("run.task_log", FREE, c.run.task_log, "false",
         "Write kind, unit, step, worker and times of every task of the first "
         "rank to tasks.jsonl in run.output."),
    NUMBER("run.log_interval", FREE, INT64, c.run.log_interval, 1, COUNT_MAX,
           "10", "Steps between printed lines."),
    NUMBER("run.comm_timeout_s", FREE, DOUBLE, c.run.comm_timeout_s, 0.001, 1e9,
           "300.0",
           "A collective that waits longer than this ends the run. Where disks "
           "are used (start, saves, end), a rank of the same host is waited "
           "for while its process lives and is not stopped, one of another "
           "host 12 times as long."),
    NUMBER("run.inject_delay_us", FREE, INT, c.run.inject_delay_us, 0, 1e9, "0",
           "Random delay of up to this before every task, for tests."),
    NUMBER("run.inject_seed", FREE, UINT64, c.run.inject_seed, 0, 0x1p63, "1",
           "Seed of the delays of inject_delay_us."),
    BOOL("run.nvme_checksum", FREE, c.run.nvme_checksum, "false",
         "Check every chunk read from nvme against its checksum."),
    NUMBER("run.memory_limit_bytes", OWN, INT64, c.run.memory_limit_bytes, 0,
           COUNT_MAX, "0",
           "Host memory that this rank's plan may use; nothing is taken from "
           "it. 0: what is free, less a reserve and what a process has beside "
           "its plan."),
    NUMBER("run.device_memory_limit_bytes", OWN, INT64,
           c.run.device_memory_limit_bytes, 0, COUNT_MAX, "0",
           "GPU memory that this rank's plan may use; 0: all that is free."),
    BOOL("run.hash", FREE, c.run.hash, "false",
         "Print a hash of the final weights."),
    NUMBER("run.hash_interval", FREE, INT64, c.run.hash_interval, 0, COUNT_MAX,
           "0",
           "Steps between hashes of weights and states in metrics.jsonl, which "
           "--replay compares with; training waits for each. 0: none."),
    WORD("run.state_dtype", TOLD, c.run.state_dtype, "fp32|bf16|fp8",
         "\"fp32\"",
         "Type of the optimizer's states. Each takes 4 bytes per parameter in "
         "fp32, 2 in bf16, 1.02 in fp8; bf16 and fp8 are rounded "
         "stochastically, and in fp8 64 elements share a power of two."),
    WORD("run.master", FREE, c.run.master, "full|remainder", "\"full\"",
         "How the fp32 master of a bf16 parameter is kept: full, 4 bytes, or "
         "as the remainder, the 16 bits that the parameter lacks. Both have "
         "the same bits; remainder needs bf16."),
    PATH("run.export", FREE, c.run.export, "\"\"",
         "Folder for the final weights as a Hugging Face model; must not exist "
         "or be empty. Empty: none."),
    WORD("run.export_dtype", FREE, c.run.export_dtype, "null|fp32|bf16|fp16",
         "null",
         "Type of the exported weights; null: the type of the parameters."),
    NUMBER("run.export_shard_bytes", FREE, INT64, c.run.export_shard_bytes, 1,
           COUNT_MAX, "5000000000",
           "Largest size of one exported file's tensors; a larger model is "
           "split over several files with an index."),

    PATH("model.import", FREE, c.import, "\"\"",
         "Folder of a Hugging Face model: config.json sets the shape, and the "
         "weights start from its safetensors. Empty: random weights."),
    WORD("model.base_dtype", SAME, c.base_dtype, "null|nf4|int8", "null",
         "The matrices of blocks, all of them frozen, are quantised. nf4: in 4 "
         "bits, as bitsandbytes has them. int8: in 8 bits, with a scale for "
         "every 64 weights. null: they are kept in the type of the "
         "parameters."),
    {.name = NULL},
};

_Static_assert(sizeof(iz_config_keys) / sizeof(iz_config_keys[0]) <=
                   IZ_CONFIG_KEYS_MAX,
               "struct iz_config_file.given holds every key");

/* ---- the members of the array "parameters" ---- */

#define RULE(name_, type_, field, doc_)                                        \
    .name = (name_), .change = IZ_CHANGE_TOLD, .type = IZ_KEY_##type_,         \
    .offset = offsetof(struct iz_rule, field), .fallback = "null",             \
    .doc = (doc_)

const struct iz_key iz_rule_keys[] = {
    [IZ_RULE_MATCH] = {RULE(
                           "match", STRING, match,
                           "Names of tensors as in checkpoints, with * ? [...] "
                           "as in a shell. A pattern that matches no tensor is "
                           "refused."),
                       .size = IZ_MATCH_MAX},
    [IZ_RULE_FROZEN] = {RULE("frozen", BOOL, frozen,
                             "Never update these: no gradient, no optimizer "
                             "state, and no backward below the lowest trained "
                             "unit.")},
    [IZ_RULE_SPARSE] = {RULE("sparse", BOOL, sparse,
                             "For an embedding table: a step moves and updates "
                             "only the rows that its samples read; other rows "
                             "keep their weights, m and v.")},
    [IZ_RULE_DECAY] = {RULE("weight_decay", DOUBLE, weight_decay,
                            "Replaces optimizer.params.weight_decay; 0: "
                            "none."),
                       .min = 0, .max = 1e6},
    [IZ_RULE_LR] = {RULE("lr_scale", DOUBLE, lr_scale,
                         "Multiplies the learning rate of the step."),
                    .min = 0, .max = 1e6},
    [IZ_RULE_MUON] = {RULE("use_muon", BOOL, use_muon,
                           "With Muon, false: these matrices of blocks are "
                           "AdamW's.")},
    [IZ_RULE_KEYS] = {.name = NULL},
};
