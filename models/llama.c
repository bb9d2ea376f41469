/* SPDX-License-Identifier: Apache-2.0 */
/* Llama and its relatives, written once for training, evaluation and
 * generation; their units are those of block.h. */
#include "models/llama.h"

#include "models/block.h"
#include "models/parts.h"

/* What a model holds: what its keys say, and so its blocks. */
struct self {
    struct iz_llama_config config;
    struct iz_block block;
};

int iz_llama_open(struct iz_model **out, const void *target)
{
    struct iz_llama_config c = *(const struct iz_llama_config *)target;
    if (c.family == IZ_FAMILY_AUTO && !(c.qkv_bias && c.qk_norm))
        c.family = c.qkv_bias  ? IZ_FAMILY_QWEN2
                   : c.qk_norm ? IZ_FAMILY_QWEN3
                   : c.window  ? IZ_FAMILY_MISTRAL
                               : IZ_FAMILY_LLAMA;
    int rc = iz_llama_complete("llama", &c);
    *out = NULL;
    if (rc == 0 && iz_family_is_mixture(c.family)) {
        fprintf(stderr, "llama: family: the program moe has it\n");
        rc = -EINVAL;
    }
    if (rc)
        return rc;
    struct self s = {.config = c, .block = iz_llama_block(&c)};
    *out = iz_model_open("llama", c.layers + 2, &s, sizeof(s));
    const struct self *own = (*out)->self;
    iz_llama_units(*out, &own->config, &own->block);
    return 0;
}

/* ---- the program ---- */

static struct iz_llama_config config;

const struct iz_program iz_program = {
    .name = "llama",
    .about = "trains models of the Llama family",
    .section = {.keys = iz_llama_keys,
                .target = &config,
                .presets = iz_llama_presets,
                .hf = &iz_llama_hf,
                .idle = iz_llama_idle},
    .open = iz_llama_open,
};
