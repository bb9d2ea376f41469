/* SPDX-License-Identifier: Apache-2.0 */
/* The run as the user wrote it: DeepSpeed's JSON with our sections model, data
 * and run.  Read and validated once; afterwards nothing asks the JSON again. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "codelets/flat/dtype.h"
#include "codelets/flat/optimizer.h"
#include "codelets/flat/quant.h"
#include "codelets/ops/ops.h"
#include "codelets/unit/layer.h"
#include "runtime/base/key.h"

#define IZ_MATCH_MAX 128
#define IZ_RULES_MAX 64
#define IZ_CONFIG_KEYS_MAX 160
#define IZ_MODEL_KEYS_MAX 96
#define IZ_CHUNK_OFF (-1) /* of run.sequence_chunk */

enum iz_home {
    IZ_HOME_NONE,
    IZ_HOME_CPU,
    IZ_HOME_NVME
}; /* DeepSpeed's words */
enum iz_order { IZ_DEPTH_FIRST, IZ_BREADTH_FIRST };
enum iz_device_kind { IZ_DEVICE_AUTO, IZ_DEVICE_CUDA, IZ_DEVICE_CPU };
enum iz_comm { IZ_COMM_AUTO, IZ_COMM_NCCL, IZ_COMM_MPI };
enum iz_product_type { IZ_PRODUCTS_AUTO, IZ_PRODUCTS_F32, IZ_PRODUCTS_BF16 };
/* Whose kernels do attention on a GPU: its forward, its backward. */
enum iz_attention_by {
    IZ_ATTENTION_AUTO,
    IZ_ATTENTION_OWN,
    IZ_ATTENTION_CUDNN
};
/* Which side updates Muon's matrices where units are computed on a GPU. */
enum iz_muon_by { IZ_MUON_AUTO, IZ_MUON_HOST, IZ_MUON_GPU };
/* Whether ranks are added per micro-batch, or micro-batches per rank. */
enum iz_sum_first { IZ_SUM_AUTO, IZ_SUM_RANKS_FIRST, IZ_SUM_LOCAL_FIRST };
/* What a step does that has no target. */
enum iz_empty { IZ_EMPTY_UPDATE, IZ_EMPTY_SKIP };
enum iz_host_comm { IZ_HOST_AUTO, IZ_HOST_MEMORY, IZ_HOST_MESSAGES };

/* DeepSpeed's after the first, then transformers'. */
enum iz_lr_kind {
    IZ_LR_CONST,
    IZ_LR_WARMUP,
    IZ_LR_DECAY,
    IZ_LR_COSINE,
    IZ_LR_HF_CONSTANT,
    IZ_LR_HF_LINEAR,
    IZ_LR_HF_COSINE,
    IZ_LR_HF_COSINE_MIN,
    IZ_LR_HF_POLYNOMIAL,
    IZ_LR_HF_WSD
};

/* Their names, in this order. */
#define IZ_LR_TYPES                                                            \
    "null|WarmupLR|WarmupDecayLR|WarmupCosineLR|constant_with_warmup|linear|"  \
    "cosine|cosine_with_min_lr|polynomial|warmup_stable_decay"

enum iz_lr_shape { IZ_LR_SHAPE_LINEAR, IZ_LR_SHAPE_COSINE, IZ_LR_SHAPE_SQRT };

struct iz_lr_config {
    enum iz_lr_kind kind;
    bool log_warmup; /* DeepSpeed's warmup_type: "log" (its default) or "linear"
                      */
    double warmup_min_lr, warmup_max_lr; /* max: optimizer's lr if unset */
    int64_t warmup_num_steps, total_num_steps;
    double warmup_min_ratio, cos_min_ratio;
    /* Of transformers' kinds. */
    double cycles, min_ratio, end_lr, power;
    int64_t decay_steps;
    enum iz_lr_shape decay_shape;
};

