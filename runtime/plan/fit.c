/* SPDX-License-Identifier: Apache-2.0 */
/* Whether a plan fits into the memory there is, the smallest change of the
 * config with which it would, and the largest model of a shape that does: the
 * same units with more or fewer of the kind that recomputes.  See plan.h. */
#include "runtime/plan/fit.h"

#include <errno.h>
#include <stdlib.h>

#include "codelets/base/take.h"
#include "codelets/base/units.h"
#include "runtime/base/text.h"
#include "runtime/plan/matrices.h"
#include "runtime/plan/split.h"

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

/* A plan that is to fit, and what it was made of. */
struct fitting {
    const struct iz_plan *p;
    const struct iz_config *c;
    const struct iz_model *m;
    const struct iz_limits *limit;
};

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

/* Of another config. */
static bool make(const struct fitting *f, const struct iz_config *c,
                 struct iz_plan *q)
{
    struct iz_target t = f->p->target;
    t.numerics.bf16_products &= c->run.cpu_products != IZ_PRODUCTS_F32;
    return !iz_plan_make(q, c, f->m, f->p->ranks, f->p->rank, &t);
}

/* Whether that fits; then it is in q, in place of the one before. */
static bool replace(const struct fitting *f, const struct iz_config *c,
                    struct iz_plan *q)
{
    struct iz_plan r;
    bool fit = false;
    if (!make(f, c, &r))
        return false;
    fit = fits_either_way(&r, c, f->m, f->limit);
    iz_plan_clear(fit ? q : &r);
    if (fit)
        *q = r;
    return fit;
}

bool iz_plan_may_split(const struct iz_config *c)
{
    return c->zero.optimizer.home == IZ_HOME_CPU &&
           c->zero.param.home != IZ_HOME_NVME;
}

/* q is the plan with the whole optimizer on the host and does not fit: the one
 * with the largest part there that does, or q still. */
static void least_split(const struct fitting *f, struct iz_config *c,
                        struct iz_plan *q)
{
    for (int i = IZ_RATIO_STEPS - 1; i >= 0 && iz_plan_may_split(c); i--) {
        c->zero.optimizer.ratio = (double)i / IZ_RATIO_STEPS;
        if (replace(f, c, q))
            return;
    }
    c->zero.optimizer.ratio = 1;
}

/* q is the plan with the smallest chunks: the one with the largest that fit, or
 * q still. */
static void most_rows(const struct fitting *f, struct iz_config *c,
                      struct iz_plan *q)
{
    int64_t n = c->run.sequence_chunk;
    for (bool fit = true; fit && 2 * n < f->m->tokens; n *= fit ? 2 : 1) {
        c->run.sequence_chunk = 2 * n;
        fit = replace(f, c, q);
    }
    c->run.sequence_chunk = n;
}

/* Applies the changes of the set `used`, as far as each changes anything; those
 * that do remain in the set.  q is the plan with them; false: there is none. */
static bool plan_with(const struct fitting *f, struct iz_config *c,
                      unsigned *used, struct iz_plan *q)
{
    const struct iz_model *m = f->m;
    bool gpu = f->p->target.gpu;
    double before = c->zero.optimizer.ratio;
    int split = -1;
    for (int i = 0; i < CHANGES; i++) {
        if (!(*used & 1U << i))
            continue;
        if ((changes[i].gpu && !gpu) ||
            (i == CHUNKS && !(m->knows_chunks && IZ_CHUNK_LEAST < m->tokens)) ||
            !apply(i, c, gpu))
            *used &= ~(1U << i);
        else if (splits(i))
            split = i;
    }
    if (!make(f, c, q))
        return false;
    if (!fits_either_way(q, c, m, f->limit) && split >= 0)
        least_split(f, c, q);
    if (*used & 1U << CHUNKS && fits_either_way(q, c, m, f->limit))
        most_rows(f, c, q);
    if (split >= 0 && c->zero.optimizer.ratio == before)
        *used &= ~(1U << split);
    return true;
}

static bool fits(const struct fitting *f, unsigned *used)
{
    struct iz_config d = *f->c;
    struct iz_plan q;
    if (!plan_with(f, &d, used, &q))
        return false;
    bool fit = iz_plan_within(&q, f->limit) && *used;
    iz_plan_clear(&q);
    return fit;
}

