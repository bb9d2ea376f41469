/* SPDX-License-Identifier: Apache-2.0 */
/* Which updates through the disk are put off, against made-up steps of four
 * units with 3, 1, 1 and 2 chunks. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h needs those above. */
#include <cmocka.h>
#include <stdatomic.h>

#include "runtime/engine/engine.h"
#include "runtime/step/update_order.h"

enum { UNITS = 4, CHUNKS = 7 };

static const struct iz_plan_unit plan[UNITS] = {{.n = 30, .chunks = 3},
                                                {.n = 10, .chunks = 1},
                                                {.n = 10, .chunks = 1},
                                                {.n = 20, .chunks = 2}};

struct fixture {
    struct iz_config config;
    struct iz_unit_memory unit[UNITS];
    struct iz_engine e;
};

static void begin(struct fixture *f)
{
    *f = (struct fixture){0};
    f->config.run.overlap = true;
    f->config.dtype = IZ_F32;
    for (int u = 0; u < UNITS; u++)
        f->unit[u].plan = &plan[u];
    f->e.config = &f->config;
    f->e.unit = f->unit;
    f->e.plan.n_units = UNITS;
    f->e.plan.zero.early = true;
    f->e.plan.zero.state_home = IZ_HOME_NVME;
}

/* A step at whose last gradient all chunks but `rest` are updated; returns how
 * many units the next one puts off. */
static int step(struct fixture *f, int rest)
{
    int64_t all = f->e.update_order.due + CHUNKS;

    atomic_store(&f->e.update_order.updated, all - rest);
    iz_update_order_end(&f->e);
    iz_update_order_begin(&f->e);
    return f->e.update_order.late;
}

static void what_a_slow_disk_has_not_done_is_put_off(void **state)
{
    struct fixture f;
    begin(&f);
    assert_int_equal(f.e.update_order.late, 0);
    assert_int_equal(step(&f, 2), 1); /* of the first unit's three */
    begin(&f);
    assert_int_equal(step(&f, 3), 1);
    begin(&f);
    assert_int_equal(step(&f, 4), 2);
    begin(&f);
    assert_int_equal(step(&f, CHUNKS), UNITS);
}

static void a_disk_that_may_have_waited_gets_more_to_do(void **state)
{
    struct fixture f;
    begin(&f);
    assert_int_equal(step(&f, 5), 3);
    assert_int_equal(step(&f, 5), 2); /* no more than what was put off */
    assert_int_equal(step(&f, 5), 3); /* more than that */
    assert_int_equal(step(&f, 4), 2);
    assert_int_equal(step(&f, 2), 1);
    assert_int_equal(step(&f, 0), 0);
    assert_int_equal(step(&f, 0), 0);
}

static void other_updates_keep_their_order(void **state)
{
    struct fixture f;
    begin(&f);
    f.e.plan.zero.early = false; /* they follow the whole backward anyway */
    assert_int_equal(step(&f, CHUNKS), 0);
    begin(&f);
    f.config.run.overlap = false;
    assert_int_equal(step(&f, CHUNKS), 0);
    begin(&f);
    f.e.plan.zero.state_home = IZ_HOME_CPU;
    assert_int_equal(step(&f, CHUNKS), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(what_a_slow_disk_has_not_done_is_put_off),
        cmocka_unit_test(a_disk_that_may_have_waited_gets_more_to_do),
        cmocka_unit_test(other_updates_keep_their_order),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
