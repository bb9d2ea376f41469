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

enum iz_use iz_bottleneck_loss(const struct iz_time_total *u)
{
    enum iz_use most = IZ_USES;
    double share = IZ_BOTTLENECK_COST;
    for (int c = IZ_USE_OPTIMIZER; c < IZ_USES; c++)
        if (u->share[c] >= share) {
            share = u->share[c];
            most = (enum iz_use)c;
        }
    return most;
}

static enum iz_bottleneck link_limit(const struct iz_time_total *u,
                                     enum iz_use c, enum iz_bottleneck full)
{
    return u->busy[c] >= IZ_BOTTLENECK_FULL ? full : IZ_BOTTLENECK_LATE;
}

enum iz_bottleneck iz_bottleneck_find(const struct iz_bottleneck_measured *m)
{
    const struct iz_time_total *u = &m->usage;
    bool host_full = m->host_busy >= IZ_BOTTLENECK_FULL;
    if (u->window_s <= 0)
        return IZ_BOTTLENECK_UNKNOWN;
    switch (iz_bottleneck_loss(u)) {
    case IZ_USE_OPTIMIZER:
        return host_full ? IZ_BOTTLENECK_WORKERS : IZ_BOTTLENECK_OPTIMIZER;
    case IZ_USE_SUMS:
        return host_full ? IZ_BOTTLENECK_WORKERS : IZ_BOTTLENECK_SUMS;
    case IZ_USE_NETWORK:
        return link_limit(u, IZ_USE_NETWORK, IZ_BOTTLENECK_NETWORK);
    case IZ_USE_UP:
        return link_limit(u, IZ_USE_UP, IZ_BOTTLENECK_UP);
    case IZ_USE_DOWN:
        return link_limit(u, IZ_USE_DOWN, IZ_BOTTLENECK_DOWN);
    case IZ_USE_DISK:
        return link_limit(u, IZ_USE_DISK, IZ_BOTTLENECK_DISK);
    case IZ_USE_TASKS:
        return IZ_BOTTLENECK_TASKS;
    case IZ_USE_NOTHING:
        return m->submitting >= IZ_BOTTLENECK_FULL ? IZ_BOTTLENECK_SUBMISSION
                                                   : IZ_BOTTLENECK_GAPS;
    default:
        return IZ_BOTTLENECK_COMPUTE;
    }
}

/* ---- the setting that would move it ---- */

static const char *of_compute(const struct iz_bottleneck_setting *s)
{
    if (s->recompute)
        return "run.recompute=none would save the repeated forwards, if the "
               "activations fit";
    if (s->gpu && !s->half)
        return "bf16.enabled=true would use the tensor cores";
    return "only more ranks or faster processors would move it";
}

static const char *of_optimizer(const struct iz_bottleneck_setting *s)
{
    if (!s->overlap)
        return "run.overlap=true would run it under the next step's forward";
    if (s->divisible)
        return "a smaller offload_optimizer.ratio would give the GPU a larger "
               "part, if its states fit there and the links have time";
    return "more samples a step (train_batch_size) would spread it";
}

/* What moves more than it must, first; then what makes a step move less. */
static const char *of_traffic(const struct iz_bottleneck_setting *s)
{
    if (s->rings && s->micro_batches > 1 && !s->breadth_first)
        return "run.schedule=breadth_first would fetch each unit once a step "
               "and direction";
    if (!s->half)
        return "bf16.enabled=true would halve the bytes";
    return "more samples a micro-batch (train_micro_batch_size_per_gpu) would "
           "use what was moved for longer";
}

static const char *of_disk(const struct iz_bottleneck_setting *s)
{
    if (s->param_on_disk)
        return "offload_param.device=cpu would take parameters off the disk";
    if (s->state_on_disk)
        return "offload_optimizer.device=cpu, or more samples a step, would "
               "relieve it";
    return "a larger run.save_interval would save less often";
}

static const char *of_late(char *out, size_t size, enum iz_use link,
                           const struct iz_bottleneck_setting *s)
{
    if (!s->overlap_comm && link == IZ_USE_NETWORK)
        return "zero_optimization.overlap_comm=true would run it beside "
               "compute";
    if (!s->overlap)
        return "run.overlap=true would take the barriers away";
    if (s->rings) {
        snprintf(out, size,
                 "run.ring=%d in place of %d would begin the fetches earlier",
                 s->ring * 2, s->ring);
        return out;
    }
    return "more micro-batches a step (gradient_accumulation_steps) would wait "
           "for it less often";
}