static void print_changes(const struct fitting *f, unsigned used, FILE *err)
{
    struct iz_config d = *f->c;
    struct iz_plan q;
    const char *glue = "izar: it fits with ";
    if (!plan_with(f, &d, &used, &q))
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
    fprintf(err, " (%.1f MiB", iz_units_mib(iz_plan_host_need(&q, f->limit)));
    if (q.target.gpu)
        fprintf(err, " of the host, %.1f MiB of the GPU",
                iz_units_mib(iz_plan_device_need(&q, f->limit)));
    fprintf(err, ")\n");
    iz_plan_clear(&q);
}

/* The first single change that is enough; else all of them, less those that are
 * not needed, dearest kept last. */
static void suggest(const struct fitting *f, FILE *err)
{
    unsigned used = 0;
    for (int i = 0; i < CHANGES; i++) {
        used = 1U << i;
        if (fits(f, &used)) {
            print_changes(f, used, err);
            return;
        }
    }
    used = ((1U << CHANGES) - 1) & ~(1U << CHUNKS); /* whose sums take memory */
    if (!fits(f, &used))
        used = (1U << CHANGES) - 1;
    if (!fits(f, &used)) {
        fprintf(err, "izar: recomputing, a smaller ring or micro-batch, stage "
                     "3 and nvme are not enough: it needs more ranks or a "
                     "smaller model\n");
        return;
    }
    for (int i = CHANGES - 1; i >= 0; i--) {
        unsigned less = used & ~(1U << i);
        if (less != used && fits(f, &less))
            used = less;
    }
    print_changes(f, used, err);
}

/* Activations come before sums near: what the host adds may be hidden. */
static void keep_most(struct iz_plan *p, const struct iz_config *c,
                      const struct iz_model *m, const struct iz_limits *limit)
{
    iz_plan_recompute(p, m, IZ_RECOMPUTE_FULL);
    iz_plan_sum_on_gpu(p, c, m, false);
    if (iz_plan_within(p, limit) || fits_either_way(p, c, m, limit))
        iz_plan_keep(p, m, limit);
}

/* How much more of the GPU's memory cuDNN's backward takes than ours. */
static void print_backward(const struct fitting *f, FILE *err)
{
    struct iz_config own = *f->c;
    struct iz_plan q;
    if (!apply(OWN_BACKWARD, &own, true) || !make(f, &own, &q))
        return;
    int64_t more = f->p->act.scratch_bytes - q.act.scratch_bytes;
    if (more > 0)
        fprintf(err,
                "izar: run.gpu_attention_backward: cudnn takes %lld bytes more "
                "than own: a matrix of the scores of each head\n",
                (long long)more);
    iz_plan_clear(&q);
}

static void print_need(int64_t need, int64_t limit, const char *what, FILE *err)
{
    if (need > limit)
        fprintf(err,
                "izar: this run needs %.1f MiB of %s, there are %.1f MiB:\n",
                iz_units_mib(need), what, iz_units_mib(limit));
}

/* Says what is lacking, and what would help. */
static void refuse(const struct fitting *f, FILE *err)
{
    const struct iz_plan *p = f->p;
    int64_t host = iz_plan_host_need(p, f->limit);
    int64_t device = iz_plan_device_need(p, f->limit);
    print_need(host, f->limit->host, "memory per rank", err);
    print_need(device, f->limit->device, "the GPU's memory", err);
    iz_plan_print(p, f->m, err);
    if (p->target.numerics.cudnn_bwd && device > f->limit->device)
        print_backward(f, err);
    iz_plan_matrices_refuse(
        p, f->m,
        f->limit->host - host + p->act.scratch_bytes * p->tasks_at_once, err);
    suggest(f, err);
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
    if (err)
        refuse(&(struct fitting){p, c, m, limit}, err);
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
static bool fits_blocks(const struct fitting *f, struct blocks b, int n,
                        double *params)
{
    struct iz_model grown;
    struct iz_plan q;
    bool fit = false;
    *params = 0;
    with_blocks(f->m, b, n, &grown);
    if (!iz_plan_make(&q, f->c, &grown, f->p->ranks, f->p->rank,
                      &f->p->target)) {
        fit = fits_either_way(&q, f->c, &grown, f->limit);
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
    struct fitting f = {p, c, m, limit};
    struct blocks b = find_blocks(m);
    int low = 0, high = 1;
    double n = 0;
    *params = 0;
    while (high < MOST_BLOCKS && fits_blocks(&f, b, high, &n)) {
        low = high;
        high *= 2;
    }
    while (high - low > 1) {
        int middle = low + (high - low) / 2;
        if (fits_blocks(&f, b, middle, &n))
            low = middle;
        else
            high = middle;
    }
    if (low > 0)
        fits_blocks(&f, b, low, params);
    return low;
}
