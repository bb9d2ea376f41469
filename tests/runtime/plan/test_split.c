/* SPDX-License-Identifier: Apache-2.0 */
/* An offloaded optimizer shared out between the host and a GPU: what each then
 * holds, the ratio that "auto" chooses; and where sums for the host are formed.
 */
#include "runtime/plan/forecast.h"
#include "tests/runtime/plan/plans.h"

#include <string.h>

#include "codelets/base/int64.h"
#include "runtime/plan/fit.h"
#include "runtime/plan/split.h"

/* As near to the ratio as the chunk that is cut allows, although a unit's own
 * share is not a number of chunks. */
static void the_ratio_is_met_to_half_a_chunk(void **state)
{
    for (int ranks = 1; ranks <= 8; ranks++)
        for (int i = 0; i <= 20; i++) {
            struct iz_config c = offloaded(i / 20.0, IZ_HOME_CPU);
            int64_t chunk = 0, host = 0, owned = 0;
            make(&p, &c, ranks, &gpu_bf16);
            for (int u = 0; u < p.n_units; u++) {
                const struct iz_plan_unit *g = &p.unit[u];
                chunk = max64(chunk, g->chunk);
                host += iz_plan_host_elems(g);
                owned += g->owned;
            }
            assert_true(fabs((double)host - i / 20.0 * (double)owned) <=
                        (double)chunk / 2);
            assert_true(p.zero.split == (i < 20));
            assert_true(i > 0 || host == 0);
            assert_true(i < 20 || host == owned);
        }
}

/* With NCCL: two buffers in fp32 on the host are shorter. */
static void gradients_of_the_gpus_part_stay_there(void **state)
{
    struct iz_config all = offloaded(1, IZ_HOME_CPU),
                     some = offloaded(0.6, IZ_HOME_CPU);
    for (int nccl = 0; nccl < 2; nccl++) {
        struct iz_target t = gpu_bf16;
        int64_t whole = 0, part = 0;
        t.nccl = nccl;
        make(&p, &all, 2, &t);
        make(&q, &some, 2, &t);
        for (int u = 0; u < p.n_units; u++) {
            whole = max64(whole, p.unit[u].owned);
            part = max64(part, iz_plan_host_elems(&q.unit[u]));
        }
        assert_true(q.zero.grads_apart == nccl && part < whole);
        assert_int_equal(p.bytes.b[IZ_TIER_CPU][IZ_MEM_STAGING] -
                             q.bytes.b[IZ_TIER_CPU][IZ_MEM_STAGING],
                         nccl ? 8 * (whole - part) : 0);
    }
}

/* The plan does not fit, and that is said. */
static void assert_way(const struct iz_config *c, struct iz_limits l,
                       const char *words)
{
    make(&p, c, 1, &gpu_bf16);
    assert_int_equal(fit(&p, c, l), -ENOMEM);
    assert_said(words);
}

/* Fewer of them are in tests/e2e/gpu/test_gpu_bytes.py. */
static void what_is_left_of_the_gpu_becomes_buffers(void **state)
{
    struct iz_config c = offloaded(0.5, IZ_HOME_CPU);
    struct iz_limits l = {.host = INT64_MAX, .device = INT64_MAX};
    int chunks = 0;
    make(&p, &c, 1, &gpu_bf16);
    assert_int_equal(p.staging[IZ_STAGING_SPLIT].n, 8);
    assert_int_equal(fit(&p, &c, l), 0);
    for (int u = 0; u < p.n_units; u++)
        chunks += p.unit[u].chunks - p.unit[u].host_chunks;
    assert_int_equal(p.staging[IZ_STAGING_SPLIT].n, chunks);
}

#define SLOW 1e10 /* bytes that the host moves a second */

static double chosen(struct iz_config c, struct iz_limits l, struct iz_target t,
                     double host_bytes_per_s)
{
    c.zero.optimizer.ratio = 1;
    c.zero.optimizer.ratio_auto = true;
    choose(&c, 1, &t, l, host_bytes_per_s);
    return c.zero.optimizer.ratio;
}

/* A host that no forward can hide has as little as fits, a fast one has all; in
 * between it has what the forward hides, and then a larger step more of it. */
