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

enum iz_use iz_bottleneck_loss(const struct iz_time_total *u)
{
    return largest_loss(u, IZ_BOTTLENECK_COST);
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
    return limit_of(m, iz_bottleneck_loss(&m->usage));
}

/* Whether activations that are not kept for want of memory are those of more
 * micro-batches than must be under way. */
static bool waves(const struct iz_bottleneck_setting *s)
{
    return s->repeats && s->breadth_first && s->micro_batches > 1;
}

/* The setting that would move a limit.  Of traffic first what moves more than
 * it must, then what makes a step move less.  `ring` is room for a sentence. */
static const char *advice(enum iz_bottleneck limit, enum iz_use link,
                          const struct iz_bottleneck_setting *s, char *ring,
                          size_t size)
{
    static const char part[] =
        "a smaller offload_optimizer.ratio would give the GPU a larger part, "
        "if its states fit there and the links have time";
    switch (limit) {
    case IZ_BOTTLENECK_COMPUTE:
        return s->repeats && s->repeats_asked
                   ? "run.recompute=auto would repeat only the forwards that "
                     "memory has no room to keep"
               : waves(s) ? "run.schedule=depth_first would leave room to keep "
                            "more activations"
               : s->repeats && s->samples > 1
                   ? "fewer samples a micro-batch "
                     "(train_micro_batch_size_per_gpu) would leave room to "
                     "keep more activations"
               : s->gpu && !s->half
                   ? "bf16.enabled=true would use the tensor cores"
                   : "only more ranks or faster processors would move it";
    case IZ_BOTTLENECK_OPTIMIZER:
        return !s->overlap ? "run.overlap=true would run it under the next "
                             "step's forward"
               : s->divisible
                   ? part
                   : "more samples a step (train_batch_size) would spread it";
    case IZ_BOTTLENECK_WORKERS:
        return "more workers (run.workers, or cores for the rank) would move "
               "it";
    case IZ_BOTTLENECK_SUBMISSION:
        return "larger tasks (train_micro_batch_size_per_gpu, sub_group_size) "
               "would need fewer";
    case IZ_BOTTLENECK_SUMS:
        if (s->divisible && s->micro_batches == 1)
            return part;
        return "more samples a micro-batch (train_micro_batch_size_per_gpu) "
               "would need fewer";
    case IZ_BOTTLENECK_TASKS:
        return s->slices >= s->workers
                   ? "more micro-batches side by side "
                     "(run.parallel_micro_batches) would occupy them"
               : s->few_slices
                   ? "a larger run.slices would cut each micro-batch for all "
                     "workers"
                   : "more samples a micro-batch "
                     "(train_micro_batch_size_per_gpu) could be cut for all "
                     "workers";
    case IZ_BOTTLENECK_GAPS:
        return !s->overlap ? "run.overlap=true would take the barriers away"
               : s->in_flight == 1
                   ? "run.in_flight=2 would have the next step ready"
                   : "larger tasks (train_micro_batch_size_per_gpu) would have "
                     "fewer gaps";
    case IZ_BOTTLENECK_DISK:
        return s->param_on_disk ? "offload_param.device=cpu would take "
                                  "parameters off the disk"
               : s->frozen_on_disk
                   ? "offload_param.frozen_device=cpu would take frozen "
                     "parameters off the disk"
               : s->state_on_disk
                   ? "offload_optimizer.device=cpu, or more samples a step, "
                     "would relieve it"
               : s->boundary_on_disk
                   ? "boundaries in memory (no activation_checkpointing."
                     "nvme_path) would relieve it"
                   : "a larger run.save_interval would save less often";
    case IZ_BOTTLENECK_LATE:
        snprintf(ring, size,
                 "run.ring=%d in place of %d would begin the fetches earlier",
                 s->ring * 2, s->ring);
        return !s->overlap_comm && link == IZ_USE_NETWORK
                   ? "zero_optimization.overlap_comm=true would run it beside "
                     "compute"
               : !s->overlap ? "run.overlap=true would take the barriers away"
               : !s->rings   ? "more micro-batches a step "
                               "(gradient_accumulation_steps) would wait for "
                               "it less often"
                             : ring;
    default: /* the links */
        return s->rings && s->micro_batches > 1 && !s->breadth_first
                   ? "run.schedule=breadth_first would fetch each unit once a "
                     "step and direction"
               : !s->half ? "bf16.enabled=true would halve the bytes"
                          : "more samples a micro-batch "
                            "(train_micro_batch_size_per_gpu) would use what "
                            "was moved for longer";
    }
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
    bool moves = (s->repeats && (s->repeats_asked || s->samples > 1)) ||
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
    enum iz_use loss = iz_bottleneck_loss(&m->usage), small = small_loss(m, s);
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
