/* SPDX-License-Identifier: Apache-2.0 */
/* The planner's arithmetic for a GPT of 2.6B parameters: the ZeRO paper's
 * table, shards, chunks, refusals; and on a GPU an offloaded optimizer shared
 * out between it and the host, and what its memory has to leave free. */
#include "tests/runtime/fixture.h"

#include "models/gpt2.h"
#include "runtime/plan/plan.h"
#include "runtime/tier/memory.h"

static const struct iz_target target1 = {.workers = 1},
                              target2 = {.workers = 2};
static const struct iz_target gpu_bf16 = {
    .workers = 2, .gpu = true, .act = IZ_BF16, .capability = 80};

static struct iz_model *model;
static struct iz_plan p, q;

static int plans_open(void **state)
{
    struct iz_gpt2_config c = {32, 32, 2560, 1024, 50257};
    return iz_gpt2_open(&model, &c);
}

static int plans_close(void **state)
{
    iz_plan_clear(&p);
    iz_plan_clear(&q);
    iz_model_close(&model);
    return 0;
}

/* One sample a step of one rank, nothing offloaded. */
static struct iz_config plain(int stage, enum iz_dtype t)
{
    return (struct iz_config){
        .train_batch_size = 4,
        .micro_batch = 1,
        .grad_accum = 1,
        .dtype = t,
        .zero = {.stage = stage,
                 .sub_group_size = 1000000000,
                 .overlap_comm = true,
                 .prefetch_bucket_size = 50000000,
                 .max_live_parameters = 1000000000,
                 .max_reuse_distance = 1000000000,
                 .optimizer = {.buffer_count = 4, .ratio = 1},
                 .param = {.buffer_count = 5}},
        .run = {.slices = 1}};
}

static struct iz_config offloaded(double ratio, enum iz_home params)
{
    struct iz_config c = plain(3, IZ_BF16);
    c.zero.optimizer.home = IZ_HOME_CPU;
    c.zero.optimizer.ratio = ratio;
    c.zero.param.home = params;
    return c;
}

/* The plan of the first of these ranks, in place of the one before. */
static void make(struct iz_plan *out, const struct iz_config *c, int ranks,
                 const struct iz_target *t)
{
    iz_plan_clear(out);
    assert_int_equal(iz_plan_make(out, c, model, ranks, 0, t), 0);
}

/* iz_plan_fit; what it says is in `said`. */
static int fit(struct iz_plan *plan, const struct iz_config *c,
               struct iz_limits l)
{
    return (int)HEARD(iz_plan_fit(plan, c, model, &l, stderr));
}

static int fit_host(struct iz_plan *plan, const struct iz_config *c,
                    int64_t bytes)
{
    return fit(plan, c, (struct iz_limits){.host = bytes});
}

#define WAY "it fits with zero_optimization.offload_optimizer."

static double bytes_per_param(void)
{
    double sum = 0, params = 0;
    for (int t = 0; t < IZ_TIERS; t++)
        sum += (double)(p.bytes.b[t][IZ_MEM_PARAM] + p.bytes.b[t][IZ_MEM_GRAD] +
                        p.bytes.b[t][IZ_MEM_STATE]);
    for (int u = 0; u < model->n_units; u++)
        for (int i = 0; i < model->unit[u].n_params; i++)
            params += (double)(model->unit[u].param[i].rows *
                               model->unit[u].param[i].cols);
    return sum / params;
}

static void the_zero_papers_table_holds(void **state)
{
    struct iz_config c = plain(0, IZ_F32);
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        for (int stage = 0; stage <= 3; stage++) {
            const double want[] = {16, 4 + 12.0 / ranks, 2 + 14.0 / ranks,
                                   16.0 / ranks};
            struct iz_config half = plain(stage, IZ_BF16);
            make(&p, &half, ranks, &target1);
            /* Padding: at most a cache line per rank and unit. */
            assert_true(fabs(bytes_per_param() - want[stage]) < 0.001);
        }
    make(&p, &c, 1, &target1); /* fp32 needs no master of its own */
    assert_true(fabs(bytes_per_param() - 16) < 0.001);
}

