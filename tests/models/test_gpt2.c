/* SPDX-License-Identifier: Apache-2.0 */
/* GPT-2, unit by unit. */
#include "tests/models/twin.h"

#include "models/gpt2.h"

static const struct iz_gpt2_config tiny = {2, 2, 6, 5, 7};
static const struct iz_gpt2_config longer = {1, 3, 9, 67, 11};

static const struct twin_kind kind = {
    .name = "gpt2",
    .open = iz_gpt2_open,
    .usual = {&tiny, 2},
    .recomputed = {&longer, 2},
    .config_bytes = sizeof(tiny),
    .bad = {{TWIN_AT(iz_gpt2_config, layers), 0},
            {TWIN_AT(iz_gpt2_config, heads), 4},
            {TWIN_AT(iz_gpt2_config, heads), 0},
            {TWIN_AT(iz_gpt2_config, width), -6},
            {TWIN_AT(iz_gpt2_config, seq), 0},
            {TWIN_AT(iz_gpt2_config, vocab), 1 << 30}}};

/* The published 124 M parameters, and 6 N + attention flops per token. */
static void sizes_are_those_of_the_paper(void **state)
{
    struct iz_gpt2_config c = {12, 12, 768, 1024, 50257};
    struct iz_model *m = twin_open(&kind, &c);
    assert_int_equal(twin_parameters(&kind, &c), 124439808);
    assert_string_equal(m->unit[4].name, "h.3");
    assert_string_equal(m->unit[4].param[2].name, "h.3.attn.c_attn.weight");
    assert_int_equal(m->unit[13].tied_unit, 0);
    iz_model_close(&m);
    assert_null(m);
}

static void flops_follow_the_closed_form(void **state)
{
    double c = longer.width, seq = longer.seq, m = 2 * seq;
    double weights = 12 * c * c * longer.layers + c * longer.vocab;
    double attention = 6 * c * (seq + 1) * longer.layers;
    assert_true(twin_flops(&kind, &longer, 2) == m * (6 * weights + attention));
}

int main(void)
{
    const struct CMUnitTest own[] = {
        SEEDED(sizes_are_those_of_the_paper),
        SEEDED(flops_follow_the_closed_form),
    };
    return twin_main(&kind, own, sizeof(own) / sizeof(own[0]));
}
