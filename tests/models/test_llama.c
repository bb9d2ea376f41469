/* SPDX-License-Identifier: Apache-2.0 */
/* The Llama family against a double-precision model. */
#include "tests/models/twin.h"

#include <math.h>

#include "codelets/ops/gemm.h"
#include "models/llama.h"
#include "tests/models/llama_double.h"

static const struct iz_llama_config tiny = {.layers = 2,
                                            .heads = 2,
                                            .width = 8,
                                            .ffn = 7,
                                            .seq = 5,
                                            .vocab = 7,
                                            .norm_eps = 1e-5,
                                            .rope_theta = 100,
                                            .rope_scaling_factor = 1};

/* All options at once, each size another odd one. */
static struct iz_llama_config all_options(void)
{
    struct iz_llama_config c = tiny;

    c.heads = 6;
    c.kv_heads = 3;
    c.head_dim = 4;
    c.width = 9;
    c.seq = 11;
    c.norm_eps = 1e-6;
    c.rope_scaling_factor = 8;
    c.rope_scaling_low_freq_factor = 1;
    c.rope_scaling_high_freq_factor = 4;
    c.rope_scaling_original_seq = 64;
    c.tie_embeddings = true;
    c.qkv_bias = true;
    c.qk_norm = true;
    return c;
}

static struct iz_llama_config longer(void)
{
    struct iz_llama_config c = tiny;

    c.layers = 1;
    c.heads = 3;
    c.kv_heads = 1;
    c.width = 12;
    c.seq = 67;
    return c;
}

static int open_model(struct iz_model **out, const void *config)
{
    return iz_llama_open(out, config);
}

/* With the values of the twin's parameters. */
static struct llama_double double_of(const struct twin *t)
{
    const struct iz_llama_config *c = t->config;

    return (struct llama_double){
        .layers = c->layers,
        .heads = c->heads,
        .kv_heads = c->kv_heads ? c->kv_heads : c->heads,
        .head_dim = c->head_dim ? c->head_dim : c->width / c->heads,
        .width = c->width,
        .ffn = c->ffn,
        .seq = c->seq,
        .vocab = c->vocab,
        .theta = c->rope_theta,
        .eps = c->norm_eps,
        .factor = c->rope_scaling_factor,
        .low_freq = c->rope_scaling_low_freq_factor,
        .high_freq = c->rope_scaling_high_freq_factor,
        .original_seq = c->rope_scaling_original_seq,
        .tied = c->tie_embeddings,
        .qkv_bias = c->qkv_bias,
        .qk_norm = c->qk_norm,
        .param = (double **)t->param,
    };
}

static double loss(const struct twin *t)
{
    struct llama_double g = double_of(t);

    return llama_double_loss(&g, t->input, t->target, t->samples, 0, NULL);
}

static const struct twin_kind kind = {open_model, loss, NULL};

static void gradients_agree_with_central_differences(void **state)
{
    struct iz_llama_config c = tiny, all = all_options(), l = longer();

    fixture_seed();
    twin_check(&kind, &tiny, IZ_F32, 2, 1);
    twin_check(&kind, &all, IZ_F32, 2, 1);
    twin_check(&kind, &l, IZ_F32, 2, 3);
    c.kv_heads = 1;
    c.tie_embeddings = true;
    twin_check(&kind, &c, IZ_F32, 1, 1);
    c.tie_embeddings = false;
    c.qk_norm = true;
    c.norm_eps = 0.1; /* not lost beside the squares */
    twin_check(&kind, &c, IZ_F32, 3, 1);
}

static void gradients_of_16_bit_weights_agree(void **state)
{
    struct iz_llama_config c = all_options();

    fixture_seed();
    twin_check(&kind, &c, IZ_BF16, 2, 1);
    twin_check(&kind, &c, IZ_F16, 2, 1);
}

static void ten_steps_agree_with_double(void **state)
{
    struct iz_llama_config c = all_options();

    fixture_seed();
    twin_check_steps(&kind, &c, 2);
}

static void recomputed_activations_give_the_same_bits(void **state)
{
    struct iz_llama_config c = all_options();

    twin_check_recompute(&kind, &c, 2);
}

static void evaluate_and_generate_agree(void **state)
{
    struct iz_llama_config c = all_options();
    struct twin t;
    struct llama_double g;
    float logits[7];
    double want[7], was;

    fixture_seed();
    t = twin_new(&kind, &c, IZ_F32, 2);
    g = double_of(&t);
    twin_train(&t, true);
    was = t.got;
    t.got = -1;
    twin_evaluate(&t);
    assert_true(t.got == was);
    twin_generate(&t, logits);
    llama_double_loss(&g, t.input, t.target, 1, c.seq - 1, want);
    for (int v = 0; v < 7; v++)
        assert_true(fabs((double)logits[v] - want[v]) < 1e-5);
    twin_free(&t);
}

/* One element is enough. */
static void nan_reaches_the_loss(void **state)
{
    struct iz_llama_config c = all_options();

    fixture_seed();
    for (int i = 0; i < 9; i++) {
        struct twin t = twin_new(&kind, &c, IZ_F32, 1);

        t.w[1 + i].d[0] = NAN;
        tensor_store(&t.w[1 + i]);
        twin_train(&t, true);
        assert_true(isnan(t.got));
        twin_free(&t);
    }
}

