/* SPDX-License-Identifier: Apache-2.0 */
/* Learning rates, loss scale and clip factor against sequences computed by hand
 * and closed forms. */
#include "tests/runtime/fixture.h"

#include "runtime/engine/schedule.h"

static void assert_near(double got, double want)
{
    if (!(fabs(got - want) <= 1e-15 + 1e-12 * fabs(want)))
        fail_msg("%.17g is not %.17g", got, want);
}

/* What the log of a warm-up of 4 steps gives at its third. */
#define LOG_3 0.792481250360578091
/* Behind the last update of a sequence. */
#define END (-1)

#define DS(kind_, log, low, high, warmup, total, ratio, min)                   \
    {                                                                          \
        .kind = (kind_), .log_warmup = (log), .warmup_min_lr = (low),          \
        .warmup_max_lr = (high), .warmup_num_steps = (warmup),                 \
        .total_num_steps = (total), .warmup_min_ratio = (ratio),               \
        .cos_min_ratio = (min)                                                 \
    }
#define HF(kind_, warmup, ...)                                                 \
    {                                                                          \
        .kind = IZ_LR_HF_##kind_, .warmup_num_steps = (warmup),                \
        .total_num_steps = __VA_ARGS__                                         \
    }

/* A scheduler (by a logarithm or not; lowest and highest rate; steps of the
 * warm-up and all; ratios of the cosine's), the optimizer's rate, and the rates
 * from update 0 on. */
static const struct {
    struct iz_lr_config lr;
    double base, want[12];
} rates[] = {
    /* Without a scheduler it is the optimizer's. */
    {DS(IZ_LR_CONST, 0, 0, 7, 0, 0, 0, 0), 0.25, {0.25, 0.25, 0.25, END}},
    /* log(2) / log(4) = 1/2 of the way at iteration 1. */
    {DS(IZ_LR_WARMUP, 1, 1, 5, 4, 0, 0, 0),
     99,
     {1, 1, 3, 1 + 4 * LOG_3, 5, 5, 5, END}},
    {DS(IZ_LR_WARMUP, 0, 1, 5, 4, 0, 0, 0), 99, {1, 1, 2, 3, 4, 5, 5, END}},
    /* One warm-up step counts as two. */
    {DS(IZ_LR_WARMUP, 0, 0, 8, 1, 0, 0, 0), 99, {0, 0, 4, 8, 8, END}},
    {DS(IZ_LR_WARMUP, 1, 0, 8, 1, 0, 0, 0), 99, {0, 0, 8, 8, END}},
    /* Up in 4, down to 0 at iteration 8, which is update 9. */
    {DS(IZ_LR_DECAY, 0, 0, 8, 4, 8, 0, 0),
     99,
     {0, 0, 2, 4, 6, 8, 6, 4, 2, 0, 0, 0}},
    /* It ends above zero when the minimum does. */
    {DS(IZ_LR_DECAY, 0, 1, 5, 2, 4, 0, 0), 99, {1, 1, 3, 5, 3, 1, 1, END}},
    /* Shorter than its warm-up: one step of the warm-up's end, then nothing. */
    {DS(IZ_LR_DECAY, 0, 0, 4, 4, 2, 0, 0), 99, {0, 0, 1, 2, 3, 0, 0, END}},
    /* The quarters of a half cosine: done = 1/4, 1/2, 3/4, 1. */
    {DS(IZ_LR_COSINE, 0, 0, 0, 4, 8, 0.25, 0.1),
     10,
     {0, 2.5, 4.375, 6.25, 8.125, 1 + 9 * (1 + M_SQRT1_2) / 2, 5.5,
      1 + 9 * (1 - M_SQRT1_2) / 2, 1, 1, 1, END}},
    {DS(IZ_LR_COSINE, 1, 0, 0, 4, 4, 0, 0.5),
     10,
     {0, 0, 5, 10 * LOG_3, 10, 5, 5, END}},
    /* Shorter than its warm-up: the rate drops to its minimum at once. */
    {DS(IZ_LR_COSINE, 0, 0, 0, 4, 2, 0, 0.5), 8, {0, 0, 2, 4, 6, 4, 4, 4, END}},
    /* transformers': the first update of a warm-up has rate 0. */
    {HF(CONSTANT, 2, 0), 8, {0, 4, 8, 8, END}},
    {HF(LINEAR, 2, 6), 8, {0, 4, 8, 6, 4, 2, 0, 0, END}},
    {HF(COSINE, 0, 4, .cycles = 0.5),
     8,
     {8, 4 + 4 * M_SQRT1_2, 4, 4 - 4 * M_SQRT1_2, 0, END}},
    {HF(COSINE_MIN, 1, 5, .cycles = 0.5, .min_ratio = 0.5),
     8,
     {0, 8, 6 + 2 * M_SQRT1_2, 6, 6 - 2 * M_SQRT1_2, 4, END}},
    {HF(POLYNOMIAL, 0, 4, .end_lr = 1, .power = 2),
     9,
     {9, 5.5, 3, 1.5, 1, 1, END}},
    {HF(WSD, 2, 8, .decay_steps = 4, .min_ratio = 0.5),
     8,
     {4, 6, 8, 8, 8, 7, 6, 5, 4, 4, END}},
    {HF(WSD, 0, 6, .decay_steps = 4, .decay_shape = IZ_LR_SHAPE_SQRT),
     8,
     {8, 8, 8, 4, 8 - 8 * M_SQRT1_2, END}},
};