static const char *of_tasks(const struct iz_bottleneck_setting *s)
{
    if (s->slices_fixed && s->slices < s->workers)
        return "run.slices=0 would cut each micro-batch for all workers";
    if (s->slices < s->workers)
        return "more samples a micro-batch (train_micro_batch_size_per_gpu) "
               "could be cut for all workers";
    return "more micro-batches side by side (run.parallel_micro_batches) would "
           "occupy them";
}

static const char *of_gaps(const struct iz_bottleneck_setting *s)
{
    if (!s->overlap)
        return "run.overlap=true would take the barriers away";
    if (s->in_flight == 1)
        return "run.in_flight=2 would have the next step ready";
    return "larger tasks (train_micro_batch_size_per_gpu) would have fewer "
           "gaps";
}

/* ---- the sentence ---- */

static void text_of_link(char *out, size_t size,
                         const struct iz_bottleneck_measured *m,
                         const struct iz_bottleneck_setting *s,
                         enum iz_bottleneck limit)
{
    static const char *const what[IZ_USES] = {
        [IZ_USE_NETWORK] = "the network, or a later rank",
        [IZ_USE_UP] = "the link to the GPU",
        [IZ_USE_DOWN] = "the link to the host",
        [IZ_USE_DISK] = "the disk",
    };
    enum iz_use c = iz_bottleneck_loss(&m->usage);
    bool late = limit == IZ_BOTTLENECK_LATE;
    char ring[96];
    snprintf(out, size,
             "%s: compute waits %.0f %% of the time for it, and it works "
             "%s%.0f %% of the time; %s",
             what[c], 100 * m->usage.share[c], late ? "only " : "",
             100 * m->usage.busy[c],
             late               ? of_late(ring, sizeof(ring), c, s)
             : c == IZ_USE_DISK ? of_disk(s)
                                : of_traffic(s));
}

void iz_bottleneck_text(char *out, size_t size,
                        const struct iz_bottleneck_measured *m,
                        const struct iz_bottleneck_setting *s)
{
    const double *share = m->usage.share;
    enum iz_bottleneck limit = iz_bottleneck_find(m);
    switch (limit) {
    case IZ_BOTTLENECK_UNKNOWN:
        snprintf(out, size, "not known: that takes two steps");
        return;
    case IZ_BOTTLENECK_COMPUTE:
        snprintf(out, size,
                 "compute: forward and backward fill %.0f %% of the time; %s",
                 100 * share[IZ_USE_UNITS], of_compute(s));
        return;
    case IZ_BOTTLENECK_OPTIMIZER:
        snprintf(out, size,
                 "the optimizer: it costs compute %.0f %% of the time; %s",
                 100 * share[IZ_USE_OPTIMIZER], of_optimizer(s));
        return;
    case IZ_BOTTLENECK_WORKERS:
        snprintf(out, size,
                 "the host's workers: they are busy %.0f %% of the time, and "
                 "compute waits %.0f %% for them; more than %d (run.workers, "
                 "or cores for the rank) would move it",
                 100 * m->host_busy,
                 100 * (share[IZ_USE_OPTIMIZER] + share[IZ_USE_SUMS]),
                 s->workers);
        return;
    case IZ_BOTTLENECK_SUMS:
        snprintf(out, size,
                 "sums, norms and copies: they cost compute %.0f %% of the "
                 "time; more samples a micro-batch "
                 "(train_micro_batch_size_per_gpu) would need fewer",
                 100 * share[IZ_USE_SUMS]);
        return;
    case IZ_BOTTLENECK_TASKS:
        snprintf(out, size,
                 "too few tasks: workers idle %.0f %% of the time beside busy "
                 "ones; %s",
                 100 * share[IZ_USE_TASKS], of_tasks(s));
        return;
    case IZ_BOTTLENECK_SUBMISSION:
        snprintf(out, size,
                 "submission: nothing runs %.0f %% of the time, and the main "
                 "thread submits %.0f %% of it; larger tasks "
                 "(train_micro_batch_size_per_gpu, sub_group_size) would need "
                 "fewer",
                 100 * share[IZ_USE_NOTHING], 100 * m->submitting);
        return;
    case IZ_BOTTLENECK_GAPS:
        snprintf(out, size,
                 "gaps between tasks: nothing runs %.0f %% of the time; %s",
                 100 * share[IZ_USE_NOTHING], of_gaps(s));
        return;
    default:
        text_of_link(out, size, m, s, limit);
    }
}
