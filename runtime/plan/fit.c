/* SPDX-License-Identifier: Apache-2.0 */
/* Whether a plan fits into the memory there is, the smallest change of the
 * config with which it would, and the largest model of a shape that does: the
 * same units with more or fewer of the kind that repeats.  See plan.h. */
#include "runtime/plan/fit.h"

#include <errno.h>
#include <stdlib.h>

#include "codelets/base/take.h"
#include "codelets/base/units.h"
#include "runtime/base/text.h"
#include "runtime/plan/matrices.h"
#include "runtime/plan/split.h"
#include "runtime/plan/unit_sizes.h"

/* Cheapest first. */
enum change {
    LEAST_RECOMPUTE,
    BOUNDARIES_TO_CPU,
    RANKS_FIRST,
    FEW_LOGITS,
    OWN_BACKWARD,
    DEPTH_FIRST,
    SMALL_RING,
    NO_COPIES,
    WIDE_PRODUCTS,
    SMALL_MICRO_BATCH,
    CHUNKS,
    STAGE_THREE,
    OPTIMIZER_TO_CPU,
    OTHER_SPLIT,
    OPTIMIZER_TO_CPU_SPLIT,
    PARAMS_TO_CPU,
    OPTIMIZER_TO_DISK,
    FOUR_STATE_BUFFERS,
    FEW_STATE_BUFFERS,
    PARAMS_TO_DISK,
    FEW_PARAM_BUFFERS,
    CHANGES
};

#define OFFLOAD "zero_optimization.offload_"

/* gpu: it only helps where there is one.  A number follows after "=". */
static const struct {
    const char *text;
    bool gpu;
} changes[CHANGES] = {
    [LEAST_RECOMPUTE] = {"run.recompute=auto", false},
    [BOUNDARIES_TO_CPU] = {"activation_checkpointing.cpu_checkpointing=true",
                           true},
    [CHUNKS] = {"run.sequence_chunk=", false},
    [RANKS_FIRST] = {"run.sum_order=ranks_first", false},
    [FEW_LOGITS] = {"run.gpu_logits_bytes=268435456", true},
    [OWN_BACKWARD] = {"run.gpu_attention_backward=own", true},
    [DEPTH_FIRST] = {"run.schedule=depth_first", false},
    [SMALL_RING] = {"run.ring=2", false},
    [NO_COPIES] = {"zero_optimization.zero_hpz_partition_size=1", false},
    [WIDE_PRODUCTS] = {"run.cpu_products=fp32", false},
    [SMALL_MICRO_BATCH] = {"train_micro_batch_size_per_gpu=1 and "
                           "gradient_accumulation_steps=",
                           false},
    [STAGE_THREE] = {"zero_optimization.stage=3", false},
    [OPTIMIZER_TO_CPU] = {OFFLOAD "optimizer.device=cpu", true},
    [OTHER_SPLIT] = {OFFLOAD "optimizer.ratio=", true},
    [OPTIMIZER_TO_CPU_SPLIT] = {OFFLOAD "optimizer.device=cpu and " OFFLOAD
                                        "optimizer.ratio=",
                                true},
    [PARAMS_TO_CPU] = {OFFLOAD "param.device=cpu", true},
    [OPTIMIZER_TO_DISK] = {OFFLOAD "optimizer.device=nvme", false},
    [FOUR_STATE_BUFFERS] = {OFFLOAD "optimizer.buffer_count=4", false},
    [FEW_STATE_BUFFERS] = {OFFLOAD "optimizer.buffer_count=2", false},
    [PARAMS_TO_DISK] = {OFFLOAD "param.device=nvme", false},
    [FEW_PARAM_BUFFERS] = {OFFLOAD "param.buffer_count=2", false},
};

/* Of a change whose optimizer may then be split: it takes the largest part on
 * the host that fits (least_split). */
static bool splits(enum change i)
{
    return i == OTHER_SPLIT || i == OPTIMIZER_TO_CPU_SPLIT;
}

static bool set_home(struct iz_offload_config *o, enum iz_home home, bool may)
{
    if (may)
        o->home = home;
    return may;
}

static bool fewer_buffers(struct iz_offload_config *o, int buffers)
{
    if (o->home != IZ_HOME_NVME || o->buffer_count <= buffers)
        return false;
    o->buffer_count = buffers;
    return true;
}

