/* SPDX-License-Identifier: Apache-2.0 */
/* A row for each family; see families.h. */
#include "models/families.h"

#include <string.h>

#define LLAMA IZ_HAS_LLAMA
#define NO_GATE (IZ_HAS_BEFORE | IZ_HAS_ROPE)
#define LAYERNORM (IZ_HAS_MEAN | IZ_HAS_NORM_BIAS)
#define BIASES (IZ_HAS_QKV_BIAS | IZ_HAS_PROJ_BIAS | IZ_HAS_MLP_BIAS)
#define ATTENTION_BIASES (IZ_HAS_QKV_BIAS | IZ_HAS_PROJ_BIAS)
#define OLMO (IZ_HAS_BEHIND | IZ_HAS_GATE | IZ_HAS_ROPE)
#define WHOLE (IZ_HAS_QK_NORM | IZ_HAS_QK_WHOLE)
#define GEMMA (LLAMA | IZ_HAS_PLUS_ONE)
#define GLM (LLAMA | IZ_HAS_ROPE_PAIRS)
#define SIGMOID (IZ_HAS_SIGMOID | IZ_HAS_CHOICE)
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
#define NORMED_ASKED(family) "\"family\": \"" family "\", \"qk_norm\": true"

/* Weights of the chosen experts add up to 1: their softmax. */
#define SUM_1(says) says ", \"norm_topk_prob\": true"
#define NO_LOSS(says) says ", \"router_aux_loss_coef\": 0"

#define FORM(...)                                                              \
    &(const struct iz_family)                                                  \
    {                                                                          \
        __VA_ARGS__                                                            \
    }

