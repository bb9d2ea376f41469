/* SPDX-License-Identifier: Apache-2.0 */
/* Whether a plan fits into the memory there is, and the smallest change of the
 * config with which it would; see plan.h. */
#include <errno.h>

#include "codelets/base/int64.h"
#include "codelets/base/units.h"
#include "runtime/plan/plan.h"

/* NCCL connects every pair of ranks at the first exchange: on eight H100 that
 * took 3.3 GB on each (NVIDIA/nccl, issue 1685), 470 MB for each other rank.
 * Ranks of other hosts share the channels of the network.  Of a small memory
 * the libraries get one part of RESERVE_SHARE, and NCCL another. */
#define RESERVE_BYTES (INT64_C(768) << 20)
#define RESERVE_PEER_BYTES (INT64_C(470) * 1000 * 1000)
#define RESERVE_PEERS 7
#define RESERVE_SHARE 16

/* The GPU's page tables have an entry of 8 bytes for each page of pinned
 * memory, and these are of 4 KiB unless the system has put them together: at
 * most one part in 512.  The driver keeps them on the GPU if nothing else is
 * asked for (its open modules: NV_MMU_VER3_PTE__SIZE, uvm_page_table_location).
 * The levels above them are less than a hundredth of that. */
#define TABLE_PART 512

struct change {
    const char *text;
    bool (*apply)(struct iz_config *c); /* false: changed nothing */
    bool gpu;                           /* only helps where there is one */
    double (*value)(const struct iz_config *c); /* ends the text; or NULL */
};

int64_t iz_plan_reserve(int64_t total_bytes, int nccl_ranks)
{
    int64_t most = total_bytes / RESERVE_SHARE;
    int64_t peers = nccl_ranks > 1 ? min64(nccl_ranks - 1, RESERVE_PEERS) : 0;
    return min64(RESERVE_BYTES, most) + min64(peers * RESERVE_PEER_BYTES, most);
}

#define RATIO_STEPS 20 /* in which a ratio is looked for */

static bool full_recompute(struct iz_config *c)
{
    bool was = c->run.recompute != IZ_RECOMPUTE_FULL;
    c->run.recompute = IZ_RECOMPUTE_FULL;
    return was;
}

static bool boundaries_to_cpu(struct iz_config *c)
{
    if (c->run.recompute == IZ_RECOMPUTE_NONE || c->cpu_checkpointing)
        return false;
    c->cpu_checkpointing = true;
    return true;
}

static bool small_micro_batch(struct iz_config *c)
{
    if (c->micro_batch == 1)
        return false;
    /* What more than one micro-batch is added in, unless a type was given. */
    c->grad_accum_fp32 |= c->grad_accum == 1;
    c->grad_accum *= c->micro_batch;
    c->micro_batch = 1;
    c->run.slices = 0;
    return true;
}

/* The accumulation steps that keep the batch. */
static double steps(const struct iz_config *c)
{
    return c->grad_accum;
}

static bool wide_products(struct iz_config *c)
{
    bool was = c->dtype == IZ_BF16 && c->run.cpu_products != IZ_PRODUCTS_F32;
    c->run.cpu_products = IZ_PRODUCTS_F32;
    return was;
}

static bool depth_first(struct iz_config *c)
{
    bool was = c->run.schedule != IZ_DEPTH_FIRST;
    c->run.schedule = IZ_DEPTH_FIRST;
    return was;
}

static bool stage_three(struct iz_config *c)
{
    bool was = c->zero.stage != 3;
    c->zero.stage = 3;
    return was;
}

static bool optimizer_to_cpu(struct iz_config *c)
{
    if (c->zero.stage == 0 || c->zero.optimizer.home != IZ_HOME_NONE)
        return false;
    c->zero.optimizer.home = IZ_HOME_CPU;
    return true;
}

/* The whole optimizer on the host, unless least_split finds better. */
static bool other_split(struct iz_config *c)
{
    c->zero.optimizer.ratio = 1;
    return true;
}

/* A change that ends with it takes the largest that fits (least_split). */
static double ratio(const struct iz_config *c)
{
    return c->zero.optimizer.ratio;
}

static bool params_to_cpu(struct iz_config *c)
{
    if (c->zero.stage != 3 || c->zero.optimizer.home == IZ_HOME_NONE ||
        c->zero.param.home != IZ_HOME_NONE)
        return false;
    c->zero.param.home = IZ_HOME_CPU;
    return true;
}

static bool small_ring(struct iz_config *c)
{
    bool was = c->run.ring != 2;
    c->run.ring = 2;
    return was;
}

static bool optimizer_to_disk(struct iz_config *c)
{
    if (c->zero.stage == 0 || c->zero.optimizer.home == IZ_HOME_NVME ||
        c->zero.optimizer.ratio < 1)
        return false;
    c->zero.optimizer.home = IZ_HOME_NVME;
    return true;
}

