/* SPDX-License-Identifier: Apache-2.0 */
/* Where compute's time went, against hand-made logs of tasks; and the rule that
 * names the limit, on constructed shares: every verdict can be reached. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h needs those above. */
#include <cmocka.h>
#include <math.h>
#include <string.h>

#include "runtime/report/bottleneck.h"
#include "runtime/report/time_shares.h"

#define S INT64_C(1000000000)

/* Workers 0 and 1 compute; then a lane, a link up, a link down, a disk, and a
 * worker of the host beside a GPU. */
enum { A, B, LANE, UP, DOWN, DISK, HOST, WORKERS };

static const enum iz_where places[WORKERS] = {
    IZ_ON_COMPUTE, IZ_ON_COMPUTE, IZ_ON_LANE, IZ_ON_UP,
    IZ_ON_DOWN,    IZ_ON_IO,      IZ_ON_HOST};

static void add(struct iz_usage *u, int worker, enum iz_kind k, int64_t begin_s,
                int64_t end_s)
{
    struct iz_span s = {.kind = (short)k,
                        .worker = (short)worker,
                        .begin_ns = begin_s * S,
                        .end_ns = end_s * S};
    iz_usage_add(u, &s);
}

static void assert_near(double have, double want)
{
    if (!(fabs(have - want) < 1e-9))
        fail_msg("%.12g, wanted %.12g", have, want);
}

static void assert_whole(const struct iz_usage_total *t)
{
    double sum = 0;
    for (int c = 0; c < IZ_USES; c++)
        sum += t->share[c];
    assert_near(sum, 1);
}

static struct iz_usage_total closed(struct iz_usage *u)
{
    iz_usage_stop(u);
    struct iz_usage_total t = iz_usage_total(u);
    iz_usage_close(&u);
    return t;
}

static void time_is_given_to_what_runs(void **state)
{
    struct iz_usage *u;
    (void)state;
    assert_int_equal(iz_usage_open(&u, places, WORKERS), 0);
    iz_usage_until(u, 10 * S);
    add(u, A, IZ_FORWARD, 8, 14);   /* 4 in the window, B idle beside it */
    add(u, A, IZ_ADAM, 14, 16);     /* B waits for it: 2 + 2 */
    add(u, LANE, IZ_FETCH, 16, 18); /* both wait: 4, shared with the disk, */
    add(u, DISK, IZ_LOAD, 17, 18);  /* which takes 1 of them */
    add(u, A, IZ_NORM, 18, 20);
    add(u, B, IZ_BACKWARD, 18, 20);
    add(u, B, IZ_BACKWARD, 29, 40); /* 1 in the window */
    iz_usage_until(u, 30 * S);
    struct iz_usage_total t = closed(u);
    assert_near(t.window_s, 20);
    assert_near(t.share[IZ_USE_UNITS], (4 + 2 + 1) / 40.0);
    assert_near(t.share[IZ_USE_OPTIMIZER], 4 / 40.0);
    assert_near(t.share[IZ_USE_NETWORK], 3 / 40.0);
    assert_near(t.share[IZ_USE_DISK], 1 / 40.0);
    assert_near(t.share[IZ_USE_SUMS], 2 / 40.0);
    assert_near(t.share[IZ_USE_TASKS], (4 + 1) / 40.0);
    assert_near(t.share[IZ_USE_NOTHING], 18 / 40.0);
    assert_whole(&t);
    assert_near(t.busy[IZ_USE_NETWORK], 2 / 20.0);
    assert_near(t.worker[A], 8 / 20.0);
    assert_near(t.worker[B], 3 / 20.0);
    assert_near(t.worker[LANE], 2 / 20.0);
}

