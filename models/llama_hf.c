/* SPDX-License-Identifier: Apache-2.0 */
/* What the tensors and the config.json of the Llama family, and of its mixtures
 * of experts, are called in published checkpoints. */
#include <stddef.h>

#include "models/moe.h"

static int64_t qkv_rows(const void *self, int i)
{
    const struct iz_llama_config *c = self;
    return (int64_t)(i == 0 ? c->heads : c->kv_heads) * c->head_dim;
}

/* Of an expert's two matrices. */
static int64_t gate_up_rows(const void *self)
{
    return 2 *
           (int64_t)((const struct iz_moe_config *)self)->moe_intermediate_size;
}

static int64_t down_rows(const void *self)
{
    return ((const struct iz_llama_config *)self)->width;
}

/* A parameter of a block that is a tensor, or the weights of several. */
#define OURS(name)                                                             \
    {                                                                          \
        .tensor = "model.layers.{}." name, .param = "layers.{}." name          \
    }
#define ATTN "model.layers.{}.self_attn."
#define MLP "model.layers.{}.mlp."
#define MIXTRAL "model.layers.{}.block_sparse_moe."
/* Experts of a type, below `at`; they are `in` a block's unit or in several. */
#define EXPERTS_IN(type, at, gate, up, down, in)                               \
    {.tensor = at "experts.[]." gate ".weight|" at "experts.[]." up ".weight", \
     .param = "layers.{}.mlp.experts." in "gate_up_proj.weight",               \
     .layout = IZ_HF_ROWS,                                                     \
     .each = gate_up_rows,                                                     \
     .types = type},                                                           \
    {                                                                          \
        .tensor = at "experts.[]." down ".weight",                             \
        .param = "layers.{}.mlp.experts." in "down_proj.weight",               \
        .layout = IZ_HF_ROWS, .each = down_rows, .types = type                 \
    }
/* The same and their router. */
#define EXPERTS(type, at, gate, up, down)                                      \
    {.tensor = at "gate.weight",                                               \
     .param = "layers.{}.mlp.gate.weight",                                     \
     .layout = IZ_HF_ROWS,                                                     \
     .types = type},                                                           \
        EXPERTS_IN(type, at, gate, up, down, ""),                              \
        EXPERTS_IN(type, at, gate, up, down, "{}.")

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
    EXPERTS("qwen3_moe", MLP, "gate_proj", "up_proj", "down_proj"),
    EXPERTS("mixtral", MIXTRAL, "w1", "w3", "w2"),
    {.tensor = "model.norm.weight", .param = "norm.weight"},
    {.tensor = "lm_head.weight", .param = "lm_head.weight"},
    {.tensor = "lm_head.weight", .param = "embed_tokens.weight", .tied = true},
    {.tensor = ATTN "rotary_emb.inv_freq"},
    {0},
};

#undef OURS
#undef ATTN
#undef MLP
#undef MIXTRAL
#undef EXPERTS_IN
#undef EXPERTS

#define DENSE "llama|mistral|qwen2|qwen3"

static bool never(const void *self)
{
    return false;
}

static bool is_scaled(const void *self)
{
    return ((const struct iz_llama_config *)self)->rope_scaling_factor != 1;
}

/* What stands in an object of frequencies for one type of them. */
#define LLAMA3(at)                                                             \
    .with = at ".rope_type|" at ".type", .with_value = "\"llama3\""

/* Frequencies have had three places: newer files have all of them in
 * rope_parameters, and every reader knows the older place, which is written.
 * What a factor divides is said by the type alone: no type means none of those
 * that have one. */
