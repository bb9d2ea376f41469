/* SPDX-License-Identifier: Apache-2.0 */
/* Mixtures of experts, unit by unit. */
#include <math.h>

#include "models/moe.h"
#include "tests/models/twin.h"

/* Of layers, heads, kv_heads, head_dim, width and seq. */
#define SIZES(l, h, k, d, w, s)                                                \
    .layers = l, .heads = h, .kv_heads = k, .head_dim = d, .width = w,         \
    .seq = s, .ffn = 7, .vocab = 7, .rope_theta = 100,                         \
    .rope_scaling_factor = 1, .rope_scaling_original_seq = 64,                 \
    .norm_eps = 1e-5
/* Of experts, how many a token has, their channels, and every which block has
 * some. */
#define EXPERTS(e, k, f, step)                                                 \
    .num_experts = e, .num_experts_per_tok = k, .moe_intermediate_size = f,    \
    .decoder_sparse_step = step, .moe_layer_end_index = -1

/* As Mixtral. */
static const struct iz_moe_config mixtral = {.llama = {SIZES(2, 2, 1, 0, 8, 5)},
                                             EXPERTS(4, 2, 5, 1),
                                             .norm_topk_prob = true,
                                             .router_aux_loss_coef = 0.02};
/* As Qwen3-MoE, with blocks of both kinds and all losses. */
static const struct iz_moe_config qwen = {
    .llama = {SIZES(4, 6, 3, 4, 9, 5), .qk_norm = true, .tie_embeddings = true},
    EXPERTS(5, 3, 4, 2),
    .mlp_only_layers = "3",
    .router_aux_loss_coef = 0.3,
    .router_z_loss_coef = 0.1};
static const struct twin_kind kind = {.name = "moe",
                                      .open = iz_moe_open,
                                      .usual = {&mixtral, 2},
                                      .recomputed = {&qwen, 2}};

/* 6 N per token for what is multiplied: of the experts, those of a token. */
static void flops_are_those_of_the_chosen(void **state)
{
    struct iz_moe_config cut = mixtral;
    double c = 8, t = 5, kv = 4, f = 5, o = 8;
    double weights =
        2 * (c * (o + 2 * kv) + o * c + 3 * c * f * 2 + c * 4) + c * 7;
    assert_true(twin_flops(&kind, &mixtral, 2) ==
                2 * t * (6 * weights + 6 * o * (t + 1) * 2));
    cut.experts_per_unit = 3;
    double ratio = twin_flops(&kind, &cut, 2) / twin_flops(&kind, &mixtral, 2);
    assert_true(fabs(ratio - 1) < 1e-12);
}

/* Memory is that of all tokens at one expert, however many experts there are.
 */
static void memory_does_not_grow_with_the_experts(void **state)
{
    struct iz_moe_config many = mixtral;
    struct iz_exec like = iz_exec_dry(IZ_CPU, IZ_F32);
    int64_t bytes[2];
    for (int i = 0; i < 2; i++) {
        many.num_experts = i ? 64 : 4;
        struct iz_model *m = twin_open(&kind, &many);
        struct iz_unit_cost k = iz_unit_cost(m, 1, 64, 0, IZ_F32, &like);
        bytes[i] = k.work_bytes + k.save_bytes[IZ_RECOMPUTE_NONE];
        iz_model_close(&m);
    }
    /* a router's row in p and in its gradient */
    int64_t rows = 64 * 5 * 2 * 4 * (64 - 4) + 64;
    assert_true(bytes[1] - bytes[0] <= rows + 1024);
}

int main(void)
{
    const struct CMUnitTest own[] = {
        cmocka_unit_test(flops_are_those_of_the_chosen),
        cmocka_unit_test(memory_does_not_grow_with_the_experts),
    };
    return twin_main(&kind, own, sizeof(own) / sizeof(own[0]));
}