static void shards_cover_every_unit(void **state)
{
    struct iz_config c = plain(3, IZ_BF16);
    /* Among so many are some whose shares, rounded down, are whole lines. */
    for (int ranks = 1; ranks <= 99; ranks++) {
        iz_plan_clear(&p);
        assert_int_equal(
            iz_plan_make(&p, &c, model, ranks, ranks - 1, &target2), 0);
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
    }
}

static void large_buffers_begin_with_a_huge_page(void **state)
{
    const int64_t huge = 2 << 20,
                  bytes[] = {4096, huge, 3 * huge + 4096, 2 * huge - 4096};
    struct iz_memory *m;
    assert_int_equal(iz_memory_open(&m, NULL, false), 0);
    for (int i = 0; i < 4; i++) {
        char *b = iz_memory_take(m, IZ_TIER_CPU, IZ_MEM_GRAD, bytes[i]);
        assert_non_null(b);
        assert_true(bytes[i] < huge || (uintptr_t)b % (uintptr_t)huge == 0);
        for (int64_t at = 0; at < bytes[i]; at++)
            assert_int_equal(b[at]++, 0);
    }
    iz_memory_close(&m);
}

static void placement_moves_bytes_and_adds_none(void **state)
{
    struct iz_config a = plain(3, IZ_BF16), b = offloaded(1, IZ_HOME_CPU);
    make(&p, &a, 2, &target1);
    make(&q, &b, 2, &target1);
    assert_true(iz_plan_host_bytes(&p) == iz_plan_host_bytes(&q));
    assert_true(q.bytes.b[IZ_TIER_DEVICE][IZ_MEM_STATE] == 0);
    assert_true(q.bytes.b[IZ_TIER_CPU][IZ_MEM_STATE] ==
                p.bytes.b[IZ_TIER_DEVICE][IZ_MEM_STATE]);
    assert_true(q.bytes.b[IZ_TIER_CPU][IZ_MEM_PARAM] ==
                p.bytes.b[IZ_TIER_DEVICE][IZ_MEM_PARAM]);
}

static void what_does_not_fit_is_refused_with_a_way_out(void **state)
{
    struct iz_config c = plain(3, IZ_BF16);
    make(&p, &c, 1, &target1);
    int64_t need = iz_plan_host_bytes(&p);
    assert_int_equal(fit_host(&p, &c, need), 0);
    assert_int_equal(fit_host(&p, &c, need / 2), -ENOMEM);
    assert_said("optimizer");
    assert_said(WAY "device=nvme");
}

static void no_more_staging_buffers_are_taken_away_than_must(void **state)
{
    struct iz_config c = plain(3, IZ_BF16), four;
    c.zero.optimizer.home = IZ_HOME_NVME;
    c.zero.optimizer.buffer_count = 12;
    four = c;
    four.zero.optimizer.buffer_count = 4;
    make(&q, &four, 1, &target1);
    make(&p, &c, 1, &target1);
    assert_int_equal(fit_host(&p, &c, iz_plan_host_bytes(&q)), -ENOMEM);
    assert_said(WAY "buffer_count=4 (");
    make(&p, &c, 1, &target1);
    assert_int_equal(fit_host(&p, &c, iz_plan_host_bytes(&q) - 1), -ENOMEM);
    assert_said(WAY "buffer_count=2 (");
}

static void activations_are_kept_where_they_fit(void **state)
{
    struct iz_config c = plain(3, IZ_BF16);
    make(&p, &c, 1, &target1);
    int64_t lean = iz_plan_host_bytes(&p);
    assert_int_equal(fit_host(&p, &c, INT64_MAX), 0);
    assert_false(p.act.recompute);
    assert_true(iz_plan_host_bytes(&p) > lean);
    assert_int_equal(fit_host(&p, &c, lean), 0);
    assert_true(p.act.recompute);
    assert_true(iz_plan_host_bytes(&p) == lean);
}