static void an_automatic_ratio_is_what_the_forward_hides(void **state)
{
    struct iz_config c = offloaded(1, IZ_HOME_CPU);
    struct iz_limits l = needs(c, 0.35);
    c.run.recompute = IZ_RECOMPUTE_FULL;
    l.host = INT64_MAX;
    assert_true(chosen(c, l, gpu_bf16, SLOW) == 0.35);
    l.device--;
    assert_true(chosen(c, l, gpu_bf16, SLOW) == 0.4);
    l.device = INT64_MAX;
    assert_true(chosen(c, l, gpu_bf16, SLOW) == 0);
    double before = 0;
    for (c.micro_batch = 4; c.micro_batch <= 16; c.micro_batch *= 2) {
        double now = chosen(c, l, gpu_bf16, 1e11);
        assert_true(now > before && now < 1);
        before = now;
    }
    assert_true(chosen(c, l, gpu_bf16, 1e14) == 1);
    l = needs(offloaded(1, IZ_HOME_CPU), 1);
    l.device--;
    assert_true(chosen(c, l, gpu_bf16, SLOW) == 1); /* nothing fits */
}

/* A GPU that has room for all activations or all of the optimizer. */
static void activations_and_states_are_weighed(void **state)
{
    struct iz_config c = offloaded(1, IZ_HOME_CPU);
    struct iz_limits l = {.host = INT64_MAX};
    c.micro_batch = 32;
    make(&p, &c, 1, &gpu_bf16);
    iz_plan_recompute(&p, model, IZ_RECOMPUTE_NONE);
    l.device = iz_plan_device_bytes(&p);
    assert_true(needs(c, 0).device <= l.device);
    assert_true(chosen(c, l, gpu_bf16, 1e14) == 1);
    double some = chosen(c, l, gpu_bf16, 5e10);
    assert_true(some > 0 && some < 1);
    assert_true(chosen(c, l, gpu_bf16, SLOW) < some);
}

/* As many samples at a time as make a step short: all where all are kept. */
static void a_step_is_cut_where_memory_is_short(void **state)
{
    struct iz_config c = offloaded(1, IZ_HOME_CPU), open;
    struct iz_target gpu = gpu_bf16, cpu = target2;
    struct iz_limits l = {.host = INT64_MAX, .device = INT64_MAX};
    c.cut_auto = c.grad_accum_open = true;
    c.micro_batch = 64;
    for (int samples = 64; samples >= 16; samples /= 2) {
        open = c;
        choose(&open, 1, &gpu, l, 1e14);
        assert_int_equal(open.micro_batch, samples);
        assert_int_equal(open.grad_accum, 64 / samples);
        assert_int_equal(open.grad_accum_fp32, samples < 64);
        make(&p, &open, 1, &gpu_bf16);
        iz_plan_recompute(&p, model, IZ_RECOMPUTE_NONE);
        l.device = iz_plan_device_bytes(&p) / 2;
    }
    open = c;
    choose(&open, 1, &cpu, l, 1e14);
    assert_int_equal(open.micro_batch, 64);
    open = c;
    others_refuse = true; /* a cut that is better on this rank alone */
    choose(&open, 2, &gpu, l, 1e14);
    others_refuse = false;
    assert_int_equal(open.micro_batch, 64);
}

/* As small as it takes, before a sample is cut, too. */
static void a_step_is_cut_before_its_samples_are(void **state)
{
    struct iz_config c = offloaded(1, IZ_HOME_CPU), open;
    struct iz_target gpu = gpu_bf16;
    struct iz_limits l = {.host = INT64_MAX};
    c.cpu_checkpointing = c.grad_accum_open = true;
    c.run.recompute = IZ_RECOMPUTE_FULL;
    c.micro_batch = 64;
    for (int samples = 64; samples >= 1; samples /= 2) {
        open = c;
        open.run.sequence_chunk = IZ_CHUNK_OFF;
        iz_config_cut(&open, 64 / samples);
        make(&p, &open, 1, &gpu);
        l.device = iz_plan_device_bytes(&p);
        open = c;
        open.cut_auto = true;
        choose(&open, 1, &gpu, l, 1e14);
        assert_int_equal(open.run.sequence_chunk, IZ_CHUNK_OFF);
        assert_true(open.micro_batch <= samples);
        make(&p, &open, 1, &gpu);
        assert_true(iz_plan_device_bytes(&p) <= l.device);
    }
}

