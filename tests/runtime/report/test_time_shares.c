/* SPDX-License-Identifier: Apache-2.0 */
/* Hidden time and where compute's time went, against a count of seconds; and
 * the rule that names the limit, on constructed shares: every verdict can be
 * reached. */
#include "tests/runtime/fixture.h"

#include "runtime/report/bottleneck.h"
#include "runtime/report/time_shares.h"

#define S INT64_C(1000000000)

static void assert_near(double have, double want)
{
    if (!(fabs(have - want) < 1e-9))
        fail_msg("%.12g, wanted %.12g", have, want);
}

/* ---- a random log ---- */

/* Workers 0 and 1 compute; then the comm worker, a link up, a link down, a
 * disk, and a worker of the host beside a GPU. */
enum { COMM = 2, HOST = 6, WORKERS };
static const enum iz_where where[WORKERS] = {
    IZ_ON_COMPUTE, IZ_ON_COMPUTE, IZ_ON_COMM, IZ_ON_H2D,
    IZ_ON_D2H,     IZ_ON_IO,      IZ_ON_HOST};

/* The first three hide others; compute has the first six, others the last five.
 */
static const enum iz_kind kinds[] = {IZ_FORWARD, IZ_BACKWARD, IZ_EVAL,
                                     IZ_SAMPLE,  IZ_ADAM,     IZ_NORM,
                                     IZ_FETCH,   IZ_REDUCE,   IZ_OFFLOAD};

static enum iz_use use_of(int worker, int kind)
{
    static const enum iz_use links[WORKERS] = {
        0, 0, IZ_USE_NETWORK, IZ_USE_UP, IZ_USE_DOWN, IZ_USE_DISK, 0};
    return links[worker]            ? links[worker]
           : kind < 4               ? IZ_USE_UNITS
           : kinds[kind] == IZ_ADAM ? IZ_USE_OPTIMIZER
                                    : IZ_USE_SUMS;
}

/* A step takes 10 seconds.  From BEHIND on, the host's tasks are those behind
 * the last step. */
enum { SECONDS = 600, BEHIND = 500 };
static struct task {
    int kind, begin, end;
} now[WORKERS][SECONDS];

/* Adds what ends until then, and continues the log behind it. */
static void run_until(struct iz_time_shares *x, struct task *next, int end)
{
    for (int w = 0; w < WORKERS; w++)
        while (next[w].end <= end) {
            struct task *t = &next[w];
            struct iz_span s = {.kind = (short)kinds[t->kind],
                                .worker = (short)w,
                                .begin_ns = t->begin * S,
                                .end_ns = t->end * S};
            if (w == HOST && t->begin >= BEHIND)
                iz_time_shares_add_behind(x, &s);
            else
                iz_time_shares_add(x, &s);
            for (int i = t->begin; i < t->end; i++)
                now[w][i] = *t;
            t->kind = (int)(w < COMM ? random_below(6) : 4 + random_below(5));
            t->begin = t->end + (int)random_below(6);
            t->end = t->begin + 1 + (int)random_below(w == COMM ? 20 : 10);
        }
}

/* Of a second: each idle worker of compute lacks a task beside a unit, or waits
 * for all that runs alike. */
static void count_second(struct iz_time_total *t, int second)
{
    int running[IZ_USES] = {0}, waits = 0;
    for (int w = 0; w < WORKERS; w++)
        if (now[w][second].kind >= 0) {
            running[use_of(w, now[w][second].kind)]++;
            t->worker[w]++;
        }
    for (int c = 0; c < IZ_USES_RUNNING; c++) {
        waits += running[c] > 0;
        t->busy[c] += running[c] > 0;
        t->task_s[c] += running[c];
        t->beside_units_s[c] += running[IZ_USE_UNITS] ? running[c] : 0;
    }
    for (int w = 0; w < COMM; w++)
        if (now[w][second].kind >= 0)
            t->share[use_of(w, now[w][second].kind)]++;
        else if (running[IZ_USE_UNITS] || !waits)
            t->share[waits ? IZ_USE_TASKS : IZ_USE_NOTHING]++;
        else
            for (int c = 0; c < IZ_USES_RUNNING; c++)
                t->share[c] += running[c] ? 1.0 / waits : 0;
    t->window_s++;
}