/* 32 blocks and an embedding pass on 33 boundaries. */
static void boundaries_on_the_host_leave_slots(void **state)
{
    struct iz_config c = plain(3, IZ_BF16);
    const int64_t one = 2 * INT64_C(1024) * 2560;
    c.grad_accum = 4;
    c.cpu_checkpointing = true;
    for (int order = IZ_DEPTH_FIRST; order <= IZ_BREADTH_FIRST; order++) {
        int64_t tracks = order == IZ_BREADTH_FIRST ? 4 : 1;
        c.run.schedule = (enum iz_order)order;
        make(&p, &c, 1, &gpu_bf16);
        assert_int_equal(p.bytes.b[IZ_TIER_DEVICE][IZ_MEM_BOUNDARY],
                         (2 * tracks + 2) * one);
        assert_int_equal(p.bytes.b[IZ_TIER_CPU][IZ_MEM_BOUNDARY],
                         32 * tracks * one);
    }
}

/* There is one memory: the same bytes, on its other tier. */
static void boundaries_of_a_cpu_are_on_the_host_anyway(void **state)
{
    struct iz_config c = plain(3, IZ_BF16);
    make(&p, &c, 1, &target2);
    c.cpu_checkpointing = true;
    make(&q, &c, 1, &target2);
    assert_int_equal(q.act.boundary_slots, 0);
    assert_true(q.bytes.b[IZ_TIER_CPU][IZ_MEM_BOUNDARY] > 0);
    assert_true(iz_plan_host_bytes(&p) == iz_plan_host_bytes(&q));
    assert_int_equal(fit_host(&q, &c, INT64_MAX), 0);
    assert_false(q.act.recompute);
}

/* Clipping needs the norm of all gradients, fp16 to know that all are finite.
 */
static void updates_are_early_that_wait_for_no_norm(void **state)
{
    for (int clipped = 0; clipped < 2; clipped++)
        for (int t = IZ_F32; t <= IZ_F16; t++) {
            struct iz_config c = plain(2, (enum iz_dtype)t);
            c.gradient_clipping = clipped;
            make(&p, &c, 2, &target2);
            assert_int_equal(p.zero.early, !clipped && t != IZ_F16);
        }
}

/* ---- an optimizer in two places ---- */

/* Of all units: elements owned and those of the host; the longest share of the
 * host and the longest chunk of those that it shares; blocks on the GPU. */
struct counts {
    int64_t owned, host, longest, chunk, blocks;
};

static int64_t larger(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static struct counts count(const struct iz_plan *plan)
{
    struct counts n = {0};
    for (int u = 0; u < plan->n_units; u++) {
        const struct iz_plan_unit *g = &plan->unit[u];
        int64_t host = iz_plan_host_elems(g);
        n.owned += g->owned;
        n.host += host;
        n.longest = larger(n.longest, host);
        n.blocks += (g->owned - host + 1023) / 1024;
        if (g->host_chunks < g->chunks)
            n.chunk = larger(n.chunk, g->chunk);
    }
    return n;
}

/* As near to the ratio as the chunk that is cut allows, although a unit's own
 * share is not a number of chunks. */
static void the_ratio_is_met_to_half_a_chunk(void **state)
{
    for (int ranks = 1; ranks <= 8; ranks++)
        for (int i = 0; i <= 20; i++) {
            struct iz_config c = offloaded(i / 20.0, IZ_HOME_CPU);
            int64_t chunk = 0;
            make(&p, &c, ranks, &gpu_bf16);
            struct counts n = count(&p);
            for (int u = 0; u < p.n_units; u++) {
                const struct iz_plan_unit *g = &p.unit[u];
                chunk = larger(chunk, g->chunk);
                assert_true(g->host_chunks >= 0 && g->host_chunks <= g->chunks);
            }
            assert_true(fabs((double)n.host -
                             c.zero.optimizer.ratio * (double)n.owned) <=
                        (double)chunk / 2);
            assert_true(p.zero.split == (i < 20));
            assert_true(i > 0 || n.host == 0);
            assert_true(i < 20 || n.host == n.owned);
        }
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
    int64_t device[IZ_MEM_CLASSES] = {0}, cpu[IZ_MEM_CLASSES] = {0};
    target.nccl = nccl;
    make(&p, &all, 2, &target);
    make(&q, &some, 2, &target);
    struct counts whole = count(&p), part = count(&q);
    int64_t moved = part.owned - part.host;
    assert_true(moved > 0 && q.zero.grads_apart == nccl && !p.zero.grads_apart);
    device[IZ_MEM_STATE] = cpu[IZ_MEM_STATE] = 12 * moved;
    device[IZ_MEM_STAGING] =
        8 * part.chunk * ((home == IZ_HOME_CPU ? 2 : 0) + (nccl ? 0 : 2));
    if (nccl) {
        device[IZ_MEM_GRAD] = cpu[IZ_MEM_GRAD] = 2 * moved;
        cpu[IZ_MEM_STAGING] = 2 * 4 * (whole.longest - part.longest);
        cpu[IZ_MEM_BATCH] = -8 * part.blocks;
        assert_true(cpu[IZ_MEM_STAGING] >= 0);
    }
    for (int c = 0; c < IZ_MEM_CLASSES; c++) {
        assert_int_equal(q.bytes.b[IZ_TIER_DEVICE][c] -
                             p.bytes.b[IZ_TIER_DEVICE][c],
                         device[c]);
        assert_int_equal(p.bytes.b[IZ_TIER_CPU][c] - q.bytes.b[IZ_TIER_CPU][c],
                         cpu[c]);
    }
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
        bool near = home == IZ_HOME_NONE;
        c.dtype = IZ_F32;
        c.grad_accum_fp32 = true;
        make(&p, &c, 2, &gpu_bf16);
        struct counts n = count(&p);
        assert_int_equal(p.bytes.b[IZ_TIER_CPU][IZ_MEM_STATE],
                         n.host * (near ? 12 : 8));
        assert_int_equal(p.bytes.b[IZ_TIER_DEVICE][IZ_MEM_STATE],
                         (n.owned - n.host) * (near ? 8 : 12));
    }
}