static const struct iz_hf_key hf_keys[] = {
    {.name = "num_hidden_layers", .key = "layers"},
    {.name = "num_attention_heads", .key = "heads"},
    {"num_key_value_heads", "kv_heads", "0", .null_is_zero = true},
    {"head_dim", "head_dim", "0",
     .types = "llama|mistral|qwen2|qwen3_moe|mixtral", .null_is_zero = true},
    {"head_dim", "head_dim", "128", .types = "qwen3"},
    {.name = "hidden_size", .key = "width"},
    {.name = "intermediate_size", .key = "ffn", .types = DENSE "|qwen3_moe"},
    {.name = "intermediate_size",
     .key = "moe_intermediate_size",
     .types = "mixtral"},
    {.name = "moe_intermediate_size",
     .key = "moe_intermediate_size",
     .types = "qwen3_moe"},
    {.name = "num_experts", .key = "num_experts", .types = "qwen3_moe"},
    {.name = "num_local_experts",
     .key = "num_experts",
     .types = "qwen3_moe",
     .write = never},
    {.name = "num_local_experts", .key = "num_experts", .types = "mixtral"},
    {.name = "num_experts_per_tok",
     .key = "num_experts_per_tok",
     .types = "qwen3_moe|mixtral"},
    {"norm_topk_prob", "norm_topk_prob", "false", .types = "qwen3_moe"},
    {"decoder_sparse_step", "decoder_sparse_step", "1", .types = "qwen3_moe"},
    {"mlp_only_layers", "mlp_only_layers", "[]", .types = "qwen3_moe",
     .null_is_zero = true},
    {"router_aux_loss_coef", "router_aux_loss_coef", "0.001",
     .types = "qwen3_moe|mixtral", .free = true},
    {.name = "output_router_logits",
     .values = "true",
     .types = "qwen3_moe|mixtral",
     .told = "transformers adds no router_aux_loss_coef to its loss then; here "
             "it acts, unless model.router_aux_loss_coef is 0"},
    {.name = "router_jitter_noise", .values = "0.0|0|null", .types = "mixtral"},
    {.name = "vocab_size", .key = "vocab"},
    {.name = "max_position_embeddings", .key = "context"},
    {"rms_norm_eps", "norm_eps", "1e-06", .types = DENSE "|qwen3_moe"},
    {"rms_norm_eps", "norm_eps", "1e-05", .types = "mixtral"},
    {.name = "tie_word_embeddings", .key = "tie_embeddings", .values = "false"},
    {.name = "hidden_act", .values = "\"silu\""},
    {.name = "attention_bias",
     .values = "false",
     .types = "llama|qwen3|qwen3_moe"},
    {.name = "mlp_bias", .values = "false", .types = "llama"},
    {"sliding_window", "window", "4096", .types = "mistral",
     .null_is_zero = true},
    {"sliding_window", "window", "0", .types = "mixtral", .null_is_zero = true},
    {.name = "sliding_window", .types = "qwen2|qwen3|qwen3_moe"},
    {.name = "layer_types",
     .values = "\"full_attention\"|null",
     .write = never},
    {.name = "use_sliding_window",
     .values = "false",
     .types = "qwen2|qwen3|qwen3_moe"},
    {"rope_theta", "rope_theta", "10000.0", .types = DENSE "|qwen3_moe"},
    {"rope_theta", "rope_theta", "1000000.0", .types = "mixtral"},
    {.name = "partial_rotary_factor", .values = "1.0|1", .write = never},
    {"original_max_position_embeddings", "rope_scaling_original_seq", "0",
     .write = never, .wins = true},
    {"rope_scaling.rope_theta", "rope_theta", .write = never},
    {.name = "rope_scaling.partial_rotary_factor",
     .values = "1.0|1",
     .write = never},
    {"rope_scaling.factor", "rope_scaling_factor", "1.0",
     LLAMA3("rope_scaling"), .write = is_scaled},
    {"rope_scaling.low_freq_factor", "rope_scaling_low_freq_factor", "1.0",
     LLAMA3("rope_scaling"), .write = is_scaled},
    {"rope_scaling.high_freq_factor", "rope_scaling_high_freq_factor", "4.0",
     LLAMA3("rope_scaling"), .write = is_scaled},
    {"rope_scaling.original_max_position_embeddings",
     "rope_scaling_original_seq", .write = is_scaled},
    {.name = "rope_scaling.rope_type",
     .values = "\"llama3\"|\"default\"",
     .write = is_scaled},
    {.name = "rope_scaling.type",
     .values = "\"llama3\"|\"default\"",
     .same = "rope_scaling.rope_type",
     .write = never},
    {.name = "rope_parameters", .same = "rope_scaling"},
    {.name = "rope_parameters.partial_rotary_factor",
     .values = "1.0|1",
     .write = never},
    {"rope_parameters.rope_theta", "rope_theta", .write = never},
    {"rope_parameters.factor", "rope_scaling_factor", LLAMA3("rope_parameters"),
     .write = never},
    {"rope_parameters.low_freq_factor", "rope_scaling_low_freq_factor",
     LLAMA3("rope_parameters"), .write = never},
    {"rope_parameters.high_freq_factor", "rope_scaling_high_freq_factor",
     LLAMA3("rope_parameters"), .write = never},
    {"rope_parameters.original_max_position_embeddings",
     "rope_scaling_original_seq", .write = never},
    {.name = "rope_parameters.rope_type",
     .values = "\"llama3\"|\"default\"",
     .write = never},
    {.name = "rope_parameters.type",
     .values = "\"llama3\"|\"default\"",
     .same = "rope_parameters.rope_type",
     .write = never},
    {0},
};

#undef LLAMA3

#define QKV(bias, norm) "\"qkv_bias\": " bias ", \"qk_norm\": " norm
#define IMPLIES(family, bias, norm)                                            \
    "\"family\": \"" family "\", " QKV(bias, norm)

static const struct iz_hf_type hf_types[] = {
    {"llama", "LlamaForCausalLM", IMPLIES("llama", "false", "false")},
    {"mistral", "MistralForCausalLM", IMPLIES("mistral", "false", "false")},
    {"qwen2", "Qwen2ForCausalLM", IMPLIES("qwen2", "true", "false")},
    {"qwen3", "Qwen3ForCausalLM", IMPLIES("qwen3", "false", "true")},
    {0},
};

static const struct iz_hf_type moe_types[] = {
    {"qwen3_moe", "Qwen3MoeForCausalLM", QKV("false", "true")},
    {"mixtral", "MixtralForCausalLM",
     QKV("false", "false") ", \"norm_topk_prob\": true"},
    {0},
};

#undef IMPLIES
#undef QKV

static const char *moe_type(const void *self)
{
    const struct iz_moe_config *c = self;
    bool everywhere = c->decoder_sparse_step == 1 && !c->mlp_only_layers[0];
    if (c->llama.qkv_bias)
        return NULL;
    if (c->llama.qk_norm)
        return c->llama.window ? NULL : "qwen3_moe";
    return everywhere && c->norm_topk_prob ? "mixtral" : NULL;
}

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

const struct iz_hf iz_moe_hf = {.types = moe_types,
                                .type = moe_type,
                                .prefix = "model.",
                                .names = hf_names,
                                .keys = hf_keys};
