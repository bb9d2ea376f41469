/* SPDX-License-Identifier: Apache-2.0 */
/* Learning rates, loss scale and clip factor against sequences computed by hand
 * and closed forms. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "runtime/engine/schedule.h"

#include <errno.h>
#include <math.h>

#define N_OF(a) ((int)(sizeof(a) / sizeof(a)[0]))

static void assert_near(double got, double want)
{
    if (!(fabs(got - want) <= 1e-15 + 1e-12 * fabs(want)))
        fail_msg("%.17g is not %.17g", got, want);
}

static void assert_lrs(const struct iz_lr_config *lr, double base,
                       const double *want, int n)
{
    for (int u = 0; u < n; u++)
        assert_near(iz_lr(lr, base, u), want[u]);
}

static void no_scheduler_is_the_optimizers_lr(void **state)
{
    struct iz_lr_config lr = {.kind = IZ_LR_CONST, .warmup_max_lr = 7};

    assert_near(iz_lr(&lr, 0.25, 0), 0.25);
    assert_near(iz_lr(&lr, 0.25, 1000000), 0.25);
}

/* 4 warm-up steps from 1 to 5: log(2) / log(4) = 1/2 of the way at iteration 1.
 */
static void warmup_by_logarithm(void **state)
{
    struct iz_lr_config lr = {.kind = IZ_LR_WARMUP,
                              .log_warmup = true,
                              .warmup_min_lr = 1,
                              .warmup_max_lr = 5,
                              .warmup_num_steps = 4};
    const double want[] = {1, 1, 3, 1 + 4 * 0.792481250360578091, 5, 5, 5};

    assert_lrs(&lr, 99, want, N_OF(want));
}

static void warmup_by_line(void **state)
{
    struct iz_lr_config lr = {.kind = IZ_LR_WARMUP,
                              .warmup_min_lr = 1,
                              .warmup_max_lr = 5,
                              .warmup_num_steps = 4};
    const double want[] = {1, 1, 2, 3, 4, 5, 5};

    assert_lrs(&lr, 99, want, N_OF(want));
}

static void one_warmup_step_counts_as_two(void **state)
{
    struct iz_lr_config lr = {
        .kind = IZ_LR_WARMUP, .warmup_max_lr = 8, .warmup_num_steps = 1};
    const double want[] = {0, 0, 4, 8, 8};
    const double want_log[] = {0, 0, 8, 8};

    assert_lrs(&lr, 99, want, N_OF(want));
    lr.log_warmup = true;
    assert_lrs(&lr, 99, want_log, N_OF(want_log));
}

/* Up in 4, down to 0 at iteration 8, which is update 9. */
static void decay_by_line(void **state)
{
    struct iz_lr_config lr = {.kind = IZ_LR_DECAY,
                              .warmup_max_lr = 8,
                              .warmup_num_steps = 4,
                              .total_num_steps = 8};
    const double want[] = {0, 0, 2, 4, 6, 8, 6, 4, 2, 0, 0, 0};

    assert_lrs(&lr, 99, want, N_OF(want));
}

static void decay_ends_above_zero_when_min_does(void **state)
{
    struct iz_lr_config lr = {.kind = IZ_LR_DECAY,
                              .warmup_min_lr = 1,
                              .warmup_max_lr = 5,
                              .warmup_num_steps = 2,
                              .total_num_steps = 4};
    const double want[] = {1, 1, 3, 5, 3, 1, 1};

    assert_lrs(&lr, 99, want, N_OF(want));
}

/* Shorter than its warm-up: one full step of warm-up end, then nothing left. */
static void decay_shorter_than_its_warmup(void **state)
{
    struct iz_lr_config lr = {.kind = IZ_LR_DECAY,
                              .warmup_max_lr = 4,
                              .warmup_num_steps = 4,
                              .total_num_steps = 2};
    const double want[] = {0, 0, 1, 2, 3, 0, 0};

    assert_lrs(&lr, 99, want, N_OF(want));
}

/* After the warm-up the quarters of a half cosine: done = 1/4, 1/2, 3/4, 1. */
static void cosine_of_the_optimizers_lr(void **state)
{
    struct iz_lr_config lr = {.kind = IZ_LR_COSINE,
                              .warmup_min_ratio = 0.25,
                              .cos_min_ratio = 0.1,
                              .warmup_num_steps = 4,
                              .total_num_steps = 8};
    const double h = sqrt(0.5);
    const double want[] = {0,     2.5,
                           4.375, 6.25,
                           8.125, 1 + 9 * (1 + h) / 2,
                           5.5,   1 + 9 * (1 - h) / 2,
                           1,     1,
                           1};

    assert_lrs(&lr, 10, want, N_OF(want));
}

static void cosine_warmup_by_logarithm(void **state)
{
    struct iz_lr_config lr = {.kind = IZ_LR_COSINE,
                              .log_warmup = true,
                              .cos_min_ratio = 0.5,
                              .warmup_num_steps = 4,
                              .total_num_steps = 4};
    const double want[] = {0, 0, 5, 10 * 0.792481250360578091, 10, 5, 5};

    assert_lrs(&lr, 10, want, N_OF(want));
}

/* The rate drops to its minimum at once and stays there. */
static void cosine_shorter_than_its_warmup(void **state)
{
    struct iz_lr_config lr = {.kind = IZ_LR_COSINE,
                              .cos_min_ratio = 0.5,
                              .warmup_num_steps = 4,
                              .total_num_steps = 2};
    const double want[] = {0, 0, 2, 4, 6, 4, 4, 4};

    assert_lrs(&lr, 8, want, N_OF(want));
}

static struct iz_config fp16_config(void)
{
    struct iz_config c = {.dtype = IZ_F16};

