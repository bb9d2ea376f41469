/* SPDX-License-Identifier: Apache-2.0 */
/* The plan of sums that a single GPU forms before they come down: what it takes
 * on either side, and that memory alone decides. */
#include "tests/runtime/fixture.h"

#include "codelets/base/int64.h"
#include "codelets/flat/flat.h"
#include "models/gpt2.h"
#include "runtime/plan/plan.h"

#define WIDTH 256
#define MICROS 4

static const struct iz_target gpu = {
    .workers = 2, .gpu = true, .act = IZ_BF16, .capability = 80};
static const struct iz_limits unlimited = {.host = INT64_MAX,
                                           .device = INT64_MAX};
static struct iz_model *model;
static struct iz_plan p, q;

static int near_open(void **state)
{
    struct iz_gpt2_config c = {4, 4, WIDTH, 64, 5000};
    return iz_gpt2_open(&model, &c);
}

static int near_close(void **state)
{
    iz_plan_clear(&p);
    iz_plan_clear(&q);
    iz_model_close(&model);
    return 0;
}

static struct iz_config config(enum iz_order schedule, double ratio)
{
    return (struct iz_config){.train_batch_size = MICROS,
                              .micro_batch = 1,
                              .grad_accum = MICROS,
                              .grad_accum_fp32 = true,
                              .dtype = IZ_BF16,
                              .zero = {.stage = 2,
                                       .sub_group_size = 1 << 16,
                                       .prefetch_bucket_size = 1,
                                       .max_live_parameters = 1000000000,
                                       .optimizer = {.home = IZ_HOME_CPU,
                                                     .buffer_count = 4,
                                                     .ratio = ratio},
                                       .param = {.buffer_count = 5}},
                              .run = {.slices = 1,
                                      .schedule = schedule,
                                      .recompute = IZ_RECOMPUTE_FULL}};
}

/* p as it is made; q as it fits. */
static void both(const struct iz_config *c, int ranks, struct iz_limits l)
{
    iz_plan_clear(&p);
    iz_plan_clear(&q);
    assert_int_equal(iz_plan_make(&p, c, model, ranks, 0, &gpu), 0);
    assert_int_equal(iz_plan_make(&q, c, model, ranks, 0, &gpu), 0);
    assert_int_equal(iz_plan_fit(&q, c, model, &l, stderr), 0);
    assert_false(p.zero.sums_near);
}

/* The embedding has two uses, so two sums, which the GPU adds. */
static void check_counts(enum iz_order schedule, double ratio)
{
    struct iz_config c = config(schedule, ratio);
    int64_t want[IZ_TIERS][IZ_MEM_CLASSES] = {0}, longest = 0;
    both(&c, 1, unlimited);
    assert_true(q.zero.sums_near);
    int64_t *device = want[IZ_TIER_DEVICE], *cpu = want[IZ_TIER_CPU];
    for (int u = 0; u < q.n_units; u++) {
        int64_t host = iz_plan_host_elems(&q.unit[u]);
        longest = max64(longest, host);
        if (u == 0)
            cpu[IZ_MEM_GRAD] = -4 * host;
        if (u == 0 || schedule == IZ_DEPTH_FIRST)
            device[IZ_MEM_GRAD] += 4 * host * (u == 0 ? 2 : 1);
        else if (u == 1 || u + 1 == q.n_units) /* ring of the blocks, head */
            device[IZ_MEM_GRAD_RING] += 4 * host * (u == 1 ? 2 : 1);
    }
    cpu[IZ_MEM_STAGING] = -2 * 2 * longest;
    for (int t = 0; t < IZ_TIERS; t++)
        for (int k = 0; k < IZ_MEM_CLASSES; k++)
            assert_int_equal(q.bytes.b[t][k] - p.bytes.b[t][k], want[t][k]);
}

static void a_near_sum_takes_its_memory_on_the_gpu(void **state)
{
    check_counts(IZ_BREADTH_FIRST, 1);
    check_counts(IZ_DEPTH_FIRST, 1);
    check_counts(IZ_DEPTH_FIRST, 0.5);
    check_counts(IZ_BREADTH_FIRST, 0);
}

/* One byte decides, on either side. */
static void sums_are_near_only_where_they_fit(void **state)
{
    struct iz_config c = config(IZ_DEPTH_FIRST, 1);
    struct iz_limits l = unlimited;
    both(&c, 1, unlimited);
    l.device = iz_plan_device_bytes(&q);
    both(&c, 1, l);
    assert_true(q.zero.sums_near);
    l.device--;
    both(&c, 1, l);
    assert_false(q.zero.sums_near);
    assert_memory_equal(&p.bytes, &q.bytes, sizeof(p.bytes));
    assert_memory_equal(p.ring, q.ring, sizeof(*p.ring) * (size_t)p.n_rings);
    for (int u = 0; u < p.n_units; u++)
        assert_int_equal(p.unit[u].sums_squares, q.unit[u].sums_squares);
}

static void several_ranks_and_states_on_the_gpu_have_none(void **state)
{
    struct iz_config c = config(IZ_DEPTH_FIRST, 1);
    both(&c, 2, unlimited);
    assert_false(q.zero.sums_near);
    c.zero.optimizer.home = IZ_HOME_NONE;
    both(&c, 1, unlimited);
    assert_false(q.zero.sums_near);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_near_sum_takes_its_memory_on_the_gpu),
        cmocka_unit_test(sums_are_near_only_where_they_fit),
        cmocka_unit_test(several_ranks_and_states_on_the_gpu_have_none),
    };
    return cmocka_run_group_tests(tests, near_open, near_close);
}
