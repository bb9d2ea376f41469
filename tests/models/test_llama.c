/* SPDX-License-Identifier: Apache-2.0 */
/* The Llama family against a double-precision model. */
#include "tests/models/llama_twin.h"

#include <math.h>
#include <stdlib.h>

/* Of layers, heads, kv_heads, head_dim, width, seq, and the scaling. */
#define SIZES(l, h, k, d, w, s, factor)                                        \
    .layers = l, .heads = h, .kv_heads = k, .head_dim = d, .width = w,         \
    .seq = s, .ffn = 7, .vocab = 7, .rope_theta = 100,                         \
    .rope_scaling_factor = factor, .rope_scaling_original_seq = 64

static const struct iz_llama_config tiny = {SIZES(2, 2, 0, 0, 8, 5, 1),
                                            .norm_eps = 1e-5};
/* All options at once, each size another odd one. */
static const struct iz_llama_config all_options = {
    SIZES(2, 6, 3, 4, 9, 11, 8),
    .norm_eps = 1e-6,
    .rope_scaling_low_freq_factor = 1,
    .rope_scaling_high_freq_factor = 4,
    .tie_embeddings = true,
    .qkv_bias = true,
    .qk_norm = true};
static const struct iz_llama_config longer = {SIZES(1, 3, 1, 0, 12, 67, 1),
                                              .norm_eps = 1e-5};
static const struct iz_llama_config tied = {
    SIZES(2, 2, 1, 0, 8, 5, 1), .norm_eps = 1e-5, .tie_embeddings = true};
/* eps is not lost beside the squares. */
static const struct iz_llama_config normed = {SIZES(2, 2, 1, 0, 8, 5, 1),
                                              .norm_eps = 0.1, .qk_norm = true};

/* ---- in double ---- */

/* x [m,width] through a block in place. */
static void block(const struct iz_llama_config *c, double *const *p, double *x,
                  int samples)
{
    int64_t m = (int64_t)samples * c->seq;
    double *h = twin_take(m * c->width);
    llama_twin_attention(c, p, x, h, samples);
    llama_twin_mlp(c, p, x, h, m);
    free(h);
}

/* Tensors in checkpoint order: embedding, those of each layer, norm, and the
 * head's own matrix where it is not the embedding's. */
static double loss(const struct twin *t, double *logits)
{
    const struct iz_llama_config *c = t->config;
    int per_layer = REST + c->qkv_bias + 2 * c->qk_norm;
    double *const *p = t->param, *const *end = p + 1 + per_layer * c->layers;
    int64_t m = (int64_t)t->samples * c->seq;
    double *x = twin_take(m * c->width);
    ref_embedding(x, t->input, p[0], NULL, m, c->width, c->seq);
    for (int l = 0; l < c->layers; l++)
        block(c, p + 1 + per_layer * l, x, t->samples);
    ref_norm(x, x, end[0], NULL, m, c->width, c->norm_eps);
    return twin_head(t, x, c->tie_embeddings ? p[0] : end[1], logits);
}

static const struct twin_kind kind = {
    .name = "llama",
    .open = iz_llama_open,
    .loss = loss,
    .gradients = {{&tiny, 2, 1},
                  {&all_options, 2, 1},
                  {&longer, 2, 3},
                  {&tied, 1, 1},
                  {&normed, 3, 1}},
    .usual = {&all_options, 2},
    .recomputed = {&all_options, 2},
    .config_bytes = sizeof(tiny),
    .bad = {{TWIN_AT(iz_llama_config, layers), 0},
            {TWIN_AT(iz_llama_config, head_dim), 0}, /* width 9, 6 heads */
            {TWIN_AT(iz_llama_config, kv_heads), 4},
            {TWIN_AT(iz_llama_config, head_dim), 5},
            {TWIN_AT(iz_llama_config, head_dim), 258},
            {TWIN_AT(iz_llama_config, rope_theta), 0},
            {TWIN_AT(iz_llama_config, rope_scaling_high_freq_factor), 1}}};

/* Numbers of parameters of the published models. */
static void sizes_are_those_of_the_published_models(void **state)
{
    static const struct {
        int layers, heads, kv_heads, head_dim, width, ffn, vocab;
        bool tied, bias, norm;
        int64_t n;
    } model[] = {
        {16, 32, 8, 0, 2048, 8192, 128256, true, false, false, 1235814400},
        {32, 32, 8, 0, 4096, 14336, 128256, false, false, false, 8030261248},
        {24, 14, 2, 0, 896, 4864, 151936, true, true, false, 494032768},
        {28, 28, 4, 0, 3584, 18944, 152064, false, true, false, 7615616512},
        {28, 16, 8, 128, 1024, 3072, 151936, true, false, true, 596049920},
        {36, 32, 8, 128, 4096, 12288, 151936, false, false, true, 8190735360},
        {32, 32, 8, 0, 4096, 14336, 32768, false, false, false, 7248023552},
    };
    for (size_t i = 0; i < sizeof(model) / sizeof(model[0]); i++) {
        struct iz_llama_config c = {.layers = model[i].layers,
                                    .heads = model[i].heads,
                                    .kv_heads = model[i].kv_heads,
                                    .head_dim = model[i].head_dim,
                                    .width = model[i].width,
                                    .ffn = model[i].ffn,
                                    .seq = 1,
                                    .vocab = model[i].vocab,
                                    .rope_theta = 1,
                                    .rope_scaling_factor = 1,
                                    .rope_scaling_original_seq = 1,
                                    .tie_embeddings = model[i].tied,
                                    .qkv_bias = model[i].bias,
                                    .qk_norm = model[i].norm};
        assert_int_equal(twin_parameters(&kind, &c), model[i].n);
    }
}

/* 6 N per token for what is multiplied, and attention of all query heads. */
static void flops_follow_the_closed_form(void **state)
{
    const struct iz_llama_config *l = &all_options;
    double c = l->width, t = l->seq, o = 6 * 4, kv = 3 * 4;
    double weights =
        2 * (c * (o + 2 * kv) + o * c + 3 * c * l->ffn) + c * l->vocab;
    double attention = 6 * o * (t + 1) * 2;
    assert_true(twin_flops(&kind, l, 2) == 2 * t * (6 * weights + attention));
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
    struct iz_llama_config c = all_options;
    struct iz_model *m = twin_open(&kind, &c);
    assert_int_equal(m->unit[2].n_params, 9);
    for (int i = 0; i < 9; i++)
        assert_string_equal(m->unit[2].param[i].name, name[i]);
    assert_string_equal(m->unit[0].param[0].name, "embed_tokens.weight");
    assert_string_equal(m->unit[3].param[0].name, "norm.weight");
    assert_int_equal(m->unit[3].tied_unit, 0);
    iz_model_close(&m);
    c.tie_embeddings = false;
    m = twin_open(&kind, &c);
    assert_string_equal(m->unit[3].param[1].name, "lm_head.weight");
    assert_int_equal(m->unit[3].tied_unit, -1);
    iz_model_close(&m);
}

int main(void)
{
    const struct CMUnitTest own[] = {
        cmocka_unit_test(sizes_are_those_of_the_published_models),
        cmocka_unit_test(flops_follow_the_closed_form),
        cmocka_unit_test(names_are_those_of_checkpoints),
    };
    return twin_main(&kind, own, sizeof(own) / sizeof(own[0]));
}
