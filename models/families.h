/* SPDX-License-Identifier: Apache-2.0 */
/* Published families of dense models, by their model_type: what their blocks
 * have, whatever their sizes. */
#pragma once

#include "models/block.h"

/* config.family; in the order of iz_family_types. */
#define IZ_FAMILIES                                                            \
    "auto|llama|mistral|qwen2|qwen3|phi3|ernie4_5|helium|granite|seed_oss|"    \
    "ministral|smollm3|arcee|olmo|olmo2|olmo3|gemma|gemma2|gemma3_text|glm|"   \
    "glm4|cohere|cohere2|stablelm|starcoder2|nemotron|exaone4|"                \
    "hunyuan_v1_dense|jais2|cwm|internlm3|iquestcoder|"                        \
    "vaultgemma|hyperclovax|phi|gpt_neox|ministral3"
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
};

/* Their `own` is a struct iz_family. */
extern const struct iz_hf_type iz_family_types[];

/* Of the causal models of transformers 5.24 that are no family here. */
extern const struct iz_hf_lack iz_family_lacks[];

/* That of config.family. */
const struct iz_family *iz_family_of(int family);
