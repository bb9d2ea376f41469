/* SPDX-License-Identifier: Apache-2.0 */
/* Hidden time and where compute's time went, against hand-made logs of tasks;
 * and the rule that names the limit, on constructed shares: every verdict can
 * be reached. */
#include "tests/runtime/fixture.h"

#include "runtime/report/bottleneck.h"
#include "runtime/report/time_shares.h"

#define S INT64_C(1000000000)

/* Workers 0 and 1 compute; then the comm worker, a link up, a link down, a
 * disk, and a worker of the host beside a GPU. */
enum { A, B, COMM, UP, DOWN, DISK, HOST, WORKERS };

static const enum iz_where kinds[WORKERS] = {
    IZ_ON_COMPUTE, IZ_ON_COMPUTE, IZ_ON_COMM, IZ_ON_H2D,
    IZ_ON_D2H,     IZ_ON_IO,      IZ_ON_HOST};

static struct iz_time_shares *x;

static int shares_open(void **state)
{
    x = iz_time_shares_open(kinds, WORKERS);
    return 0;
}

static int shares_close(void **state)
{
    iz_time_shares_close(&x);
    return 0;
}

static void add(int worker, enum iz_kind k, int64_t begin_s, int64_t end_s)
{
    struct iz_span s = {.kind = (short)k,
                        .worker = (short)worker,
                        .begin_ns = begin_s * S,
                        .end_ns = end_s * S};
    iz_time_shares_add(x, &s);
}

static void assert_near(double have, double want)
{
    if (!(fabs(have - want) < 1e-9))
        fail_msg("%.12g, wanted %.12g", have, want);
}

static void assert_text(const struct iz_bottleneck_measured *m,
                        const struct iz_bottleneck_setting *s, const char *part)
{
    char text[512];
    iz_bottleneck_text(text, sizeof(text), m, s);
    if (!strstr(text, part))
        fail_msg("\"%s\" is not in: %s", part, text);
    assert_true(strlen(text) < 250);
    assert_null(strchr(text, '"')); /* it goes into JSON as it is */
}

/* Of all that was added; the parts of compute's time are all of it. */
static struct iz_time_total total(void)
{
    double sum = 0;
    iz_time_shares_stop(x, true);
    struct iz_time_total t = iz_time_shares_total(x);
    for (int c = 0; c < IZ_USES; c++)
        sum += t.share[c];
    assert_near(sum, t.window_s > 0);
    return t;
}

static void time_is_given_to_what_runs(void **state)
{
    iz_time_shares_until(x, 10 * S);
    add(A, IZ_FORWARD, 8, 14);   /* 4 in the window, B idle beside it */
    add(A, IZ_ADAM, 14, 16);     /* B waits for it: 2 + 2 */
    add(COMM, IZ_FETCH, 16, 18); /* both wait: 4, shared with the disk, */
    add(DISK, IZ_LOAD, 17, 18);  /* which takes 1 of them */
    add(A, IZ_NORM, 18, 20);
    add(B, IZ_BACKWARD, 18, 20);
    add(B, IZ_BACKWARD, 29, 40); /* 1 in the window */
    iz_time_shares_until(x, 30 * S);
    struct iz_time_total t = total();
    assert_near(t.window_s, 20);
    assert_near(t.share[IZ_USE_UNITS], (4 + 2 + 1) / 40.0);
    assert_near(t.share[IZ_USE_OPTIMIZER], 4 / 40.0);
    assert_near(t.share[IZ_USE_NETWORK], 3 / 40.0);
    assert_near(t.share[IZ_USE_DISK], 1 / 40.0);
    assert_near(t.share[IZ_USE_SUMS], 2 / 40.0);
    assert_near(t.share[IZ_USE_TASKS], (4 + 1) / 40.0);
    assert_near(t.share[IZ_USE_NOTHING], 18 / 40.0);
    assert_near(t.busy[IZ_USE_NETWORK], 2 / 20.0);
    assert_near(t.worker[A], 8 / 20.0);
    assert_near(t.worker[B], 3 / 20.0);
    assert_near(t.worker[COMM], 2 / 20.0);
}

