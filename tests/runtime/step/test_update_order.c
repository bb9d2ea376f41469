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

/* Where states are, whether they are updated early, and run.overlap; of each
 * step how many chunks are not updated at its last gradient, and how many units
 * the next one puts off. */
static const struct {
    enum iz_home states;
    bool early, overlap;
    int steps, rest[8], put_off[8];
} cases[] = {
    /* Of the first unit's three; all three; and more. */
    {IZ_HOME_NVME, true, true, 1, {2}, {1}},
    {IZ_HOME_NVME, true, true, 1, {3}, {1}},
    {IZ_HOME_NVME, true, true, 1, {4}, {2}},
    {IZ_HOME_NVME, true, true, 1, {CHUNKS}, {UNITS}},
    /* A disk that may have waited gets more to do: that had no more left than
     * was put off, or more. */
    {IZ_HOME_NVME, true, true, 7, {5, 5, 5, 4, 2, 0, 0}, {3, 2, 3, 2, 1, 0, 0}},
    /* Behind the whole backward anyway; and others. */
    {IZ_HOME_NVME, false, true, 1, {CHUNKS}, {0}},
    {IZ_HOME_NVME, true, false, 1, {CHUNKS}, {0}},
    {IZ_HOME_CPU, true, true, 1, {CHUNKS}, {0}},
};

static void what_a_slow_disk_has_not_done_is_put_off(void **state)
{
    for (int i = 0; i < N_OF(cases); i++) {
        struct iz_config config = {.run.overlap = cases[i].overlap};
        struct iz_unit_memory unit[UNITS];
        struct iz_engine e = {.config = &config, .unit = unit};
        for (int u = 0; u < UNITS; u++)
            unit[u].plan = &plan[u];
        e.plan.n_units = UNITS;
        e.plan.zero.early = cases[i].early;
        e.plan.zero.state.home = cases[i].states;
        for (int k = 0, late = 0; k < cases[i].steps; k++) {
            int64_t all = e.update_order.due + CHUNKS;
            atomic_store(&e.update_order.updated, all - cases[i].rest[k]);
            late = iz_update_order_late(&e, late);
            assert_int_equal(late, cases[i].put_off[k]);
        }
    }
}

static void the_slowest_disk_decides_for_all(void **state)
{
    const double each[] = {1, 9, 3, 9, 2, 9}; /* others' numbers between */
    assert_int_equal(iz_update_order_of_all(each, 2, 3), 3);
    assert_int_equal(iz_update_order_of_all(each, 2, 1), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_a_slow_disk_has_not_done_is_put_off),
        cmocka_unit_test(the_slowest_disk_decides_for_all),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
