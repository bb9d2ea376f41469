/* SPDX-License-Identifier: Apache-2.0 */
/* Whether a plan fits into the memory there is, the smallest change of the
 * config with which it would, and the largest model of a shape that does: the
 * same units with more or fewer blocks.  See plan.h. */
#include "runtime/plan/fit.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>

#include "codelets/base/int64.h"
#include "codelets/base/take.h"
#include "codelets/base/units.h"
#include "runtime/base/text.h"
#include "runtime/plan/forecast.h"
#include "runtime/plan/matrices.h"
#include "runtime/plan/split.h"

#define STATES "zero_optimization.offload_optimizer."
#define PARAMS "zero_optimization.offload_param."

/* Changes whose numbers are found, and follow after "=".  Before SPLIT is the
 * one that it may need; it and what is behind it may need SAVES, too. */
enum { MICRO_BATCH = 9, CHUNKS = 10, SAVES = 11, SPLIT = 14, CHANGES = 21 };

struct change {
    const char *text;
    bool may; /* it may help there */
};

/* Saves beside training cannot read these on nvme; a config refuses both. */
static bool must_wait(const struct iz_config *c, bool states)
{
    return c->run.save_mode == IZ_SAVE_ASYNC &&
           (c->run.nvme_checksum ||
            (states && c->run.state_dtype != IZ_MOMENT_F32));
}

/* Micro-batches of a sample each, or a pair. */
static int64_t most_micros(const struct iz_config *c)
{
    return (int64_t)c->micro_batch * c->grad_accum / c->data.group;
}

/* Change i of all, cheapest first. */
static struct change change_of(int i, const struct iz_plan_for *f,
                               const struct iz_config *c)
{
    const struct iz_offload_config *o = &c->zero.optimizer, *p = &c->zero.param;
    const struct iz_run_config *r = &c->run;
    bool gpu = f->target->gpu, three = c->zero.stage == 3;
    bool cudnn = r->gpu_attention == IZ_ATTENTION_CUDNN ||
                 r->gpu_attention_backward == IZ_ATTENTION_CUDNN;
    const struct change all[CHANGES] = {
        /* planned as full, which is its last resort */
        {"run.recompute=auto", r->recompute != IZ_RECOMPUTE_FULL},
        {"activation_checkpointing.cpu_checkpointing=true", gpu},
        {"run.sum_order=ranks_first",
         iz_sum_choose(c, gpu) != IZ_SUM_RANKS_FIRST},
        {"run.gpu_logits_bytes=268435456",
         gpu && r->gpu_logits_bytes > IZ_LOGITS_BYTES},
        {"run.gpu_attention_backward=own",
         gpu && r->gpu_attention_backward == IZ_ATTENTION_CUDNN},
        {"run.schedule=depth_first", true},
        {"run.ring=2", true},
        {"zero_optimization.zero_hpz_partition_size=1",
         c->zero.hpz_partition > 1},
        {"run.cpu_products=fp32", c->dtype == IZ_BF16},
        [MICRO_BATCH] = {"train_micro_batch_size_per_gpu=",
                         c->micro_batch > c->data.group &&
                             most_micros(c) <= IZ_BATCH_MAX},
        [CHUNKS] = {"run.sequence_chunk=",
                    f->model->knows_chunks && c->lora.dropout == 0 &&
                        !(gpu && cudnn) && IZ_CHUNK_LEAST < f->model->tokens &&
                        (r->sequence_chunk == IZ_CHUNK_OFF ||
                         r->sequence_chunk > IZ_CHUNK_LEAST)},
        [SAVES] = {"run.save_mode=auto", must_wait(c, true)},
        {"zero_optimization.stage=3", true},
        {STATES "device=cpu",
         gpu && c->zero.stage > 0 && o->home == IZ_HOME_NONE},
        [SPLIT] = {STATES "ratio=", gpu},
        {PARAMS "device=cpu",
         gpu && three && o->home != IZ_HOME_NONE && p->home == IZ_HOME_NONE},
        {STATES "device=nvme",
         c->zero.stage > 0 && o->ratio >= 1 && !must_wait(c, true)},
        {STATES "buffer_count=4",
         o->home == IZ_HOME_NVME && o->buffer_count > 4},
        {STATES "buffer_count=2",
         o->home == IZ_HOME_NVME && o->buffer_count > 2},
        {PARAMS "device=nvme", three && c->zero.hpz_partition <= 1 &&
                                   (!gpu || o->home != IZ_HOME_NONE) &&
                                   o->ratio >= 1 && !must_wait(c, false)},
        {PARAMS "buffer_count=2",
         p->home == IZ_HOME_NVME && p->buffer_count > 2}};
    return all[i];
}