static void an_automatic_ratio_is_1_where_nothing_is_shared(void **state)
{
    struct iz_config c = offloaded(1, IZ_HOME_CPU);
    struct iz_limits l = {.host = INT64_MAX, .device = INT64_MAX};
    assert_true(chosen(c, l, target1, SLOW) == 1);
    c.run.state_dtype = IZ_MOMENT_FP8;
    assert_true(chosen(c, l, gpu_bf16, SLOW) == 0);
    c.run.save_mode = IZ_SAVE_ASYNC; /* which reads no coded states of a GPU */
    assert_true(chosen(c, l, gpu_bf16, SLOW) == 1);
    c = offloaded(1, IZ_HOME_NVME);
    assert_true(chosen(c, l, gpu_bf16, SLOW) == 1);
    c = offloaded(1, IZ_HOME_NONE);
    c.zero.optimizer.home = IZ_HOME_NONE;
    assert_true(chosen(c, l, gpu_bf16, SLOW) == 1);
}

/* Nobody measures a disk. */
static void a_disk_of_unknown_rate_has_no_prediction(void **state)
{
    struct iz_config c = offloaded(1, IZ_HOME_NVME);
    struct iz_rate rate[IZ_RATES];
    for (int i = 0; i < IZ_RATES; i++)
        rate[i] = (struct iz_rate){.bytes_per_s = 1e9};
    make(&p, &c, 1, &gpu_bf16);
    assert_true(iz_forecast(&p, rate).step_s > 0);
    rate[IZ_ON_IO].bytes_per_s = 1;
    assert_true(iz_forecast(&p, rate).step_s == 0);
}

static void freeze_blocks(bool yes)
{
    for (int u = 1; u + 1 < model->n_units; u++)
        for (int i = 0; i < model->unit[u].n_params; i++)
            model->unit[u].param[i].frozen = yes;
}

/* It is read twice a step, before each pass. */
static void a_frozen_base_on_a_disk_takes_its_time(void **state)
{
    struct iz_config c = plain(3, IZ_BF16);
    struct iz_rate rate[IZ_RATES];
    double bytes = 0;
    c.zero.param.frozen = 1 + IZ_HOME_NVME;
    for (int i = 0; i < IZ_RATES; i++)
        rate[i] = (struct iz_rate){.bytes_per_s = 1e12};
    rate[IZ_ON_IO].bytes_per_s = 1e8;
    freeze_blocks(true);
    make(&p, &c, 1, &gpu_bf16);
    freeze_blocks(false);
    for (int u = 1; u + 1 < model->n_units; u++)
        bytes += 2 * (double)p.unit[u].frozen.shard;
    double s = iz_forecast(&p, rate).step_s, least = bytes / 1e8 / 2;
    assert_true(bytes > 0 && s > least && s < 2.2 * least);
}

static void what_does_not_fit_has_a_way_out(void **state)
{
    struct iz_config c = offloaded(0.5, IZ_HOME_CPU);
    struct iz_limits l = needs(c, 1);
    l.host = INT64_MAX;
    assert_way(&c, l, WAY "ratio=1 (");
    assert_said("effective ratio 0.500");
    c = offloaded(1, IZ_HOME_CPU);
    l = needs(c, 0.5);
    l.device--; /* a GPU that is full takes no chunks */
    assert_way(&c, l, WAY "device=nvme (");
    assert_null(strstr(said, "ratio="));
    for (int t = IZ_MOMENT_BF16; t <= IZ_MOMENT_FP8; t++) {
        c.run.state_dtype = (enum iz_moment_type)t;
        assert_way(&c, needs(c, 0.5), WAY "ratio=0.5 (");
    }
    /* Neither holds all states, both together do. */
    c = offloaded(1, IZ_HOME_NONE);
    l = needs(c, 0.5);
    c.zero.optimizer.home = IZ_HOME_NONE;
    assert_way(&c, l,
               WAY "device=cpu and zero_optimization.offload_optimizer."
                   "ratio=0.5 (");
}

