/* SPDX-License-Identifier: Apache-2.0 */
/* Published families of models, by their model_type: what their blocks have,
 * whatever their sizes. */
#pragma once

#include "models/block.h"

/* config.family; in the order of iz_family_types and iz_mixture_types. */
#define IZ_FAMILIES                                                            \
    "auto|llama|mistral|qwen2|qwen3|phi3|ernie4_5|helium|granite|seed_oss|"    \
    "ministral|smollm3|arcee|olmo|olmo2|olmo3|gemma|gemma2|gemma3_text|glm|"   \
    "glm4|cohere|cohere2|stablelm|starcoder2|nemotron|exaone4|"                \
    "hunyuan_v1_dense|jais2|cwm|internlm3|iquestcoder|"                        \
    "vaultgemma|hyperclovax|phi|gpt_neox|ministral3|"                          \
    "qwen3_moe|mixtral|olmoe|qwen2_moe|granitemoe|granitemoeshared|"           \
    "glm4_moe|dots1|solar_open|ernie4_5_moe|minimax_m2|gpt_oss"
enum {
    IZ_FAMILY_AUTO,
    IZ_FAMILY_LLAMA,
    IZ_FAMILY_MISTRAL,
    IZ_FAMILY_QWEN2,
    IZ_FAMILY_QWEN3
};

struct iz_family {
    unsigned has, may; /* of enum iz_block_has; may: if a key says so */
    unsigned parallel; /* what it has if the key of that name is true */
    enum iz_activation act;
    int every;       /* every which block has no window; 0: none */
    bool root;       /* embeddings are multiplied by the root of the width */
    bool local_rope; /* blocks with a window turn by frequencies of their own */
    bool scaled;     /* transformers scales what a file says nothing of */
    bool joined;     /* all experts of a block are one tensor */
};

/* Dense ones, and mixtures of experts; their `own` is a struct iz_family. */
extern const struct iz_hf_type iz_family_types[], iz_mixture_types[];

/* Of the causal models of transformers 5.24 that are no family here. */
extern const struct iz_hf_lack iz_family_lacks[];

/* That of config.family; of `auto` there is no type. */
const struct iz_family *iz_family_of(int family);
const struct iz_hf_type *iz_family_type(int family);
/* A value of config.family; `auto` if there is none of this name. */
int iz_family_named(const char *type);
bool iz_family_is_mixture(int family);
