/* SPDX-License-Identifier: Apache-2.0 */
/* Which updates through the disk are put off, against made-up steps of four
 * units with 3, 1, 1 and 2 chunks. */
#include "tests/runtime/fixture.h"

#include <stdatomic.h>

#include "runtime/engine/engine.h"
#include "runtime/step/update_order.h"

enum { UNITS = 4, CHUNKS = 7 };

static const struct iz_plan_unit plan[UNITS] = {{.n = 30, .chunks = 3},
                                                {.n = 10, .chunks = 1},
                                                {.n = 10, .chunks = 1},
                                                {.n = 20, .chunks = 2}};

static struct iz_config config;
static struct iz_unit_memory unit[UNITS];
static struct iz_engine e;
static int late;

static void begin(enum iz_home states, bool early, bool overlap)
{
    e = (struct iz_engine){.config = &config, .unit = unit};
    late = 0;
    config.run.overlap = overlap;
    for (int u = 0; u < UNITS; u++)
        unit[u].plan = &plan[u];
    e.plan.n_units = UNITS;
    e.plan.zero.early = early;
    e.plan.zero.state.home = states;
}

/* A step at whose last gradient all chunks but `rest` are updated; returns how
 * many units the next one puts off. */
static int step(int rest)
{
    int64_t all = e.update_order.due + CHUNKS;
    atomic_store(&e.update_order.updated, all - rest);
    return late = iz_update_order_late(&e, late);
}

static void what_a_slow_disk_has_not_done_is_put_off(void **state)
{
    /* Of the first unit's three; all three; and more. */
    static const int rest[] = {2, 3, 4, CHUNKS}, put_off[] = {1, 1, 2, UNITS};
    for (int i = 0; i < 4; i++) {
        begin(IZ_HOME_NVME, true, true);
        assert_int_equal(step(rest[i]), put_off[i]);
    }
}

static void a_disk_that_may_have_waited_gets_more_to_do(void **state)
{
    begin(IZ_HOME_NVME, true, true);
    assert_int_equal(step(5), 3);
    assert_int_equal(step(5), 2); /* no more than what was put off */
    assert_int_equal(step(5), 3); /* more than that */
    assert_int_equal(step(4), 2);
    assert_int_equal(step(2), 1);
    assert_int_equal(step(0), 0);
    assert_int_equal(step(0), 0);
}

static void the_slowest_disk_decides_for_all(void **state)
{
    const double each[] = {1, 9, 3, 9, 2, 9}; /* others' numbers between */
    assert_int_equal(iz_update_order_of_all(each, 2, 3), 3);
    assert_int_equal(iz_update_order_of_all(each, 2, 1), 1);
}

static void other_updates_keep_their_order(void **state)
{
    begin(IZ_HOME_NVME, false, true); /* behind the whole backward anyway */
    assert_int_equal(step(CHUNKS), 0);
    begin(IZ_HOME_NVME, true, false);
    assert_int_equal(step(CHUNKS), 0);
    begin(IZ_HOME_CPU, true, true);
    assert_int_equal(step(CHUNKS), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_a_slow_disk_has_not_done_is_put_off),
        cmocka_unit_test(a_disk_that_may_have_waited_gets_more_to_do),
        cmocka_unit_test(the_slowest_disk_decides_for_all),
        cmocka_unit_test(other_updates_keep_their_order),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