static void what_runs_beside_units_is_hidden(void **state)
{
    iz_time_shares_until(x, 0);
    add(A, IZ_BACKWARD, 0, 6);
    add(UP, IZ_FETCH, 4, 10);
    add(DOWN, IZ_OFFLOAD, 6, 10);
    add(HOST, IZ_ADAM, 0, 2);
    iz_time_shares_until(x, 10 * S);
    struct iz_time_total t = total();
    assert_near(t.task_s[IZ_USE_UP], 6);
    assert_near(t.beside_units_s[IZ_USE_UP], 2);
    assert_near(t.task_s[IZ_USE_DOWN], 4);
    assert_near(t.beside_units_s[IZ_USE_DOWN], 0);
    assert_near(t.beside_units_s[IZ_USE_OPTIMIZER], 2);
    /* Nobody of compute waits for the host's worker beside a unit. */
    assert_near(t.share[IZ_USE_OPTIMIZER], 0);
    assert_near(t.share[IZ_USE_UP], 4 / 20.0);
    assert_near(t.share[IZ_USE_DOWN], 4 / 20.0);
}

/* A run tells its events as they come, and saves in between. */
static void rounds_and_pauses_change_nothing(void **state)
{
    for (int64_t i = 0; i < 20; i++) {
        if (i == 10) {
            iz_time_shares_stop(x, false); /* from 100 to 200 it saves */
            add(A, IZ_NORM, 150, 160);
            iz_time_shares_stop(x, false);
        }
        int64_t at = 10 * i + (i < 10 ? 0 : 100);
        iz_time_shares_until(x, at * S);
        add(A, IZ_FORWARD, at, at + 5);
        add(B, IZ_BACKWARD, at + 3, at + 12); /* over the round's end */
    }
    struct iz_time_total t = total();
    assert_near(t.window_s, 90 + 90);
    assert_near(t.worker[A], 5 * 18 / 180.0);
    assert_near(t.worker[B], (9 * 18 - 2 * 2) / 180.0);
    assert_near(t.share[IZ_USE_SUMS], 0);
}

static void without_two_steps_nothing_is_known(void **state)
{
    struct iz_bottleneck_measured m = {0};
    iz_time_shares_until(x, 5 * S);
    add(A, IZ_FORWARD, 5, 6);
    m.usage = total();
    assert_int_equal(iz_bottleneck_find(&m), IZ_BOTTLENECK_UNKNOWN);
    assert_text(&m, &(struct iz_bottleneck_setting){0}, "two steps");
}

/* ---- hidden time: of each kind, beside forwards and backwards ---- */

static void assert_hidden(enum iz_kind k, double seconds, double hidden)
{
    assert_near(iz_time_shares_kind(x, k).seconds, seconds);
    assert_near(iz_time_shares_kind(x, k).hidden_s, hidden);
}

static void time_beside_computation_is_hidden(void **state)
{
    add(A, IZ_FORWARD, 10, 20);
    add(A, IZ_BACKWARD, 15, 30); /* overlaps the other: counted once */
    add(A, IZ_ADAM, 5, 12);      /* 2 of 7 */
    add(A, IZ_ADAM, 12, 28);     /* all 16 */
    add(A, IZ_REDUCE, 29, 40);   /* 1 of 11 */
    add(A, IZ_FETCH, 0, 10);     /* touches only */
    iz_time_shares_stop(x, true);
    assert_hidden(IZ_ADAM, 23, 18);
    assert_hidden(IZ_REDUCE, 11, 1);
    assert_hidden(IZ_FETCH, 10, 0);
}

/* A computation is logged when it ends, so it may come a round after what ran
 * beside it. */
static void a_late_computation_still_counts(void **state)
{
    add(A, IZ_ADAM, 1, 3);
    iz_time_shares_stop(x, false);
    add(A, IZ_FORWARD, 0, 4);
    iz_time_shares_stop(x, false);
    add(A, IZ_ADAM, 5, 6);
    iz_time_shares_stop(x, true);
    assert_hidden(IZ_ADAM, 3, 2);
}

/* A long wait is logged when it ends, rounds after what ran beside it. */
static void a_long_task_counts_old_computation(void **state)
{
    add(A, IZ_FORWARD, 0, 4);
    add(A, IZ_NORM, 5, 6);
    iz_time_shares_stop(x, false);
    add(A, IZ_REDUCE, 1, 7);
    iz_time_shares_stop(x, true);
    assert_hidden(IZ_REDUCE, 6, 3);
}