static void what_runs_beside_units_is_hidden(void **state)
{
    struct iz_usage *u;
    (void)state;
    assert_int_equal(iz_usage_open(&u, places, WORKERS), 0);
    iz_usage_until(u, 0);
    add(u, A, IZ_BACKWARD, 0, 6);
    add(u, UP, IZ_FETCH, 4, 10);
    add(u, DOWN, IZ_OFFLOAD, 6, 10);
    add(u, HOST, IZ_ADAM, 0, 2);
    iz_usage_until(u, 10 * S);
    struct iz_usage_total t = closed(u);
    assert_near(t.task_s[IZ_USE_UP], 6);
    assert_near(t.beside_units_s[IZ_USE_UP], 2);
    assert_near(t.task_s[IZ_USE_DOWN], 4);
    assert_near(t.beside_units_s[IZ_USE_DOWN], 0);
    assert_near(t.beside_units_s[IZ_USE_OPTIMIZER], 2);
    /* Nobody of compute waits for the host's worker beside a unit. */
    assert_near(t.share[IZ_USE_OPTIMIZER], 0);
    assert_near(t.share[IZ_USE_UP], 4 / 20.0);
    assert_near(t.share[IZ_USE_DOWN], 4 / 20.0);
    assert_whole(&t);
}

/* A run tells its events as they come, and saves in between. */
static void rounds_and_pauses_change_nothing(void **state)
{
    struct iz_usage *u;
    (void)state;
    assert_int_equal(iz_usage_open(&u, places, WORKERS), 0);
    for (int64_t i = 0; i < 20; i++) {
        if (i == 10) {
            iz_usage_stop(u); /* from 100 to 200 it saves */
            add(u, A, IZ_NORM, 150, 160);
            iz_usage_stop(u);
        }
        int64_t at = 10 * i + (i < 10 ? 0 : 100);
        iz_usage_until(u, at * S);
        add(u, A, IZ_FORWARD, at, at + 5);
        add(u, B, IZ_BACKWARD, at + 3, at + 12); /* over the round's end */
    }
    struct iz_usage_total t = closed(u);
    assert_near(t.window_s, 90 + 90);
    assert_near(t.worker[A], 5 * 18 / 180.0);
    assert_near(t.worker[B], (9 * 18 - 2 * 2) / 180.0);
    assert_whole(&t);
    assert_near(t.share[IZ_USE_SUMS], 0);
}

static void without_two_steps_nothing_is_known(void **state)
{
    struct iz_usage *u;
    struct iz_limit_measured m = {0};
    char text[512];
    (void)state;
    assert_int_equal(iz_usage_open(&u, places, WORKERS), 0);
    iz_usage_until(u, 5 * S);
    add(u, A, IZ_FORWARD, 5, 6);
    m.usage = closed(u);
    assert_int_equal(iz_limit_find(&m), IZ_LIMIT_UNKNOWN);
    iz_limit_text(text, sizeof(text), &m, &(struct iz_limit_setting){0});
    assert_non_null(strstr(text, "two steps"));
}

/* ---- the rule ---- */

/* `part` of compute's time for c, the rest for units. */
static struct iz_limit_measured measured(enum iz_use c, double part)
{
    struct iz_limit_measured m = {.usage.window_s = 1};
    m.usage.share[IZ_USE_UNITS] = 1 - part;
    m.usage.share[c] += part;
    return m;
}

