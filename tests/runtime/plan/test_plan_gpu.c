/* SPDX-License-Identifier: Apache-2.0 */
/* The planner's arithmetic on a GPU: an offloaded optimizer shared out between
 * it and the host, and what its memory has to leave free. */
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

static const struct iz_target target2 = {.workers = 2};
static const struct iz_target gpu_bf16 = {
    .workers = 2, .gpu = true, .act = IZ_BF16, .capability = 80};

static struct iz_config offloaded(double ratio, enum iz_home params)
{
    struct iz_config c = plan_config(3, IZ_BF16);
    c.zero.optimizer.home = IZ_HOME_CPU;
    c.zero.optimizer.ratio = ratio;
    c.zero.param.home = params;
    return c;
}

static int64_t owned(const struct iz_plan *p)
{
    int64_t n = 0;
    for (int u = 0; u < p->n_units; u++)
        n += p->unit[u].owned;
    return n;
}

static int64_t on_host(const struct iz_plan *p)
{
    int64_t n = 0;
    for (int u = 0; u < p->n_units; u++)
        n += iz_plan_host_elems(&p->unit[u]);
    return n;
}

/* As near to the ratio as the chunk that is cut allows, although a unit's own
 * share is not a number of chunks. */
static void the_ratio_is_met_to_half_a_chunk(void **state)
{
    for (int ranks = 1; ranks <= 8; ranks++)
        for (int i = 0; i <= 20; i++) {
            struct iz_config c = offloaded(i / 20.0, IZ_HOME_CPU);
            struct iz_plan p;
            int64_t chunk = 0;
            assert_int_equal(
                iz_plan_make(&p, &c, plan_model, ranks, 0, &gpu_bf16), 0);
            for (int u = 0; u < p.n_units; u++) {
                const struct iz_plan_unit *g = &p.unit[u];
                chunk = g->chunk > chunk ? g->chunk : chunk;
                assert_true(g->host_chunks >= 0 && g->host_chunks <= g->chunks);
            }
            assert_true(fabs((double)on_host(&p) -
                             c.zero.optimizer.ratio * (double)owned(&p)) <=
                        (double)chunk / 2);
            assert_true(p.zero.split == (i < 20));
            assert_true(i > 0 || on_host(&p) == 0);
            assert_true(i < 20 || on_host(&p) == owned(&p));
            iz_plan_clear(&p);
        }
}

/* Longest of all units: what the host has of a shard. */
static int64_t longest_on_host(const struct iz_plan *p)
{
    int64_t n = 0;
    for (int u = 0; u < p->n_units; u++)
        if (iz_plan_host_elems(&p->unit[u]) > n)
            n = iz_plan_host_elems(&p->unit[u]);
    return n;
}

static int64_t blocks_on_gpu(const struct iz_plan *p)
{
    int64_t n = 0;
    for (int u = 0; u < p->n_units; u++)
        n += (p->unit[u].owned - iz_plan_host_elems(&p->unit[u]) + 1023) / 1024;
    return n;
}

/* The longest chunk of a unit that is not the host's alone. */
static int64_t split_chunk(const struct iz_plan *p)
{
    int64_t chunk = 0;
    for (int u = 0; u < p->n_units; u++)
        if (p->unit[u].host_chunks < p->unit[u].chunks &&
            p->unit[u].chunk > chunk)
            chunk = p->unit[u].chunk;
    return chunk;
}

/* 12 bytes of every element, here or there, and with NCCL 2 of its gradient:
 * two buffers in fp32 on the host are shorter, and it has 8 bytes for each
 * block of 1024.  Where the host's collectives sum, the gradient stays and
 * needs room in the eight buffers of a chunk, as parameters do that live on the
 * host. */