/* Or a run of a month would keep every span. */
static void old_computation_is_forgotten(void **state)
{
    for (int i = 0; i < 10; i++) {
        add(A, IZ_FORWARD, 10 * i, 10 * i + 4);
        add(A, IZ_NORM, 10 * i + 5, 10 * i + 6);
        iz_time_shares_stop(x, false);
    }
    add(A, IZ_FETCH, 0, 100);
    iz_time_shares_stop(x, true);
    assert_true(iz_time_shares_kind(x, IZ_FETCH).hidden_s < 20);
}

static void gaps_between_computations_are_not_hidden(void **state)
{
    for (int i = 0; i < 100; i++)
        add(A, IZ_FORWARD, 4 * (99 - i), 4 * (99 - i) + 1);
    add(A, IZ_FETCH, 0, 400);
    iz_time_shares_stop(x, true);
    assert_hidden(IZ_FETCH, 400, 100);
}

/* Steps of a run: the figures of the kinds are those of all tasks, also before
 * the window, between two of them and under way; those of the window are not.
 */
static void both_accounts_share_a_log(void **state)
{
    add(A, IZ_FORWARD, 0, 9);
    add(B, IZ_ADAM, 0, 8); /* before the window */
    for (int64_t i = 1; i < 12; i++) {
        iz_time_shares_until(x, 10 * i * S);
        if (i == 6) { /* what was added before it is in no later window */
            add(DOWN, IZ_OFFLOAD, 65, 75);
            iz_time_shares_stop(x, false);
        }
        add(A, IZ_FORWARD, 10 * i, 10 * i + 9);
        add(B, IZ_ADAM, 10 * i, 10 * i + 10); /* 9 of 10 */
    }
    assert_hidden(IZ_ADAM, 8 + 11 * 10, 8 + 9 * 9);
    add(COMM, IZ_REDUCE, 110, 119);
    iz_time_shares_stop(x, true);
    assert_hidden(IZ_ADAM, 8 + 11 * 10, 8 + 11 * 9);
    assert_hidden(IZ_REDUCE, 9, 9);
    struct iz_time_total t = iz_time_shares_total(x);
    assert_near(t.window_s, 50 + 40); /* 10 to 60 and 70 to 110 */
    assert_near(t.task_s[IZ_USE_OPTIMIZER], 90);
    assert_near(t.beside_units_s[IZ_USE_OPTIMIZER], 9 * 9);
    assert_near(t.task_s[IZ_USE_DOWN], 0);
    assert_near(iz_time_shares_seconds(x, IZ_USE_NETWORK), 9);
}

/* A simulation ends within the last optimizer. */
static void behind_the_last_step_no_kind_counts(void **state)
{
    struct iz_span s = {
        .kind = IZ_ADAM, .worker = B, .begin_ns = 4 * S, .end_ns = 12 * S};
    add(A, IZ_FORWARD, 0, 10);
    add(B, IZ_ADAM, 0, 4);
    iz_time_shares_add_behind(x, &s);
    iz_time_shares_until(x, 2 * S);
    iz_time_shares_until(x, 10 * S);
    iz_time_shares_stop(x, true);
    assert_hidden(IZ_ADAM, 4, 4);
    assert_int_equal(iz_time_shares_kind(x, IZ_ADAM).tasks, 1);
    assert_near(iz_time_shares_total(x).task_s[IZ_USE_OPTIMIZER], 8);
    assert_near(iz_time_shares_seconds(x, IZ_USE_OPTIMIZER), 12);
}

/* ---- the rule ---- */

/* `part` of compute's time for c, the rest for units. */
static struct iz_bottleneck_measured measured(enum iz_use c, double part)
{
    struct iz_bottleneck_measured m = {.usage.window_s = 1};
    m.usage.share[IZ_USE_UNITS] = 1 - part;
    m.usage.share[c] += part;
    return m;
}

