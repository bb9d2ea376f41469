/* SPDX-License-Identifier: Apache-2.0 */
/* Hidden time against hand-made logs of tasks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h needs those above. */
#include <cmocka.h>
#include <math.h>

#include "runtime/report/overlap.h"

#define S INT64_C(1000000000)

static void add(struct iz_overlap *o, enum iz_kind k, int64_t begin_s,
                int64_t end_s)
{
    struct iz_span s = {
        .kind = (short)k, .begin_ns = begin_s * S, .end_ns = end_s * S};
    iz_overlap_add(o, &s);
}

static void assert_hidden(const struct iz_overlap *o, enum iz_kind k,
                          double seconds, double hidden)
{
    assert_true(fabs(iz_overlap_kind(o, k)->seconds - seconds) < 1e-9);
    assert_true(fabs(iz_overlap_kind(o, k)->hidden_s - hidden) < 1e-9);
}

static void time_beside_computation_is_hidden(void **state)
{
    struct iz_overlap *o;
    (void)state;
    assert_int_equal(iz_overlap_open(&o), 0);
    add(o, IZ_FORWARD, 10, 20);
    add(o, IZ_BACKWARD, 15, 30); /* overlaps the other: counted once */
    add(o, IZ_ADAM, 5, 12);      /* 2 of 7 */
    add(o, IZ_ADAM, 12, 28);     /* all 16 */
    add(o, IZ_REDUCE, 29, 40);   /* 1 of 11 */
    add(o, IZ_FETCH, 0, 10);     /* touches only */
    iz_overlap_settle(o, true);
    assert_hidden(o, IZ_ADAM, 23, 18);
    assert_hidden(o, IZ_REDUCE, 11, 1);
    assert_hidden(o, IZ_FETCH, 10, 0);
    iz_overlap_close(&o);
}

/* A computation is logged when it ends, so it may come a round after what ran
 * beside it. */
static void a_late_computation_still_counts(void **state)
{
    struct iz_overlap *o;
    (void)state;
    assert_int_equal(iz_overlap_open(&o), 0);
    add(o, IZ_ADAM, 1, 3);
    iz_overlap_settle(o, false);
    add(o, IZ_FORWARD, 0, 4);
    iz_overlap_settle(o, false);
    add(o, IZ_ADAM, 5, 6);
    iz_overlap_settle(o, true);
    assert_hidden(o, IZ_ADAM, 3, 2);
    iz_overlap_close(&o);
}

/* A long wait is logged when it ends, rounds after what ran beside it. */
static void a_long_task_counts_old_computation(void **state)
{
    struct iz_overlap *o;
    (void)state;
    assert_int_equal(iz_overlap_open(&o), 0);
    add(o, IZ_FORWARD, 0, 4);
    add(o, IZ_NORM, 5, 6);
    iz_overlap_settle(o, false);
    add(o, IZ_REDUCE, 1, 7);
    iz_overlap_settle(o, true);
    assert_hidden(o, IZ_REDUCE, 6, 3);
    iz_overlap_close(&o);
}

/* Or a run of a month would keep every span. */
static void old_computation_is_forgotten(void **state)
{
    struct iz_overlap *o;
    (void)state;
    assert_int_equal(iz_overlap_open(&o), 0);
    for (int i = 0; i < 10; i++) {
        add(o, IZ_FORWARD, 10 * i, 10 * i + 4);
        add(o, IZ_NORM, 10 * i + 5, 10 * i + 6);
        iz_overlap_settle(o, false);
    }
    add(o, IZ_FETCH, 0, 100);
    iz_overlap_settle(o, true);
    assert_true(iz_overlap_kind(o, IZ_FETCH)->hidden_s < 20);
    iz_overlap_close(&o);
}

static void gaps_between_computations_are_not_hidden(void **state)
{
    struct iz_overlap *o;
    (void)state;
    assert_int_equal(iz_overlap_open(&o), 0);
    for (int i = 0; i < 100; i++)
        add(o, IZ_FORWARD, 4 * (99 - i), 4 * (99 - i) + 1);
    add(o, IZ_FETCH, 0, 400);
    iz_overlap_settle(o, true);
    assert_hidden(o, IZ_FETCH, 400, 100);
    iz_overlap_close(&o);
}

int main(void)
{
    const struct CMUnitTest overlap_tests[] = {
        cmocka_unit_test(time_beside_computation_is_hidden),
        cmocka_unit_test(a_late_computation_still_counts),
        cmocka_unit_test(a_long_task_counts_old_computation),
        cmocka_unit_test(old_computation_is_forgotten),
        cmocka_unit_test(gaps_between_computations_are_not_hidden),
    };
    return cmocka_run_group_tests(overlap_tests, NULL, NULL);
}