static void a_cpu_cannot_share_with_a_gpu(void **state)
{
    struct iz_config c = offloaded(0.5, IZ_HOME_CPU);
    assert_int_equal(iz_plan_check(&c, &gpu_bf16, 1, NULL), 0);
    assert_fails(iz_plan_check(&c, &target2, 1, stderr), -EINVAL,
                 "zero_optimization.offload_optimizer.ratio: 0.5 leaves chunks "
                 "to a GPU");
    c.zero.optimizer.ratio = 1;
    assert_int_equal(iz_plan_check(&c, &target2, 1, NULL), 0);
}

/* A worker that waited for a buffer would be one less. */
static void every_worker_has_a_buffer_for_what_goes_up(void **state)
{
    struct iz_config c = offloaded(1, IZ_HOME_NONE);
    struct iz_target gpu = gpu_bf16;
    gpu.workers = 23;
    make(&p, &c, 1, &gpu);
    assert_true(p.staging[IZ_STAGING_UPDATE].n > 23);
    assert_true(p.staging[IZ_STAGING_UPDATE].bytes > 0);
}

/* Bytes of the host and of the GPU with this ratio. */
static struct iz_limits needs(struct iz_config c, double ratio)
{
    c.zero.optimizer.home = IZ_HOME_CPU;
    c.zero.optimizer.ratio = ratio;
    make(&p, &c, 1, &gpu_bf16);
    return (struct iz_limits){.host = iz_plan_host_bytes(&p),
                              .device = iz_plan_device_bytes(&p)};
}

/* The plan does not fit, and that is said. */
static void assert_way(const struct iz_config *c, struct iz_limits l,
                       const char *words)
{
    make(&p, c, 1, &gpu_bf16);
    assert_int_equal(fit(&p, c, l), -ENOMEM);
    assert_said(words);
}

/* Where the GPU is too small for its part, the host can have all. */
static void the_whole_optimizer_on_the_host_is_a_way_out(void **state)
{
    struct iz_config c = offloaded(0.5, IZ_HOME_CPU);
    struct iz_limits l = needs(c, 1);
    l.host = INT64_MAX;
    assert_way(&c, l, WAY "ratio=1 (");
    assert_said("effective ratio 0.500");
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
            int64_t more = needs(c, (part[k] + 1) / 20.0).host;
            char want[100];
            assert_true(more > l.host);
            snprintf(want, sizeof(want), WAY "ratio=%.15g (", part[k] / 20.0);
            assert_way(&c, l, want);
            l.host = more - 1;
            assert_way(&c, l, want);
            /* From a smaller part that the GPU has no room for, as well. */
            c.zero.optimizer.ratio = 0;
            if (k > 0)
                assert_way(&c, l, want);
        }
}