static void every_verdict_is_reached(void **state)
{
    struct iz_bottleneck_measured m[IZ_BOTTLENECKS] = {
        [IZ_BOTTLENECK_COMPUTE] = measured(IZ_USE_OPTIMIZER, 0.09),
        [IZ_BOTTLENECK_OPTIMIZER] = measured(IZ_USE_OPTIMIZER, 0.11),
        [IZ_BOTTLENECK_WORKERS] = measured(IZ_USE_OPTIMIZER, 0.3),
        [IZ_BOTTLENECK_SUMS] = measured(IZ_USE_SUMS, 0.2),
        [IZ_BOTTLENECK_NETWORK] = measured(IZ_USE_NETWORK, 0.2),
        [IZ_BOTTLENECK_UP] = measured(IZ_USE_UP, 0.2),
        [IZ_BOTTLENECK_DOWN] = measured(IZ_USE_DOWN, 0.2),
        [IZ_BOTTLENECK_DISK] = measured(IZ_USE_DISK, 0.2),
        [IZ_BOTTLENECK_LATE] = measured(IZ_USE_UP, 0.2),
        [IZ_BOTTLENECK_TASKS] = measured(IZ_USE_TASKS, 0.2),
        [IZ_BOTTLENECK_SUBMISSION] = measured(IZ_USE_NOTHING, 0.2),
        [IZ_BOTTLENECK_GAPS] = measured(IZ_USE_NOTHING, 0.2),
    };
    m[IZ_BOTTLENECK_WORKERS].host_busy = 0.81;
    m[IZ_BOTTLENECK_OPTIMIZER].host_busy = 0.79;
    for (int c = 0; c < IZ_USES_RUNNING; c++)
        for (int l = 0; l < IZ_BOTTLENECKS; l++)
            m[l].usage.busy[c] = l == IZ_BOTTLENECK_LATE ? 0.79 : 0.81;
    m[IZ_BOTTLENECK_SUBMISSION].submitting = 0.81;
    m[IZ_BOTTLENECK_GAPS].submitting = 0.79;
    for (int l = 0; l < IZ_BOTTLENECKS; l++) {
        enum iz_bottleneck found = iz_bottleneck_find(&m[l]);
        if (found != (enum iz_bottleneck)l)
            fail_msg("%s, wanted %s", iz_bottleneck_names[found],
                     iz_bottleneck_names[l]);
    }
}

static void the_largest_loss_is_the_limit(void **state)
{
    struct iz_bottleneck_measured m = measured(IZ_USE_TASKS, 0.2);
    m.usage.share[IZ_USE_NETWORK] = 0.21;
    m.usage.share[IZ_USE_UNITS] -= 0.21;
    m.usage.busy[IZ_USE_NETWORK] = 1;
    assert_int_equal(iz_bottleneck_find(&m), IZ_BOTTLENECK_NETWORK);
    m.usage.share[IZ_USE_NETWORK] = 0.19;
    assert_int_equal(iz_bottleneck_find(&m), IZ_BOTTLENECK_TASKS);
}

/* A setting that is there already is not proposed. */
static void a_sentence_names_a_setting_that_would_move_it(void **state)
{
    struct iz_bottleneck_setting s = {.overlap = true, .overlap_comm = true};
    struct iz_bottleneck_measured m = measured(IZ_USE_OPTIMIZER, 0.05);
    assert_text(&m, &s, "fill 95 %");
    assert_text(&m, &s, "more ranks");
    s.recomputes = true;
    assert_text(&m, &s, "more ranks");
    s.samples = 2;
    assert_text(&m, &s, "fewer samples a micro-batch");
    s.breadth_first = true;
    assert_text(&m, &s, "fewer samples a micro-batch");
    s.micro_batches = 4;
    assert_text(&m, &s, "run.schedule=depth_first");
    s.recompute_asked = true;
    assert_text(&m, &s, "run.recompute=auto");
    s = (struct iz_bottleneck_setting){.overlap = true, .overlap_comm = true};
    m = measured(IZ_USE_OPTIMIZER, 0.25);
    assert_text(&m, &s, "train_batch_size");
    s.overlap = false;
    s.divisible = true;
    assert_text(&m, &s, "run.overlap=true");
    s.overlap = true;
    assert_text(&m, &s, "a smaller offload_optimizer.ratio");
    m.host_busy = 0.9;
    assert_text(&m, &s, "run.workers");
    m = measured(IZ_USE_NETWORK, 0.25);
    m.usage.busy[IZ_USE_NETWORK] = 0.5;
    s.rings = true;
    s.ring = 2;
    assert_text(&m, &s, "run.ring=4 in place of 2");
    s.overlap_comm = false;
    assert_text(&m, &s, "overlap_comm=true");
    m.usage.busy[IZ_USE_NETWORK] = 0.9;
    s.micro_batches = 4;
    assert_text(&m, &s, "run.schedule=breadth_first");
    s.breadth_first = true;
    assert_text(&m, &s, "bf16");
    s.half = true;
    assert_text(&m, &s, "train_micro_batch_size_per_gpu");
    m = measured(IZ_USE_DISK, 0.25);
    m.usage.busy[IZ_USE_DISK] = 0.9;
    assert_text(&m, &s, "run.save_interval");
    s.boundary_on_disk = true;
    assert_text(&m, &s, "activation_checkpointing.nvme_path");
    s.state_on_disk = true;
    assert_text(&m, &s, "offload_optimizer.device=cpu");
    s.state_on_disk = false;
    s.frozen_on_disk = true;
    assert_text(&m, &s, "offload_param.frozen_device=cpu");
    s.param_on_disk = true;
    assert_text(&m, &s, "offload_param.device=cpu");
    m = measured(IZ_USE_NOTHING, 0.25);
    s.in_flight = 1;
    assert_text(&m, &s, "run.in_flight=2");
    m.submitting = 1;
    assert_text(&m, &s, "sub_group_size");
    m = measured(IZ_USE_TASKS, 0.25);
    s.workers = 8;
    assert_text(&m, &s, "train_micro_batch_size_per_gpu");
    s.few_slices = true;
    assert_text(&m, &s, "a larger run.slices");
    s.slices = 8;
    assert_text(&m, &s, "run.parallel_micro_batches");
}

