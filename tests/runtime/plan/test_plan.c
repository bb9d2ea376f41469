/* SPDX-License-Identifier: Apache-2.0 */
/* The planner's arithmetic: the ZeRO paper's table, shards, chunks, refusals.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka.h needs those above. */
#include <cmocka.h>
#include <errno.h>
#include <math.h>
#include <string.h>

#include "runtime/plan/planning.h"
#include "runtime/tier/memory.h"

static const struct iz_target target1 = {.workers = 1},
                              target2 = {.workers = 2};

static double bytes_per_param(const struct iz_plan *p)
{
    double sum = 0;
    for (int t = 0; t < IZ_TIERS; t++)
        sum +=
            (double)(p->bytes.b[t][IZ_MEM_PARAM] + p->bytes.b[t][IZ_MEM_GRAD] +
                     p->bytes.b[t][IZ_MEM_STATE]);
    return sum / plan_parameters();
}

static void the_zero_papers_table_holds(void **state)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        for (int stage = 0; stage <= 3; stage++) {
            const double want[] = {16, 4 + 12.0 / ranks, 2 + 14.0 / ranks,
                                   16.0 / ranks};
            struct iz_config c = plan_config(stage, IZ_BF16);
            struct iz_plan p;
            assert_int_equal(
                iz_plan_make(&p, &c, plan_model, ranks, 0, &target1), 0);
            /* Padding: at most a cache line per rank and unit. */
            assert_true(fabs(bytes_per_param(&p) - want[stage]) < 0.001);
            iz_plan_clear(&p);
        }
}

static void fp32_needs_no_separate_master(void **state)
{
    struct iz_config c = plan_config(0, IZ_F32);
    struct iz_plan p;
    assert_int_equal(iz_plan_make(&p, &c, plan_model, 1, 0, &target1), 0);
    assert_true(fabs(bytes_per_param(&p) - 16) < 0.001);
    iz_plan_clear(&p);
}

static void shards_cover_every_unit(void **state)
{
    /* Among so many are some whose shares, rounded down, are whole lines. */
    for (int ranks = 1; ranks <= 99; ranks++) {
        struct iz_config c = plan_config(3, IZ_BF16);
        struct iz_plan p;
        assert_int_equal(
            iz_plan_make(&p, &c, plan_model, ranks, ranks - 1, &target2), 0);
        for (int u = 0; u < p.n_units; u++) {
            const struct iz_plan_unit *g = &p.unit[u];
            assert_true(g->padded >= g->n && g->padded < g->n + 64 * ranks);
            assert_true(g->padded == g->shard * ranks);
            assert_true(g->chunk * g->chunks >= g->owned);
            assert_true(g->chunk * (g->chunks - 1) < g->owned);
            /* No chunk is mostly empty: on disk it has a whole one's bytes. */
            assert_true(g->chunk * g->chunks - g->owned < 2048 * g->chunks);
            assert_true(g->chunks <= 64);
        }
        iz_plan_clear(&p);
    }
}

static void large_buffers_begin_with_a_huge_page(void **state)
{
    const int64_t huge = 2 << 20,
                  bytes[] = {4096, huge, 3 * huge + 4096, 2 * huge - 4096};
    struct iz_memory *m;
    assert_int_equal(iz_memory_open(&m, NULL, false), 0);
    for (int i = 0; i < 4; i++) {
        char *p = iz_memory_take(m, IZ_TIER_CPU, IZ_MEM_GRAD, bytes[i]);
        assert_non_null(p);
        assert_true(bytes[i] < huge || (uintptr_t)p % (uintptr_t)huge == 0);
        for (int64_t at = 0; at < bytes[i]; at++)
            assert_int_equal(p[at]++, 0);
    }
    iz_memory_close(&m);
}