/* Whether the rate is the scheduler's own: warmup_max_lr behind its warm-up. */
static inline bool iz_lr_is_own(const struct iz_lr_config *lr)
{
    return lr->kind == IZ_LR_WARMUP || lr->kind == IZ_LR_DECAY;
}

struct iz_fp16_config {
    double loss_scale; /* 0 = dynamic */
    int initial_scale_power, loss_scale_window, hysteresis;
    bool consecutive_hysteresis;
    double min_loss_scale;
};

struct iz_offload_config {
    enum iz_home home;
    int frozen; /* offload_param only: 1 + the home of what is frozen; 0: it is
                   home, too */
    char nvme_path[IZ_PATH_MAX];
    bool pin_memory;
    int buffer_count; /* staging buffers of the nvme tier */
    double ratio;    /* offload_optimizer only: part of the chunks that the host
                        keeps and updates, the GPU the others */
    bool ratio_auto; /* the plan chooses it */
};

struct iz_zero_config {
    int stage;
    struct iz_offload_config optimizer, param;
    int64_t sub_group_size; /* elements per optimizer chunk */
    int hpz_partition; /* consecutive ranks that have a copy of the parameters'
                          shards among them; 1: there are no copies */
    bool overlap_comm; /* false: collectives do not run beside compute */
    int64_t prefetch_bucket_size; /* elements fetched ahead; sets the ring */
    int64_t max_live_parameters;  /* elements; upper bound of the ring */
    int64_t max_reuse_distance; /* elements; 0: a slot is never reused within a
                                   step */
};

struct iz_data_config {
    /* Token shards or bytes: a file, a pattern, or a list with commas. */
    char path[IZ_PATH_MAX];
    char val_path[IZ_PATH_MAX]; /* "" : the last val_fraction of path */
    double val_fraction;
    bool bytes;       /* the files are raw bytes: token = byte (vocab 256) */
    int document_end; /* the token that ends a document; -1: none */
    bool packed;      /* its shards say where documents begin: iz_data_look */
    bool apart;       /* documents of a sample do not see each other */
    int group;        /* samples that stay together: 2 of pairs, else 1 */
};

/* Whether training waits while a checkpoint of run.save_interval is written;
 * auto: where it must. */
enum iz_save_mode { IZ_SAVE_AUTO, IZ_SAVE_ASYNC, IZ_SAVE_SYNC };

/* How the fp32 master of a bf16 parameter is kept: whole, or as its difference
 * from the parameter. */
enum iz_master_form { IZ_MASTER_FULL, IZ_MASTER_REMAINDER };

