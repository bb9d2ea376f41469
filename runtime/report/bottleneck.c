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

enum iz_bottleneck iz_bottleneck_find(const struct iz_bottleneck_measured *m)
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
    enum iz_use loss = iz_bottleneck_loss(&m->usage);
    double busy = loss == IZ_USE_NOTHING   ? m->submitting
                  : loss <= IZ_USE_SUMS    ? m->host_busy
                  : loss < IZ_USES_RUNNING ? m->usage.busy[loss]
                                           : 0;
    if (m->usage.window_s <= 0)
        return IZ_BOTTLENECK_UNKNOWN;
    return busy >= IZ_BOTTLENECK_FULL ? from[loss].full : from[loss].not_full;
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

static const char *of_sums(const struct iz_bottleneck_setting *s)
{
    return "more samples a micro-batch (train_micro_batch_size_per_gpu) would "
           "need fewer";
}

static const char *of_late(const struct iz_bottleneck_setting *s,
                           enum iz_use link, char *ring, size_t size)
{
    if (!s->overlap_comm && link == IZ_USE_NETWORK)
        return "zero_optimization.overlap_comm=true would run it beside "
               "compute";
    if (!s->overlap)
        return "run.overlap=true would take the barriers away";
    if (!s->rings)
        return "more micro-batches a step (gradient_accumulation_steps) would "
               "wait for it less often";
    snprintf(ring, size,
             "run.ring=%d in place of %d would begin the fetches earlier",
             s->ring * 2, s->ring);
    return ring;
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

void iz_bottleneck_text(char *out, size_t size,
                        const struct iz_bottleneck_measured *m,
                        const struct iz_bottleneck_setting *s)
{
    /* "WHAT N % of the time; SETTING" */
    static const struct {
        const char *what;
        enum iz_use use;
        const char *(*setting)(const struct iz_bottleneck_setting *);
    } simple[IZ_BOTTLENECKS] = {
        [IZ_BOTTLENECK_COMPUTE] = {"compute: forward and backward fill",
                                   IZ_USE_UNITS, of_compute},
        [IZ_BOTTLENECK_OPTIMIZER] = {"the optimizer: it costs compute",
                                     IZ_USE_OPTIMIZER, of_optimizer},
        [IZ_BOTTLENECK_SUMS] = {"sums, norms and copies: they cost compute",
                                IZ_USE_SUMS, of_sums},
        [IZ_BOTTLENECK_TASKS] = {"too few tasks: workers idle", IZ_USE_TASKS,
                                 of_tasks},
        [IZ_BOTTLENECK_GAPS] = {"gaps between tasks: nothing runs",
                                IZ_USE_NOTHING, of_gaps},
    };
    static const char *const links[IZ_USES] = {
        [IZ_USE_NETWORK] = "the network, or a later rank",
        [IZ_USE_UP] = "the link to the GPU",
        [IZ_USE_DOWN] = "the link to the host",
        [IZ_USE_DISK] = "the disk",
    };
    const double *share = m->usage.share;
    enum iz_bottleneck limit = iz_bottleneck_find(m);
    enum iz_use loss = iz_bottleneck_loss(&m->usage);
    bool late = limit == IZ_BOTTLENECK_LATE;
    char ring[96];
    if (limit == IZ_BOTTLENECK_UNKNOWN)
        snprintf(out, size, "not known: that takes two steps");
    else if (simple[limit].what)
        snprintf(out, size, "%s %.0f %% of the time%s; %s", simple[limit].what,
                 100 * share[simple[limit].use],
                 limit == IZ_BOTTLENECK_TASKS ? " beside busy ones" : "",
                 simple[limit].setting(s));
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
                 "thread submits %.0f %% of it; larger tasks "
                 "(train_micro_batch_size_per_gpu, sub_group_size) would need "
                 "fewer",
                 100 * share[IZ_USE_NOTHING], 100 * m->submitting);
    else
        snprintf(out, size,
                 "%s: compute waits %.0f %% of the time for it, and it works "
                 "%s%.0f %% of the time; %s",
                 links[loss], 100 * share[loss], late ? "only " : "",
                 100 * m->usage.busy[loss],
                 late                  ? of_late(s, loss, ring, sizeof(ring))
                 : loss == IZ_USE_DISK ? of_disk(s)
                                       : of_traffic(s));
}