static void placement_moves_bytes_and_adds_none(void **state)
{
    struct iz_config a = plan_config(3, IZ_BF16), b = a;
    struct iz_plan p, q;
    b.zero.optimizer.home = IZ_HOME_CPU;
    b.zero.param.home = IZ_HOME_CPU;
    assert_int_equal(iz_plan_make(&p, &a, plan_model, 2, 0, &target1), 0);
    assert_int_equal(iz_plan_make(&q, &b, plan_model, 2, 0, &target1), 0);
    assert_true(iz_plan_host_bytes(&p) == iz_plan_host_bytes(&q));
    assert_true(q.bytes.b[IZ_TIER_DEVICE][IZ_MEM_STATE] == 0);
    assert_true(q.bytes.b[IZ_TIER_CPU][IZ_MEM_STATE] ==
                p.bytes.b[IZ_TIER_DEVICE][IZ_MEM_STATE]);
    assert_true(q.bytes.b[IZ_TIER_CPU][IZ_MEM_PARAM] ==
                p.bytes.b[IZ_TIER_DEVICE][IZ_MEM_PARAM]);
    iz_plan_clear(&p);
    iz_plan_clear(&q);
}

static void what_does_not_fit_is_refused_with_a_way_out(void **state)
{
    struct iz_config c = plan_config(3, IZ_BF16);
    static char text[8192];
    struct iz_plan p;
    FILE *f = fmemopen(text, sizeof(text), "w");
    assert_int_equal(iz_plan_make(&p, &c, plan_model, 1, 0, &target1), 0);
    int64_t need = iz_plan_host_bytes(&p);
    assert_int_equal(plan_fit(&p, &c, need, f), 0);
    assert_int_equal(plan_fit(&p, &c, need / 2, f), -ENOMEM);
    fclose(f);
    assert_non_null(strstr(text, "optimizer"));
    assert_non_null(strstr(text, "it fits with "
                                 "zero_optimization.offload_optimizer.device="
                                 "nvme"));
    iz_plan_clear(&p);
}

/* Bytes of the plan with so many buffers for states on the disk. */
static int64_t need_with_buffers(struct iz_config c, int buffers)
{
    struct iz_plan p;
    c.zero.optimizer.buffer_count = buffers;
    assert_int_equal(iz_plan_make(&p, &c, plan_model, 1, 0, &target1), 0);
    int64_t need = iz_plan_host_bytes(&p);
    iz_plan_clear(&p);
    return need;
}

static void no_more_staging_buffers_are_taken_away_than_must(void **state)
{
    static const struct {
        int fit, less; /* bytes below what so many buffers need */
        const char *said;
    } row[] = {{4, 0, "buffer_count=4 ("}, {4, 1, "buffer_count=2 ("}};
    struct iz_config c = plan_config(3, IZ_BF16);
    c.zero.optimizer.home = IZ_HOME_NVME;
    c.zero.optimizer.buffer_count = 12;
    for (int i = 0; i < 2; i++) {
        static char text[8192];
        FILE *f = fmemopen(text, sizeof(text), "w");
        struct iz_plan p;
        int64_t limit = need_with_buffers(c, row[i].fit) - row[i].less;
        assert_int_equal(iz_plan_make(&p, &c, plan_model, 1, 0, &target1), 0);
        assert_int_equal(plan_fit(&p, &c, limit, f), -ENOMEM);
        fclose(f);
        const char *way = strstr(text, "it fits with zero_optimization."
                                       "offload_optimizer.");
        assert_non_null(way);
        assert_non_null(strstr(way, row[i].said));
        iz_plan_clear(&p);
    }
}

static void activations_are_kept_where_they_fit(void **state)
{
    struct iz_config c = plan_config(3, IZ_BF16);
    struct iz_plan p;
    assert_int_equal(iz_plan_make(&p, &c, plan_model, 1, 0, &target1), 0);
    int64_t lean = iz_plan_host_bytes(&p);
    assert_int_equal(plan_fit(&p, &c, INT64_MAX, NULL), 0);
    assert_false(p.act.recompute);
    assert_true(iz_plan_host_bytes(&p) > lean);
    assert_int_equal(plan_fit(&p, &c, lean, NULL), 0);
    assert_true(p.act.recompute);
    assert_true(iz_plan_host_bytes(&p) == lean);
    iz_plan_clear(&p);
}