/* False: changed nothing. */
static bool apply(enum change i, struct iz_config *c, bool gpu)
{
    struct iz_offload_config *o = &c->zero.optimizer, *p = &c->zero.param;
    struct iz_config was = *c;
    switch (i) {
    case LEAST_RECOMPUTE: /* planned as full, which is its last resort */
        if (was.run.recompute == IZ_RECOMPUTE_FULL)
            return false;
        c->run.recompute = IZ_RECOMPUTE_AUTO;
        return was.run.recompute != IZ_RECOMPUTE_AUTO;
    case BOUNDARIES_TO_CPU:
        c->cpu_checkpointing = true;
        return !was.cpu_checkpointing;
    case CHUNKS: /* of the least rows, unless most_rows finds more */
        c->run.sequence_chunk = IZ_CHUNK_LEAST;
        return was.run.sequence_chunk == IZ_CHUNK_OFF;
    case RANKS_FIRST:
        c->run.sum_order = IZ_SUM_RANKS_FIRST;
        return iz_sum_choose(&was, gpu) != IZ_SUM_RANKS_FIRST;
    case FEW_LOGITS:
        c->run.gpu_logits_bytes = IZ_LOGITS_BYTES;
        return was.run.gpu_logits_bytes > IZ_LOGITS_BYTES;
    case OWN_BACKWARD:
        c->run.gpu_attention_backward = IZ_ATTENTION_OWN;
        return was.run.gpu_attention_backward == IZ_ATTENTION_CUDNN;
    case DEPTH_FIRST:
        c->run.schedule = IZ_DEPTH_FIRST;
        return was.run.schedule != IZ_DEPTH_FIRST;
    case SMALL_RING:
        c->run.ring = 2;
        return was.run.ring != 2;
    case NO_COPIES:
        c->zero.hpz_partition = 1;
        return was.zero.hpz_partition > 1;
    case WIDE_PRODUCTS:
        c->run.cpu_products = IZ_PRODUCTS_F32;
        return c->dtype == IZ_BF16 && was.run.cpu_products != IZ_PRODUCTS_F32;
    case SMALL_MICRO_BATCH:
        if (c->micro_batch == 1)
            return false;
        iz_config_cut(c, c->micro_batch * c->grad_accum);
        c->run.slices = 0;
        return true;
    case STAGE_THREE:
        c->zero.stage = 3;
        return was.zero.stage != 3;
    case OPTIMIZER_TO_CPU:
    case OPTIMIZER_TO_CPU_SPLIT:
        return set_home(o, IZ_HOME_CPU,
                        c->zero.stage > 0 && o->home == IZ_HOME_NONE);
    case OTHER_SPLIT: /* all on the host, unless least_split finds better */
        o->ratio = 1;
        return true;
    case PARAMS_TO_CPU:
        return set_home(p, IZ_HOME_CPU,
                        c->zero.stage == 3 && o->home != IZ_HOME_NONE &&
                            p->home == IZ_HOME_NONE);
    case OPTIMIZER_TO_DISK:
        return set_home(o, IZ_HOME_NVME,
                        c->zero.stage > 0 && o->home != IZ_HOME_NVME &&
                            o->ratio >= 1);
    case PARAMS_TO_DISK:
        return set_home(p, IZ_HOME_NVME,
                        c->zero.stage == 3 && p->home != IZ_HOME_NVME &&
                            c->zero.hpz_partition <= 1 && o->ratio >= 1);
    case FOUR_STATE_BUFFERS:
        return fewer_buffers(o, 4);
    case FEW_STATE_BUFFERS:
        return fewer_buffers(o, 2);
    default: /* FEW_PARAM_BUFFERS */
        return fewer_buffers(p, 2);
    }
}

/* With the sums of a single rank on the GPU, else with them on the host. */
static bool fits_either_way(struct iz_plan *p, const struct iz_config *c,
                            const struct iz_model *m,
                            const struct iz_limits *limit)
{
    iz_plan_sum_on_gpu(p, c, m, true);
    if (!iz_plan_within(p, limit))
        iz_plan_sum_on_gpu(p, c, m, false);
    return iz_plan_within(p, limit);
}

