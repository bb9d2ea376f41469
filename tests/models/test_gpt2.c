/* SPDX-License-Identifier: Apache-2.0 */
/* GPT-2, unit by unit. */
#include "tests/models/twin.h"

#include "models/gpt2.h"

static const struct iz_gpt2_config tiny = {2, 2, 6, 5, 7};
static const struct iz_gpt2_config longer = {1, 3, 9, 67, 11};

static const struct twin_kind kind = {.name = "gpt2",
                                      .open = iz_gpt2_open,
                                      .usual = {&tiny, 2},
                                      .recomputed = {&longer, 2}};

/* 6 N per token, and attention. */
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
        SEEDED(flops_follow_the_closed_form),
    };
    return twin_main(&kind, own, sizeof(own) / sizeof(own[0]));
}