/* A run tells its tasks when they end, and saves from 200 to 300, between the
 * windows. */
static void time_is_that_of_a_count_of_seconds(void **state)
{
    struct iz_time_shares *x = iz_time_shares_open(where, WORKERS);
    struct task next[WORKERS] = {{0}};
    double seconds[IZ_KINDS] = {0}, hidden[IZ_KINDS] = {0}, all[IZ_USES] = {0};
    struct iz_time_total want = {0};
    memset(now, -1, sizeof(now));
    for (int end = 0; end <= SECONDS; end += 10) {
        run_until(x, next, end);
        if (end == SECONDS || (end >= 200 && end < 300))
            iz_time_shares_stop(x, end == SECONDS);
        else
            iz_time_shares_until(x, end * S);
    }
    for (int i = 0; i < SECONDS; i++) {
        bool hides = false;
        for (int w = 0; w < COMM; w++)
            hides |= now[w][i].kind >= 0 && now[w][i].kind < 3;
        for (int w = 0; w < WORKERS; w++) {
            const struct task *t = &now[w][i];
            if (t->kind >= 0)
                all[use_of(w, t->kind)]++;
            if (t->kind >= 0 && (w != HOST || t->begin < BEHIND)) {
                seconds[kinds[t->kind]]++;
                hidden[kinds[t->kind]] += hides && t->kind > 2;
            }
        }
        if (i < 190 || (i >= 300 && i < 590))
            count_second(&want, i);
    }
    struct iz_time_total t = iz_time_shares_total(x);
    assert_near(t.window_s, want.window_s);
    for (int c = 0; c < IZ_USES; c++)
        assert_near(t.share[c], want.share[c] / COMM / want.window_s);
    for (int c = 0; c < IZ_USES_RUNNING; c++) {
        assert_near(t.busy[c], want.busy[c] / want.window_s);
        assert_near(t.task_s[c], want.task_s[c]);
        assert_near(t.beside_units_s[c], want.beside_units_s[c]);
        assert_near(iz_time_shares_seconds(x, (enum iz_use)c), all[c]);
    }
    for (int w = 0; w < WORKERS; w++)
        assert_near(t.worker[w], want.worker[w] / want.window_s);
    for (int k = 0; k < IZ_KINDS; k++) {
        struct iz_kind_time one = iz_time_shares_kind(x, (enum iz_kind)k);
        assert_near(one.seconds, seconds[k]);
        assert_near(one.hidden_s, hidden[k]);
    }
    iz_time_shares_close(&x);
}

static void add(struct iz_time_shares *x, enum iz_kind k, int begin, int end)
{
    struct iz_span s = {
        .kind = (short)k, .begin_ns = begin * S, .end_ns = end * S};
    iz_time_shares_add(x, &s);
}

/* Or a run of a month would keep every span. */
static void old_computation_is_forgotten(void **state)
{
    struct iz_time_shares *x = iz_time_shares_open(where, WORKERS);
    for (int i = 0; i < 10; i++) {
        add(x, IZ_FORWARD, 10 * i, 10 * i + 4);
        add(x, IZ_NORM, 10 * i + 5, 10 * i + 6);
        iz_time_shares_stop(x, false);
    }
    add(x, IZ_FETCH, 0, 100);
    iz_time_shares_stop(x, true);
    assert_true(iz_time_shares_kind(x, IZ_FETCH).hidden_s < 20);
    iz_time_shares_close(&x);
}

/* ---- the rule ---- */

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
    struct iz_bottleneck_measured m = {0};
    assert_text(&m, &s, "two steps");
    m = measured(IZ_USE_OPTIMIZER, 0.05);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(time_is_that_of_a_count_of_seconds),
        cmocka_unit_test(old_computation_is_forgotten),
        cmocka_unit_test(every_verdict_is_reached),
        cmocka_unit_test(the_largest_loss_is_the_limit),
        cmocka_unit_test(a_sentence_names_a_setting_that_would_move_it),
        cmocka_unit_test(small_losses_together_are_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