static double chosen(struct iz_config c, struct iz_limits l,
                     const struct iz_target *t)
{
    c.zero.optimizer.ratio = 1;
    c.zero.optimizer.ratio_auto = true;
    iz_plan_choose_ratio(&c, model, 1, 0, t, &l, NULL, NULL);
    return c.zero.optimizer.ratio;
}

/* With one micro-batch, activations that can be kept are; otherwise, and where
 * they never can, the GPU gets all that fits. */
static void an_automatic_ratio_is_the_smallest_that_fits(void **state)
{
    struct iz_config c = offloaded(1, IZ_HOME_CPU);
    struct iz_limits l = needs(c, 0.35);
    l.host = INT64_MAX;
    c.run.recompute = IZ_RECOMPUTE_FULL;
    assert_true(chosen(c, l, &gpu_bf16) == 0.35);
    l.device = INT64_MAX;
    assert_true(chosen(c, l, &gpu_bf16) == 0);
    c.run.recompute = IZ_RECOMPUTE_AUTO;
    assert_true(chosen(c, l, &gpu_bf16) == 0);
    c.zero.optimizer.ratio = 0.6;
    c.micro_batch = 32;
    make(&p, &c, 1, &gpu_bf16);
    iz_plan_keep(&p, model, true);
    l.device = iz_plan_device_bytes(&p);
    assert_true(needs(c, 0).device <= l.device);
    assert_true(chosen(c, l, &gpu_bf16) == 0.6);
    c.run.recompute = IZ_RECOMPUTE_FULL;
    assert_true(chosen(c, l, &gpu_bf16) == 0);
    c.run.recompute = IZ_RECOMPUTE_AUTO;
    c.grad_accum = 2;
    assert_true(chosen(c, l, &gpu_bf16) < 0.6);
    l = needs(offloaded(1, IZ_HOME_CPU), 0.5);
    l.device--;
    assert_true(chosen(c, l, &gpu_bf16) == 1); /* nothing fits */
}

static void an_automatic_ratio_is_1_where_nothing_is_shared(void **state)
{
    struct iz_config c = offloaded(1, IZ_HOME_CPU);
    struct iz_limits l = {.host = INT64_MAX, .device = INT64_MAX};
    assert_true(chosen(c, l, &target1) == 1);
    c.run.state_dtype = IZ_MOMENT_FP8;
    assert_true(chosen(c, l, &gpu_bf16) == 0);
    c.run.save_mode = IZ_SAVE_ASYNC; /* which reads no coded states of a GPU */
    assert_true(chosen(c, l, &gpu_bf16) == 1);
    c = offloaded(1, IZ_HOME_NVME);
    assert_true(chosen(c, l, &gpu_bf16) == 1);
    c = offloaded(1, IZ_HOME_NONE);
    c.zero.optimizer.home = IZ_HOME_NONE;
    assert_true(chosen(c, l, &gpu_bf16) == 1);
}

static void a_gpu_that_is_full_takes_no_chunks(void **state)
{
    struct iz_config c = offloaded(1, IZ_HOME_CPU);
    struct iz_limits l = needs(c, 0.5);
    l.device--;
    assert_way(&c, l, WAY "device=nvme (");
    assert_null(strstr(said, "ratio="));
}

/* Where they fit with half of them on the GPU, that is the way out. */
static void coded_states_are_shared_out_too(void **state)
{
    for (int t = IZ_MOMENT_BF16; t <= IZ_MOMENT_FP8; t++) {
        struct iz_config c = offloaded(1, IZ_HOME_CPU);
        c.run.state_dtype = (enum iz_moment_type)t;
        assert_way(&c, needs(c, 0.5), WAY "ratio=0.5 (");
    }
}