const struct iz_hf_type iz_family_types[] = {
    {"llama", "LlamaForCausalLM", ASKED("llama"),
     FORM(LLAMA, .act = IZ_SILU, .may = BIASES)},
    {"mistral", "MistralForCausalLM", PLAIN("mistral"),
     FORM(LLAMA, .act = IZ_SILU)},
    {"qwen2", "Qwen2ForCausalLM", BIASED("qwen2"),
     FORM(LLAMA | IZ_HAS_QKV_BIAS, .act = IZ_SILU)},
    {"qwen3", "Qwen3ForCausalLM", NORMED_ASKED("qwen3"),
     FORM(LLAMA | IZ_HAS_QK_NORM, .act = IZ_SILU, .may = ATTENTION_BIASES)},
    {"phi3", "Phi3ForCausalLM", PLAIN("phi3"), FORM(LLAMA, .act = IZ_SILU)},
    {"ernie4_5", "Ernie4_5ForCausalLM", ASKED("ernie4_5"),
     FORM(GLM, .act = IZ_SILU, .may = BIASES)},
    {"helium", "HeliumForCausalLM", ASKED("helium"),
     FORM(GLM, .act = IZ_SILU, .may = IZ_HAS_QKV_BIAS | IZ_HAS_MLP_BIAS)},
    {"granite", "GraniteForCausalLM", ASKED("granite"),
     FORM(LLAMA, .act = IZ_SILU, .may = BIASES)},
    {"seed_oss", "SeedOssForCausalLM", ASKED("seed_oss"),
     FORM(LLAMA, .act = IZ_SILU, .may = BIASES)},
    {"ministral", "MinistralForCausalLM", PLAIN("ministral"),
     FORM(LLAMA, .act = IZ_SILU)},
    {"smollm3", "SmolLM3ForCausalLM", ASKED("smollm3"),
     FORM(LLAMA, .act = IZ_SILU, .may = BIASES)},
    {"arcee", "ArceeForCausalLM", ASKED("arcee"),
     FORM(NO_GATE, .act = IZ_RELU2, .may = BIASES)},
    {"olmo", "OlmoForCausalLM", ASKED("olmo"),
     FORM(LLAMA | IZ_HAS_MEAN | IZ_HAS_BARE, .act = IZ_SILU,
          .may = ATTENTION_BIASES)},
    {"olmo2", "Olmo2ForCausalLM", NORMED_ASKED("olmo2"),
     FORM(OLMO | WHOLE, .act = IZ_SILU, .may = ATTENTION_BIASES)},
    {"olmo3", "Olmo3ForCausalLM", NORMED_ASKED("olmo3"),
     FORM(OLMO | WHOLE, .act = IZ_SILU, .every = 4, .local_rope = true,
          .may = ATTENTION_BIASES)},
    {"gemma", "GemmaForCausalLM", ASKED("gemma"),
     FORM(GEMMA, .act = IZ_GELU_TANH, .root = true, .may = ATTENTION_BIASES)},
    {"gemma2", "Gemma2ForCausalLM", ASKED("gemma2"),
     FORM(GEMMA | IZ_HAS_BEHIND, .act = IZ_GELU_TANH, .every = 2, .root = true,
          .may = ATTENTION_BIASES)},
    {"gemma3_text", "Gemma3ForCausalLM", NORMED_ASKED("gemma3_text"),
     FORM(GEMMA | IZ_HAS_BEHIND | IZ_HAS_QK_NORM, .act = IZ_GELU_TANH,
          .every = 6, .root = true, .local_rope = true,
          .may = ATTENTION_BIASES)},
    {"glm", "GlmForCausalLM", ASKED("glm"),
     FORM(GLM, .act = IZ_SILU, .may = IZ_HAS_QKV_BIAS)},
    {"glm4", "Glm4ForCausalLM", ASKED("glm4"),
     FORM(GLM | IZ_HAS_BEHIND, .act = IZ_SILU, .may = IZ_HAS_QKV_BIAS)},
    {"cohere", "CohereForCausalLM", ASKED("cohere"),
     FORM(COHERE, .act = IZ_SILU, .may = ATTENTION_BIASES)},
    {"cohere2", "Cohere2ForCausalLM", ASKED("cohere2"),
     FORM(COHERE | IZ_HAS_ROPE_IN_WINDOW, .act = IZ_SILU, .every = 4,
          .may = ATTENTION_BIASES)},
    {"stablelm", "StableLmForCausalLM", ASKED("stablelm"),
     FORM(LLAMA | LAYERNORM, .act = IZ_SILU, .may = IZ_HAS_QKV_BIAS,
          .parallel = IZ_HAS_PARALLEL | IZ_HAS_ONE_NORM)},
    {"starcoder2", "Starcoder2ForCausalLM", ASKED("starcoder2"),
     FORM(NO_GATE | LAYERNORM, .act = IZ_GELU_TANH, .may = BIASES)},
    {"nemotron", "NemotronForCausalLM", ASKED("nemotron"),
     FORM(NO_GATE | LAYERNORM | IZ_HAS_PLUS_ONE, .act = IZ_RELU2,
          .may = BIASES)},
    {"exaone4", "Exaone4ForCausalLM", NORMED("exaone4"),
     FORM(OLMO | IZ_HAS_QK_NORM | IZ_HAS_ROPE_IN_WINDOW, .act = IZ_SILU,
          .every = 4)},
    {"hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM",
     NORMED_ASKED("hunyuan_v1_dense"),
     FORM(LLAMA | IZ_HAS_QK_NORM | IZ_HAS_QK_LATE, .act = IZ_SILU,
          .may = ATTENTION_BIASES)},
    {"jais2", "Jais2ForCausalLM", ASKED("jais2"),
     FORM(NO_GATE | LAYERNORM, .act = IZ_RELU2, .may = BIASES)},
    {"cwm", "CwmForCausalLM", PLAIN("cwm"),
     FORM(LLAMA, .act = IZ_SILU, .every = 4, .scaled = true,
          .may = IZ_HAS_MLP_BIAS)},
    {"internlm3", "LlamaForCausalLM", ASKED("internlm3"),
     FORM(LLAMA, .act = IZ_SILU, .may = BIASES)},
    {"iquestcoder", "LlamaForCausalLM", ASKED("iquestcoder"),
     FORM(LLAMA, .act = IZ_SILU, .may = BIASES)},
    {"vaultgemma", "VaultGemmaForCausalLM", ASKED("vaultgemma"),
     FORM(GEMMA, .act = IZ_GELU_TANH, .every = 2, .root = true,
          .may = ATTENTION_BIASES)},
    {"hyperclovax", "HyperCLOVAXForCausalLM", ASKED("hyperclovax"),
     FORM(LLAMA | IZ_HAS_BEHIND, .act = IZ_SILU, .may = BIASES)},
    {"phi", "PhiForCausalLM", BIASED("phi"),
     FORM(NO_GATE | LAYERNORM | BIASES | IZ_HAS_PARALLEL | IZ_HAS_ONE_NORM |
              IZ_HAS_HEAD_BIAS,
          .act = IZ_GELU_TANH)},
    {"gpt_neox", "GPTNeoXForCausalLM", ASKED("gpt_neox"),
     FORM(NO_GATE | LAYERNORM | IZ_HAS_MLP_BIAS, .act = IZ_GELU_ERF,
          .may = ATTENTION_BIASES, .parallel = IZ_HAS_PARALLEL)},
    {"ministral3", "Ministral3ForCausalLM", PLAIN("ministral3"),
     FORM(LLAMA, .act = IZ_SILU, .scaled = true)},
    {0},
};

