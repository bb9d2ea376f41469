/* SPDX-License-Identifier: Apache-2.0 */
/* Whether a plan fits into the memory there is, and the smallest change of the
 * config with which it would; see plan.h. */
#include <errno.h>
#include <string.h>

#include "runtime/plan.h"

struct change {
    const char *text;
    bool (*apply)(struct iz_config *c); /* false: changed nothing */
    bool gpu;                           /* only helps where there is one */
};

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

/* The whole optimizer on the host. */
static bool no_split(struct iz_config *c)
{
    bool was = c->zero.optimizer.ratio < 1;
    c->zero.optimizer.ratio = 1;
    return was;
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

static bool fewer(struct iz_offload_config *o)
{
    if (o->home != IZ_HOME_NVME || o->buffer_count <= 2)
        return false;
    o->buffer_count = 2;
    return true;
}

static bool few_state_buffers(struct iz_config *c)
{
    return fewer(&c->zero.optimizer);
}

static bool few_param_buffers(struct iz_config *c)
{
    return fewer(&c->zero.param);
}

/* Cheapest first.  %d: the accumulation steps that keep the batch. */
static const struct change changes[] = {
    {"run.recompute=full", full_recompute, false},
    {"activation_checkpointing.cpu_checkpointing=true", boundaries_to_cpu,
     true},
    {"run.schedule=depth_first", depth_first, false},
    {"run.ring=2", small_ring, false},
    {"train_micro_batch_size_per_gpu=1 and gradient_accumulation_steps=%d",
     small_micro_batch, false},
    {"zero_optimization.stage=3", stage_three, false},
    {"zero_optimization.offload_optimizer.device=cpu", optimizer_to_cpu, true},
    {"zero_optimization.offload_optimizer.ratio=1", no_split, true},
    {"zero_optimization.offload_param.device=cpu", params_to_cpu, true},
    {"zero_optimization.offload_optimizer.device=nvme", optimizer_to_disk,
     false},
    {"zero_optimization.offload_param.device=nvme", params_to_disk, false},
    {"zero_optimization.offload_optimizer.buffer_count=2", few_state_buffers,
     false},
    {"zero_optimization.offload_param.buffer_count=2", few_param_buffers,
     false},
};
#define CHANGES ((int)(sizeof(changes) / sizeof(changes[0])))

static bool within(const struct iz_plan *p, const struct iz_limits *l)
{
    return iz_plan_host_bytes(p) <= l->host &&
           iz_plan_device_bytes(p) <= l->device;
}

/* Applies the changes of the set `used`, as far as each changes anything; those
 * that do remain in the set.  q is the plan with them; false: there is none. */
static bool plan_with(const struct iz_plan *p, struct iz_config *c,
                      const struct iz_model *m, unsigned *used,
                      struct iz_plan *q)
{
    for (int i = 0; i < CHANGES; i++)
        if (*used & 1U << i &&
            ((changes[i].gpu && !p->target.gpu) || !changes[i].apply(c)))
            *used &= ~(1U << i);
    return !iz_plan_make(q, c, m, p->ranks, p->rank, &p->target);
}

static bool fits(const struct iz_plan *p, const struct iz_config *c,
                 const struct iz_model *m, const struct iz_limits *limit,
                 unsigned *used)
{
    struct iz_config d = *c;
    struct iz_plan q;
    if (!plan_with(p, &d, m, used, &q))
        return false;
    bool fit = within(&q, limit) && *used;
    iz_plan_clear(&q);
    return fit;
}

static void print_changes(const struct iz_plan *p, const struct iz_config *c,
                          const struct iz_model *m, unsigned used, FILE *err)
{
    struct iz_config d = *c;
    struct iz_plan q;
    const char *glue = "izar: it fits with ";
    if (!plan_with(p, &d, m, &used, &q))
        return;
    for (int i = 0; i < CHANGES; i++) {
        if (!(used & 1U << i))
            continue;
        const char *number = strstr(changes[i].text, "%d");
        int len = number ? (int)(number - changes[i].text)
                         : (int)strlen(changes[i].text);
        fprintf(err, "%s%.*s", glue, len, changes[i].text);
        if (number)
            fprintf(err, "%d", d.grad_accum);
        glue = " and ";
    }
    fprintf(err, " (%.1f MiB", (double)iz_plan_host_bytes(&q) / 1048576);
    if (p->target.gpu)
        fprintf(err, " of the host, %.1f MiB of the GPU",
                (double)iz_plan_device_bytes(&q) / 1048576);
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
            print_changes(p, c, m, used, err);
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
    print_changes(p, c, m, used, err);
}

int iz_plan_fit(struct iz_plan *p, const struct iz_config *c,
                const struct iz_model *m, const struct iz_limits *limit,
                FILE *err)
{
    /* What lives on the host so that the GPU has room is not kept there. */
    bool lean = p->boundaries_down && p->target.gpu;
    if (c->run.recompute == IZ_RECOMPUTE_AUTO && !lean) {
        iz_plan_keep(p, m, true);
        if (!within(p, limit))
            iz_plan_keep(p, m, false);
    }
    if (within(p, limit))
        return 0;
    if (!err)
        return -ENOMEM;
    if (iz_plan_host_bytes(p) > limit->host)
        fprintf(err,
                "izar: this run needs %.1f MiB of memory per rank, there are "
                "%.1f MiB:\n",
                (double)iz_plan_host_bytes(p) / 1048576,
                (double)limit->host / 1048576);
    if (iz_plan_device_bytes(p) > limit->device)
        fprintf(err,
                "izar: this run needs %.1f MiB of the GPU's memory, there are "
                "%.1f MiB:\n",
                (double)iz_plan_device_bytes(p) / 1048576,
                (double)limit->device / 1048576);
    iz_plan_print(p, m, err);
    suggest(p, c, m, limit, err);
    return -ENOMEM;
}