struct iz_run_config {
    char output[IZ_PATH_MAX]; /* directory: metrics, effective config,
                                 checkpoints */
    int64_t steps;
    uint64_t seed;
    int64_t save_interval; /* 0: only at the end; see save */
    bool save;             /* checkpoint at the end and when interrupted */
    int keep_last;
    enum iz_empty empty_steps;
    bool decay_matrices;   /* weight_decay is of these alone */
    int64_t eval_interval; /* 0: only at the end when eval_batches > 0 */
    int eval_batches;      /* steps that have as many samples as validation */
    int sample_tokens;     /* generated at the end; 0: none */
    char sample_prompt[256];
    double sample_temperature;
    char scheduler[32]; /* StarPU's; STARPU_SCHED in the environment wins */
    enum iz_device_kind device;
    enum iz_comm comm;                  /* between GPUs */
    enum iz_host_comm host_comm;        /* between ranks of one host */
    char cpu_kernels[32];               /* codelets/ops/blas.h; "auto" */
    enum iz_product_type cpu_products;  /* with bf16 weights on a CPU */
    enum iz_attention_by gpu_attention; /* on a GPU, and: */
    enum iz_attention_by gpu_attention_backward;
    enum iz_muon_by muon_products;     /* of a run that computes on a GPU */
    int64_t sequence_chunk;            /* rows; 0: chosen, -1: all */
    int64_t gpu_logits_bytes;          /* at a time, there; 0: chosen */
    bool tf32;                         /* fp32 products on a GPU may use tf32 */
    int64_t device_memory_limit_bytes; /* of the GPU; 0 = what is free */
    int workers; /* compute workers of each rank; 0 = its cores */
    enum iz_order schedule;
    enum iz_recompute recompute;
    bool overlap;  /* false: barriers around the optimizer, for comparison */
    int in_flight; /* steps submitted ahead at most */
    int parallel_micro_batches; /* of a depth-first wave; 0 = workers */
    enum iz_sum_first sum_order;
    int sum_group; /* 0: the ranks of a host */
    int slices;    /* tasks per micro-batch; 0 = enough to occupy all workers */
    int ring;      /* gathered-unit buffers; 0 = from the zero section */
    int64_t log_interval;
    bool task_log; /* every task of rank 0 with its times: output/tasks.jsonl */
    double comm_timeout_s;
    int inject_delay_us; /* random delay before every task up to this: tests */
    uint64_t inject_seed;
    bool nvme_checksum;
    int save_mode;    /* of interval saves: enum iz_save_mode */
    int save_buffers; /* between states and the file of an asynchronous one */
    int64_t
        memory_limit_bytes; /* of this rank's node share; 0 = what is free */
    enum iz_moment_type state_dtype; /* of the optimizer's states */
    enum iz_master_form master;
    bool hash;                /* print a hash of the final weights */
    int64_t hash_interval;    /* of the chain of hashes; 0: none */
    char export[IZ_PATH_MAX]; /* folder for the final weights; "": none */
    int export_dtype;         /* 0: that of the parameters, else 1 + iz_dtype */
    int64_t export_shard_bytes; /* tensors of a file at most */
};

enum iz_lora_export { IZ_LORA_MERGED, IZ_LORA_ADAPTER };

struct iz_lora_config {
    int rank; /* 0: no adapters */
    double alpha;
    double dropout;
    bool use_rslora; /* the scale is alpha / sqrt(rank) */
    bool use_dora;
    /* JSON: others than those, by names as in targets; of an import the
     * folder has them. */
    char rank_pattern[IZ_PATH_MAX], alpha_pattern[IZ_PATH_MAX];
    char targets[IZ_PATH_MAX];         /* patterns with commas between */
    char modules_to_save[IZ_PATH_MAX]; /* the same of modules */
    char import[IZ_PATH_MAX];          /* folder of an adapter to begin with */
    enum iz_lora_export export;
    /* Of the folder to import: adapters of the fused weights of experts. */
    bool gate_up, down;
    bool ties; /* what is tied stays so, where it is trained in full */
};

enum {
    IZ_RULE_MATCH,
    IZ_RULE_FROZEN,
    IZ_RULE_SPARSE,
    IZ_RULE_DECAY,
    IZ_RULE_LR,
    IZ_RULE_MUON,
    IZ_RULE_KEYS
};

/* "parameters": settings of the tensors whose names match; a later rule that
 * matches overrides what it gives. */
struct iz_rule {
    char match[IZ_MATCH_MAX]; /* a pattern as in a shell: * ? [...] */
    bool frozen, sparse, use_muon;
    double weight_decay, lr_scale;
    bool given[IZ_RULE_KEYS]; /* in the order of iz_rule_keys */
};

