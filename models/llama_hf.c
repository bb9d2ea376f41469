/* SPDX-License-Identifier: Apache-2.0 */
/* What the Llama family's tensors and config.json are called in published
 * checkpoints. */
#include <stddef.h>

#include "models/llama.h"

static int64_t qkv_rows(const void *self, int i)
{
    const struct iz_llama_config *c = self;
    return (int64_t)(i == 0 ? c->heads : c->kv_heads) * c->head_dim;
}

/* A parameter of a block that is a tensor, or the weights of several. */
#define OURS(name)                                                             \
    {                                                                          \
        .tensor = "model.layers.{}." name, .param = "layers.{}." name          \
    }
#define ATTN "model.layers.{}.self_attn."
#define MLP "model.layers.{}.mlp."

static const struct iz_hf_name hf_names[] = {
    {.tensor = "model.embed_tokens.weight", .param = "embed_tokens.weight"},
    OURS("input_layernorm.weight"),
    {.tensor = ATTN "q_proj.weight|" ATTN "k_proj.weight|" ATTN "v_proj.weight",
     .param = "layers.{}.self_attn.qkv_proj.weight",
     .layout = IZ_HF_ROWS,
     .cut = qkv_rows},
    {.tensor = ATTN "q_proj.bias|" ATTN "k_proj.bias|" ATTN "v_proj.bias",
     .param = "layers.{}.self_attn.qkv_proj.bias",
     .cut = qkv_rows},
    OURS("self_attn.o_proj.weight"),
    OURS("self_attn.q_norm.weight"),
    OURS("self_attn.k_norm.weight"),
    OURS("post_attention_layernorm.weight"),
    {.tensor = MLP "gate_proj.weight|" MLP "up_proj.weight",
     .param = "layers.{}.mlp.gate_up_proj.weight",
     .layout = IZ_HF_ROWS},
    OURS("mlp.down_proj.weight"),
    {.tensor = "model.norm.weight", .param = "norm.weight"},
    {.tensor = "lm_head.weight", .param = "lm_head.weight"},
    {.tensor = "lm_head.weight", .param = "embed_tokens.weight", .tied = true},
    {.tensor = ATTN "rotary_emb.inv_freq"},
    {0},
};

#undef OURS
#undef ATTN
#undef MLP

static bool never(const void *self)
{
    return false;
}

static bool is_scaled(const void *self)
{
    return ((const struct iz_llama_config *)self)->rope_scaling_factor != 1;
}

/* Frequencies have had three places: newer files have all of them in
 * rope_parameters, and every reader knows the older place, which is written.
 * What a factor divides is said by the type alone: no type means none of those
 * that have one. */
static const struct iz_hf_key hf_keys[] = {
    {.name = "num_hidden_layers", .key = "layers"},
    {.name = "num_attention_heads", .key = "heads"},
    {"num_key_value_heads", "kv_heads", "0", .null_is_zero = true},
    {"head_dim", "head_dim", "0", .types = "llama|mistral|qwen2",
     .null_is_zero = true},
    {"head_dim", "head_dim", "128", .types = "qwen3"},
    {.name = "hidden_size", .key = "width"},
    {.name = "intermediate_size", .key = "ffn"},
    {.name = "vocab_size", .key = "vocab"},
    {.name = "max_position_embeddings", .key = "context"},
    {.name = "rms_norm_eps", .key = "norm_eps", .values = "1e-06"},
    {.name = "tie_word_embeddings", .key = "tie_embeddings", .values = "false"},
    {.name = "hidden_act", .values = "\"silu\""},
    {.name = "attention_bias", .values = "false", .types = "llama|qwen3"},
    {.name = "mlp_bias", .values = "false", .types = "llama"},
    {"sliding_window", "window", "4096", .types = "mistral",
     .null_is_zero = true},
    {.name = "use_sliding_window", .values = "false", .types = "qwen2|qwen3"},
    {.name = "rope_theta", .key = "rope_theta", .values = "10000.0"},
    {.name = "partial_rotary_factor", .values = "1.0|1", .write = never},
    {"rope_scaling.factor", "rope_scaling_factor", "1.0",
     .with = "rope_scaling.rope_type|rope_scaling.type",
     .with_value = "\"llama3\"", .write = is_scaled},
    {"rope_scaling.low_freq_factor", "rope_scaling_low_freq_factor", "1.0",
     .write = is_scaled},
    {"rope_scaling.high_freq_factor", "rope_scaling_high_freq_factor", "4.0",
     .write = is_scaled},
    {"rope_scaling.original_max_position_embeddings",
     "rope_scaling_original_seq", "0", .write = is_scaled},
    {.name = "rope_scaling.rope_type",
     .values = "\"llama3\"|\"default\"",
     .write = is_scaled},
    {.name = "rope_scaling.type",
     .values = "\"llama3\"|\"default\"",
     .write = never},
    {"rope_parameters.rope_theta", "rope_theta", .write = never},
    {"rope_parameters.factor", "rope_scaling_factor",
     .with = "rope_parameters.rope_type", .with_value = "\"llama3\"",
     .write = never},
    {"rope_parameters.low_freq_factor", "rope_scaling_low_freq_factor",
     .write = never},
    {"rope_parameters.high_freq_factor", "rope_scaling_high_freq_factor",
     .write = never},
    {"rope_parameters.original_max_position_embeddings",
     "rope_scaling_original_seq", .write = never},
    {.name = "rope_parameters.rope_type",
     .values = "\"llama3\"|\"default\"",
     .write = never},
    {0},
};

#define IMPLIES(family, bias, norm)                                            \
    "\"family\": \"" family "\", \"qkv_bias\": " bias ", \"qk_norm\": " norm

static const struct iz_hf_type hf_types[] = {
    {"llama", "LlamaForCausalLM", IMPLIES("llama", "false", "false")},
    {"mistral", "MistralForCausalLM", IMPLIES("mistral", "false", "false")},
    {"qwen2", "Qwen2ForCausalLM", IMPLIES("qwen2", "true", "false")},
    {"qwen3", "Qwen3ForCausalLM", IMPLIES("qwen3", "false", "true")},
    {0},
};

#undef IMPLIES

static const char *hf_type(const void *self)
{
    int family = ((const struct iz_llama_config *)self)->family;
    return family == IZ_LLAMA_AUTO ? NULL
                                   : hf_types[family - IZ_LLAMA_LLAMA].name;
}

const struct iz_hf iz_llama_hf = {.types = hf_types,
                                  .type = hf_type,
                                  .prefix = "model.",
                                  .names = hf_names,
                                  .keys = hf_keys};