/* The optimizer cannot stay where parameters are not, nor cuDNN's attention
 * read chunks. */
static void a_way_out_is_none_that_a_gpu_refuses(void **state)
{
    struct iz_config c = plain(3, IZ_BF16);
    struct iz_limits l = {.host = INT64_C(1) << 50};
    c.run.recompute = IZ_RECOMPUTE_FULL;
    c.run.sequence_chunk = IZ_CHUNK_OFF;
    freeze_blocks(true);
    make(&p, &c, 1, &gpu_bf16);
    l.device = iz_plan_device_bytes(&p) - (INT64_C(3) << 30);
    assert_way(&c, l,
               WAY "device=cpu and zero_optimization.offload_param.device=cpu");
    freeze_blocks(false);
    c.cpu_checkpointing = true;
    make(&p, &c, 1, &gpu_bf16);
    l.device = iz_plan_device_bytes(&p) - 4096;
    assert_way(&c, l, "it fits with run.sequence_chunk=");
    c.run.gpu_attention = IZ_ATTENTION_CUDNN;
    assert_way(&c, l, "izar: ");
    assert_null(strstr(said, "run.sequence_chunk="));
}

/* ---- sums that a single GPU forms before they come down ---- */

/* p as it is made; q as it fits.  Whether the sums of q are on the GPU. */
static bool on_gpu(const struct iz_config *c, int ranks, int64_t device)
{
    make(&p, c, ranks, &gpu_bf16);
    make(&q, c, ranks, &gpu_bf16);
    assert_int_equal(
        fit(&q, c, (struct iz_limits){.host = INT64_MAX, .device = device}), 0);
    assert_false(p.zero.sums_on_gpu);
    return q.zero.sums_on_gpu;
}

/* One byte decides, on either side. */
static void sums_on_the_gpu_take_its_memory_where_they_fit(void **state)
{
    struct iz_config c = offloaded(1, IZ_HOME_NONE);
    c.zero.stage = 2;
    c.grad_accum = 4;
    c.grad_accum_fp32 = true;
    c.run.recompute = IZ_RECOMPUTE_FULL;
    assert_true(on_gpu(&c, 1, INT64_MAX));
    int64_t need = iz_plan_device_bytes(&q);
    assert_true(on_gpu(&c, 1, need));
    assert_false(on_gpu(&c, 1, need - 1));
    assert_memory_equal(&p.bytes, &q.bytes, sizeof(p.bytes));
    assert_memory_equal(p.ring, q.ring, sizeof(*p.ring) * (size_t)p.n_rings);
    for (int u = 0; u < p.n_units; u++)
        assert_int_equal(p.unit[u].sums_squares, q.unit[u].sums_squares);
    assert_false(on_gpu(&c, 2, INT64_MAX)); /* several ranks have none, */
    c.zero.optimizer.home = IZ_HOME_NONE;   /* nor have states on the GPU */
    assert_false(on_gpu(&c, 1, INT64_MAX));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_ratio_is_met_to_half_a_chunk),
        cmocka_unit_test(gradients_of_the_gpus_part_stay_there),
        cmocka_unit_test(what_is_left_of_the_gpu_becomes_buffers),
        cmocka_unit_test(an_automatic_ratio_is_what_the_forward_hides),
        cmocka_unit_test(activations_and_states_are_weighed),
        cmocka_unit_test(a_step_is_cut_where_memory_is_short),
        cmocka_unit_test(a_step_is_cut_before_its_samples_are),
        cmocka_unit_test(an_automatic_ratio_is_1_where_nothing_is_shared),
        cmocka_unit_test(a_disk_of_unknown_rate_has_no_prediction),
        cmocka_unit_test(a_frozen_base_on_a_disk_takes_its_time),
        cmocka_unit_test(what_does_not_fit_has_a_way_out),
        cmocka_unit_test(a_way_out_is_none_that_a_gpu_refuses),
        cmocka_unit_test(sums_on_the_gpu_take_its_memory_where_they_fit),
    };
    return cmocka_run_group_tests(tests, plans_open, plans_close);
}
