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
/* The same, which some types call otherwise. */
#define NAMED(name, other, others)                                             \
    {.tensor = "model.layers.{}." name,                                        \
     .param = "layers.{}." name,                                               \
     .types = "!" others},                                                     \
    {                                                                          \
        .tensor = "model.layers.{}." other, .param = "layers.{}." name,        \
        .types = others                                                        \
    }
#define GEMMAS "gemma2|gemma3_text|vaultgemma"
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
    {.tensor = "model.embed_tokens.weight",
     .param = "embed_tokens.weight",
     .grows = true},
    OURS("input_layernorm.weight"),
    OURS("input_layernorm.bias"),
    {.tensor = ATTN "qkv_proj.weight",
     .param = "layers.{}.self_attn.qkv_proj.weight",
     .types = "phi3"},
    {.tensor = ATTN "q_proj.weight|" ATTN "k_proj.weight|" ATTN "v_proj.weight",
     .param = "layers.{}.self_attn.qkv_proj.weight",
     .layout = IZ_HF_ROWS,
     .cut = qkv_rows,
     .types = "!phi3"},
    {.tensor = ATTN "q_proj.bias|" ATTN "k_proj.bias|" ATTN "v_proj.bias",
     .param = "layers.{}.self_attn.qkv_proj.bias",
     .cut = qkv_rows},
    OURS("self_attn.o_proj.weight"),
    OURS("self_attn.o_proj.bias"),
    NAMED("self_attn.q_norm.weight", "self_attn.query_layernorm.weight",
          "hunyuan_v1_dense"),
    NAMED("self_attn.k_norm.weight", "self_attn.key_layernorm.weight",
          "hunyuan_v1_dense"),
    NAMED("post_attention_layernorm.weight", "pre_feedforward_layernorm.weight",
          GEMMAS),
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
    NAMED("mlp.up_proj.weight", "mlp.c_fc.weight", "starcoder2"),
    NAMED("mlp.up_proj.bias", "mlp.c_fc.bias", "starcoder2"),
    NAMED("mlp.down_proj.weight", "mlp.c_proj.weight", "starcoder2"),
    NAMED("mlp.down_proj.bias", "mlp.c_proj.bias", "starcoder2"),
    EXPERTS("qwen3_moe", MLP, "gate_proj", "up_proj", "down_proj"),
    EXPERTS("mixtral", MIXTRAL, "w1", "w3", "w2"),
    {.tensor = "model.norm.weight", .param = "norm.weight"},
    {.tensor = "model.norm.bias", .param = "norm.bias"},
    {.tensor = "lm_head.weight", .param = "lm_head.weight", .grows = true},
    {.tensor = "lm_head.weight",
     .param = "embed_tokens.weight",
     .tied = true,
     .grows = true},
    {.tensor = ATTN "rotary_emb.inv_freq"},
    /* Beside a text model. */
    {.tensor = "vision_tower.*"},
    {.tensor = "multi_modal_projector.*"},
    {0},
};

#undef OURS
#undef NAMED
#undef ATTN
#undef MLP
#undef MIXTRAL
#undef EXPERTS_IN
#undef EXPERTS

#define LAYERNORMS "cohere|cohere2|stablelm|jais2"
/* Of which some blocks have a window. */
#define SORTED                                                                 \
    "vaultgemma|ministral|gemma2|gemma3_text|olmo3|cohere2|exaone4|cwm"
#define TIED                                                                   \
    "gemma|gemma2|gemma3_text|cohere|cohere2|starcoder2|ernie4_5|smollm3"
#define THETAS "mixtral|gemma3_text|cwm|ernie4_5|cohere|olmo3|helium|smollm3"
#define BY_SORT "gemma3_text|olmo3"
#define PARTLY "glm|glm4|nemotron|stablelm"
#define KEYED_BIAS "seed_oss|glm|glm4"