/* 32 blocks and an embedding pass on 33 boundaries. */
static void boundaries_on_the_host_leave_slots(void **state)
{
    struct iz_config c = plan_config(3, IZ_BF16);
    struct iz_target gpu = {
        .workers = 2, .gpu = true, .act = IZ_BF16, .capability = 80};
    const int64_t one = 2 * INT64_C(1024) * 2560;
    struct iz_plan p;
    c.grad_accum = 4;
    c.cpu_checkpointing = true;
    for (int order = IZ_DEPTH_FIRST; order <= IZ_BREADTH_FIRST; order++) {
        int64_t tracks = order == IZ_BREADTH_FIRST ? 4 : 1;
        c.run.schedule = (enum iz_order)order;
        assert_int_equal(iz_plan_make(&p, &c, plan_model, 1, 0, &gpu), 0);
        assert_int_equal(p.bytes.b[IZ_TIER_DEVICE][IZ_MEM_BOUNDARY],
                         (2 * tracks + 2) * one);
        assert_int_equal(p.bytes.b[IZ_TIER_CPU][IZ_MEM_BOUNDARY],
                         32 * tracks * one);
        iz_plan_clear(&p);
    }
}

/* There is one memory: the same bytes, on its other tier. */
static void boundaries_of_a_cpu_are_on_the_host_anyway(void **state)
{
    struct iz_config c = plan_config(3, IZ_BF16);
    struct iz_plan p, q;
    assert_int_equal(iz_plan_make(&p, &c, plan_model, 1, 0, &target2), 0);
    c.cpu_checkpointing = true;
    assert_int_equal(iz_plan_make(&q, &c, plan_model, 1, 0, &target2), 0);
    assert_int_equal(q.act.boundary_slots, 0);
    assert_true(q.bytes.b[IZ_TIER_CPU][IZ_MEM_BOUNDARY] > 0);
    assert_true(iz_plan_host_bytes(&p) == iz_plan_host_bytes(&q));
    assert_int_equal(plan_fit(&q, &c, INT64_MAX, NULL), 0);
    assert_false(q.act.recompute);
    iz_plan_clear(&p);
    iz_plan_clear(&q);
}

/* Clipping needs the norm of all gradients, fp16 to know that all are finite.
 */
static void updates_are_early_that_wait_for_no_norm(void **state)
{
    for (int clipped = 0; clipped < 2; clipped++)
        for (int t = IZ_F32; t <= IZ_F16; t++) {
            struct iz_config c = plan_config(2, (enum iz_dtype)t);
            struct iz_plan p;
            c.gradient_clipping = clipped;
            assert_int_equal(iz_plan_make(&p, &c, plan_model, 2, 0, &target2),
                             0);
            assert_int_equal(p.zero.early, !clipped && t != IZ_F16);
            iz_plan_clear(&p);
        }
}

int main(void)
{
    const struct CMUnitTest plan_tests[] = {
        cmocka_unit_test(the_zero_papers_table_holds),
        cmocka_unit_test(fp32_needs_no_separate_master),
        cmocka_unit_test(shards_cover_every_unit),
        cmocka_unit_test(large_buffers_begin_with_a_huge_page),
        cmocka_unit_test(placement_moves_bytes_and_adds_none),
        cmocka_unit_test(what_does_not_fit_is_refused_with_a_way_out),
        cmocka_unit_test(no_more_staging_buffers_are_taken_away_than_must),
        cmocka_unit_test(activations_are_kept_where_they_fit),
        cmocka_unit_test(boundaries_on_the_host_leave_slots),
        cmocka_unit_test(updates_are_early_that_wait_for_no_norm),
        cmocka_unit_test(boundaries_of_a_cpu_are_on_the_host_anyway),
    };
    return cmocka_run_group_tests(plan_tests, plan_open, plan_close);
}