static void rates_are_those_computed_by_hand(void **state)
{
    for (int i = 0; i < N_OF(rates); i++)
        for (int u = 0; u < N_OF(rates[i].want) && rates[i].want[u] != END; u++)
            assert_near(iz_lr(&rates[i].lr, rates[i].base, u),
                        rates[i].want[u]);
    assert_near(iz_lr(&rates[0].lr, 0.25, 1000000), 0.25);
}

/* What differs from a scale of 16, a window of 3 and a hysteresis of 2; one
 * letter per step: o overflows, g does not; and the scale after each. */
static const struct {
    enum iz_dtype dtype;
    int power, hysteresis;
    bool consecutive;
    double fixed, min;
    const char *steps;
    double want[8];
} scales[] = {
    /* Without fp16 it is one. */
    {IZ_BF16, 4, 2, false, 0, 1, "ooogog", {1, 1, 1, 1, 1, 1}},
    {IZ_F16, 4, 2, false, 8, 1, "ooogggg", {8, 8, 8, 8, 8, 8, 8}},
    /* It doubles after a window. */
    {IZ_F16, 4, 2, false, 0, 1, "gggggggg", {16, 16, 16, 32, 32, 32, 64, 64}},
    /* The first overflow only uses hysteresis; without a refill all later ones
     * halve. */
    {IZ_F16, 4, 2, false, 0, 1, "oogoo", {16, 8, 8, 4, 2}},
    /* Doubling refills it, */
    {IZ_F16, 4, 2, false, 0, 1, "ooggggoo", {16, 8, 8, 8, 8, 16, 16, 8}},
    /* and a consecutive one refills at once. */
    {IZ_F16, 4, 2, true, 0, 1, "ogogooo", {16, 16, 16, 16, 16, 8, 4}},
    {IZ_F16, 4, 1, false, 0, 1, "oogo", {8, 4, 4, 2}},
    /* The scale stops at its minimum: the last step fails. */
    {IZ_F16, 4, 1, false, 0, 3, "oooo", {8, 4, 3, -3}},
    /* Hysteresis comes before the minimum. */
    {IZ_F16, 0, 2, false, 0, 1, "oo", {1, -1}},
};

static void scales_are_those_computed_by_hand(void **state)
{
    for (int i = 0; i < N_OF(scales); i++) {
        struct iz_config c = {.dtype = scales[i].dtype};
        struct iz_loss_scale s;
        c.fp16 = (struct iz_fp16_config){.initial_scale_power = scales[i].power,
                                         .loss_scale_window = 3,
                                         .loss_scale = scales[i].fixed,
                                         .hysteresis = scales[i].hysteresis,
                                         .consecutive_hysteresis =
                                             scales[i].consecutive,
                                         .min_loss_scale = scales[i].min};
        iz_loss_scale_init(&s, &c);
        for (int k = 0; scales[i].steps[k] != '\0'; k++) {
            bool fails = scales[i].want[k] < 0;
            assert_int_equal(
                iz_loss_scale_update(&s, &c.fp16, scales[i].steps[k] == 'o'),
                fails ? -ERANGE : 0);
            if (s.scale != fabs(scales[i].want[k]))
                fail_msg("step %d of %s: %g is not %g", k, scales[i].steps,
                         s.scale, scales[i].want[k]);
            assert_true(fails || s.iteration == k + 1);
        }
    }
}

static void clip_factor_is_deepspeeds(void **state)
{
    assert_near(iz_schedule_clip_factor(3, 0), 1);   /* off */
    assert_near(iz_schedule_clip_factor(0.5, 1), 1); /* short enough */
    assert_near(iz_schedule_clip_factor(1, 1),
                1 / 1.000001); /* not at the limit itself */
    assert_near(iz_schedule_clip_factor(4, 1), 1 / 4.000001);
    assert_near(iz_schedule_clip_factor(4, 2), 2 / 4.000001);
    assert_near(iz_schedule_clip_factor(0, 1e-9), 1e-9 / 1e-6);
    assert_near(iz_schedule_clip_factor(NAN, 1),
                1); /* the gradient says it itself */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rates_are_those_computed_by_hand),
        cmocka_unit_test(scales_are_those_computed_by_hand),
        cmocka_unit_test(clip_factor_is_deepspeeds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