/* False: changed nothing. */
static bool apply(int i, const struct iz_plan_for *f, struct iz_config *c)
{
    struct change x = change_of(i, f, c);
    if (!x.may)
        return false;
    if (i == MICRO_BATCH) {
        iz_config_cut(c, (int)most_micros(c));
        c->run.slices = 0;
    } else if (i == CHUNKS) { /* of the least rows; see most_rows */
        c->run.sequence_chunk = IZ_CHUNK_LEAST;
    } else if (i == SPLIT) { /* all on the host; see least_split */
        c->zero.optimizer.ratio = 1;
    } else {
        return iz_config_set(c, x.text);
    }
    return true;
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

struct iz_trial iz_plan_try(const struct iz_plan_for *f,
                            const struct iz_config *c, bool keep)
{
    struct iz_trial t = {.step_s = INFINITY};
    struct iz_target target = *f->target;
    struct iz_plan p;
    target.numerics.bf16_products &= c->run.cpu_products != IZ_PRODUCTS_F32;
    if (iz_plan_make(&p, c, f->model, f->ranks, f->rank, &target))
        return t;
    t.within = keep ? !iz_plan_fit(&p, c, f->model, f->limit, NULL)
                    : fits_either_way(&p, c, f->model, f->limit);
    if (keep && t.within) {
        t.step_s = iz_forecast(&p, f->rate).step_s;
        t.recomputed = iz_plan_recomputed(&p);
        t.sums_on_gpu = p.zero.sums_on_gpu;
        t.attends = p.attends;
    }
    t.why_own = p.why_own;
    t.host_bytes = iz_plan_host_need(&p, f->limit);
    t.device_bytes = iz_plan_device_need(&p, f->limit);
    t.scratch_bytes = p.act.scratch_bytes;
    for (int u = 0; u < p.n_units; u++)
        t.params +=
            (double)(p.unit[u].n + p.unit[u].frozen.n + p.unit[u].quant.n);
    iz_plan_clear(&p);
    return t;
}

bool iz_plan_may_split(const struct iz_config *c)
{
    bool read = c->run.state_dtype == IZ_MOMENT_F32 ||
                c->run.save_mode != IZ_SAVE_ASYNC;
    return c->zero.optimizer.home == IZ_HOME_CPU &&
           c->zero.param.home != IZ_HOME_NVME && read;
}

/* Of the optimizer, the largest part on the host that fits; all of it does not.
 */
static struct iz_trial least_split(const struct iz_plan_for *f,
                                   struct iz_config *c)
{
    struct iz_trial t = {.within = false};
    for (int i = IZ_RATIO_STEPS - 1; i >= 0 && iz_plan_may_split(c); i--) {
        c->zero.optimizer.ratio = (double)i / IZ_RATIO_STEPS;
        t = iz_plan_try(f, c, false);
        if (t.within)
            return t;
    }
    c->zero.optimizer.ratio = 1;
    return t;
}

/* The largest chunks that fit, as the smallest do. */
static struct iz_trial most_rows(const struct iz_plan_for *f,
                                 struct iz_config *c, struct iz_trial best)
{
    int64_t n = c->run.sequence_chunk;
    for (struct iz_trial t = best; t.within && 2 * n < f->model->tokens;) {
        c->run.sequence_chunk = 2 * n;
        t = iz_plan_try(f, c, false);
        n *= t.within ? 2 : 1;
        best = t.within ? t : best;
    }
    c->run.sequence_chunk = n;
    return best;
}

/* With the changes of the set `used`, as far as each changes anything; those
 * that do remain in the set. */
static struct iz_trial try_with(const struct iz_plan_for *f,
                                struct iz_config *c, unsigned *used)
{
    double before = c->zero.optimizer.ratio;
    for (int i = 0; i < CHANGES; i++)
        if (*used & 1U << i && !apply(i, f, c))
            *used &= ~(1U << i);
    struct iz_trial t = iz_plan_try(f, c, false);
    if (!t.within && *used & 1U << SPLIT)
        t = least_split(f, c);
    if (t.within && *used & 1U << CHUNKS)
        t = most_rows(f, c, t);
    if (c->zero.optimizer.ratio == before)
        *used &= ~(1U << SPLIT);
    return t;
}

static bool fits(const struct iz_plan_for *f, const struct iz_config *c,
                 unsigned *used)
{
    struct iz_config d = *c;
    return try_with(f, &d, used).within && *used;
}

static void print_changes(const struct iz_plan_for *f,
                          const struct iz_config *c, unsigned used, FILE *err)
{
    struct iz_config d = *c;
    struct iz_trial t = try_with(f, &d, &used);
    const char *glue = "izar: it fits with ";
    for (int i = 0; i < CHANGES; i++) {
        if (!(used & 1U << i))
            continue;
        fprintf(err, "%s%s", glue, change_of(i, f, &d).text);
        if (i == MICRO_BATCH)
            fprintf(err, "%d and gradient_accumulation_steps=%d%s",
                    d.micro_batch, d.grad_accum,
                    c->run.slices > 1 ? " and run.slices=0" : "");
        else if (i == CHUNKS)
            fprintf(err, "%lld", (long long)d.run.sequence_chunk);
        else if (i == SPLIT)
            fprintf(err, "%.15g", d.zero.optimizer.ratio);
        glue = " and ";
    }
    fprintf(err, " (%.1f MiB", iz_units_mib(t.host_bytes));
    if (f->target->gpu)
        fprintf(err, " of the host, %.1f MiB of the GPU",
                iz_units_mib(t.device_bytes));
    fprintf(err, ")\n");
}

/* The first single change that is enough, or one with what it needs; else all
 * of them, less those that are not needed, dearest kept last. */
static void suggest(const struct iz_plan_for *f, const struct iz_config *c,
                    FILE *err)
{
    unsigned used = 0;
    for (int i = 0; i < CHANGES; i++) {
        unsigned own = i == SPLIT ? 3U << (SPLIT - 1) : 1U << i;
        used = own;
        bool enough = fits(f, c, &used);
        if (!enough && i >= SPLIT && must_wait(c, true)) {
            used = own | 1U << SAVES;
            enough = fits(f, c, &used);
        }
        if (enough) {
            print_changes(f, c, used, err);
            return;
        }
    }
    used = ((1U << CHANGES) - 1) & ~(1U << CHUNKS); /* whose sums take memory */
    if (!fits(f, c, &used))
        used = (1U << CHANGES) - 1;
    if (!fits(f, c, &used)) {
        fprintf(err, "izar: recomputing, a smaller ring or micro-batch, stage "
                     "3 and nvme are not enough: it needs more ranks or a "
                     "smaller model\n");
        return;
    }
    for (int i = CHANGES - 1; i >= 0; i--) {
        unsigned less = used & ~(1U << i);
        if (less != used && fits(f, c, &less))
            used = less;
    }
    print_changes(f, c, used, err);
}

/* Activations come before sums on the GPU: what the host adds may be hidden. */
static void keep_most(struct iz_plan *p, const struct iz_config *c,
                      const struct iz_model *m, const struct iz_limits *limit)
{
    iz_plan_recompute(p, m, IZ_RECOMPUTE_FULL);
    iz_plan_sum_on_gpu(p, c, m, false);
    if (iz_plan_within(p, limit) || fits_either_way(p, c, m, limit))
        iz_plan_keep(p, m, limit);
}

/* How much more of the GPU's memory cuDNN's backward takes than ours. */
static void print_backward(const struct iz_plan *p, const struct iz_plan_for *f,
                           const struct iz_config *c, FILE *err)
{
    struct iz_config own = *c;
    own.run.gpu_attention_backward = IZ_ATTENTION_OWN;
    int64_t more =
        p->act.scratch_bytes - iz_plan_try(f, &own, false).scratch_bytes;
    if (more > 0)
        fprintf(err,
                "izar: run.gpu_attention_backward: cudnn takes %lld bytes more "
                "than own: a matrix of the scores of each head\n",
                (long long)more);
}

static void print_need(int64_t need, int64_t limit, const char *what, FILE *err)
{
    if (need > limit)
        fprintf(err,
                "izar: this run needs %.1f MiB of %s, there are %.1f MiB:\n",
                iz_units_mib(need), what, iz_units_mib(limit));
}

/* Says what is lacking, and what would help. */
static void refuse(const struct iz_plan *p, const struct iz_plan_for *f,
                   const struct iz_config *c, FILE *err)
{
    int64_t host = iz_plan_host_need(p, f->limit);
    int64_t device = iz_plan_device_need(p, f->limit);
    print_need(host, f->limit->host, "memory per rank", err);
    print_need(device, f->limit->device, "the GPU's memory", err);
    iz_plan_print(p, f->model, err);
    if (p->target.numerics.cudnn_bwd && device > f->limit->device)
        print_backward(p, f, c, err);
    iz_plan_matrices_refuse(
        p, f->model,
        f->limit->host - host + p->act.scratch_bytes * p->tasks_at_once, err);
    suggest(f, c, err);
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
        refuse(p,
               &(struct iz_plan_for){.model = m,
                                     .ranks = p->ranks,
                                     .rank = p->rank,
                                     .target = &p->target,
                                     .limit = limit},
               c, err);
    return -ENOMEM;
}

/* ---- the largest model ---- */

/* Counts the units of n blocks, the model's taken in turn, and lists them
 * unless `list` is NULL.  A block begins behind what the first unit hands over:
 * within one that has several units they hand over more. */
static int list_blocks(const struct iz_model *m, int n, struct iz_unit *list)
{
    int count = 0;
    for (int u = 1;; u = u + 2 < m->n_units ? u + 1 : 1) {
        n -= m->unit[u - 1].out_elems == m->unit[0].out_elems;
        if (n < 0)
            return count;
        if (list)
            list[count] = m->unit[u];
        count++;
    }
}

/* Of the model with n blocks, which borrows the parameters' lists. */
static struct iz_trial try_blocks(const struct iz_plan_for *f,
                                  const struct iz_config *c, int n)
{
    const struct iz_model *m = f->model;
    struct iz_model grown = *m;
    struct iz_plan_for of = *f;
    of.model = &grown;
    grown.n_units = 2 + list_blocks(m, n, NULL);
    grown.unit = iz_take(grown.n_units, sizeof(*grown.unit), "units");
    grown.unit[0] = m->unit[0];
    list_blocks(m, n, grown.unit + 1);
    grown.unit[grown.n_units - 1] = m->unit[m->n_units - 1];
    struct iz_trial t = iz_plan_try(&of, c, false);
    free(grown.unit);
    return t;
}

int iz_plan_largest(const struct iz_plan *p, const struct iz_config *c,
                    const struct iz_model *m, const struct iz_limits *limit,
                    double *params)
{
    struct iz_target target = p->target;
    const struct iz_plan_for f = {.model = m,
                                  .ranks = p->ranks,
                                  .rank = p->rank,
                                  .target = &target,
                                  .limit = limit};
    int low = 0, high = IZ_PLAN_MOST_BLOCKS + 1;
    *params = 0;
    while (high - low > 1) { /* doubled until that does not fit */
        int n = high > IZ_PLAN_MOST_BLOCKS ? (int)max64(2 * low, 1)
                                           : low + (high - low) / 2;
        struct iz_trial t = try_blocks(&f, c, n);
        *(t.within ? &low : &high) = n;
        if (t.within)
            *params = t.params;
    }
    return low;
}
