/* SPDX-License-Identifier: Apache-2.0 */
/* The Llama family: rotary positions, RMSNorm before attention and MLP, groups
 * of heads that share keys, and a gated MLP; with the options that make it
 * Llama 3, Mistral, Qwen 2.5 or Qwen 3.  Parameters have the layouts of the
 * published checkpoints, where those that one product uses are stacked. */
#pragma once

#include <stdbool.h>

#include "codelets/unit/layer.h"
#include "models/block.h"
#include "runtime/run/run.h"

/* config.family: which published models have this shape. */
#define IZ_LLAMA_FAMILIES "auto|llama|mistral|qwen2|qwen3"
enum {
    IZ_LLAMA_AUTO,
    IZ_LLAMA_LLAMA,
    IZ_LLAMA_MISTRAL,
    IZ_LLAMA_QWEN2,
    IZ_LLAMA_QWEN3
};

struct iz_llama_config {
    int layers, heads, width, ffn, seq, vocab;
    int kv_heads; /* 0: heads */
    int head_dim; /* 0: width / heads */
    double norm_eps, rope_theta;
    /* Llama 3's longer context; a factor of 1 is none. */
    double rope_scaling_factor, rope_scaling_low_freq_factor;
    double rope_scaling_high_freq_factor;
    int rope_scaling_original_seq;
    bool tie_embeddings; /* the head uses the embedding's matrix */
    bool qkv_bias, qk_norm;
    int family;  /* as which it is published; 0: by the two above */
    int context; /* longest sequence it is made for; 0: seq */
    int window;  /* tokens that attention looks back at most; 0: all */
};

/* Of `model` in a config, each list with an end of zeros. */
extern const struct iz_key iz_llama_keys[];
extern const struct iz_preset iz_llama_presets[];

/* Puts what they stand for in place of zeros.  -EINVAL with the reason printed
 * if that is no model; `model` is whose it is. */
int iz_llama_complete(const char *model, struct iz_llama_config *c);

/* The blocks of a complete one. */
struct iz_block iz_llama_block(const struct iz_llama_config *c);

/* Gives m its units: embedding, these blocks, head.  0 or -ENOMEM. */
int iz_llama_units(struct iz_model *m, const struct iz_llama_config *c,
                   const struct iz_block *b);

/* Their tensors and keys; its self begins with a struct iz_llama_config. */
extern const struct iz_hf iz_llama_hf;

/* Creates a model of a struct iz_llama_config; close it with iz_model_close.
 * Returns 0, or -EINVAL or -ENOMEM after printing the reason. */
int iz_llama_open(struct iz_model **out, const void *config);
