/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of the table of tensors (llama_hf.c): what mixtures of experts have in
 * place of a block's MLP, and sinks. */
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
/* All experts in one tensor. */
#define JOINED(type, name, of, as)                                             \
    {                                                                          \
        .tensor = name, .param = "layers.{}.mlp.experts." of, .layout = as,    \
        .types = type                                                          \
    }
#define SHARED(type, gate_up, down)                                            \
    {.tensor = gate_up,                                                        \
     .param = "layers.{}.mlp.shared_expert.gate_up_proj.weight",               \
     .layout = IZ_HF_ROWS,                                                     \
     .types = type},                                                           \
    {                                                                          \
        .tensor = down,                                                        \
        .param = "layers.{}.mlp.shared_expert.down_proj.weight", .types = type \
    }
#define CHOICE(type, name, as)                                                 \
    {                                                                          \
        .tensor = name, .param = "layers.{}.mlp.choice.bias", .layout = as,    \
        .types = type                                                          \
    }
EXPERTS("qwen3_moe|olmoe|qwen2_moe|" ERNIE_MOE "|" GLM_MOE, MLP, "gate_proj",
        "up_proj", "down_proj"),
    EXPERTS("mixtral|" MINIMAX, MIXTRAL, "w1", "w3", "w2"),
    AT("block_sparse_moe.router.layer.weight", "mlp.gate.weight", GRANITE_MOE),
    JOINED(GRANITE_MOE, MIXTRAL "input_linear.weight", "gate_up_proj.weight",
           IZ_HF_EXPERTS),
    JOINED(GRANITE_MOE, MIXTRAL "output_linear.weight", "down_proj.weight",
           IZ_HF_EXPERTS),
    AT("mlp.router.weight", "mlp.gate.weight", OSS),
    AT("mlp.router.bias", "mlp.gate.bias", OSS),
    JOINED(OSS, MLP "experts.gate_up_proj", "gate_up_proj.weight",
           IZ_HF_EXPERTS_TRANSPOSED),
    JOINED(OSS, MLP "experts.gate_up_proj_bias", "gate_up_proj.bias",
           IZ_HF_EXPERTS),
    JOINED(OSS, MLP "experts.down_proj", "down_proj.weight",
           IZ_HF_EXPERTS_TRANSPOSED),
    JOINED(OSS, MLP "experts.down_proj_bias", "down_proj.bias", IZ_HF_EXPERTS),
    AT("self_attn.sinks", "self_attn.sinks.weight"),
    CHOICE(GLM_MOE, MLP "gate.e_score_correction_bias", IZ_HF_SAME),
    CHOICE(ERNIE_MOE, MLP "moe_statics.e_score_correction_bias", IZ_HF_ROWS),
    CHOICE(MINIMAX, MIXTRAL "e_score_correction_bias", IZ_HF_SAME),
    SHARED("qwen2_moe",
           MLP "shared_expert.gate_proj.weight|" MLP
               "shared_expert.up_proj.weight",
           MLP "shared_expert.down_proj.weight"),
    SHARED(ERNIE_MOE "|" GLM_MOE,
           MLP "shared_experts.gate_proj.weight|" MLP
               "shared_experts.up_proj.weight",
           MLP "shared_experts.down_proj.weight"),
    SHARED(GRANITE_MOE, "model.layers.{}.shared_mlp.input_linear.weight",
           "model.layers.{}.shared_mlp.output_linear.weight"),
    AT("mlp.shared_expert_gate.weight", "mlp.shared_expert_gate.weight", NULL,
       IZ_HF_ROWS),
#undef MIXTRAL
#undef EXPERTS_IN
#undef EXPERTS
#undef JOINED
#undef SHARED
#undef CHOICE
