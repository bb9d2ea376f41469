/* SPDX-License-Identifier: Apache-2.0 */
/* The Llama family, unit by unit. */
#include "models/llama.h"
#include "tests/models/twin.h"

/* All options at once, each size another odd one. */
static const struct iz_llama_config all_options = {
    .layers = 2,
    .heads = 6,
    .kv_heads = 3,
    .head_dim = 4,
    .width = 9,
    .seq = 67, /* more than a tile has */
    .ffn = 7,
    .vocab = 7,
    .rope_theta = 100,
    .rope_scaling_factor = 8,
    .rope_scaling_original_seq = 64,
    .norm_eps = 1e-6,
    .rope_scaling_low_freq_factor = 1,
    .rope_scaling_high_freq_factor = 4,
    .tie_embeddings = true,
    .no_rope_layer_interval = 2,
    .qkv_bias = true,
    .qk_norm = true};
static const struct twin_kind kind = {.name = "llama",
                                      .open = iz_llama_open,
                                      .usual = {&all_options, 2},
                                      .recomputed = {&all_options, 2}};

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

/* Of blocks with a window, though no row reaches its end. */
static void a_wide_window_has_its_frequencies(void **state)
{
    for (int base = 0; base < 2; base++) {
        struct iz_llama_config c = all_options;
        c.window = c.seq;
        c.rope_local_base_freq = 3 * base;
        assert_int_equal(iz_llama_complete("llama", &c), 0);
        struct iz_block b = iz_llama_block(&c);
        assert_int_equal(b.window, 0);
        assert_int_equal(b.sort[0] & IZ_SORT_WINDOW, base);
        assert_true(b.rope[1].theta == (base ? 3 : c.rope_theta));
    }
}

int main(void)
{
    const struct CMUnitTest own[] = {
        cmocka_unit_test(flops_follow_the_closed_form),
        cmocka_unit_test(a_wide_window_has_its_frequencies),
    };
    return twin_main(&kind, own, sizeof(own) / sizeof(own[0]));
}
