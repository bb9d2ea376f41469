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

/* A tensor of a block, and the parameter of ours that it is. */
#define AT(tensor_, ...)                                                       \
    {                                                                          \
        .tensor = "model.layers.{}." tensor_,                                  \
        .param = "layers.{}." __VA_ARGS__                                      \
    }
#define OURS(name) AT(name, name)
#define BLOCK "layers.{}."
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
    AT("self_attn.qkv_proj.weight", "self_attn.qkv_proj.weight", "phi3"),
    AT("self_attn.qkv_proj.weight", "self_attn.qkv_proj.weight", "gpt_neox",
       IZ_HF_BY_HEAD, .each = head_rows),
    {.tensor = ATTN "q_proj.weight|" ATTN "k_proj.weight|" ATTN "v_proj.weight",
     .param = BLOCK "self_attn.qkv_proj.weight",
     .types = "!phi3|gpt_neox",
     .layout = IZ_HF_ROWS,
     .cut = qkv_rows},
    AT("self_attn.qkv_proj.bias", "self_attn.qkv_proj.bias", "gpt_neox",
       IZ_HF_BY_HEAD, .each = head_rows),
    {.tensor = ATTN "q_proj.bias|" ATTN "k_proj.bias|" ATTN "v_proj.bias",
     .param = BLOCK "self_attn.qkv_proj.bias",
     .types = "!gpt_neox",
     .cut = qkv_rows},
    OURS("self_attn.o_proj.weight"),
    OURS("self_attn.o_proj.bias"),
    OURS("self_attn.q_norm.weight"),
    OURS("self_attn.k_norm.weight"),
    AT("post_attention_layernorm.weight", "post_attention_layernorm.weight",
       "!" GEMMAS),
    AT("pre_feedforward_layernorm.weight", "post_attention_layernorm.weight",
       GEMMAS),
    OURS("post_attention_layernorm.bias"),
    AT("post_attention_layernorm.weight", "self_attn.norm.weight",
       "!glm4|hyperclovax"),
    AT("post_norm1.weight", "self_attn.norm.weight", "hyperclovax"),
    AT("post_norm2.weight", "mlp.norm.weight", "hyperclovax"),
    AT("post_self_attn_layernorm.weight", "self_attn.norm.weight", "glm4"),
    AT("post_feedforward_layernorm.weight", "mlp.norm.weight",
       "!glm4|hyperclovax"),
    AT("post_mlp_layernorm.weight", "mlp.norm.weight", "glm4"),
    AT("mlp.gate_up_proj.weight", "mlp.gate_up_proj.weight", "phi3|glm|glm4"),
    {.tensor = MLP "gate_proj.weight|" MLP "up_proj.weight",
     .param = BLOCK "mlp.gate_up_proj.weight",
     .types = "!phi3|glm|glm4",
     .layout = IZ_HF_ROWS},
    {.tensor = MLP "gate_proj.bias|" MLP "up_proj.bias",
     .param = BLOCK "mlp.gate_up_proj.bias"},
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
#undef AT
#undef BLOCK
#undef ATTN
#undef MLP

#define LAYERNORMS "cohere|cohere2|stablelm|jais2|phi|gpt_neox"
/* Of which some blocks have a window. */
#define SORTED                                                                 \
    "vaultgemma|ministral|gemma2|gemma3_text|olmo3|cohere2|exaone4|cwm|" OSS
#define TIED                                                                   \
    "gemma|gemma2|gemma3_text|vaultgemma|cohere|cohere2|starcoder2|ernie4_5|"  \
    "smollm3|" ERNIE_MOE
#define THETAS                                                                 \
    "mixtral|gemma3_text|cwm|ernie4_5|cohere|olmo3|helium|smollm3|gpt_neox|"   \
    "solar_open|" ERNIE_MOE "|" MINIMAX "|" OSS
#define BY_SORT "gemma3_text|olmo3"
/* iz_family.scaled: they must say how. */
#define SAID "cwm|ministral3|" OSS
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