struct iz_config {
    int64_t train_batch_size; /* samples per step, all ranks */
    int micro_batch;          /* samples per task chain */
    int grad_accum;           /* micro-batches per rank and step */
    bool cut_auto; /* the plan chooses both; until then one has all samples */
    double gradient_clipping; /* 0 = off */
    enum iz_dtype dtype;    /* of parameters and gradients: fp32, bf16, fp16 */
    bool grad_accum_fp32;   /* accumulators between micro-batches */
    bool grad_accum_open;   /* fp32 exactly if there are several */
    bool cpu_checkpointing; /* boundaries of units live on the host */
    char boundary_path[IZ_PATH_MAX]; /* or in a file in this folder; "": no */
    struct iz_hyper optimizer;
    struct iz_lr_config lr;
    struct iz_fp16_config fp16;
    struct iz_zero_config zero;
    struct iz_data_config data;
    struct iz_run_config run;
    char import[IZ_PATH_MAX]; /* model.import: initial weights; "": random */
    enum iz_quant base_dtype; /* of the matrices of blocks, all frozen */
    struct iz_lora_config lora;
    struct iz_preference loss;
    struct iz_rule rule[IZ_RULES_MAX];
    int n_rules;
    /* Rows of iz_config_keys that a user gave; that a resumed run began with,
     * see keep.c. */
    bool given[IZ_CONFIG_KEYS_MAX], kept[IZ_CONFIG_KEYS_MAX];
    bool model_given[IZ_MODEL_KEYS_MAX]; /* rows of the model's, in the same way
                                          */
};

/* Reads `path` (NULL: no file), applies the `set` overrides ("key=value", n of
 * them), fills *c and the model's section.  Prints on `notes` (may be NULL)
 * what was assumed where the file leaves it open ("auto", no optimizer), and
 * which of its keys have no effect.  On error prints one line per fault on
 * `err`
 * ("config.json: zero_optimization.stage: 5 is not in 0..3") and returns a
 * negative errno. `ranks` resolves DeepSpeed's batch rule. */
int iz_config_read(struct iz_config *c, const struct iz_section *model,
                   const char *path, char *const *set, int n_set, int ranks,
                   FILE *notes, FILE *err);

/* What a config meets: by its plan, and by its data. */
struct iz_setting {
    int ranks, slices;
    bool gpu, gathers, saves_beside; /* units on a GPU; parameters for a use;
                                        checkpoints while training goes on */
    bool chunks;                     /* blocks handle some rows at a time */
    bool masked;                     /* samples may lack targets */
    int64_t samples;                 /* to be trained with; 0: not known */
};

/* Prints what is odd there, if anything is: a schedule that ends elsewhere,
 * keys that were given and can have no effect. */
void iz_config_remark(const struct iz_config *c, const struct iz_section *model,
                      const struct iz_setting *run, FILE *out);

/* Fills in what *c leaves open by `lines`, the identity of the run that it goes
 * on with, and keeps it. */
void iz_config_keep(struct iz_config *c, const char *lines, int ranks);
/* Of a choice that a resumed run keeps: whether it did; whether it is open. */
bool iz_config_is_kept(const struct iz_config *c, const char *key);
bool iz_config_is_open(const struct iz_config *c, const char *key);

/* Samples of a micro-batch, and micro-batches: products stay far below 2^63. */
#define IZ_BATCH_MAX 1e6
/* Cuts a rank's samples of a step, which they divide, into so many
 * micro-batches. */
void iz_config_cut(struct iz_config *c, int micro_batches);

/* Sets a key whose value is a field of *c, as "key=value" of --set would; what
 * it stands for is neither checked nor resolved.  Returns whether it was other.
 */
bool iz_config_set(struct iz_config *c, const char *set);

/* Writes the effective config (every key with its value) as JSON that
 * iz_config_read takes again, whole or not at all.  Negative errno with the
 * reason printed. */
int iz_config_write(const struct iz_config *c, const struct iz_section *model,
                    const char *path);

/* The same as lines "name value", values as in JSON, "parameters" as one of
 * them; some lines may be empty. */
void iz_config_lines(FILE *out, const struct iz_config *c,
                     const struct iz_section *model);
/* What another value of a key outside the model's own means; false: there is
 * no such key. */
bool iz_config_change(const char *key, enum iz_change *change);

/* Prints the keys for --help (markdown = false) or docs/config.md (true). */
void iz_config_doc(const struct iz_section *model, bool markdown, FILE *out);