static void check_ratio(enum iz_home home, bool nccl)
{
    struct iz_target target = gpu_bf16;
    struct iz_config all = offloaded(1, home), some = offloaded(0.6, home);
    int64_t moved, device[IZ_MEM_CLASSES] = {0}, cpu[IZ_MEM_CLASSES] = {0};
    struct iz_plan p, q;

    target.nccl = nccl;
    assert_int_equal(iz_plan_make(&p, &all, plan_model, 2, 0, &target), 0);
    assert_int_equal(iz_plan_make(&q, &some, plan_model, 2, 0, &target), 0);
    moved = owned(&q) - on_host(&q);
    assert_true(moved > 0 && q.zero.grads_apart == nccl && !p.zero.grads_apart);
    device[IZ_MEM_STATE] = cpu[IZ_MEM_STATE] = 12 * moved;
    device[IZ_MEM_STAGING] =
        8 * split_chunk(&q) * ((home == IZ_HOME_CPU ? 2 : 0) + (nccl ? 0 : 2));
    if (nccl) {
        device[IZ_MEM_GRAD] = cpu[IZ_MEM_GRAD] = 2 * moved;
        cpu[IZ_MEM_STAGING] =
            2 * 4 * (longest_on_host(&p) - longest_on_host(&q));
        cpu[IZ_MEM_BATCH] = -8 * blocks_on_gpu(&q);
        assert_true(cpu[IZ_MEM_STAGING] >= 0);
    }
    for (int c = 0; c < IZ_MEM_CLASSES; c++) {
        assert_int_equal(q.bytes.b[IZ_TIER_DEVICE][c] -
                             p.bytes.b[IZ_TIER_DEVICE][c],
                         device[c]);
        assert_int_equal(p.bytes.b[IZ_TIER_CPU][c] - q.bytes.b[IZ_TIER_CPU][c],
                         cpu[c]);
    }
    iz_plan_clear(&p);
    iz_plan_clear(&q);
}

static void the_ratio_moves_states_and_gradients(void **state)
{
    for (int home = IZ_HOME_NONE; home <= IZ_HOME_CPU; home++) {
        check_ratio((enum iz_home)home, false);
        check_ratio((enum iz_home)home, true);
    }
}

/* In fp32 a master of its own is needed where the parameters are not. */
static void fp32_has_a_master_on_the_other_side_only(void **state)
{
    for (int home = IZ_HOME_NONE; home <= IZ_HOME_CPU; home++) {
        struct iz_config c = offloaded(0.5, (enum iz_home)home);
        struct iz_plan p;
        int64_t host, gpu;
        bool near = home == IZ_HOME_NONE;
        c.dtype = IZ_F32;
        c.grad_accum_fp32 = true;
        assert_int_equal(iz_plan_make(&p, &c, plan_model, 2, 0, &gpu_bf16), 0);
        host = on_host(&p);
        gpu = owned(&p) - host;
        assert_int_equal(p.bytes.b[IZ_TIER_CPU][IZ_MEM_STATE],
                         host * (near ? 12 : 8));
        assert_int_equal(p.bytes.b[IZ_TIER_DEVICE][IZ_MEM_STATE],
                         gpu * (near ? 8 : 12));
        iz_plan_clear(&p);
    }
}

static void a_cpu_cannot_share_with_a_gpu(void **state)
{
    struct iz_config c = offloaded(0.5, IZ_HOME_CPU);
    char text[256] = "";
    FILE *f = fmemopen(text, sizeof(text), "w");
    assert_int_equal(iz_plan_split_check(&c, &gpu_bf16, f), 0);
    assert_int_equal(iz_plan_split_check(&c, &target2, f), -EINVAL);
    c.zero.optimizer.ratio = 1;
    assert_int_equal(iz_plan_split_check(&c, &target2, f), 0);
    fclose(f);
    assert_non_null(strstr(text, "zero_optimization.offload_optimizer.ratio: "
                                 "0.5 leaves chunks to a GPU"));
}

/* A worker that waited for a buffer would be one less. */
static void every_worker_has_a_buffer_for_what_goes_up(void **state)
{
    struct iz_config c = offloaded(1, IZ_HOME_NONE);
    struct iz_target gpu = gpu_bf16;
    struct iz_plan p;
    gpu.workers = 23;
    assert_int_equal(iz_plan_make(&p, &c, plan_model, 1, 0, &gpu), 0);
    assert_true(p.staging[IZ_STAGING_UPDATE].n > 23);
    assert_true(p.staging[IZ_STAGING_UPDATE].bytes > 0);
    iz_plan_clear(&p);
}