/* What transformers would scale by itself says all, also with a factor of 1. */
static bool is_scaled(const void *self)
{
    const struct iz_llama_config *c = self;
    return c->rope_scaling_factor != 1 ||
           (iz_family_of(c->family)->scaled &&
            c->rope_scaling_type != IZ_ROPE_DEFAULT);
}

static bool is_plain(const void *self)
{
    return !is_scaled(self);
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

static double amplitude_of(const void *self)
{
    const struct iz_llama_config *c = self;
    return is_yarn(self) ? c->rope_scaling_attention_factor : 0;
}

static bool has_amplitude(const void *self)
{
    return amplitude_of(self) != 0;
}

static bool has_amplitude_1(const void *self)
{
    return amplitude_of(self) == 1;
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

/* A key that is called alike. */
#define OWN(name_, ...)                                                        \
    {                                                                          \
        .name = name_, .key = name_, __VA_ARGS__                               \
    }
/* Always one of some values. */
#define ONLY(name_, ...)                                                       \
    {                                                                          \
        .name = name_, .key = NULL, __VA_ARGS__                                \
    }

/* Equal ones of 1 make a factor of 1, too; llama.cpp asks for the second. */
#define MSCALE(at, writes)                                                     \
    {at ".mscale",                                                             \
     "rope_scaling_attention_factor",                                          \
     .with = at ".mscale_all_dim",                                             \
     .with_value = "1.0|1",                                                    \
     .types = "ministral3",                                                    \
     .write = writes},                                                         \
        ONLY(at ".mscale", "1.0|1", "ministral3", .write = never),             \
        ONLY(at ".mscale_all_dim", "1.0|1", "ministral3", .write = writes)

/* Frequencies have had three places: newer files have all of them in
 * rope_parameters, and every reader knows the older place, which is written.
 * What a factor divides is said by the type alone: no type means none of those
 * that have one. */
static const struct iz_hf_key hf_keys[] = {
    {.name = "num_hidden_layers", .key = "layers"},
    {"num_attention_heads", "heads", .types = "!gemma3_text"},
    {"num_attention_heads", "heads", "8", .types = "gemma3_text"},
    {"num_key_value_heads", "kv_heads", "0", .types = "!gemma3_text|gpt_neox",
     .null_is_zero = true},
    {"num_key_value_heads", "kv_heads", "4", .types = "gemma3_text"},
    OWN("head_dim", "0",
        "!qwen3|ernie4_5|helium|seed_oss|gemma|gemma2|gemma3_text|glm|glm4|"
        "iquestcoder|cwm|phi3|stablelm|vaultgemma|gpt_neox|ministral3|"
        "solar_open|" MINIMAX "|" OSS,
        .null_is_zero = true),
    OWN("head_dim", "128",
        "qwen3|ernie4_5|helium|seed_oss|glm|glm4|iquestcoder|cwm|ministral3|"
        "solar_open|" MINIMAX),
    OWN("head_dim", "64", OSS),
    OWN("head_dim", "256", "gemma|" GEMMAS),
    {.name = "hidden_size", .key = "width"},
    {"intermediate_size", "ffn", .types = "!" ALL_EXPERTS},
#include "models/moe_members.h"
    {"vocab_size", "vocab", .types = "!gemma3_text", .grows = true},
    {"vocab_size", "vocab", "262208", .types = "gemma3_text"},
    {"max_position_embeddings", "context", .types = "!gemma3_text"},
    {"max_position_embeddings", "context", "131072", .types = "gemma3_text"},
    {"rms_norm_eps", "norm_eps", "1e-06",
     .types = "llama|mistral|qwen2|qwen3|qwen3_moe|granite|seed_oss|ministral|"
              "smollm3|gemma|gemma2|gemma3_text|vaultgemma|hyperclovax|"
              "qwen2_moe|dots1|" GRANITE_MOE "|" MINIMAX},
    {"rms_norm_eps", "norm_eps", "1e-05",
     .types = "mixtral|phi3|ernie4_5|arcee|olmo2|olmo3|exaone4|"
              "hunyuan_v1_dense|internlm3|iquestcoder|cwm|ministral3|olmoe|"
              "glm4_moe|solar_open|" ERNIE_MOE "|" OSS},
    {"rms_norm_eps", "norm_eps", "1e-08", .types = "helium"},
    {"rms_norm_eps", "norm_eps", "1.5625e-07", .types = "glm|glm4"},
    {"layer_norm_eps", "norm_eps", "1e-05", .types = LAYERNORMS},
    {"norm_epsilon", "norm_eps", "1e-05", .types = "starcoder2"},
    OWN("norm_eps", "1e-05", "nemotron"),
    {"tie_word_embeddings", "tie_embeddings", "false", .types = "!" TIED},
    {"tie_word_embeddings", "tie_embeddings", "true", .types = TIED},
    ONLY("hidden_act", "\"silu\"",
         "!arcee|gemma|gemma2|gemma3_text|starcoder2|nemotron|jais2|vaultgemma|"
         "phi|gpt_neox"),
    ONLY("hidden_act", "\"gelu_new\"|\"gelu_pytorch_tanh\"|\"gelu_fast\"",
         "phi"),
    ONLY("hidden_act", "\"gelu\"", "gpt_neox"),
    ONLY("hidden_act", "\"relu2\"", "arcee|nemotron|jais2"),
    ONLY("hidden_act", "\"gelu_pytorch_tanh\"", "gemma|starcoder2"),
    ONLY("hidden_activation", "\"gelu_pytorch_tanh\"", GEMMAS),
    {"attention_bias", "qkv_bias", "true", .types = KEYED_BIAS},
    {"attention_bias", "qkv_bias", "false", .types = "glm4_moe"},
    OWN("qkv_bias", "true", "qwen2_moe"),
    {"use_qkv_bias", "qkv_bias", "false", .types = "stablelm"},
    {"attention_bias", "qkv_bias", "true", .types = "jais2|gpt_neox"},
    {"attention_bias", "proj_bias", "true", .types = "jais2|gpt_neox",
     .write = never},
    {"attention_bias", "qkv_bias", "false", .types = BIASED_WHOLE "|helium"},
    {"attention_bias", "proj_bias", "false", .types = BIASED_WHOLE,
     .write = never},
    ONLY("attention_bias", "true", OSS),
    ONLY("attention_bias", "false",
         "qwen3_moe|olmoe|dots1|solar_open|" GRANITE_MOE),
    {"attention_out_bias", "proj_bias", "false", .types = "seed_oss"},
    OWN("mlp_bias", "true", "jais2"),
    OWN("mlp_bias", "false",
        "llama|arcee|granite|hyperclovax|helium|nemotron|seed_oss|smollm3|"
        "iquestcoder|internlm3|cwm"),
    {"use_bias", "qkv_bias", "false", .types = "ernie4_5"},
    {"use_bias", "qkv_bias", "true", .types = "starcoder2"},
    {"use_bias", "proj_bias", "false", .types = "ernie4_5", .write = never},
    {"use_bias", "proj_bias", "true", .types = "starcoder2", .write = never},
    {"use_bias", "mlp_bias", "false", .types = "ernie4_5", .write = never},
    {"use_bias", "mlp_bias", "true", .types = "starcoder2", .write = never},
    ONLY("use_bias", "false", ERNIE_MOE),
    ONLY("clip_qkv", "null", "olmo|olmoe"),
    {"use_qk_norm", "qk_norm", "false", .types = "glm4_moe"},
    ONLY("use_qk_norm", "false", "cohere"),
    ONLY("qk_layernorm", "false", "stablelm|phi"),
    {"use_parallel_residual", "parallel", "false", .types = "stablelm"},
    {"use_parallel_residual", "parallel", "true", .types = "gpt_neox"},
    ONLY("use_bidirectional_attention", "null|false", "gemma|" GEMMAS),
    OWN("query_pre_attn_scalar", "256", GEMMAS),
    OWN("attn_logit_softcapping", "50.0", "gemma2|vaultgemma",
        .null_is_zero = true),
    OWN("final_logit_softcapping", "30.0", "gemma2|vaultgemma",
        .null_is_zero = true),
    OWN("final_logit_softcapping", "0", "gemma3_text", .null_is_zero = true),
    ONLY("attn_logit_softcapping", "null", "gemma3_text"),
    OWN("attention_multiplier", "1.0", GRANITE, .null_is_zero = true),
    OWN("attention_multiplier", "0", "hyperclovax", .null_is_zero = true),
    ONLY("use_post_norm", "true", "hyperclovax"),
    OWN("embedding_multiplier", "1.0", "hyperclovax|" GRANITE),
    OWN("residual_multiplier", "1.0", "hyperclovax|" GRANITE),
    OWN("logits_scaling", "1.0", GRANITE),
    {"logits_scaling", "logit_scale", "1.0", .types = "hyperclovax"},
    OWN("logit_scale", "0.0625", "cohere|cohere2"),
    {"sliding_window", "window", "4096",
     .types = "mistral|ministral|gemma2|gemma3_text|vaultgemma|olmo3|exaone4",
     .null_is_zero = true},
    {"sliding_window", "window", "4096", .types = "cohere2"},
    {"sliding_window", "window", "128", .types = OSS, .null_is_zero = true},
    ONLY("sliding_window", "null", "dots1"),
    {"sliding_window", "window", "8192", .types = "cwm", .null_is_zero = true},
    {"sliding_window", "window", "0",
     .types = "mixtral|phi3|starcoder2|ministral3", .null_is_zero = true},
    ONLY("sliding_window", NULL, "qwen2|qwen3|qwen3_moe|qwen2_moe|smollm3"),
    ONLY("layer_types", "\"full_attention\"|null", "!" SORTED, .write = never),
    OWN("layer_types", NULL, "cwm"),
    OWN("layer_types", "[]",
        "ministral|gemma2|gemma3_text|vaultgemma|olmo3|cohere2|exaone4|" OSS,
        .null_is_zero = true),
    ONLY("sliding_window_pattern", "6", "gemma3_text", .write = never),
    ONLY("sliding_window_pattern", "4", "cohere2", .write = never),
    ONLY("sliding_window_pattern", "4|\"LLLG\"|0|null", "exaone4",
         .write = never),
    ONLY("_sliding_window_pattern", NULL, "gemma3_text"),
    OWN("no_rope_layers", "[]", "smollm3", .null_is_zero = true),
    OWN("no_rope_layer_interval", "4", "smollm3"),
    ONLY("use_sliding_window", "false",
         "qwen2|qwen3|qwen3_moe|qwen2_moe|smollm3"),
    OWN("rope_theta", "10000.0", "!" THETAS),
    OWN("rope_theta", "1000000.0", "mixtral|gemma3_text|cwm|solar_open"),
    OWN("rope_theta", "500000.0", "ernie4_5|cohere|" ERNIE_MOE),
    OWN("rope_theta", "150000.0", OSS),
    OWN("rope_theta", "5000000.0", MINIMAX),
    /* transformers 5.24 gives another one of olmo3's to some blocks alone. */
    ONLY("rope_theta", "500000.0|500000", "olmo3"),
    ONLY("rope_parameters.full_attention.rope_theta", "500000.0|500000",
         "olmo3", .write = never),
    ONLY("rope_parameters.sliding_attention.rope_theta", "500000.0|500000",
         "olmo3", .write = never),
    OWN("rope_theta", "100000.0", "helium"),
    OWN("rope_theta", "2000000.0", "smollm3"),
    OWN("rope_local_base_freq", "10000.0", "gemma3_text"),
    {"rope_parameters.full_attention.rope_theta", "rope_theta",
     .types = "gemma3_text", .write = never},
    {"rope_parameters.sliding_attention.rope_theta", "rope_local_base_freq",
     .types = "gemma3_text", .write = never},
    ONLY("rope_parameters.sliding_attention.rope_type", "\"default\"", BY_SORT,
         .write = never),
    {"rotary_emb_base", "rope_theta", "10000.0", .types = "gpt_neox"},
    {"rotary_pct", "partial_rotary_factor", "0.25", .types = "gpt_neox"},
    OWN("partial_rotary_factor", "0.5", "glm|glm4|nemotron|phi|glm4_moe"),
    OWN("partial_rotary_factor", "1.0", MINIMAX),
    OWN("rotary_dim", "0", MINIMAX, .null_is_zero = true),
    OWN("partial_rotary_factor", "0.25", "stablelm"),
    {"rope_parameters.partial_rotary_factor", "partial_rotary_factor",
     .types = PARTLY, .write = never},
    ONLY("partial_rotary_factor", "1.0|1", "!" PARTLY, .write = never),
    {"original_max_position_embeddings", "rope_scaling_original_seq", "0",
     .types = "!phi3", .write = never, .wins = true},
    /* Without it transformers says 4096. */
    {"original_max_position_embeddings", "rope_scaling_original_seq", "0",
     .types = "phi3", .wins = true},
    {"rope_scaling.rope_theta", "rope_theta", .types = "!olmo3",
     .write = never},
    ONLY("rope_scaling.partial_rotary_factor", "1.0|1", .write = never),
    {"rope_scaling.factor", "rope_scaling_factor", "1.0",
     SCALED("rope_scaling"), .write = is_scaled},
    {"rope_scaling.low_freq_factor", "rope_scaling_low_freq_factor", "1.0",
     LLAMA3("rope_scaling"), .write = is_llama3},
    {"rope_scaling.high_freq_factor", "rope_scaling_high_freq_factor", "4.0",
     LLAMA3("rope_scaling"), .write = is_llama3},
    {"rope_scaling.original_max_position_embeddings",
     "rope_scaling_original_seq", .types = "!ministral3",
     .write = has_original},
    {"rope_scaling.original_max_position_embeddings",
     "rope_scaling_original_seq", .types = "ministral3"},
    {"rope_scaling.beta_fast", "rope_scaling_beta_fast", "", .write = is_yarn},
    {"rope_scaling.beta_slow", "rope_scaling_beta_slow", "", .write = is_yarn},
    {"rope_scaling.truncate", "rope_scaling_truncate", "", .write = is_yarn},
    {"rope_scaling.attention_factor", "rope_scaling_attention_factor", "",
     .null_is_zero = true, .write = has_amplitude},
    {"rope_scaling.rope_type", "rope_scaling_type", "", .types = "!" SAID,
     .write = is_scaled},
    {"rope_scaling.rope_type", "rope_scaling_type", .types = SAID,
     .write = is_scaled},
    ONLY("rope_scaling.rope_type", "\"default\"|\"llama3\"|\"linear\"|\"yarn\"",
         SAID, .write = is_plain),
    {"rope_scaling.llama_4_scaling_beta", "rope_scaling_query_beta",
     .types = "ministral3"},
    MSCALE("rope_scaling", has_amplitude_1),
    {"rope_parameters.llama_4_scaling_beta", "rope_scaling_query_beta",
     .types = "ministral3", .write = never},
    MSCALE("rope_parameters", never),
    ONLY("rope_parameters.max_position_embeddings", NULL, "ministral3"),
    {"rope_scaling.type", "rope_scaling_type", .write = never},
    ONLY("rope_parameters", .same = "rope_scaling"),
    ONLY("rope_parameters.partial_rotary_factor", "1.0|1", "!" PARTLY,
         .write = never),
    /* Of types that have it by sort of block, transformers reads no other. */
    {"rope_parameters.rope_theta", "rope_theta", .types = "!" BY_SORT,
     .write = never},
    OTHER("rope_parameters", "!" BY_SORT),
    OTHER("rope_parameters.full_attention", BY_SORT),
    {0},
};

#undef LLAMA3
#undef SCALED
#undef MSCALE
#undef OTHER
#undef OWN
#undef ONLY

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