/* Losses that are small one by one may be large together. */
static void small_losses_together_are_told(void **state)
{
    struct iz_bottleneck_setting s = {
        .overlap = true, .divisible = true, .gpu = true, .half = true};
    struct iz_bottleneck_measured m = measured(IZ_USE_OPTIMIZER, 0.09);
    assert_text(&m, &s, "fill 91 %");
    assert_text(&m, &s, "only more ranks");
    m.usage.share[IZ_USE_SUMS] = 0.08;
    m.usage.share[IZ_USE_UNITS] -= 0.08;
    assert_int_equal(iz_bottleneck_find(&m), IZ_BOTTLENECK_COMPUTE);
    assert_text(&m, &s, "fill 83 %");
    assert_text(&m, &s, "9 %, goes to the optimizer: a smaller offload_opt");
    m.host_busy = 0.9;
    assert_text(&m, &s, "more workers (run.workers");
    m.host_busy = 0;
    m.usage.share[IZ_USE_OPTIMIZER] = 0.07;
    m.usage.share[IZ_USE_UNITS] += 0.02;
    assert_text(&m, &s, "copies: more samples a micro-batch");
    s.micro_batches = 1; /* a GPU with a part of the states sums for them */
    assert_text(&m, &s, "copies: a smaller offload_optimizer.ratio");
    m.usage.share[IZ_USE_NOTHING] = 0.095;
    m.usage.share[IZ_USE_UNITS] -= 0.095;
    m.submitting = 1;
    assert_text(&m, &s, "gaps between tasks: larger tasks");
    s.recomputes = true; /* for want of memory, and one sample is the least */
    s.samples = 1;
    assert_text(&m, &s, "gaps between tasks: larger tasks");
    s.samples = 2;
    assert_text(&m, &s, "fewer samples a micro-batch");
    s.recompute_asked = true;
    assert_text(&m, &s, "run.recompute=auto");
}

/* With a log of its own. */
#define SHARES(f) cmocka_unit_test_setup_teardown(f, shares_open, shares_close)

int main(void)
{
    const struct CMUnitTest tests[] = {
        SHARES(time_is_given_to_what_runs),
        SHARES(what_runs_beside_units_is_hidden),
        SHARES(rounds_and_pauses_change_nothing),
        SHARES(without_two_steps_nothing_is_known),
        SHARES(time_beside_computation_is_hidden),
        SHARES(a_late_computation_still_counts),
        SHARES(a_long_task_counts_old_computation),
        SHARES(old_computation_is_forgotten),
        SHARES(gaps_between_computations_are_not_hidden),
        SHARES(both_accounts_share_a_log),
        SHARES(behind_the_last_step_no_kind_counts),
        SHARES(every_verdict_is_reached),
        SHARES(the_largest_loss_is_the_limit),
        SHARES(a_sentence_names_a_setting_that_would_move_it),
        SHARES(small_losses_together_are_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