    c.fp16 = (struct iz_fp16_config){.initial_scale_power = 4,
                                     .loss_scale_window = 3,
                                     .hysteresis = 2,
                                     .min_loss_scale = 1};
    return c;
}

/* One letter per step: o overflows, g does not; the scale after each. */
static void assert_scales(const struct iz_config *c, const char *steps,
                          const double *want)
{
    struct iz_loss_scale s;

    iz_loss_scale_init(&s, c);
    for (int i = 0; steps[i] != '\0'; i++) {
        assert_int_equal(iz_loss_scale_update(&s, &c->fp16, steps[i] == 'o'),
                         0);
        if (s.scale != want[i])
            fail_msg("step %d of %s: %g is not %g", i, steps, s.scale, want[i]);
        assert_int_equal(s.iteration, i + 1);
    }
}

static void scale_is_one_without_fp16(void **state)
{
    struct iz_config c = fp16_config();
    const double want[] = {1, 1, 1, 1, 1, 1};

    c.dtype = IZ_BF16;
    assert_scales(&c, "ooogog", want);
}

static void static_scale_never_changes(void **state)
{
    struct iz_config c = fp16_config();
    const double want[] = {128, 128, 128, 128, 128, 128, 128};

    c.fp16.loss_scale = 128;
    assert_scales(&c, "ooogggg", want);
}

static void scale_doubles_after_a_window(void **state)
{
    struct iz_config c = fp16_config();
    const double want[] = {16, 16, 16, 32, 32, 32, 64, 64};

    assert_scales(&c, "gggggggg", want);
}

/* The first overflow only uses hysteresis; without a refill all later ones
 * halve. */
static void hysteresis_delays_the_first_halving(void **state)
{
    struct iz_config c = fp16_config();
    const double want[] = {16, 8, 8, 4, 2};

    assert_scales(&c, "oogoo", want);
}

static void doubling_refills_the_hysteresis(void **state)
{
    struct iz_config c = fp16_config();
    const double want[] = {16, 8, 8, 8, 8, 16, 16, 8};

    assert_scales(&c, "ooggggoo", want);
}

static void consecutive_hysteresis_refills_at_once(void **state)
{
    struct iz_config c = fp16_config();
    const double want[] = {16, 16, 16, 16, 16, 8, 4};

    c.fp16.consecutive_hysteresis = true;
    assert_scales(&c, "ogogooo", want);
}

static void hysteresis_of_one_halves_at_once(void **state)
{
    struct iz_config c = fp16_config();
    const double want[] = {8, 4, 4, 2};

    c.fp16.hysteresis = 1;
    assert_scales(&c, "oogo", want);
}

static void scale_stops_at_its_minimum(void **state)
{
    struct iz_config c = fp16_config();
    struct iz_loss_scale s;

    c.fp16.hysteresis = 1;
    c.fp16.min_loss_scale = 3; /* 16, 8, 4, 3 */
    iz_loss_scale_init(&s, &c);
    for (int i = 0; i < 3; i++)
        assert_int_equal(iz_loss_scale_update(&s, &c.fp16, true), 0);
    assert_near(s.scale, 3);
    assert_int_equal(iz_loss_scale_update(&s, &c.fp16, true), -ERANGE);
    assert_near(s.scale, 3);
}

static void hysteresis_comes_before_the_minimum(void **state)
{
    struct iz_config c = fp16_config();
    struct iz_loss_scale s;

    c.fp16.initial_scale_power = 0;
    iz_loss_scale_init(&s, &c);
    assert_int_equal(iz_loss_scale_update(&s, &c.fp16, true), 0);
    assert_int_equal(iz_loss_scale_update(&s, &c.fp16, true), -ERANGE);
}

static void clip_factor_is_deepspeeds(void **state)
{
    assert_near(iz_clip_factor(3, 0), 1);   /* off */
    assert_near(iz_clip_factor(0.5, 1), 1); /* short enough */
    assert_near(iz_clip_factor(1, 1),
                1 / 1.000001); /* not at the limit itself */
    assert_near(iz_clip_factor(4, 1), 1 / 4.000001);
    assert_near(iz_clip_factor(4, 2), 2 / 4.000001);
    assert_near(iz_clip_factor(0, 1e-9), 1e-9 / 1e-6);
    assert_near(iz_clip_factor(NAN, 1), 1); /* the gradient says it itself */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(no_scheduler_is_the_optimizers_lr),
        cmocka_unit_test(warmup_by_logarithm),
        cmocka_unit_test(warmup_by_line),
        cmocka_unit_test(one_warmup_step_counts_as_two),
        cmocka_unit_test(decay_by_line),
        cmocka_unit_test(decay_ends_above_zero_when_min_does),
        cmocka_unit_test(decay_shorter_than_its_warmup),
        cmocka_unit_test(cosine_of_the_optimizers_lr),
        cmocka_unit_test(cosine_warmup_by_logarithm),
        cmocka_unit_test(cosine_shorter_than_its_warmup),
        cmocka_unit_test(scale_is_one_without_fp16),
        cmocka_unit_test(static_scale_never_changes),
        cmocka_unit_test(scale_doubles_after_a_window),
        cmocka_unit_test(hysteresis_delays_the_first_halving),
        cmocka_unit_test(doubling_refills_the_hysteresis),
        cmocka_unit_test(consecutive_hysteresis_refills_at_once),
        cmocka_unit_test(hysteresis_of_one_halves_at_once),
        cmocka_unit_test(scale_stops_at_its_minimum),
        cmocka_unit_test(hysteresis_comes_before_the_minimum),
        cmocka_unit_test(clip_factor_is_deepspeeds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