/* Numbers of parameters of the published models. */
static void sizes_are_those_of_the_published_models(void **state)
{
    static const struct {
        struct iz_llama_config c;
        int64_t n;
    } model[] = {
        {{.layers = 16,
          .heads = 32,
          .kv_heads = 8,
          .width = 2048,
          .ffn = 8192,
          .vocab = 128256,
          .tie_embeddings = true},
         1235814400},
        {{.layers = 32,
          .heads = 32,
          .kv_heads = 8,
          .width = 4096,
          .ffn = 14336,
          .vocab = 128256},
         8030261248},
        {{.layers = 24,
          .heads = 14,
          .kv_heads = 2,
          .width = 896,
          .ffn = 4864,
          .vocab = 151936,
          .tie_embeddings = true,
          .qkv_bias = true},
         494032768},
        {{.layers = 28,
          .heads = 28,
          .kv_heads = 4,
          .width = 3584,
          .ffn = 18944,
          .vocab = 152064,
          .qkv_bias = true},
         7615616512},
        {{.layers = 28,
          .heads = 16,
          .kv_heads = 8,
          .head_dim = 128,
          .width = 1024,
          .ffn = 3072,
          .vocab = 151936,
          .tie_embeddings = true,
          .qk_norm = true},
         596049920},
        {{.layers = 36,
          .heads = 32,
          .kv_heads = 8,
          .head_dim = 128,
          .width = 4096,
          .ffn = 12288,
          .vocab = 151936,
          .qk_norm = true},
         8190735360},
        {{.layers = 32,
          .heads = 32,
          .kv_heads = 8,
          .width = 4096,
          .ffn = 14336,
          .vocab = 32768},
         7248023552},
    };

    for (size_t i = 0; i < sizeof(model) / sizeof(model[0]); i++) {
        struct iz_llama_config c = model[i].c;

        c.seq = 1;
        c.rope_theta = c.rope_scaling_factor = 1;
        assert_int_equal(twin_parameters(&kind, &c), model[i].n);
    }
}

/* 6 N per token for what is multiplied, and attention of all query heads. */
static void flops_follow_the_closed_form(void **state)
{
    struct iz_llama_config l = all_options();
    struct twin m = twin_new(&kind, &l, IZ_F32, 2);
    double c = l.width, t = l.seq, o = 6 * 4, kv = 3 * 4;
    double weights =
        2 * (c * (o + 2 * kv) + o * c + 3 * c * l.ffn) + c * l.vocab;
    double attention = 6 * o * (t + 1) * 2;

    assert_true(twin_flops(&m) == 2 * t * (6 * weights + attention));
    twin_free(&m);
}

static void names_are_those_of_checkpoints(void **state)
{
    static const char *const name[] = {
        "layers.1.input_layernorm.weight",
        "layers.1.self_attn.qkv_proj.weight",
        "layers.1.self_attn.o_proj.weight",
        "layers.1.post_attention_layernorm.weight",
        "layers.1.mlp.gate_up_proj.weight",
        "layers.1.mlp.down_proj.weight",
        "layers.1.self_attn.qkv_proj.bias",
        "layers.1.self_attn.q_norm.weight",
        "layers.1.self_attn.k_norm.weight"};
    struct iz_llama_config c = all_options();
    struct iz_model *m;

    assert_int_equal(iz_llama_open(&m, &c), 0);
    assert_int_equal(m->unit[2].n_params, 9);
    for (int i = 0; i < 9; i++)
        assert_string_equal(m->unit[2].param[i].name, name[i]);
    assert_string_equal(m->unit[0].param[0].name, "embed_tokens.weight");
    assert_string_equal(m->unit[3].param[0].name, "norm.weight");
    assert_int_equal(m->unit[3].tied_unit, 0);
    iz_model_close(&m);
    c.tie_embeddings = false;
    assert_int_equal(iz_llama_open(&m, &c), 0);
    assert_string_equal(m->unit[3].param[1].name, "lm_head.weight");
    assert_int_equal(m->unit[3].tied_unit, -1);
    iz_model_close(&m);
}

static void impossible_models_are_refused(void **state)
{
    struct iz_llama_config c = tiny;

    c.layers = 0;
    twin_refuses(&kind, &c);
    c = tiny;
    c.heads = 3; /* width 8 */
    twin_refuses(&kind, &c);
    c = tiny;
    c.kv_heads = 3;
    twin_refuses(&kind, &c);
    c = tiny;
    c.head_dim = 5;
    twin_refuses(&kind, &c);
    c = tiny;
    c.head_dim = 258;
    twin_refuses(&kind, &c);
    c = tiny;
    c.rope_theta = 0;
    twin_refuses(&kind, &c);
    c = all_options();
    c.rope_scaling_high_freq_factor = c.rope_scaling_low_freq_factor;
    twin_refuses(&kind, &c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(gradients_agree_with_central_differences),
        cmocka_unit_test(gradients_of_16_bit_weights_agree),
        cmocka_unit_test(ten_steps_agree_with_double),
        cmocka_unit_test(recomputed_activations_give_the_same_bits),
        cmocka_unit_test(evaluate_and_generate_agree),
        cmocka_unit_test(nan_reaches_the_loss),
        cmocka_unit_test(sizes_are_those_of_the_published_models),
        cmocka_unit_test(flops_follow_the_closed_form),
        cmocka_unit_test(names_are_those_of_checkpoints),
        cmocka_unit_test(impossible_models_are_refused),
    };

    iz_gemm_open();
    return cmocka_run_group_tests_name("llama", tests, NULL, NULL);
}