static bool make(const struct iz_plan *p, const struct iz_config *c,
                 const struct iz_model *m, struct iz_plan *q)
{
    struct iz_target t = p->target;
    t.numerics.bf16_products &= c->run.cpu_products != IZ_PRODUCTS_F32;
    return !iz_plan_make(q, c, m, p->ranks, p->rank, &t);
}

bool iz_plan_may_split(const struct iz_config *c)
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
    for (int i = IZ_RATIO_STEPS - 1; i >= 0 && iz_plan_may_split(c); i--) {
        struct iz_plan r;
        c->zero.optimizer.ratio = (double)i / IZ_RATIO_STEPS;
        if (!make(p, c, m, &r))
            continue;
        if (fits_either_way(&r, c, m, limit)) {
            iz_plan_clear(q);
            *q = r;
            return;
        }
        iz_plan_clear(&r);
    }
    c->zero.optimizer.ratio = 1;
}

/* q is the plan with the smallest chunks: the one with the largest that fit, or
 * q still. */
static void most_rows(const struct iz_plan *p, struct iz_config *c,
                      const struct iz_model *m, const struct iz_limits *limit,
                      struct iz_plan *q)
{
    int64_t n = c->run.sequence_chunk;
    struct iz_plan r;
    while (2 * n < m->tokens) {
        c->run.sequence_chunk = 2 * n;
        if (!make(p, c, m, &r))
            break;
        if (!fits_either_way(&r, c, m, limit)) {
            iz_plan_clear(&r);
            break;
        }
        iz_plan_clear(q);
        *q = r;
        n *= 2;
    }
    c->run.sequence_chunk = n;
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
        if ((changes[i].gpu && !p->target.gpu) ||
            (i == CHUNKS && !(m->knows_chunks && IZ_CHUNK_LEAST < m->tokens)) ||
            !apply(i, c, p->target.gpu))
            *used &= ~(1U << i);
        else if (splits(i))
            split = i;
    }
    if (!make(p, c, m, q))
        return false;
    if (!fits_either_way(q, c, m, limit) && split >= 0)
        least_split(p, c, m, limit, q);
    if (*used & 1U << CHUNKS && fits_either_way(q, c, m, limit))
        most_rows(p, c, m, limit, q);
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
        if (i == SMALL_MICRO_BATCH)
            fprintf(err, "%d", d.grad_accum);
        else if (i == CHUNKS)
            fprintf(err, "%lld", (long long)d.run.sequence_chunk);
        else if (splits(i))
            fprintf(err, "%.15g", d.zero.optimizer.ratio);
        glue = " and ";
    }
    fprintf(err, " (%.1f MiB", iz_units_mib(iz_plan_host_need(&q, limit)));
    if (p->target.gpu)
        fprintf(err, " of the host, %.1f MiB of the GPU",
                iz_units_mib(iz_plan_device_need(&q, limit)));
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
    used = ((1U << CHANGES) - 1) & ~(1U << CHUNKS); /* whose sums take memory */
    if (!fits(p, c, m, limit, &used))
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

/* Activations come before sums near: what the host adds may be hidden. */
static void keep_most(struct iz_plan *p, const struct iz_config *c,
                      const struct iz_model *m, const struct iz_limits *limit)
{
    iz_plan_repeat(p, m, IZ_REPEAT_FULL);
    iz_plan_sum_on_gpu(p, c, m, false);
    if (iz_plan_within(p, limit) || fits_either_way(p, c, m, limit))
        iz_plan_keep(p, m, limit);
}

/* How much more of the GPU's memory cuDNN's backward takes than ours. */
static void print_backward(const struct iz_plan *p, const struct iz_config *c,
                           const struct iz_model *m, FILE *err)
{
    struct iz_config own = *c;
    struct iz_plan q;
    if (!apply(OWN_BACKWARD, &own, true) || !make(p, &own, m, &q))
        return;
    int64_t more = p->act.scratch_bytes - q.act.scratch_bytes;
    if (more > 0)
        fprintf(err,
                "izar: run.gpu_attention_backward: cudnn takes %lld bytes more "
                "than own: a matrix of the scores of each head\n",
                (long long)more);
    iz_plan_clear(&q);
}

