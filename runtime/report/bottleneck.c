/* SPDX-License-Identifier: Apache-2.0 */
/* The rule that names what limited a run, and its sentence; see bottleneck.h.
 */
#include "runtime/report/bottleneck.h"

#include <stdio.h>

const char *const iz_bottleneck_names[IZ_BOTTLENECKS] = {
    [IZ_BOTTLENECK_UNKNOWN] = "unknown",
    [IZ_BOTTLENECK_COMPUTE] = "compute",
    [IZ_BOTTLENECK_OPTIMIZER] = "optimizer",
    [IZ_BOTTLENECK_WORKERS] = "host workers",
    [IZ_BOTTLENECK_SUMS] = "sums",
    [IZ_BOTTLENECK_NETWORK] = "network",
    [IZ_BOTTLENECK_UP] = "link to the GPU",
    [IZ_BOTTLENECK_DOWN] = "link to the host",
    [IZ_BOTTLENECK_DISK] = "disk",
    [IZ_BOTTLENECK_LATE] = "late fetches",
    [IZ_BOTTLENECK_TASKS] = "too few tasks",
    [IZ_BOTTLENECK_SUBMISSION] = "submission",
    [IZ_BOTTLENECK_GAPS] = "gaps",
};

/* What the workers lose most time to: the largest share but that of the units,
 * IZ_USES where none reaches `least`. */
static enum iz_use largest_loss(const struct iz_time_total *u, double least)
{
    enum iz_use most = IZ_USES;
    double share = least;
    for (int c = IZ_USE_OPTIMIZER; c < IZ_USES; c++)
        if (u->share[c] >= share) {
            share = u->share[c];
            most = (enum iz_use)c;
        }
    return most;
}

static enum iz_bottleneck limit_of(const struct iz_bottleneck_measured *m,
                                   enum iz_use loss)
{
    /* What the loss comes from, where that is full and where it is not. */
    static const struct {
        enum iz_bottleneck full, not_full;
    } from[IZ_USES + 1] = {
        [IZ_USE_OPTIMIZER] = {IZ_BOTTLENECK_WORKERS, IZ_BOTTLENECK_OPTIMIZER},
        [IZ_USE_SUMS] = {IZ_BOTTLENECK_WORKERS, IZ_BOTTLENECK_SUMS},
        [IZ_USE_NETWORK] = {IZ_BOTTLENECK_NETWORK, IZ_BOTTLENECK_LATE},
        [IZ_USE_UP] = {IZ_BOTTLENECK_UP, IZ_BOTTLENECK_LATE},
        [IZ_USE_DOWN] = {IZ_BOTTLENECK_DOWN, IZ_BOTTLENECK_LATE},
        [IZ_USE_DISK] = {IZ_BOTTLENECK_DISK, IZ_BOTTLENECK_LATE},
        [IZ_USE_TASKS] = {IZ_BOTTLENECK_TASKS, IZ_BOTTLENECK_TASKS},
        [IZ_USE_NOTHING] = {IZ_BOTTLENECK_SUBMISSION, IZ_BOTTLENECK_GAPS},
        [IZ_USES] = {IZ_BOTTLENECK_COMPUTE, IZ_BOTTLENECK_COMPUTE},
    };
    double busy = loss == IZ_USE_NOTHING   ? m->submitting
                  : loss <= IZ_USE_SUMS    ? m->host_busy
                  : loss < IZ_USES_RUNNING ? m->usage.busy[loss]
                                           : 0;
    if (m->usage.window_s <= 0)
        return IZ_BOTTLENECK_UNKNOWN;
    return busy >= IZ_BOTTLENECK_FULL ? from[loss].full : from[loss].not_full;
}

enum iz_bottleneck iz_bottleneck_find(const struct iz_bottleneck_measured *m)
{
    return limit_of(m, largest_loss(&m->usage, IZ_BOTTLENECK_COST));
}

/* ---- the setting that would move a limit ---- */

/* Whether activations that are not kept for want of memory are those of more
 * micro-batches than must be under way. */
static bool waves(const struct iz_bottleneck_setting *s)
{
    return s->recomputes && s->breadth_first && s->micro_batches > 1;
}

#define LARGER_PART                                                            \
    "a smaller offload_optimizer.ratio would give the GPU a larger part, if "  \
    "its states fit there and the links have time"

/* Of a limit the first row that holds counts. */
struct advice {
    enum iz_bottleneck limit;
    bool holds;
    const char *text;
};

static const char *first_advice(const struct advice *a,
                                enum iz_bottleneck limit)
{
    while (a->text && (a->limit != limit || !a->holds))
        a++;
    return a->text;
}