/* Where the GPU is too small for its part, the host can have all. */
static void the_whole_optimizer_on_the_host_is_a_way_out(void **state)
{
    struct iz_config c = offloaded(0.5, IZ_HOME_CPU);
    static char text[8192];
    struct iz_plan p, q;
    FILE *f = fmemopen(text, sizeof(text), "w");
    assert_int_equal(iz_plan_make(&p, &c, plan_model, 1, 0, &gpu_bf16), 0);
    c.zero.optimizer.ratio = 1;
    assert_int_equal(iz_plan_make(&q, &c, plan_model, 1, 0, &gpu_bf16), 0);
    c.zero.optimizer.ratio = 0.5;
    struct iz_limits l = {.host = INT64_MAX,
                          .device = iz_plan_device_bytes(&q)};
    assert_int_equal(iz_plan_fit(&p, &c, plan_model, &l, f), -ENOMEM);
    fclose(f);
    assert_non_null(strstr(text, "effective ratio 0.500"));
    assert_non_null(strstr(text, "it fits with "
                                 "zero_optimization.offload_optimizer.ratio=1 "
                                 "("));
    iz_plan_clear(&p);
    iz_plan_clear(&q);
}

/* Bytes of the host and of the GPU with this ratio. */
static struct iz_limits needs(struct iz_config c, double ratio)
{
    struct iz_limits l = {0};
    struct iz_plan p;
    c.zero.optimizer.home = IZ_HOME_CPU;
    c.zero.optimizer.ratio = ratio;
    assert_int_equal(iz_plan_make(&p, &c, plan_model, 1, 0, &gpu_bf16), 0);
    l.host = iz_plan_host_bytes(&p);
    l.device = iz_plan_device_bytes(&p);
    iz_plan_clear(&p);
    return l;
}

/* What is said of a plan that does not fit. */
static const char *refusal(const struct iz_config *c, struct iz_limits l)
{
    static char text[8192];
    struct iz_plan p;
    FILE *f;
    memset(text, 0, sizeof(text));
    f = fmemopen(text, sizeof(text), "w");
    assert_int_equal(iz_plan_make(&p, c, plan_model, 1, 0, &gpu_bf16), 0);
    assert_int_equal(iz_plan_fit(&p, c, plan_model, &l, f), -ENOMEM);
    fclose(f);
    iz_plan_clear(&p);
    return text;
}

/* As much of the optimizer on the host as there is room for, and no more on the
 * GPU than it takes. */
static void a_host_that_is_short_leaves_chunks_to_the_gpu(void **state)
{
    static const int part[] = {0, 7, 19};
    for (int home = IZ_HOME_NONE; home <= IZ_HOME_CPU; home++)
        for (int k = 0; k < 3; k++) {
            struct iz_config c = offloaded(1, (enum iz_home)home);
            struct iz_limits l = needs(c, part[k] / 20.0);
            char want[100];
            int64_t more = needs(c, (part[k] + 1) / 20.0).host;
            assert_true(more > l.host);
            snprintf(want, sizeof(want),
                     "it fits with zero_optimization.offload_optimizer."
                     "ratio=%.15g (",
                     part[k] / 20.0);
            assert_non_null(strstr(refusal(&c, l), want));
            l.host = more - 1;
            assert_non_null(strstr(refusal(&c, l), want));
            /* From a smaller part that the GPU has no room for, as well. */
            if (k > 0) {
                c.zero.optimizer.ratio = 0;
                assert_non_null(strstr(refusal(&c, l), want));
            }
        }
}

static void a_gpu_that_is_full_takes_no_chunks(void **state)
{
    struct iz_config c = offloaded(1, IZ_HOME_CPU);
    struct iz_limits l = needs(c, 0.5);
    const char *text;
    l.device--;
    text = refusal(&c, l);
    assert_null(strstr(text, "ratio="));
    assert_non_null(strstr(text, "it fits with zero_optimization."
                                 "offload_optimizer.device=nvme ("));
}