const struct iz_hf_type iz_mixture_types[] = {
    {"qwen3_moe", "Qwen3MoeForCausalLM", NORMED("qwen3_moe"),
     FORM(LLAMA | IZ_HAS_QK_NORM, .act = IZ_SILU)},
    {"mixtral", "MixtralForCausalLM", SUM_1(PLAIN("mixtral")),
     FORM(LLAMA, .act = IZ_SILU)},
    {"olmoe", "OlmoeForCausalLM", NORMED("olmoe"),
     FORM(LLAMA | WHOLE, .act = IZ_SILU)},
    {"qwen2_moe", "Qwen2MoeForCausalLM", ASKED("qwen2_moe"),
     FORM(LLAMA | IZ_HAS_SHARED_GATE, .act = IZ_SILU, .may = IZ_HAS_QKV_BIAS)},
    {"granitemoe", "GraniteMoeForCausalLM", SUM_1(PLAIN("granitemoe")),
     FORM(LLAMA, .act = IZ_SILU, .joined = true)},
    {"granitemoeshared", "GraniteMoeSharedForCausalLM",
     SUM_1(PLAIN("granitemoeshared")),
     FORM(LLAMA, .act = IZ_SILU, .joined = true)},
    {"glm4_moe", "Glm4MoeForCausalLM", NO_LOSS("\"family\": \"glm4_moe\""),
     FORM(LLAMA | SIGMOID, .act = IZ_SILU,
          .may = IZ_HAS_QKV_BIAS | IZ_HAS_QK_NORM)},
    {"dots1", "Dots1ForCausalLM", NO_LOSS(NORMED("dots1")),
     FORM(LLAMA | SIGMOID | IZ_HAS_QK_NORM, .act = IZ_SILU)},
    {"solar_open", "SolarOpenForCausalLM", NO_LOSS(PLAIN("solar_open")),
     FORM(LLAMA | SIGMOID, .act = IZ_SILU)},
    {"ernie4_5_moe", "Ernie4_5_MoeForCausalLM", SUM_1(PLAIN("ernie4_5_moe")),
     FORM(GLM | IZ_HAS_CHOICE, .act = IZ_SILU)},
    {"minimax_m2", "MiniMaxM2ForCausalLM", NO_LOSS(SUM_1(NORMED("minimax_m2"))),
     FORM(LLAMA | WHOLE | SIGMOID, .act = IZ_SILU)},
    {"gpt_oss", "GptOssForCausalLM", SUM_1(BIASED("gpt_oss")),
     FORM(LLAMA | BIASES | IZ_HAS_ROUTER_BIAS | IZ_HAS_SINKS, .act = IZ_SWISH_7,
          .every = 2, .scaled = true, .joined = true)},
    {0},
};