int iz_plan_fit(struct iz_plan *p, const struct iz_config *c,
                const struct iz_model *m, const struct iz_limits *limit,
                FILE *err)
{
    const struct iz_numerics *n = &p->target.numerics;
    if (p->why_own && (n->cudnn || n->cudnn_bwd))
        return iz_text_refuse(err, "run.gpu_attention%s: cudnn: %s; use own",
                              n->cudnn ? "" : "_backward", p->why_own);
    if (c->run.recompute == IZ_RECOMPUTE_AUTO)
        keep_most(p, c, m, limit);
    if (fits_either_way(p, c, m, limit)) {
        iz_plan_split_widen(p, limit->device - iz_plan_device_need(p, limit));
        iz_places_list(p, m);
        return 0;
    }
    if (!err)
        return -ENOMEM;
    if (iz_plan_host_need(p, limit) > limit->host)
        fprintf(err,
                "izar: this run needs %.1f MiB of memory per rank, there are "
                "%.1f MiB:\n",
                iz_units_mib(iz_plan_host_need(p, limit)),
                iz_units_mib(limit->host));
    if (iz_plan_device_need(p, limit) > limit->device)
        fprintf(err,
                "izar: this run needs %.1f MiB of the GPU's memory, there are "
                "%.1f MiB:\n",
                iz_units_mib(iz_plan_device_need(p, limit)),
                iz_units_mib(limit->device));
    iz_plan_print(p, m, err);
    if (p->target.numerics.cudnn_bwd &&
        iz_plan_device_need(p, limit) > limit->device)
        print_backward(p, c, m, err);
    iz_plan_matrices_refuse(p, m,
                            limit->host - iz_plan_host_need(p, limit) +
                                p->act.scratch_bytes * p->tasks_at_once,
                            err);
    suggest(p, c, m, limit, err);
    return -ENOMEM;
}

/* ---- the largest model ---- */

#define MOST_BLOCKS (1 << 14)

/* The run of equal kinds that is longest: a model's blocks. */
struct blocks {
    int first, count;
};

static struct blocks find_blocks(const struct iz_model *m)
{
    struct blocks best = {0, 0};
    for (int u = 0; u < m->n_units;) {
        int end = u + 1;
        while (end < m->n_units && m->unit[end].kind == m->unit[u].kind)
            end++;
        if (end - u > best.count)
            best = (struct blocks){u, end - u};
        u = end;
    }
    return best;
}

/* m with n blocks; the parameters' lists are borrowed from it. */
static void with_blocks(const struct iz_model *m, struct blocks b, int n,
                        struct iz_model *out)
{
    int after = m->n_units - b.first - b.count;
    *out = *m;
    out->n_units = b.first + n + after;
    out->unit = iz_take(out->n_units, sizeof(*out->unit), "units");
    for (int u = 0; u < out->n_units; u++) {
        int from = u < b.first       ? u
                   : u < b.first + n ? b.first
                                     : u - n + b.count;
        out->unit[u] = m->unit[from];
    }
}

/* Whether n blocks fit, and how many parameters that is. */
static bool fits_blocks(const struct iz_plan *p, const struct iz_config *c,
                        const struct iz_model *m, struct blocks b, int n,
                        const struct iz_limits *limit, double *params)
{
    struct iz_model grown;
    struct iz_plan q;
    bool fit = false;
    *params = 0;
    with_blocks(m, b, n, &grown);
    if (!iz_plan_make(&q, c, &grown, p->ranks, p->rank, &p->target)) {
        fit = fits_either_way(&q, c, &grown, limit);
        for (int u = 0; u < q.n_units; u++)
            *params +=
                (double)(q.unit[u].n + q.unit[u].frozen.n + q.unit[u].quant.n);
        iz_plan_clear(&q);
    }
    free(grown.unit);
    return fit;
}

int iz_plan_largest(const struct iz_plan *p, const struct iz_config *c,
                    const struct iz_model *m, const struct iz_limits *limit,
                    double *params)
{
    struct blocks b = find_blocks(m);
    int low = 0, high = 1;
    double n = 0;
    *params = 0;
    while (high < MOST_BLOCKS && fits_blocks(p, c, m, b, high, limit, &n)) {
        low = high;
        high *= 2;
    }
    while (high - low > 1) {
        int middle = low + (high - low) / 2;
        if (fits_blocks(p, c, m, b, middle, limit, &n))
            low = middle;
        else
            high = middle;
    }
    if (low > 0)
        fits_blocks(p, c, m, b, low, limit, params);
    return low;
}