/* Neither holds all states, both together do. */
static void host_and_gpu_together_are_a_way_out(void **state)
{
    struct iz_config c = offloaded(1, IZ_HOME_NONE);
    struct iz_limits l = needs(c, 0.5);
    c.zero.optimizer.home = IZ_HOME_NONE;
    assert_way(&c, l,
               WAY "device=cpu and zero_optimization.offload_optimizer."
                   "ratio=0.5 (");
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

static void
a_host_keeps_a_reserve_and_what_ranks_have_beside_plans(void **state)
{
    const int64_t gib = INT64_C(1) << 30, mib = INT64_C(1) << 20;
    assert_int_equal(iz_plan_host_reserve(8 * gib), gib);
    assert_int_equal(iz_plan_host_reserve(24 * gib), gib);
    assert_int_equal(iz_plan_host_reserve(330 * gib), 10 * gib);
    struct iz_config c = plain(3, IZ_BF16);
    make(&p, &c, 1, &target1);
    struct iz_limits l = {.device = INT64_MAX, .host = iz_plan_host_bytes(&p)};
    assert_true(iz_plan_within(&p, &l));
    l.beside = true;
    assert_false(iz_plan_within(&p, &l));
    int64_t chunks = 0;
    for (int u = 0; u < p.n_units; u++)
        chunks += p.unit[u].chunks;
    assert_int_equal(iz_plan_beside(&p), (212 + 5 * target1.workers) * mib +
                                             chunks * 60 * 1024 + l.host / 512);
    l.host += iz_plan_beside(&p);
    assert_true(iz_plan_within(&p, &l));
    l.host--;
    assert_false(iz_plan_within(&p, &l));
}

/* All of the host's but the states is pinned: 8 bytes on the GPU for a page. */
static void a_gpu_has_room_for_the_tables_of_pinned_memory(void **state)
{
    struct iz_config c = offloaded(1, IZ_HOME_CPU);
    struct iz_limits l = needs(c, 1);
    int64_t *cpu = p.bytes.b[IZ_TIER_CPU];
    int64_t pinned = iz_bytes_tier(&p.bytes, IZ_TIER_CPU) - cpu[IZ_MEM_STATE];
    assert_true(cpu[IZ_MEM_STATE] > 0 && pinned > cpu[IZ_MEM_PARAM]);
    assert_int_equal(fit(&p, &c, l), 0);
    l.tables = true;
    assert_int_equal(fit(&p, &c, l), -ENOMEM);
    l.device += (pinned + 511) / 512 - 1;
    assert_int_equal(fit(&p, &c, l), -ENOMEM);
    l.device++;
    assert_int_equal(fit(&p, &c, l), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_zero_papers_table_holds),
        cmocka_unit_test(shards_cover_every_unit),
        cmocka_unit_test(large_buffers_begin_with_a_huge_page),
        cmocka_unit_test(placement_moves_bytes_and_adds_none),
        cmocka_unit_test(what_does_not_fit_is_refused_with_a_way_out),
        cmocka_unit_test(no_more_staging_buffers_are_taken_away_than_must),
        cmocka_unit_test(activations_are_kept_where_they_fit),
        cmocka_unit_test(boundaries_on_the_host_leave_slots),
        cmocka_unit_test(updates_are_early_that_wait_for_no_norm),
        cmocka_unit_test(boundaries_of_a_cpu_are_on_the_host_anyway),
        cmocka_unit_test(every_worker_has_a_buffer_for_what_goes_up),
        cmocka_unit_test(the_ratio_is_met_to_half_a_chunk),
        cmocka_unit_test(the_ratio_moves_states_and_gradients),
        cmocka_unit_test(fp32_has_a_master_on_the_other_side_only),
        cmocka_unit_test(a_cpu_cannot_share_with_a_gpu),
        cmocka_unit_test(the_whole_optimizer_on_the_host_is_a_way_out),
        cmocka_unit_test(a_host_that_is_short_leaves_chunks_to_the_gpu),
        cmocka_unit_test(an_automatic_ratio_is_the_smallest_that_fits),
        cmocka_unit_test(an_automatic_ratio_is_1_where_nothing_is_shared),
        cmocka_unit_test(a_gpu_that_is_full_takes_no_chunks),
        cmocka_unit_test(coded_states_are_shared_out_too),
        cmocka_unit_test(host_and_gpu_together_are_a_way_out),
        cmocka_unit_test(a_gpu_has_room_for_libraries),
        cmocka_unit_test(
            a_host_keeps_a_reserve_and_what_ranks_have_beside_plans),
        cmocka_unit_test(a_gpu_has_room_for_the_tables_of_pinned_memory),
    };
    return cmocka_run_group_tests(tests, plans_open, plans_close);
}