static bool never(const void *self)
{
    return false;
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
    {"num_key_value_heads", "kv_heads", "0", .types = "!gemma3_text",
     .null_is_zero = true},
    {"num_key_value_heads", "kv_heads", "4", .types = "gemma3_text"},
    {"head_dim", "head_dim", "0",
     .types = "!qwen3|ernie4_5|helium|seed_oss|gemma|gemma2|gemma3_text|glm|"
              "glm4|iquestcoder|cwm|phi3|stablelm|vaultgemma",
     .null_is_zero = true},
    {"head_dim", "head_dim", "128",
     .types = "qwen3|ernie4_5|helium|seed_oss|glm|glm4|iquestcoder|cwm"},
    {"head_dim", "head_dim", "256", .types = "gemma|" GEMMAS},
    {.name = "hidden_size", .key = "width"},
    {.name = "intermediate_size", .key = "ffn", .types = "!mixtral"},
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
              "smollm3|gemma|gemma2|gemma3_text|vaultgemma|hyperclovax"},
    {"rms_norm_eps", "norm_eps", "1e-05",
     .types = "mixtral|phi3|ernie4_5|arcee|olmo2|olmo3|exaone4|"
              "hunyuan_v1_dense|internlm3|iquestcoder|cwm"},
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
              "vaultgemma"},
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
    {"use_qkv_bias", "qkv_bias", "false", .types = "stablelm"},
    {.name = "attention_bias", .values = "true", .types = "jais2"},
    {.name = "attention_bias",
     .values = "false",
     .types = "!mistral|qwen2|mixtral|phi3|ernie4_5|ministral|stablelm|"
              "starcoder2|exaone4|jais2|cwm|" KEYED_BIAS},
    {.name = "attention_out_bias", .values = "false", .types = "seed_oss"},
    {.name = "mlp_bias", .values = "true", .types = "jais2"},
    {.name = "mlp_bias",
     .values = "false",
     .types =
         "llama|arcee|granite|hyperclovax|helium|nemotron|seed_oss|smollm3|"
         "iquestcoder|cwm"},
    {.name = "use_bias", .values = "false", .types = "ernie4_5"},
    {.name = "use_bias", .values = "true", .types = "starcoder2"},
    {.name = "clip_qkv", .values = "null", .types = "olmo"},
    {.name = "use_qk_norm", .values = "false", .types = "cohere"},
    {.name = "qk_layernorm", .values = "false", .types = "stablelm"},
    {.name = "use_parallel_residual", .values = "false", .types = "stablelm"},
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
    {"attention_multiplier", "attention_multiplier", "1.0", .types = "granite"},
    {"attention_multiplier", "attention_multiplier", "0",
     .types = "hyperclovax", .null_is_zero = true},
    {.name = "use_post_norm", .values = "true", .types = "hyperclovax"},
    {"embedding_multiplier", "embedding_multiplier", "1.0",
     .types = "granite|hyperclovax"},
    {"residual_multiplier", "residual_multiplier", "1.0",
     .types = "granite|hyperclovax"},
    {"logits_scaling", "logits_scaling", "1.0", .types = "granite"},
    {"logits_scaling", "logit_scale", "1.0", .types = "hyperclovax"},
    {"logit_scale", "logit_scale", "0.0625", .types = "cohere|cohere2"},
    {"sliding_window", "window", "4096",
     .types = "mistral|ministral|gemma2|gemma3_text|vaultgemma|olmo3|exaone4",
     .null_is_zero = true},
    {"sliding_window", "window", "4096", .types = "cohere2"},
    {"sliding_window", "window", "8192", .types = "cwm", .null_is_zero = true},
    {"sliding_window", "window", "0", .types = "mixtral|phi3|starcoder2",
     .null_is_zero = true},
    {.name = "sliding_window", .types = "qwen2|qwen3|qwen3_moe|smollm3"},
    {.name = "layer_types",
     .values = "\"full_attention\"|null",
     .types = "!" SORTED,
     .write = never},
    {"layer_types", "layer_types", .types = "cwm"},
    {"layer_types", "layer_types", "[]",
     .types = "ministral|gemma2|gemma3_text|vaultgemma|olmo3|cohere2|exaone4",
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
     .types = "qwen2|qwen3|qwen3_moe|smollm3"},
    {"rope_theta", "rope_theta", "10000.0", .types = "!" THETAS},
    {"rope_theta", "rope_theta", "1000000.0",
     .types = "mixtral|gemma3_text|cwm"},
    {"rope_theta", "rope_theta", "500000.0", .types = "ernie4_5|cohere"},
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
    {"partial_rotary_factor", "partial_rotary_factor", "0.5",
     .types = "glm|glm4|nemotron"},
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
    {"rope_scaling.type", "rope_scaling_type", .write = never},
    {.name = "rope_parameters", .same = "rope_scaling"},
    {.name = "rope_parameters.partial_rotary_factor",
     .values = "1.0|1",
     .types = "!" PARTLY,
     .write = never},
    {"rope_parameters.rope_theta", "rope_theta", .types = "!olmo3",
     .write = never},
    OTHER("rope_parameters", NULL),
    OTHER("rope_parameters.full_attention", BY_SORT),
    {0},
};

#undef LLAMA3
#undef SCALED
#undef OTHER

#define QKV(bias, norm) "\"qkv_bias\": " bias ", \"qk_norm\": " norm

static const struct iz_hf_type moe_types[] = {
    {"qwen3_moe", "Qwen3MoeForCausalLM", QKV("false", "true"), NULL},
    {"mixtral", "MixtralForCausalLM",
     QKV("false", "false") ", \"norm_topk_prob\": true", NULL},
    {0},
};

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
    return family == IZ_FAMILY_AUTO
               ? NULL
               : iz_family_types[family - IZ_FAMILY_LLAMA].name;
}

const struct iz_hf iz_llama_hf = {.types = iz_family_types,
                                  .type = hf_type,
                                  .prefix = "model.",
                                  .names = hf_names,
                                  .keys = hf_keys,
                                  .lacks = iz_family_lacks};

const struct iz_hf iz_moe_hf = {.types = moe_types,
                                .type = moe_type,
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