enum {
    DENSE = sizeof(iz_family_types) / sizeof(*iz_family_types) - 1,
    MIXTURES = sizeof(iz_mixture_types) / sizeof(*iz_mixture_types) - 1
};

const struct iz_hf_type *iz_family_type(int family)
{
    return family == IZ_FAMILY_AUTO ? NULL
           : family > DENSE         ? &iz_mixture_types[family - DENSE - 1]
                                    : &iz_family_types[family - 1];
}

const struct iz_family *iz_family_of(int family)
{
    static const struct iz_family any = {
        LLAMA, .may = IZ_HAS_QKV_BIAS | IZ_HAS_QK_NORM, .act = IZ_SILU};
    return family == IZ_FAMILY_AUTO ? &any : iz_family_type(family)->own;
}

int iz_family_named(const char *type)
{
    int family = DENSE + MIXTURES;
    while (family && strcmp(iz_family_type(family)->name, type) != 0)
        family--;
    return family;
}

bool iz_family_is_mixture(int family)
{
    return family > DENSE;
}

const struct iz_hf_lack iz_family_lacks[] = {
    {"experts of its kind",
     "afmoe|aria_text|axk1|axk2|cohere2_moe|deepseek_v2|exaone_moe|flex_olmo|"
     "granitemoe_swa|granitemoehybrid|hunyuan_v1_moe|hy_v3|inkling_text|"
     "jamba|jetmoe|kimi_linear|kolibri1|laguna|lara_mini|lfm2_moe|"
     "llama4_text|mellum|mimo_v2_flash|minimax|minimax_m3_vl_text|"
     "nemotron_h|phimoe|qwen3_5_moe_text|qwen3_next|qwen4_exp_text|"
     "sarvam_mla|sarvam_moe|zaya"},
    {"xIELU", "apertus|apertus1p5_text"},
    {"latent attention",
     "axk1|axk2|deepseek_v2|deepseek_v3|deepseek_v32|glm4_moe_lite|"
     "glm_moe_dsa|minicpm3|sarvam_mla|youtu"},
    {"sparse attention", "axk2|deepseek_v32|glm_moe_dsa"},
    {"recurrent or linear attention",
     "bailing_hybrid|bamba|falcon_h1|falcon_mamba|granitemoehybrid|"
     "inkling_text|jamba|kimi_linear|lara_mini|lfm2_moe|lfm3|mamba|"
     "nemotron_h|olmo_hybrid|qwen3_5_moe_text|qwen3_5_text|qwen3_next|"
     "qwen4_exp_text|recurrent_gemma|rwkv|xlstm"},
    {"its block", "beam|bitnet|diffllama|doge|dory|exaone|lfm2|"
                  "modernbert-decoder|nanochat"},
    {"its positions",
     "bert|bert-generation|big_bird|biogpt|blenderbot-small|bloom|codegen|"
     "falcon_mamba|gpt_bigcode|gpt_neo|gptj|inkling_text|jamba|"
     "kimi_linear|mamba|mpt|nemotron_h|openai-gpt|opt|rwkv|xglm|xlstm"},
    {"its stacking of queries, keys and values",
     "bloom|codegen|falcon|gpt_bigcode|gpt_neox_japanese|"
     "hrm_text|minimax|mpt|openai-gpt|persimmon|sarvam_moe"},
    {"attention sinks", "flint|granite_swa|granitemoe_swa|mimo_v2_flash"},
    {"proportional rotation", "gemma4_text|gemma4_unified_text|lfm3"},
    {"attention in chunks", "llama4_text"},
    {0},
};
