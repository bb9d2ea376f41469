/* SPDX-License-Identifier: Apache-2.0 */
/* Configs and plans of the suites beside it; see plans.h. */
#include "tests/runtime/plan/plans.h"

#include "models/gpt2.h"
#include "runtime/plan/fit.h"

const struct iz_target target1 = {.workers = 1}, target2 = {.workers = 2};
const struct iz_target gpu_bf16 = {
    .workers = 2,
    .gpu = true,
    .act = IZ_BF16,
    .numerics.capability = 80,
    .compute = {.flops_per_s = 700e12, .bytes_per_s = 3e12}};

struct iz_model *model;
struct iz_plan p, q;

int plans_open(void **state)
{
    struct iz_gpt2_config c = {32, 32, 2560, 1024, 50257};
    return iz_gpt2_open(&model, &c);
}

int plans_close(void **state)
{
    iz_plan_clear(&p);
    iz_plan_clear(&q);
    iz_model_close(&model);
    return 0;
}

struct iz_config plain(int stage, enum iz_dtype t)
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
        .data = {.group = 1},
        .run = {.slices = 1, .recompute = IZ_RECOMPUTE_AUTO}};
}

struct iz_config offloaded(double ratio, enum iz_home params)
{
    struct iz_config c = plain(3, IZ_BF16);
    c.zero.optimizer.home = IZ_HOME_CPU;
    c.zero.optimizer.ratio = ratio;
    c.zero.param.home = params;
    return c;
}

void make(struct iz_plan *out, const struct iz_config *c, int ranks,
          const struct iz_target *t)
{
    iz_plan_clear(out);
    assert_int_equal(iz_plan_make(out, c, model, ranks, 0, t), 0);
}

int fit(struct iz_plan *plan, const struct iz_config *c, struct iz_limits l)
{
    return (int)HEARD(iz_plan_fit(plan, c, model, &l, stderr));
}

bool others_refuse;

static bool all_say(void *arg, bool ok)
{
    (void)arg;
    return ok && !others_refuse;
}

void choose(struct iz_config *c, int ranks, struct iz_target *t,
            struct iz_limits l, double host_bytes_per_s)
{
    struct iz_rate rate[IZ_RATES];
    for (int i = 0; i < IZ_RATES; i++)
        rate[i] = (struct iz_rate){.bytes_per_s = 50e9, .latency_s = 1e-5};
    rate[IZ_ON_COMPUTE] = rate[IZ_RATE_SQUARES] = t->compute;
    rate[IZ_ON_HOST].bytes_per_s = host_bytes_per_s / t->workers;
    iz_plan_choose(c, &(struct iz_plan_for){.model = model,
                                            .ranks = ranks,
                                            .target = t,
                                            .limit = &l,
                                            .rate = rate,
                                            .all = all_say});
}

struct iz_limits needs(struct iz_config c, double ratio)
{
    c.zero.optimizer.home = IZ_HOME_CPU;
    c.zero.optimizer.ratio = ratio;
    make(&p, &c, 1, &gpu_bf16);
    return (struct iz_limits){.host = iz_plan_host_bytes(&p),
                              .device = iz_plan_device_bytes(&p)};
}
