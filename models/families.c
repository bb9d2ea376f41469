/* SPDX-License-Identifier: Apache-2.0 */
/* A row for each family; see families.h. */
#include "models/families.h"

#define LLAMA IZ_HAS_LLAMA
#define NO_GATE (IZ_HAS_BEFORE | IZ_HAS_ROPE)
#define LAYERNORM (IZ_HAS_MEAN | IZ_HAS_NORM_BIAS)
#define BIASES (IZ_HAS_QKV_BIAS | IZ_HAS_PROJ_BIAS | IZ_HAS_MLP_BIAS)
#define OLMO (IZ_HAS_BEHIND | IZ_HAS_GATE | IZ_HAS_ROPE)
#define WHOLE (IZ_HAS_QK_NORM | IZ_HAS_QK_WHOLE)
#define GEMMA (LLAMA | IZ_HAS_PLUS_ONE)
#define GLM (LLAMA | IZ_HAS_ROPE_PAIRS)
#define COHERE                                                                 \
    (LLAMA | IZ_HAS_MEAN | IZ_HAS_PARALLEL | IZ_HAS_ONE_NORM |                 \
     IZ_HAS_ROPE_PAIRS)

#define SAYS(family, bias, norm)                                               \
    "\"family\": \"" family "\", \"qkv_bias\": " bias ", \"qk_norm\": " norm
#define PLAIN(family) SAYS(family, "false", "false")
#define BIASED(family) SAYS(family, "true", "false")
#define NORMED(family) SAYS(family, "false", "true")
/* The file says whether there is a bias. */
#define ASKED(family) "\"family\": \"" family "\", \"qk_norm\": false"

#define FORM(...)                                                              \
    &(const struct iz_family)                                                  \
    {                                                                          \
        __VA_ARGS__                                                            \
    }

const struct iz_hf_type iz_family_types[] = {
    {"llama", "LlamaForCausalLM", PLAIN("llama"), FORM(LLAMA, .act = IZ_SILU)},
    {"mistral", "MistralForCausalLM", PLAIN("mistral"),
     FORM(LLAMA, .act = IZ_SILU)},
    {"qwen2", "Qwen2ForCausalLM", BIASED("qwen2"),
     FORM(LLAMA | IZ_HAS_QKV_BIAS, .act = IZ_SILU)},
    {"qwen3", "Qwen3ForCausalLM", NORMED("qwen3"),
     FORM(LLAMA | IZ_HAS_QK_NORM, .act = IZ_SILU)},
    {"phi3", "Phi3ForCausalLM", PLAIN("phi3"), FORM(LLAMA, .act = IZ_SILU)},
    {"ernie4_5", "Ernie4_5ForCausalLM", PLAIN("ernie4_5"),
     FORM(GLM, .act = IZ_SILU)},
    {"helium", "HeliumForCausalLM", PLAIN("helium"), FORM(GLM, .act = IZ_SILU)},
    {"granite", "GraniteForCausalLM", PLAIN("granite"),
     FORM(LLAMA, .act = IZ_SILU)},
    {"seed_oss", "SeedOssForCausalLM", ASKED("seed_oss"),
     FORM(LLAMA, .act = IZ_SILU, .may = IZ_HAS_QKV_BIAS)},
    {"ministral", "MinistralForCausalLM", PLAIN("ministral"),
     FORM(LLAMA, .act = IZ_SILU)},
    {"smollm3", "SmolLM3ForCausalLM", PLAIN("smollm3"),
     FORM(LLAMA, .act = IZ_SILU)},
    {"arcee", "ArceeForCausalLM", PLAIN("arcee"),
     FORM(NO_GATE, .act = IZ_RELU2)},
    {"olmo", "OlmoForCausalLM", PLAIN("olmo"),
     FORM(LLAMA | IZ_HAS_MEAN | IZ_HAS_BARE, .act = IZ_SILU)},
    {"olmo2", "Olmo2ForCausalLM", NORMED("olmo2"),
     FORM(OLMO | WHOLE, .act = IZ_SILU)},
    {"olmo3", "Olmo3ForCausalLM", NORMED("olmo3"),
     FORM(OLMO | WHOLE, .act = IZ_SILU, .every = 4)},
    {"gemma", "GemmaForCausalLM", PLAIN("gemma"),
     FORM(GEMMA, .act = IZ_GELU_TANH, .root = true)},
    {"gemma2", "Gemma2ForCausalLM", PLAIN("gemma2"),
     FORM(GEMMA | IZ_HAS_BEHIND, .act = IZ_GELU_TANH, .every = 2,
          .root = true)},
    {"gemma3_text", "Gemma3ForCausalLM", NORMED("gemma3_text"),
     FORM(GEMMA | IZ_HAS_BEHIND | IZ_HAS_QK_NORM, .act = IZ_GELU_TANH,
          .every = 6, .root = true, .local_rope = true)},
    {"glm", "GlmForCausalLM", ASKED("glm"),
     FORM(GLM, .act = IZ_SILU, .may = IZ_HAS_QKV_BIAS)},
    {"glm4", "Glm4ForCausalLM", ASKED("glm4"),
     FORM(GLM | IZ_HAS_BEHIND, .act = IZ_SILU, .may = IZ_HAS_QKV_BIAS)},
    {"cohere", "CohereForCausalLM", PLAIN("cohere"),
     FORM(COHERE, .act = IZ_SILU)},
    {"cohere2", "Cohere2ForCausalLM", PLAIN("cohere2"),
     FORM(COHERE | IZ_HAS_ROPE_IN_WINDOW, .act = IZ_SILU, .every = 4)},
    {"stablelm", "StableLmForCausalLM", ASKED("stablelm"),
     FORM(LLAMA | LAYERNORM, .act = IZ_SILU, .may = IZ_HAS_QKV_BIAS)},
    {"starcoder2", "Starcoder2ForCausalLM", BIASED("starcoder2"),
     FORM(NO_GATE | LAYERNORM | BIASES, .act = IZ_GELU_TANH)},
    {"nemotron", "NemotronForCausalLM", PLAIN("nemotron"),
     FORM(NO_GATE | LAYERNORM | IZ_HAS_PLUS_ONE, .act = IZ_RELU2)},
    {"exaone4", "Exaone4ForCausalLM", NORMED("exaone4"),
     FORM(OLMO | IZ_HAS_QK_NORM | IZ_HAS_ROPE_IN_WINDOW, .act = IZ_SILU,
          .every = 4)},
    {"hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM",
     NORMED("hunyuan_v1_dense"),
     FORM(LLAMA | IZ_HAS_QK_NORM | IZ_HAS_QK_LATE, .act = IZ_SILU)},
    {"jais2", "Jais2ForCausalLM", BIASED("jais2"),
     FORM(NO_GATE | LAYERNORM | BIASES, .act = IZ_RELU2)},
    {"cwm", "CwmForCausalLM", PLAIN("cwm"),
     FORM(LLAMA, .act = IZ_SILU, .every = 4)},
    {"internlm3", "LlamaForCausalLM", PLAIN("internlm3"),
     FORM(LLAMA, .act = IZ_SILU)},
    {"iquestcoder", "LlamaForCausalLM", PLAIN("iquestcoder"),
     FORM(LLAMA, .act = IZ_SILU)},
    {0},
};

const struct iz_family *iz_family_of(int family)
{
    static const struct iz_family any = {
        LLAMA, .may = IZ_HAS_QKV_BIAS | IZ_HAS_QK_NORM, .act = IZ_SILU};
    return family == IZ_FAMILY_AUTO
               ? &any
               : iz_family_types[family - IZ_FAMILY_LLAMA].own;
}