/* Of what computes and waits; NULL: it is traffic. */
static const char *advice_of_tasks(enum iz_bottleneck limit,
                                   const struct iz_bottleneck_setting *s)
{
    const struct advice table[] = {
        {IZ_BOTTLENECK_COMPUTE, s->recomputes && s->recompute_asked,
         "run.recompute=auto would recompute only the forwards that memory has "
         "no "
         "room to keep"},
        {IZ_BOTTLENECK_COMPUTE, waves(s),
         "run.schedule=depth_first would leave room to keep more activations"},
        {IZ_BOTTLENECK_COMPUTE, s->recomputes && s->samples > 1,
         "fewer samples a micro-batch (train_micro_batch_size_per_gpu) would "
         "leave room to keep more activations"},
        {IZ_BOTTLENECK_COMPUTE, s->gpu && !s->half,
         "bf16.enabled=true would use the tensor cores"},
        {IZ_BOTTLENECK_COMPUTE, true,
         "only more ranks or faster processors would move it"},
        {IZ_BOTTLENECK_OPTIMIZER, !s->overlap,
         "run.overlap=true would run it under the next step's forward"},
        {IZ_BOTTLENECK_OPTIMIZER, s->divisible, LARGER_PART},
        {IZ_BOTTLENECK_OPTIMIZER, true,
         "more samples a step (train_batch_size) would spread it"},
        {IZ_BOTTLENECK_WORKERS, true,
         "more workers (run.workers, or cores for the rank) would move it"},
        {IZ_BOTTLENECK_SUBMISSION, true,
         "larger tasks (train_micro_batch_size_per_gpu, sub_group_size) would "
         "need fewer"},
        {IZ_BOTTLENECK_SUMS, s->divisible && s->micro_batches == 1,
         LARGER_PART},
        {IZ_BOTTLENECK_SUMS, true,
         "more samples a micro-batch (train_micro_batch_size_per_gpu) would "
         "need fewer"},
        {IZ_BOTTLENECK_TASKS, s->slices >= s->workers,
         "more micro-batches side by side (run.parallel_micro_batches) would "
         "occupy them"},
        {IZ_BOTTLENECK_TASKS, s->few_slices,
         "a larger run.slices would cut each micro-batch for all workers"},
        {IZ_BOTTLENECK_TASKS, true,
         "more samples a micro-batch (train_micro_batch_size_per_gpu) could be "
         "cut for all workers"},
        {IZ_BOTTLENECK_GAPS, !s->overlap,
         "run.overlap=true would take the barriers away"},
        {IZ_BOTTLENECK_GAPS, s->in_flight == 1,
         "run.in_flight=2 would have the next step ready"},
        {IZ_BOTTLENECK_GAPS, true,
         "larger tasks (train_micro_batch_size_per_gpu) would have fewer gaps"},
        {0}};
    return first_advice(table, limit);
}

/* First what moves more than it must, then what makes a step move less.
 * UNKNOWN: all limits without rows of their own. */
static const char *advice_of_traffic(enum iz_bottleneck limit, enum iz_use link,
                                     const struct iz_bottleneck_setting *s,
                                     const char *ring)
{
    const struct advice table[] = {
        {IZ_BOTTLENECK_DISK, s->param_on_disk,
         "offload_param.device=cpu would take parameters off the disk"},
        {IZ_BOTTLENECK_DISK, s->frozen_on_disk,
         "offload_param.frozen_device=cpu would take frozen parameters off the "
         "disk"},
        {IZ_BOTTLENECK_DISK, s->state_on_disk,
         "offload_optimizer.device=cpu, or more samples a step, would relieve "
         "it"},
        {IZ_BOTTLENECK_DISK, s->boundary_on_disk,
         "boundaries in memory (no activation_checkpointing.nvme_path) would "
         "relieve it"},
        {IZ_BOTTLENECK_DISK, true,
         "a larger run.save_interval would save less often"},
        {IZ_BOTTLENECK_LATE, !s->overlap_comm && link == IZ_USE_NETWORK,
         "zero_optimization.overlap_comm=true would run it beside compute"},
        {IZ_BOTTLENECK_LATE, !s->overlap,
         "run.overlap=true would take the barriers away"},
        {IZ_BOTTLENECK_LATE, !s->rings,
         "more micro-batches a step (gradient_accumulation_steps) would wait "
         "for it less often"},
        {IZ_BOTTLENECK_LATE, true, ring},
        {IZ_BOTTLENECK_UNKNOWN,
         s->rings && s->micro_batches > 1 && !s->breadth_first,
         "run.schedule=breadth_first would fetch each unit once a step and "
         "direction"},
        {IZ_BOTTLENECK_UNKNOWN, !s->half,
         "bf16.enabled=true would halve the bytes"},
        {IZ_BOTTLENECK_UNKNOWN, true,
         "more samples a micro-batch (train_micro_batch_size_per_gpu) would "
         "use what was moved for longer"},
        {0}};
    const char *own = first_advice(table, limit);
    return own ? own : first_advice(table, IZ_BOTTLENECK_UNKNOWN);
}