/* Where they fit with half of them on the GPU, that is the way out. */
static void narrow_states_are_shared_out_too(void **state)
{
    for (int t = IZ_MOMENT_BF16; t <= IZ_MOMENT_FP8; t++) {
        struct iz_config c = offloaded(1, IZ_HOME_CPU);
        struct iz_limits l;

        c.run.state_dtype = (enum iz_moment_type)t;
        l = needs(c, 0.5);
        assert_non_null(strstr(refusal(&c, l),
                               "it fits with zero_optimization."
                               "offload_optimizer.ratio=0.5 ("));
    }
}

/* Neither holds all states, both together do. */
static void host_and_gpu_together_are_a_way_out(void **state)
{
    struct iz_config c = offloaded(1, IZ_HOME_NONE);
    struct iz_limits l = needs(c, 0.5);
    c.zero.optimizer.home = IZ_HOME_NONE;
    assert_non_null(strstr(refusal(&c, l),
                           "it fits with zero_optimization.offload_optimizer."
                           "device=cpu and zero_optimization."
                           "offload_optimizer.ratio=0.5 ("));
}

static void a_gpu_has_room_for_libraries(void **state)
{
    const int64_t gib = INT64_C(1) << 30, peer = 470000000;

    assert_int_equal(iz_plan_reserve(140 * gib, 0), 3 * gib / 4);
    assert_int_equal(iz_plan_reserve(140 * gib, 1), 3 * gib / 4);
    assert_int_equal(iz_plan_reserve(140 * gib, 2), 3 * gib / 4 + peer);
    assert_int_equal(iz_plan_reserve(140 * gib, 8), 3 * gib / 4 + 7 * peer);
    assert_int_equal(iz_plan_reserve(140 * gib, 64), 3 * gib / 4 + 7 * peer);
    assert_int_equal(iz_plan_reserve(gib, 8), gib / 8);
}

/* All of the host's but the states is pinned: 8 bytes on the GPU for a page. */
static void a_gpu_has_room_for_the_tables_of_pinned_memory(void **state)
{
    struct iz_config c = offloaded(1, IZ_HOME_CPU);
    struct iz_limits l = needs(c, 1);
    struct iz_plan p;
    int64_t *cpu, pinned;
    assert_int_equal(iz_plan_make(&p, &c, plan_model, 1, 0, &gpu_bf16), 0);
    cpu = p.bytes.b[IZ_TIER_CPU];
    pinned = iz_bytes_tier(&p.bytes, IZ_TIER_CPU) - cpu[IZ_MEM_STATE];
    assert_true(cpu[IZ_MEM_STATE] > 0 && pinned > cpu[IZ_MEM_PARAM]);
    assert_int_equal(iz_plan_fit(&p, &c, plan_model, &l, NULL), 0);
    l.tables = true;
    assert_int_equal(iz_plan_fit(&p, &c, plan_model, &l, NULL), -ENOMEM);
    l.device += (pinned + 511) / 512 - 1;
    assert_int_equal(iz_plan_fit(&p, &c, plan_model, &l, NULL), -ENOMEM);
    l.device++;
    assert_int_equal(iz_plan_fit(&p, &c, plan_model, &l, NULL), 0);
    iz_plan_clear(&p);
}

int main(void)
{
    const struct CMUnitTest plan_tests[] = {
        cmocka_unit_test(every_worker_has_a_buffer_for_what_goes_up),
        cmocka_unit_test(the_ratio_is_met_to_half_a_chunk),
        cmocka_unit_test(the_ratio_moves_states_and_gradients),
        cmocka_unit_test(fp32_has_a_master_on_the_other_side_only),
        cmocka_unit_test(a_cpu_cannot_share_with_a_gpu),
        cmocka_unit_test(the_whole_optimizer_on_the_host_is_a_way_out),
        cmocka_unit_test(a_host_that_is_short_leaves_chunks_to_the_gpu),
        cmocka_unit_test(a_gpu_that_is_full_takes_no_chunks),
        cmocka_unit_test(narrow_states_are_shared_out_too),
        cmocka_unit_test(host_and_gpu_together_are_a_way_out),
        cmocka_unit_test(a_gpu_has_room_for_libraries),
        cmocka_unit_test(a_gpu_has_room_for_the_tables_of_pinned_memory),
    };
    return cmocka_run_group_tests(plan_tests, plan_open, plan_close);
}