static void every_verdict_is_reached(void **state)
{
    struct iz_limit_measured m[IZ_LIMITS] = {
        [IZ_LIMIT_COMPUTE] = measured(IZ_USE_OPTIMIZER, 0.09),
        [IZ_LIMIT_OPTIMIZER] = measured(IZ_USE_OPTIMIZER, 0.11),
        [IZ_LIMIT_WORKERS] = measured(IZ_USE_OPTIMIZER, 0.3),
        [IZ_LIMIT_SUMS] = measured(IZ_USE_SUMS, 0.2),
        [IZ_LIMIT_NETWORK] = measured(IZ_USE_NETWORK, 0.2),
        [IZ_LIMIT_UP] = measured(IZ_USE_UP, 0.2),
        [IZ_LIMIT_DOWN] = measured(IZ_USE_DOWN, 0.2),
        [IZ_LIMIT_DISK] = measured(IZ_USE_DISK, 0.2),
        [IZ_LIMIT_LATE] = measured(IZ_USE_UP, 0.2),
        [IZ_LIMIT_TASKS] = measured(IZ_USE_TASKS, 0.2),
        [IZ_LIMIT_SUBMISSION] = measured(IZ_USE_NOTHING, 0.2),
        [IZ_LIMIT_GAPS] = measured(IZ_USE_NOTHING, 0.2),
    };
    (void)state;
    m[IZ_LIMIT_WORKERS].host_busy = 0.81;
    m[IZ_LIMIT_OPTIMIZER].host_busy = 0.79;
    for (int c = 0; c < IZ_USES_RUNNING; c++)
        for (int l = 0; l < IZ_LIMITS; l++)
            m[l].usage.busy[c] = l == IZ_LIMIT_LATE ? 0.79 : 0.81;
    m[IZ_LIMIT_SUBMISSION].submitting = 0.81;
    m[IZ_LIMIT_GAPS].submitting = 0.79;
    for (int l = 0; l < IZ_LIMITS; l++) {
        enum iz_limit found = iz_limit_find(&m[l]);
        if (found != (enum iz_limit)l)
            fail_msg("%s, wanted %s", iz_limit_names[found], iz_limit_names[l]);
    }
}

static void the_largest_loss_is_the_limit(void **state)
{
    struct iz_limit_measured m = measured(IZ_USE_TASKS, 0.2);
    (void)state;
    m.usage.share[IZ_USE_NETWORK] = 0.21;
    m.usage.share[IZ_USE_UNITS] -= 0.21;
    m.usage.busy[IZ_USE_NETWORK] = 1;
    assert_int_equal(iz_limit_find(&m), IZ_LIMIT_NETWORK);
    m.usage.share[IZ_USE_NETWORK] = 0.19;
    assert_int_equal(iz_limit_find(&m), IZ_LIMIT_TASKS);
}

static void assert_text(const struct iz_limit_measured *m,
                        const struct iz_limit_setting *s, const char *part)
{
    char text[512];
    iz_limit_text(text, sizeof(text), m, s);
    if (!strstr(text, part))
        fail_msg("\"%s\" is not in: %s", part, text);
    assert_true(strlen(text) < 250);
    assert_null(strchr(text, '"')); /* it goes into JSON as it is */
}

/* A setting that is there already is not proposed. */
static void a_sentence_names_a_setting_that_would_move_it(void **state)
{
    struct iz_limit_setting s = {.overlap = true, .overlap_comm = true};
    struct iz_limit_measured m = measured(IZ_USE_OPTIMIZER, 0.05);
    (void)state;
    assert_text(&m, &s, "fill 95 %");
    assert_text(&m, &s, "more ranks");
    s.recompute = true;
    assert_text(&m, &s, "run.recompute=none");
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
    s.state_on_disk = true;
    assert_text(&m, &s, "offload_optimizer.device=cpu");
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
    s.slices_fixed = true;
    assert_text(&m, &s, "run.slices=0");
    s.slices = 8;
    assert_text(&m, &s, "run.parallel_micro_batches");
}

int main(void)
{
    const struct CMUnitTest usage_tests[] = {
        cmocka_unit_test(time_is_given_to_what_runs),
        cmocka_unit_test(what_runs_beside_units_is_hidden),
        cmocka_unit_test(rounds_and_pauses_change_nothing),
        cmocka_unit_test(without_two_steps_nothing_is_known),
        cmocka_unit_test(every_verdict_is_reached),
        cmocka_unit_test(the_largest_loss_is_the_limit),
        cmocka_unit_test(a_sentence_names_a_setting_that_would_move_it),
    };
    return cmocka_run_group_tests(usage_tests, NULL, NULL);
}
