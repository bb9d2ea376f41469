/* SPDX-License-Identifier: Apache-2.0 */
/* Llama and its relatives: the families of families.h.  Parameters have the
 * layouts of the published checkpoints, where those that one product uses are
 * stacked. */
#pragma once

#include <stdbool.h>

#include "codelets/unit/layer.h"
#include "models/families.h"
#include "runtime/run/run.h"

struct iz_llama_config {
    int layers, heads, width, ffn, seq, vocab;
    int kv_heads; /* 0: heads */
    int head_dim; /* 0: width / heads */
    double norm_eps, rope_theta;
    int rope_scaling_type; /* enum iz_rope_scaling, or the one below */
    double rope_scaling_beta_fast, rope_scaling_beta_slow;
    double rope_scaling_attention_factor;
    bool rope_scaling_truncate;
    double rope_scaling_query_beta;
    /* Llama 3's longer context; a factor of 1 is none. */
    double rope_scaling_factor, rope_scaling_low_freq_factor;
    double rope_scaling_high_freq_factor;
    int rope_scaling_original_seq;
    bool tie_embeddings; /* the head uses the embedding's matrix */
    bool qkv_bias, qk_norm, proj_bias, mlp_bias;
    bool parallel; /* the MLP reads what attention reads */
    int family;    /* as which it is published; 0: by the two above */
    int context;   /* longest sequence it is made for; 0: seq */
    int window;    /* tokens that attention looks back at most; 0: all */
    char layer_types[8192];     /* of each block, with commas; "": by family */
    char no_rope_layers[2048];  /* of each block 0 where it is not turned */
    int no_rope_layer_interval; /* ... or every which; 0: none */
    double partial_rotary_factor, rope_local_base_freq;
    int rotary_dim; /* columns of a head that turn; 0: by the first */
    double attention_multiplier; /* 0: by the next one */
    int query_pre_attn_scalar;   /* 0: head_dim */
    double attn_logit_softcapping, final_logit_softcapping; /* 0: none */
    double embedding_multiplier, residual_multiplier;
    double logits_scaling, logit_scale;
};

enum { IZ_ROPE_DEFAULT = IZ_ROPE_YARN + 1 };

/* Of `model` in a config, each list with an end of zeros. */
extern const struct iz_key iz_llama_keys[];
extern const struct iz_preset iz_llama_presets[];

/* Whether config.json of this type has a word for a key of `model`. */
bool iz_llama_knows(const char *type, const char *key);

/* Puts what they stand for in place of zeros.  -EINVAL with the reason printed
 * if that is no model; `model` is whose it is. */
int iz_llama_complete(const char *model, struct iz_llama_config *c);

/* Why a key of it can have no effect, as struct iz_section says. */
const char *iz_llama_idle(const void *config, const char *key);

/* The blocks of a complete one. */
struct iz_block iz_llama_block(const struct iz_llama_config *c);

/* Gives m its units: embedding, these blocks, head. */
void iz_llama_units(struct iz_model *m, const struct iz_llama_config *c,
                    const struct iz_block *b);

/* Their tensors and keys; its self begins with a struct iz_llama_config. */
extern const struct iz_hf iz_llama_hf;

/* Creates a model of a struct iz_llama_config; close it with iz_model_close.
 * Returns 0, or -EINVAL after printing the reason. */
int iz_llama_open(struct iz_model **out, const void *config);