/* `ring` is room for a sentence. */
static const char *advice(enum iz_bottleneck limit, enum iz_use link,
                          const struct iz_bottleneck_setting *s, char *ring,
                          size_t size)
{
    const char *text = advice_of_tasks(limit, s);
    snprintf(ring, size,
             "run.ring=%d in place of %d would begin the fetches earlier",
             s->ring * 2, s->ring);
    return text ? text : advice_of_traffic(limit, link, s, ring);
}

/* ---- the sentence ---- */

static const char *const loss_names[IZ_USES] = {
    [IZ_USE_OPTIMIZER] = "the optimizer",
    [IZ_USE_SUMS] = "sums, norms and copies",
    [IZ_USE_NETWORK] = "the network, or a later rank",
    [IZ_USE_UP] = "the link to the GPU",
    [IZ_USE_DOWN] = "the link to the host",
    [IZ_USE_DISK] = "the disk",
    [IZ_USE_TASKS] = "too few tasks",
    [IZ_USE_NOTHING] = "gaps between tasks",
};

/* Of small losses that are together worth a word: the largest one.  Not where
 * compute itself can take less. */
static enum iz_use small_loss(const struct iz_bottleneck_measured *m,
                              const struct iz_bottleneck_setting *s)
{
    double lost = 1 - m->usage.share[IZ_USE_UNITS];
    bool moves = (s->recomputes && (s->recompute_asked || s->samples > 1)) ||
                 waves(s) || (s->gpu && !s->half);
    return iz_bottleneck_find(m) == IZ_BOTTLENECK_COMPUTE && !moves &&
                   lost >= IZ_BOTTLENECK_COST
               ? largest_loss(&m->usage, 0)
               : IZ_USES;
}

void iz_bottleneck_text(char *out, size_t size,
                        const struct iz_bottleneck_measured *m,
                        const struct iz_bottleneck_setting *s)
{
    /* "WHAT N % of the time; SETTING" */
    static const struct {
        const char *what;
        enum iz_use use;
    } simple[IZ_BOTTLENECKS] = {
        [IZ_BOTTLENECK_COMPUTE] = {"compute: forward and backward fill",
                                   IZ_USE_UNITS},
        [IZ_BOTTLENECK_OPTIMIZER] = {"the optimizer: it costs compute",
                                     IZ_USE_OPTIMIZER},
        [IZ_BOTTLENECK_SUMS] = {"sums, norms and copies: they cost compute",
                                IZ_USE_SUMS},
        [IZ_BOTTLENECK_TASKS] = {"too few tasks: workers idle", IZ_USE_TASKS},
        [IZ_BOTTLENECK_GAPS] = {"gaps between tasks: nothing runs",
                                IZ_USE_NOTHING},
    };
    const double *share = m->usage.share;
    enum iz_bottleneck limit = iz_bottleneck_find(m);
    enum iz_use loss = largest_loss(&m->usage, IZ_BOTTLENECK_COST);
    enum iz_use small = small_loss(m, s);
    bool late = limit == IZ_BOTTLENECK_LATE;
    char ring[96];
    const char *setting =
        small < IZ_USES
            ? advice(limit_of(m, small), small, s, ring, sizeof(ring))
            : advice(limit, loss, s, ring, sizeof(ring));
    if (limit == IZ_BOTTLENECK_UNKNOWN)
        snprintf(out, size, "not known: that takes two steps");
    else if (small < IZ_USES)
        snprintf(out, size,
                 "compute: forward and backward fill %.0f %% of the time; of "
                 "the rest most, %.0f %%, goes to %s: %s",
                 100 * share[IZ_USE_UNITS], 100 * share[small],
                 loss_names[small], setting);
    else if (simple[limit].what)
        snprintf(out, size, "%s %.0f %% of the time%s; %s", simple[limit].what,
                 100 * share[simple[limit].use],
                 limit == IZ_BOTTLENECK_TASKS ? " beside busy ones" : "",
                 setting);
    else if (limit == IZ_BOTTLENECK_WORKERS)
        snprintf(out, size,
                 "the host's workers: they are busy %.0f %% of the time, and "
                 "compute waits %.0f %% for them; more than %d (run.workers, "
                 "or cores for the rank) would move it",
                 100 * m->host_busy,
                 100 * (share[IZ_USE_OPTIMIZER] + share[IZ_USE_SUMS]),
                 s->workers);
    else if (limit == IZ_BOTTLENECK_SUBMISSION)
        snprintf(out, size,
                 "submission: nothing runs %.0f %% of the time, and the main "
                 "thread submits %.0f %% of it; %s",
                 100 * share[IZ_USE_NOTHING], 100 * m->submitting, setting);
    else
        snprintf(out, size,
                 "%s: compute waits %.0f %% of the time for it, and it works "
                 "%s%.0f %% of the time; %s",
                 loss_names[loss], 100 * share[loss], late ? "only " : "",
                 100 * m->usage.busy[loss], setting);
}
