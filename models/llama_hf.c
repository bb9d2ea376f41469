/* SPDX-License-Identifier: Apache-2.0 */
/* What the tensors and the config.json of the Llama family, and of its mixtures
 * of experts, are called in published checkpoints. */
#include <stddef.h>
#include <string.h>

#include "models/moe.h"

static int64_t qkv_rows(const void *self, int i)
{
    const struct iz_llama_config *c = self;
    return (int64_t)(i == 0 ? c->heads : c->kv_heads) * c->head_dim;
}

static int64_t head_rows(const void *self)
{
    return ((const struct iz_llama_config *)self)->head_dim;
}

static int64_t layers_of(const void *self)
{
    return ((const struct iz_llama_config *)self)->layers;
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
#define GEMMAS "gemma2|gemma3_text|vaultgemma"
#define ATTN "model.layers.{}.self_attn."
#define MLP "model.layers.{}.mlp."
#define GRANITE_MOE "granitemoe|granitemoeshared"
#define GLM_MOE "glm4_moe|dots1|solar_open"
#define ERNIE_MOE "ernie4_5_moe"
#define MINIMAX "minimax_m2"
#define OSS "gpt_oss"

static const struct iz_hf_name hf_names[] = {
    {.tensor = "model.embed_tokens.weight",
     .param = "embed_tokens.weight",
     .grows = true},
    OURS("input_layernorm.weight"),
    OURS("input_layernorm.bias"),
    {.tensor = ATTN "qkv_proj.weight",
     .param = "layers.{}.self_attn.qkv_proj.weight",
     .types = "phi3"},
    {.tensor = ATTN "qkv_proj.weight",
     .param = "layers.{}.self_attn.qkv_proj.weight",
     .layout = IZ_HF_BY_HEAD,
     .each = head_rows,
     .types = "gpt_neox"},
    {.tensor = ATTN "q_proj.weight|" ATTN "k_proj.weight|" ATTN "v_proj.weight",
     .param = "layers.{}.self_attn.qkv_proj.weight",
     .layout = IZ_HF_ROWS,
     .cut = qkv_rows,
     .types = "!phi3|gpt_neox"},
    {.tensor = ATTN "qkv_proj.bias",
     .param = "layers.{}.self_attn.qkv_proj.bias",
     .layout = IZ_HF_BY_HEAD,
     .each = head_rows,
     .types = "gpt_neox"},
    {.tensor = ATTN "q_proj.bias|" ATTN "k_proj.bias|" ATTN "v_proj.bias",
     .param = "layers.{}.self_attn.qkv_proj.bias",
     .cut = qkv_rows,
     .types = "!gpt_neox"},
    OURS("self_attn.o_proj.weight"),
    OURS("self_attn.o_proj.bias"),
    OURS("self_attn.q_norm.weight"),
    OURS("self_attn.k_norm.weight"),
    {.tensor = "model.layers.{}.post_attention_layernorm.weight",
     .param = "layers.{}.post_attention_layernorm.weight",
     .types = "!" GEMMAS},
    {.tensor = "model.layers.{}.pre_feedforward_layernorm.weight",
     .param = "layers.{}.post_attention_layernorm.weight",
     .types = GEMMAS},
    OURS("post_attention_layernorm.bias"),
    {.tensor = "model.layers.{}.post_attention_layernorm.weight",
     .param = "layers.{}.self_attn.norm.weight",
     .types = "!glm4|hyperclovax"},
    {.tensor = "model.layers.{}.post_norm1.weight",
     .param = "layers.{}.self_attn.norm.weight",
     .types = "hyperclovax"},
    {.tensor = "model.layers.{}.post_norm2.weight",
     .param = "layers.{}.mlp.norm.weight",
     .types = "hyperclovax"},
    {.tensor = "model.layers.{}.post_self_attn_layernorm.weight",
     .param = "layers.{}.self_attn.norm.weight",
     .types = "glm4"},
    {.tensor = "model.layers.{}.post_feedforward_layernorm.weight",
     .param = "layers.{}.mlp.norm.weight",
     .types = "!glm4|hyperclovax"},
    {.tensor = "model.layers.{}.post_mlp_layernorm.weight",
     .param = "layers.{}.mlp.norm.weight",
     .types = "glm4"},
    {.tensor = MLP "gate_up_proj.weight",
     .param = "layers.{}.mlp.gate_up_proj.weight",
     .types = "phi3|glm|glm4"},
    {.tensor = MLP "gate_proj.weight|" MLP "up_proj.weight",
     .param = "layers.{}.mlp.gate_up_proj.weight",
     .layout = IZ_HF_ROWS,
     .types = "!phi3|glm|glm4"},
    {.tensor = MLP "gate_proj.bias|" MLP "up_proj.bias",
     .param = "layers.{}.mlp.gate_up_proj.bias"},
    OURS("mlp.up_proj.weight"),
    OURS("mlp.up_proj.bias"),
    OURS("mlp.down_proj.weight"),
    OURS("mlp.down_proj.bias"),
#include "models/moe_names.h"
    {.tensor = "model.norm.weight", .param = "norm.weight"},
    {.tensor = "model.norm.bias", .param = "norm.bias"},
    {.tensor = "lm_head.weight", .param = "lm_head.weight", .grows = true},
    {.tensor = "lm_head.bias", .param = "lm_head.bias"},
    {.tensor = "lm_head.weight",
     .param = "embed_tokens.weight",
     .tied = true,
     .grows = true},
    {.tensor = ATTN "rotary_emb.inv_freq"},
    {.tensor = "gpt_neox.layers.{}.attention.rotary_emb.inv_freq"},
    {.tensor = "gpt_neox.layers.{}.attention.bias"},
    {.tensor = "gpt_neox.layers.{}.attention.masked_bias"},
    /* Predict more tokens. */
    {.tensor = "model.layers.{}.*", .types = "glm4_moe", .beyond = layers_of},
    /* Beside a text model. */
    {.tensor = "vision_tower.*"},
    {.tensor = "multi_modal_projector.*"},
    {0},
};

static const struct iz_hf_word hf_words[] = {
    {"hunyuan_v1_dense", "q_norm", "query_layernorm"},
    {"hunyuan_v1_dense", "k_norm", "key_layernorm"},
    {"starcoder2", "up_proj", "c_fc"},
    {"starcoder2", "down_proj", "c_proj"},
    {"phi", "o_proj", "dense"},
    {"phi", "up_proj", "fc1"},
    {"phi", "down_proj", "fc2"},
    {"phi", "model.norm", "model.final_layernorm"},
    {"gpt_neox", "self_attn.qkv_proj", "attention.query_key_value"},
    {"gpt_neox", "self_attn.o_proj", "attention.dense"},
    {"gpt_neox", "up_proj", "dense_h_to_4h"},
    {"gpt_neox", "down_proj", "dense_4h_to_h"},
    {"gpt_neox", "embed_tokens", "embed_in"},
    {"gpt_neox", "model.norm", "model.final_layer_norm"},
    {"gpt_neox", "model.", "gpt_neox."},
    {"gpt_neox", "lm_head", "embed_out"},
    {0},
};

#undef OURS
#undef ATTN
#undef MLP

#define LAYERNORMS "cohere|cohere2|stablelm|jais2|phi|gpt_neox"
/* Of which some blocks have a window. */
#define SORTED                                                                 \
    "vaultgemma|ministral|gemma2|gemma3_text|olmo3|cohere2|exaone4|cwm|" OSS
#define TIED                                                                   \
    "gemma|gemma2|gemma3_text|cohere|cohere2|starcoder2|ernie4_5|"             \
    "smollm3|" ERNIE_MOE
#define THETAS                                                                 \
    "mixtral|gemma3_text|cwm|ernie4_5|cohere|olmo3|helium|smollm3|gpt_neox|"   \
    "solar_open|" ERNIE_MOE "|" MINIMAX "|" OSS
#define BY_SORT "gemma3_text|olmo3"
#define PARTLY "glm|glm4|nemotron|stablelm|phi|gpt_neox|glm4_moe|" MINIMAX
/* Whose attention_bias is of queries, keys and values; of all four products. */
#define KEYED_BIAS "seed_oss|glm|glm4"
#define BIASED_WHOLE                                                           \
    "llama|qwen3|granite|arcee|olmo|olmo2|olmo3|gemma|gemma2|gemma3_text|"     \
    "vaultgemma|cohere|cohere2|nemotron|smollm3|hunyuan_v1_dense|"             \
    "hyperclovax|iquestcoder|internlm3"
#define GRANITE "granite|" GRANITE_MOE
/* intermediate_size is that of experts. */
#define ALL_EXPERTS "mixtral|olmoe|" GRANITE_MOE "|" MINIMAX "|" OSS
/* There are losses of routers. */
#define BALANCED                                                               \
    "qwen3_moe|mixtral|qwen2_moe|" GRANITE_MOE "|" ERNIE_MOE "|" OSS

static bool never(const void *self)
{
    return false;
}

static bool has_query_beta(const void *self)
{
    return ((const struct iz_llama_config *)self)->rope_scaling_query_beta != 0;
}

static bool is_scaled(const void *self)
{
    return ((const struct iz_llama_config *)self)->rope_scaling_factor != 1;
}

static bool is_of(const void *self, enum iz_rope_scaling kind)
{
    const struct iz_llama_config *c = self;
    return is_scaled(self) && c->rope_scaling_type == (int)kind;
}

static bool is_llama3(const void *self)
{
    return is_of(self, IZ_ROPE_LLAMA3);
}

static bool is_yarn(const void *self)
{
    return is_of(self, IZ_ROPE_YARN);
}

static bool has_original(const void *self)
{
    return is_scaled(self) && !is_of(self, IZ_ROPE_LINEAR);
}

static bool has_amplitude(const void *self)
{
    return is_yarn(self) && ((const struct iz_llama_config *)self)
                                    ->rope_scaling_attention_factor != 0;
}

/* What stands in an object of frequencies for one type of them. */
#define LLAMA3(at)                                                             \
    .with = at ".rope_type|" at ".type", .with_value = "\"llama3\""
#define SCALED(at)                                                             \
    .with = at ".rope_type|" at ".type",                                       \
    .with_value = "\"llama3\"|\"linear\"|\"yarn\""
/* An object that is read and not written; another name of what rope_scaling
 * says. */
#define OTHER(at, of)                                                          \
    {at ".factor", "rope_scaling_factor", SCALED(at), .types = of,             \
     .write = never},                                                          \
        {at ".low_freq_factor", "rope_scaling_low_freq_factor", LLAMA3(at),    \
         .types = of, .write = never},                                         \
        {at ".high_freq_factor", "rope_scaling_high_freq_factor", LLAMA3(at),  \
         .types = of, .write = never},                                         \
        {at ".original_max_position_embeddings", "rope_scaling_original_seq",  \
         .types = of, .write = never},                                         \
        {at ".beta_fast", "rope_scaling_beta_fast", .types = of,               \
         .write = never},                                                      \
        {at ".beta_slow", "rope_scaling_beta_slow", .types = of,               \
         .write = never},                                                      \
        {at ".truncate", "rope_scaling_truncate", .types = of,                 \
         .write = never},                                                      \
        {at ".attention_factor", "rope_scaling_attention_factor", .types = of, \
         .null_is_zero = true, .write = never},                                \
        {at ".rope_type", "rope_scaling_type", .types = of, .write = never},   \
    {                                                                          \
        at ".type", "rope_scaling_type", .types = of, .write = never           \
    }

/* Frequencies have had three places: newer files have all of them in
 * rope_parameters, and every reader knows the older place, which is written.
 * What a factor divides is said by the type alone: no type means none of those
 * that have one. */
static const struct iz_hf_key hf_keys[] = {
    {.name = "num_hidden_layers", .key = "layers"},
    {.name = "num_attention_heads", .key = "heads", .types = "!gemma3_text"},
    {"num_attention_heads", "heads", "8", .types = "gemma3_text"},
    {"num_key_value_heads", "kv_heads", "0", .types = "!gemma3_text|gpt_neox",
     .null_is_zero = true},
    {"num_key_value_heads", "kv_heads", "4", .types = "gemma3_text"},
    {"head_dim", "head_dim", "0",
     .types =
         "!qwen3|ernie4_5|helium|seed_oss|gemma|gemma2|gemma3_text|glm|"
         "glm4|iquestcoder|cwm|phi3|stablelm|vaultgemma|gpt_neox|ministral3|"
         "solar_open|" MINIMAX "|" OSS,
     .null_is_zero = true},
    {"head_dim", "head_dim", "128",
     .types = "qwen3|ernie4_5|helium|seed_oss|glm|glm4|iquestcoder|cwm|"
              "ministral3|solar_open|" MINIMAX},
    {"head_dim", "head_dim", "64", .types = OSS},
    {"head_dim", "head_dim", "256", .types = "gemma|" GEMMAS},
    {.name = "hidden_size", .key = "width"},
    {.name = "intermediate_size", .key = "ffn", .types = "!" ALL_EXPERTS},
#include "models/moe_members.h"
    {.name = "vocab_size",
     .key = "vocab",
     .types = "!gemma3_text",
     .grows = true},
    {"vocab_size", "vocab", "262208", .types = "gemma3_text"},
    {.name = "max_position_embeddings",
     .key = "context",
     .types = "!gemma3_text"},
    {"max_position_embeddings", "context", "131072", .types = "gemma3_text"},
    {"rms_norm_eps", "norm_eps", "1e-06",
     .types = "llama|mistral|qwen2|qwen3|qwen3_moe|granite|seed_oss|ministral|"
              "smollm3|gemma|gemma2|gemma3_text|vaultgemma|hyperclovax|"
              "qwen2_moe|dots1|" GRANITE_MOE "|" MINIMAX},
    {"rms_norm_eps", "norm_eps", "1e-05",
     .types =
         "mixtral|phi3|ernie4_5|arcee|olmo2|olmo3|exaone4|"
         "hunyuan_v1_dense|internlm3|iquestcoder|cwm|ministral3|olmoe|glm4_moe|"
         "solar_open|" ERNIE_MOE "|" OSS},
    {"rms_norm_eps", "norm_eps", "1e-08", .types = "helium"},
    {"rms_norm_eps", "norm_eps", "1.5625e-07", .types = "glm|glm4"},
    {"layer_norm_eps", "norm_eps", "1e-05", .types = LAYERNORMS},
    {"norm_epsilon", "norm_eps", "1e-05", .types = "starcoder2"},
    {"norm_eps", "norm_eps", "1e-05", .types = "nemotron"},
    {.name = "tie_word_embeddings",
     .key = "tie_embeddings",
     .values = "false",
     .types = "!" TIED},
    {"tie_word_embeddings", "tie_embeddings", "true", .types = TIED},
    {.name = "hidden_act",
     .values = "\"silu\"",
     .types = "!arcee|gemma|gemma2|gemma3_text|starcoder2|nemotron|jais2|"
              "vaultgemma|phi|gpt_neox"},
    {.name = "hidden_act",
     .values = "\"gelu_new\"|\"gelu_pytorch_tanh\"|\"gelu_fast\"",
     .types = "phi"},
    {.name = "hidden_act", .values = "\"gelu\"", .types = "gpt_neox"},
    {.name = "hidden_act",
     .values = "\"relu2\"",
     .types = "arcee|nemotron|jais2"},
    {.name = "hidden_act",
     .values = "\"gelu_pytorch_tanh\"",
     .types = "gemma|starcoder2"},
    {.name = "hidden_activation",
     .values = "\"gelu_pytorch_tanh\"",
     .types = GEMMAS},
    {"attention_bias", "qkv_bias", "true", .types = KEYED_BIAS},
    {"attention_bias", "qkv_bias", "false", .types = "glm4_moe"},
    {"qkv_bias", "qkv_bias", "true", .types = "qwen2_moe"},
    {"use_qkv_bias", "qkv_bias", "false", .types = "stablelm"},
    {"attention_bias", "qkv_bias", "true", .types = "jais2|gpt_neox"},
    {"attention_bias", "proj_bias", "true", .types = "jais2|gpt_neox",
     .write = never},
    {"attention_bias", "qkv_bias", "false", .types = BIASED_WHOLE "|helium"},
    {"attention_bias", "proj_bias", "false", .types = BIASED_WHOLE,
     .write = never},
    {.name = "attention_bias", .values = "true", .types = OSS},
    {.name = "attention_bias",
     .values = "false",
     .types = "qwen3_moe|olmoe|dots1|solar_open|" GRANITE_MOE},
    {"attention_out_bias", "proj_bias", "false", .types = "seed_oss"},
    {"mlp_bias", "mlp_bias", "true", .types = "jais2"},
    {"mlp_bias", "mlp_bias", "false",
     .types = "llama|arcee|granite|hyperclovax|helium|nemotron|seed_oss|"
              "smollm3|iquestcoder|internlm3|cwm"},
    {"use_bias", "qkv_bias", "false", .types = "ernie4_5"},
    {"use_bias", "qkv_bias", "true", .types = "starcoder2"},
    {"use_bias", "proj_bias", "false", .types = "ernie4_5", .write = never},
    {"use_bias", "proj_bias", "true", .types = "starcoder2", .write = never},
    {"use_bias", "mlp_bias", "false", .types = "ernie4_5", .write = never},
    {"use_bias", "mlp_bias", "true", .types = "starcoder2", .write = never},
    {.name = "use_bias", .values = "false", .types = ERNIE_MOE},
    {.name = "clip_qkv", .values = "null", .types = "olmo|olmoe"},
    {"use_qk_norm", "qk_norm", "false", .types = "glm4_moe"},
    {.name = "use_qk_norm", .values = "false", .types = "cohere"},
    {.name = "qk_layernorm", .values = "false", .types = "stablelm|phi"},
    {"use_parallel_residual", "parallel", "false", .types = "stablelm"},
    {"use_parallel_residual", "parallel", "true", .types = "gpt_neox"},
    {.name = "use_bidirectional_attention",
     .values = "null|false",
     .types = "gemma|" GEMMAS},
    {"query_pre_attn_scalar", "query_pre_attn_scalar", "256", .types = GEMMAS},
    {"attn_logit_softcapping", "attn_logit_softcapping", "50.0",
     .types = "gemma2|vaultgemma", .null_is_zero = true},
    {"final_logit_softcapping", "final_logit_softcapping", "30.0",
     .types = "gemma2|vaultgemma", .null_is_zero = true},
    {"final_logit_softcapping", "final_logit_softcapping", "0",
     .types = "gemma3_text", .null_is_zero = true},
    {.name = "attn_logit_softcapping",
     .values = "null",
     .types = "gemma3_text"},
    {"attention_multiplier", "attention_multiplier", "1.0", .types = GRANITE},
    {"attention_multiplier", "attention_multiplier", "0",
     .types = "hyperclovax", .null_is_zero = true},
    {.name = "use_post_norm", .values = "true", .types = "hyperclovax"},
    {"embedding_multiplier", "embedding_multiplier", "1.0",
     .types = "hyperclovax|" GRANITE},
    {"residual_multiplier", "residual_multiplier", "1.0",
     .types = "hyperclovax|" GRANITE},
    {"logits_scaling", "logits_scaling", "1.0", .types = GRANITE},
    {"logits_scaling", "logit_scale", "1.0", .types = "hyperclovax"},
    {"logit_scale", "logit_scale", "0.0625", .types = "cohere|cohere2"},
    {"sliding_window", "window", "4096",
     .types = "mistral|ministral|gemma2|gemma3_text|vaultgemma|olmo3|exaone4",
     .null_is_zero = true},
    {"sliding_window", "window", "4096", .types = "cohere2"},
    {"sliding_window", "window", "128", .types = OSS, .null_is_zero = true},
    {.name = "sliding_window", .values = "null", .types = "dots1"},
    {"sliding_window", "window", "8192", .types = "cwm", .null_is_zero = true},
    {"sliding_window", "window", "0",
     .types = "mixtral|phi3|starcoder2|ministral3", .null_is_zero = true},
    {.name = "sliding_window",
     .types = "qwen2|qwen3|qwen3_moe|qwen2_moe|smollm3"},
    {.name = "layer_types",
     .values = "\"full_attention\"|null",
     .types = "!" SORTED,
     .write = never},
    {"layer_types", "layer_types", .types = "cwm"},
    {"layer_types", "layer_types", "[]",
     .types =
         "ministral|gemma2|gemma3_text|vaultgemma|olmo3|cohere2|exaone4|" OSS,
     .null_is_zero = true},
    {.name = "sliding_window_pattern",
     .values = "6",
     .types = "gemma3_text",
     .write = never},
    {.name = "sliding_window_pattern",
     .values = "4",
     .types = "cohere2",
     .write = never},
    {.name = "_sliding_window_pattern", .types = "gemma3_text"},
    {"no_rope_layers", "no_rope_layers", "[]", .types = "smollm3"},
    {"no_rope_layer_interval", "no_rope_layer_interval", "4",
     .types = "smollm3"},
    {.name = "use_sliding_window",
     .values = "false",
     .types = "qwen2|qwen3|qwen3_moe|qwen2_moe|smollm3"},
    {"rope_theta", "rope_theta", "10000.0", .types = "!" THETAS},
    {"rope_theta", "rope_theta", "1000000.0",
     .types = "mixtral|gemma3_text|cwm|solar_open"},
    {"rope_theta", "rope_theta", "500000.0",
     .types = "ernie4_5|cohere|" ERNIE_MOE},
    {"rope_theta", "rope_theta", "150000.0", .types = OSS},
    {"rope_theta", "rope_theta", "5000000.0", .types = MINIMAX},
    /* transformers 5.24 gives another one of olmo3's to some blocks alone. */
    {.name = "rope_theta", .values = "500000.0|500000", .types = "olmo3"},
    {.name = "rope_parameters.full_attention.rope_theta",
     .values = "500000.0|500000",
     .types = "olmo3",
     .write = never},
    {.name = "rope_parameters.sliding_attention.rope_theta",
     .values = "500000.0|500000",
     .types = "olmo3",
     .write = never},
    {"rope_theta", "rope_theta", "100000.0", .types = "helium"},
    {"rope_theta", "rope_theta", "2000000.0", .types = "smollm3"},
    {"rope_local_base_freq", "rope_local_base_freq", "10000.0",
     .types = "gemma3_text"},
    {"rope_parameters.full_attention.rope_theta", "rope_theta",
     .types = "gemma3_text", .write = never},
    {"rope_parameters.sliding_attention.rope_theta", "rope_local_base_freq",
     .types = "gemma3_text", .write = never},
    {.name = "rope_parameters.sliding_attention.rope_type",
     .values = "\"default\"",
     .types = BY_SORT,
     .write = never},
    {"rotary_emb_base", "rope_theta", "10000.0", .types = "gpt_neox"},
    {"rotary_pct", "partial_rotary_factor", "0.25", .types = "gpt_neox"},
    {"partial_rotary_factor", "partial_rotary_factor", "0.5",
     .types = "glm|glm4|nemotron|phi|glm4_moe"},
    {"partial_rotary_factor", "partial_rotary_factor", "1.0", .types = MINIMAX},
    {"rotary_dim", "rotary_dim", "0", .types = MINIMAX, .null_is_zero = true,
     .write = never},
    {"partial_rotary_factor", "partial_rotary_factor", "0.25",
     .types = "stablelm"},
    {"rope_parameters.partial_rotary_factor", "partial_rotary_factor",
     .types = PARTLY, .write = never},
    {.name = "partial_rotary_factor",
     .values = "1.0|1",
     .types = "!" PARTLY,
     .write = never},
    {"original_max_position_embeddings", "rope_scaling_original_seq", "0",
     .write = never, .wins = true},
    {"rope_scaling.rope_theta", "rope_theta", .types = "!olmo3",
     .write = never},
    {.name = "rope_scaling.partial_rotary_factor",
     .values = "1.0|1",
     .write = never},
    {"rope_scaling.factor", "rope_scaling_factor", "1.0",
     SCALED("rope_scaling"), .write = is_scaled},
    {"rope_scaling.low_freq_factor", "rope_scaling_low_freq_factor", "1.0",
     LLAMA3("rope_scaling"), .write = is_llama3},
    {"rope_scaling.high_freq_factor", "rope_scaling_high_freq_factor", "4.0",
     LLAMA3("rope_scaling"), .write = is_llama3},
    {"rope_scaling.original_max_position_embeddings",
     "rope_scaling_original_seq", .write = has_original},
    {"rope_scaling.beta_fast", "rope_scaling_beta_fast", "", .write = is_yarn},
    {"rope_scaling.beta_slow", "rope_scaling_beta_slow", "", .write = is_yarn},
    {"rope_scaling.truncate", "rope_scaling_truncate", "", .write = is_yarn},
    {"rope_scaling.attention_factor", "rope_scaling_attention_factor", "",
     .null_is_zero = true, .write = has_amplitude},
    {"rope_scaling.rope_type", "rope_scaling_type", "", .write = is_scaled},
    {"rope_scaling.llama_4_scaling_beta", "rope_scaling_query_beta",
     .types = "ministral3", .write = has_query_beta},
    {"rope_parameters.llama_4_scaling_beta", "rope_scaling_query_beta",
     .types = "ministral3", .write = never},
    /* Equal ones of 1 make a factor of 1, too. */
    {"rope_parameters.mscale", "rope_scaling_attention_factor",
     .types = "ministral3", .write = never},
    {.name = "rope_parameters.mscale",
     .values = "1.0|1",
     .types = "ministral3",
     .write = never},
    {.name = "rope_parameters.mscale_all_dim",
     .values = "1.0|1",
     .types = "ministral3",
     .write = never},
    {.name = "rope_parameters.max_position_embeddings", .types = "ministral3"},
    {"rope_scaling.type", "rope_scaling_type", .write = never},
    {.name = "rope_parameters", .same = "rope_scaling"},
    {.name = "rope_parameters.partial_rotary_factor",
     .values = "1.0|1",
     .types = "!" PARTLY,
     .write = never},
    /* Of types that have it by sort of block, transformers reads no other. */
    {"rope_parameters.rope_theta", "rope_theta", .types = "!" BY_SORT,
     .write = never},
    OTHER("rope_parameters", "!" BY_SORT),
    OTHER("rope_parameters.full_attention", BY_SORT),
    {0},
};

#undef LLAMA3
#undef SCALED
#undef OTHER

static const char *hf_type(const void *self)
{
    int family = ((const struct iz_llama_config *)self)->family;
    const struct iz_hf_type *type = iz_family_type(family);
    return type ? type->name : NULL;
}

const struct iz_hf iz_llama_hf = {.types = iz_family_types,
                                  .type = hf_type,
                                  .prefix = "model.",
                                  .names = hf_names,
                                  .words = hf_words,
                                  .keys = hf_keys,
                                  .lacks = iz_family_lacks};

const struct iz_hf iz_moe_hf = {.types = iz_mixture_types,
                                .type = hf_type,
                                .prefix = "model.",
                                .names = hf_names,
                                .keys = hf_keys,
                                .lacks = iz_family_lacks};

bool iz_llama_knows(const char *type, const char *key)
{
    for (const struct iz_hf_key *k = hf_keys; k->name; k++)
        if (k->key && strcmp(k->key, key) == 0 &&
            iz_key_applies(type, k->types))
            return true;
    return false;
}