static bool params_to_disk(struct iz_config *c)
{
    if (c->zero.stage != 3 || c->zero.param.home == IZ_HOME_NVME ||
        c->zero.optimizer.ratio < 1)
        return false;
    c->zero.param.home = IZ_HOME_NVME;
    return true;
}

static bool fewer(struct iz_offload_config *o, int buffers)
{
    if (o->home != IZ_HOME_NVME || o->buffer_count <= buffers)
        return false;
    o->buffer_count = buffers;
    return true;
}

static bool four_state_buffers(struct iz_config *c)
{
    return fewer(&c->zero.optimizer, 4);
}

static bool few_state_buffers(struct iz_config *c)
{
    return fewer(&c->zero.optimizer, 2);
}

static bool few_param_buffers(struct iz_config *c)
{
    return fewer(&c->zero.param, 2);
}

/* Cheapest first. */
static const struct change changes[] = {
    {"run.recompute=full", full_recompute, false, NULL},
    {"activation_checkpointing.cpu_checkpointing=true", boundaries_to_cpu, true,
     NULL},
    {"run.schedule=depth_first", depth_first, false, NULL},
    {"run.ring=2", small_ring, false, NULL},
    {"run.cpu_products=fp32", wide_products, false, NULL},
    {"train_micro_batch_size_per_gpu=1 and gradient_accumulation_steps=",
     small_micro_batch, false, steps},
    {"zero_optimization.stage=3", stage_three, false, NULL},
    {"zero_optimization.offload_optimizer.device=cpu", optimizer_to_cpu, true,
     NULL},
    {"zero_optimization.offload_optimizer.ratio=", other_split, true, ratio},
    {"zero_optimization.offload_optimizer.device=cpu and "
     "zero_optimization.offload_optimizer.ratio=",
     optimizer_to_cpu, true, ratio},
    {"zero_optimization.offload_param.device=cpu", params_to_cpu, true, NULL},
    {"zero_optimization.offload_optimizer.device=nvme", optimizer_to_disk,
     false, NULL},
    {"zero_optimization.offload_optimizer.buffer_count=4", four_state_buffers,
     false, NULL},
    {"zero_optimization.offload_optimizer.buffer_count=2", few_state_buffers,
     false, NULL},
    {"zero_optimization.offload_param.device=nvme", params_to_disk, false,
     NULL},
    {"zero_optimization.offload_param.buffer_count=2", few_param_buffers, false,
     NULL},
};
#define CHANGES ((int)(sizeof(changes) / sizeof(changes[0])))

/* All of the host's tier is pinned but the states; see iz_memory_open_gpu. */
static int64_t table_bytes(const struct iz_plan *p)
{
    int64_t pinned = iz_bytes_tier(&p->bytes, IZ_TIER_CPU) -
                     p->bytes.b[IZ_TIER_CPU][IZ_MEM_STATE];
    return p->target.gpu ? (pinned + TABLE_PART - 1) / TABLE_PART : 0;
}

int64_t iz_plan_device_need(const struct iz_plan *p, const struct iz_limits *l)
{
    return iz_plan_device_bytes(p) + (l->tables ? table_bytes(p) : 0);
}

bool iz_plan_within(const struct iz_plan *p, const struct iz_limits *l)
{
    return iz_plan_host_bytes(p) <= l->host &&
           iz_plan_device_need(p, l) <= l->device;
}

static bool make(const struct iz_plan *p, const struct iz_config *c,
                 const struct iz_model *m, struct iz_plan *q)
{
    struct iz_target t = p->target;
    t.bf16_products = t.bf16_products && c->run.cpu_products != IZ_PRODUCTS_F32;
    return !iz_plan_make(q, c, m, p->ranks, p->rank, &t);
}

/* What runtime/config/check.c wants of a ratio below 1. */
static bool may_split(const struct iz_config *c)
{
    return c->zero.optimizer.home == IZ_HOME_CPU &&
           c->zero.param.home != IZ_HOME_NVME;
}

/* q is the plan with the whole optimizer on the host and does not fit: the one
 * with the largest part there that does, or q still. */
static void least_split(const struct iz_plan *p, struct iz_config *c,
                        const struct iz_model *m, const struct iz_limits *limit,
                        struct iz_plan *q)
{
    for (int i = RATIO_STEPS - 1; i >= 0 && may_split(c); i--) {
        struct iz_plan r;
        c->zero.optimizer.ratio = (double)i / RATIO_STEPS;
        if (!make(p, c, m, &r))
            continue;
        if (iz_plan_within(&r, limit)) {
            iz_plan_clear(q);
            *q = r;
            return;
        }
        iz_plan_clear(&r);
    }
    c->zero.optimizer.ratio = 1;
}

