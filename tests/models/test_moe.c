/* SPDX-License-Identifier: Apache-2.0 */
/* Mixtures of experts, unit by unit. */
#include <math.h>
#include <string.h>

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
/* The same with experts in units of their own: the last has fewer. */
static const struct iz_moe_config apart = {
    .llama = {SIZES(3, 6, 3, 4, 9, 5), .qk_norm = true, .qkv_bias = true},
    EXPERTS(5, 3, 4, 2),
    .experts_per_unit = 2,
    .router_aux_loss_coef = 0.3,
    .router_z_loss_coef = 0.1};
static const struct twin_kind kind = {
    .name = "moe",
    .open = iz_moe_open,
    .usual = {&mixtral, 2},
    .recomputed = {&qwen, 2},
    .config_bytes = sizeof(mixtral),
    .bad = {{TWIN_AT(iz_moe_config, num_experts), 0},
            {TWIN_AT(iz_moe_config, num_experts), 1025},
            {TWIN_AT(iz_moe_config, num_experts_per_tok), 5},
            {TWIN_AT(iz_moe_config, num_experts_per_tok), 0},
            {TWIN_AT(iz_moe_config, moe_intermediate_size), 0},
            {TWIN_AT(iz_moe_config, experts_per_unit), 5},
            {TWIN_AT(iz_moe_config, experts_per_unit), -1},
            {TWIN_AT(iz_moe_config, decoder_sparse_step), 3},
            {TWIN_AT(iz_moe_config, n_group), 3},
            {TWIN_AT(iz_moe_config, n_group), 4},
            {TWIN_AT(iz_moe_config, topk_group), 2},
            {TWIN_AT(iz_moe_config, llama.family), IZ_FAMILY_LLAMA}}};

/* The parameters of a block: two norms around attention's two, then these. */
enum { GATE_UP = 4, DOWN, ROUTER };

/* Rows of zeros in a router and equal logits: all tokens go to the first
 * experts.  The others' gradient is zero, to the bit. */
static void experts_without_tokens_have_no_gradient(void **state)
{
    struct twin t = twin_new(&kind, &mixtral, IZ_F32, 2);
    int first = twin_first(&t, 1), router = first + ROUTER;
    twin_set(&t, router, 0);
    twin_train(&t, IZ_RECOMPUTE_NONE);
    assert_true(t.aux.most == 2 && t.aux.least == 0);
    for (int i = GATE_UP; i <= DOWN; i++) {
        int64_t n = iz_view_len(t.dw[first + i].v);
        twin_load(&t, first + i);
        for (int64_t k = 0; k < n; k++) {
            double g = t.dw[first + i].d[k];
            assert_true(k < n / 2 ? isfinite(g) : g == 0);
        }
        assert_true(t.dw[first + i].d[0] != 0);
    }
    twin_free(&t);
}

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

/* A unit is of another kind where its layers are others. */
static void mixtures_are_a_kind_with_a_loss(void **state)
{
    struct iz_model *m = twin_open(&kind, &qwen);
    for (int u = 1; u <= 4; u++) {
        assert_true(m->unit[u].own_loss == (u == 2));
        assert_true((m->unit[u].kind == m->unit[1].kind) == (u != 2));
    }
    iz_model_close(&m);
}

/* Counted from 0, of which there may be one. */
static void blocks_behind_an_index_have_no_experts(void **state)
{
    struct iz_moe_config c = apart;
    c.experts_per_unit = 0;
    c.decoder_sparse_step = 1;
    for (int end = -1; end < 3; end++) {
        c.moe_layer_end_index = end;
        struct iz_model *m = twin_open(&kind, &c);
        for (int u = 1; u <= 3; u++)
            assert_true(m->unit[u].own_loss == (end < 0 || u - 1 <= end));
        iz_model_close(&m);
    }
}

static void experts_in_units_have_names_of_their_own(void **state)
{
    static const char *const unit[] = {"embed",      "layers.0",   "layers.1",
                                       "layers.1.0", "layers.1.2", "layers.1.4",
                                       "layers.2",   "head"};
    static const char *const name[] = {
        "layers.1.mlp.experts.4.gate_up_proj.weight",
        "layers.1.mlp.experts.4.down_proj.weight"};
    struct iz_model *m = twin_open(&kind, &apart);
    assert_int_equal(m->n_units, 8);
    for (int u = 0; u < 8; u++)
        assert_string_equal(m->unit[u].name, unit[u]);
    for (int i = 0; i < 2; i++)
        assert_string_equal(m->unit[5].param[i].name, name[i]);
    assert_int_equal(m->unit[2].n_params, 8);
    assert_string_equal(m->unit[2].param[7].name, "layers.1.mlp.gate.weight");
    assert_true(m->unit[3].kind == m->unit[4].kind);
    assert_true(m->unit[4].kind != m->unit[5].kind);
    iz_model_close(&m);
}

static void lists_of_blocks_are_checked(void **state)
{
    static const char *const bad[] = {"-1", "4", "1"};
    struct iz_moe_config c = qwen;
    struct iz_model *m;
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        snprintf(c.mlp_only_layers, sizeof(c.mlp_only_layers), "%s%s", bad[i],
                 strcmp(bad[i], "1") == 0 ? ",3" : "");
        assert_true(iz_moe_open(&m, &c) < 0);
    }
    snprintf(c.mlp_only_layers, sizeof(c.mlp_only_layers), "0,3");
    assert_int_equal(iz_moe_open(&m, &c), 0);
    iz_model_close(&m);
}

/* Of what the nearest families lack. */
static void a_shape_that_no_family_has_is_none_of_them(void **state)
{
    struct iz_moe_config shared = mixtral, dense = mixtral, grouped = qwen;
    const struct iz_moe_config *const all[] = {&shared, &dense, &grouped};
    struct iz_model *m;
    shared.n_shared_experts = 1;
    dense.first_k_dense_replace = 1;
    grouped.routed_scaling_factor = 2;
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        assert_int_equal(iz_moe_open(&m, all[i]), 0);
        assert_null(iz_moe_hf.type(m->self));
        iz_model_close(&m);
    }
}

int main(void)
{
    const struct CMUnitTest own[] = {
        cmocka_unit_test(a_shape_that_no_family_has_is_none_of_them),
        cmocka_unit_test(experts_without_tokens_have_no_gradient),
        cmocka_unit_test(flops_are_those_of_the_chosen),
        cmocka_unit_test(memory_does_not_grow_with_the_experts),
        cmocka_unit_test(mixtures_are_a_kind_with_a_loss),
        cmocka_unit_test(blocks_behind_an_index_have_no_experts),
        cmocka_unit_test(experts_in_units_have_names_of_their_own),
        cmocka_unit_test(lists_of_blocks_are_checked),
    };
    return twin_main(&kind, own, sizeof(own) / sizeof(own[0]));
}