/* Applies the changes of the set `used`, as far as each changes anything; those
 * that do remain in the set.  q is the plan with them; false: there is none. */
static bool plan_with(const struct iz_plan *p, struct iz_config *c,
                      const struct iz_model *m, const struct iz_limits *limit,
                      unsigned *used, struct iz_plan *q)
{
    double before = c->zero.optimizer.ratio;
    int split = -1;
    for (int i = 0; i < CHANGES; i++) {
        if (!(*used & 1U << i))
            continue;
        if ((changes[i].gpu && !p->target.gpu) || !changes[i].apply(c))
            *used &= ~(1U << i);
        else if (changes[i].value == ratio)
            split = i;
    }
    if (!make(p, c, m, q))
        return false;
    if (split >= 0 && !iz_plan_within(q, limit))
        least_split(p, c, m, limit, q);
    if (split >= 0 && c->zero.optimizer.ratio == before)
        *used &= ~(1U << split);
    return true;
}

static bool fits(const struct iz_plan *p, const struct iz_config *c,
                 const struct iz_model *m, const struct iz_limits *limit,
                 unsigned *used)
{
    struct iz_config d = *c;
    struct iz_plan q;
    if (!plan_with(p, &d, m, limit, used, &q))
        return false;
    bool fit = iz_plan_within(&q, limit) && *used;
    iz_plan_clear(&q);
    return fit;
}

static void print_changes(const struct iz_plan *p, const struct iz_config *c,
                          const struct iz_model *m,
                          const struct iz_limits *limit, unsigned used,
                          FILE *err)
{
    struct iz_config d = *c;
    struct iz_plan q;
    const char *glue = "izar: it fits with ";
    if (!plan_with(p, &d, m, limit, &used, &q))
        return;
    for (int i = 0; i < CHANGES; i++) {
        if (!(used & 1U << i))
            continue;
        fprintf(err, "%s%s", glue, changes[i].text);
        if (changes[i].value)
            fprintf(err, "%.15g", changes[i].value(&d));
        glue = " and ";
    }
    fprintf(err, " (%.1f MiB", iz_mib(iz_plan_host_bytes(&q)));
    if (p->target.gpu)
        fprintf(err, " of the host, %.1f MiB of the GPU",
                iz_mib(iz_plan_device_need(&q, limit)));
    fprintf(err, ")\n");
    iz_plan_clear(&q);
}

/* The first single change that is enough; else all of them, less those that are
 * not needed, dearest kept last. */
static void suggest(const struct iz_plan *p, const struct iz_config *c,
                    const struct iz_model *m, const struct iz_limits *limit,
                    FILE *err)
{
    unsigned used = 0;
    for (int i = 0; i < CHANGES; i++) {
        used = 1U << i;
        if (fits(p, c, m, limit, &used)) {
            print_changes(p, c, m, limit, used, err);
            return;
        }
    }
    used = (1U << CHANGES) - 1;
    if (!fits(p, c, m, limit, &used)) {
        fprintf(err, "izar: recomputing, a smaller ring or micro-batch, stage "
                     "3 and nvme are not enough: it needs more ranks or a "
                     "smaller model\n");
        return;
    }
    for (int i = CHANGES - 1; i >= 0; i--) {
        unsigned less = used & ~(1U << i);
        if (less != used && fits(p, c, m, limit, &less))
            used = less;
    }
    print_changes(p, c, m, limit, used, err);
}

int iz_plan_fit(struct iz_plan *p, const struct iz_config *c,
                const struct iz_model *m, const struct iz_limits *limit,
                FILE *err)
{
    /* What lives on the host so that the GPU has room is not kept there. */
    bool lean = p->act.boundaries_down && p->target.gpu;
    if (c->run.recompute == IZ_RECOMPUTE_AUTO && !lean) {
        iz_plan_keep(p, m, true);
        if (!iz_plan_within(p, limit))
            iz_plan_keep(p, m, false);
    }
    if (iz_plan_within(p, limit))
        return 0;
    if (!err)
        return -ENOMEM;
    if (iz_plan_host_bytes(p) > limit->host)
        fprintf(err,
                "izar: this run needs %.1f MiB of memory per rank, there are "
                "%.1f MiB:\n",
                iz_mib(iz_plan_host_bytes(p)), iz_mib(limit->host));
    if (iz_plan_device_need(p, limit) > limit->device)
        fprintf(err,
                "izar: this run needs %.1f MiB of the GPU's memory, there are "
                "%.1f MiB:\n",
                iz_mib(iz_plan_device_need(p, limit)), iz_mib(limit->device));
    iz_plan_print(p, m, err);
    suggest(p, c, m, limit, err);
    return -ENOMEM;
}
