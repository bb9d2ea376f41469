/* SPDX-License-Identifier: Apache-2.0 */
/* From which checkpoint a run goes on, and the loop over steps: at most a few
 * are under way, events are taken, checkpoints begun and ended. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "codelets/base/take.h"
#include "runtime/engine/trace.h"
#include "runtime/run/state.h"
#include "runtime/step/train.h"

#define SAVE "the save of a checkpoint" /* the phase, for messages */

/* ---- the checkpoint that it goes on from ---- */

/* Whose the checkpoints of the output are: the newest one is taken, unless some
 * are of another run. */
static int find_owner(struct run *r)
{
    struct run_from *f = &r->from;
    char id[IZ_CKPT_ID];
    int64_t step = f->step, of;
    if (r->o.replay)
        step = iz_replay_whose(r);
    of = step;
    if (step < 0 || iz_ckpt_whose(r->c.run.output, step, f->id, &f->identity))
        return 0; /* what is wrong with it is told when it is read */
    while ((step = iz_ckpt_dir_newest(r->c.run.output, step)) >= 0) {
        if (iz_ckpt_whose(r->c.run.output, step, id, NULL) || !*id)
            continue;
        if (*f->id && strcmp(id, f->id) != 0)
            return iz_text_refuse(
                stderr,
                "--resume: %s holds checkpoints of two runs: step %lld is of "
                "run %s, step %lld of run %s: move those of one away",
                r->c.run.output, (long long)of, f->id, (long long)step, id);
        of = step;
        snprintf(f->id, sizeof(f->id), "%s", id);
    }
    return 0;
}

/* The first rank finds it, for all. */
int iz_run_find_checkpoint(struct run *r)
{
    struct run_from *f = &r->from;
    bool here = iz_run_first(r);
    /* A replay of a run's first steps may have no checkpoint before them. */
    f->step = iz_ckpt_dir_newest(r->c.run.output,
                                 r->o.replay ? r->o.from + 1 : INT64_MAX);
    if (r->o.replay)
        iz_chain_open(r);
    int s = here ? find_owner(r) : 0;
    if (here && f->step < 0 && !r->o.plan && !r->o.replay)
        s = iz_text_refuse(
            stderr, "--resume: no checkpoint in %s%s", r->c.run.output,
            access(r->c.run.output, F_OK) ? ": there is no such folder" : "");
    int64_t bytes = f->identity ? (int64_t)strlen(f->identity) + 1 : 0;
    iz_coll_broadcast(r->coll, &bytes, sizeof(bytes), 0, "the checkpoint");
    if (!here && bytes)
        f->identity = iz_take(bytes, 1, "the checkpoint");
    s = iz_run_agree(r, s, "the checkpoint");
    if (s)
        return s;
    iz_coll_broadcast(r->coll, &f->step, sizeof(f->step), 0, "the checkpoint");
    iz_coll_broadcast(r->coll, f->identity, bytes, 0, "the checkpoint");
    if (f->identity)
        iz_config_keep(&r->c, f->identity, iz_run_ranks(r));
    return 0;
}

/* ---- saves ---- */

/* Of a save that has become a checkpoint. */
static void report_save(struct run *r)
{
    int64_t step = r->saver ? iz_ckpt_save_done(r->saver) : 0;
    if (!step || !iz_run_first(r))
        return;
    iz_metrics_between(r->metrics);
    printf("saved step %lld in %s/checkpoints\n", (long long)step,
           r->c.run.output);
}

static void take_event(struct run *r)
{
    struct iz_event v = iz_train_event(r->e);
    iz_metrics_event(r->metrics, &v);
    if (r->saver && !r->save_error)
        r->save_error = iz_ckpt_save_event(r->saver, &v);
    report_save(r);
    if (v.eval)
        return;
    r->progress.taken = v.step;
    r->progress.stopped |= v.stop;
    if (v.failure && !r->progress.failure)
        r->progress.failure = v.failure;
}

static void take_all(struct run *r)
{
    while (r->e->events.taken < r->e->events.due)
        take_event(r);
}

/* Training waits. */
int iz_run_save_now(struct run *r)
{
    take_all(r);
    if (r->progress.failure)
        return 0;
    const char *before = atomic_exchange(&r->coll->phase, SAVE);
    int s = r->saver ? 0 : iz_ckpt_save_open(&r->saver, r->e, &r->of);
    if (!s)
        s = iz_ckpt_save_now(r->saver);
    r->coll->phase = before;
    iz_metrics_pause(r->metrics);
    report_save(r);
    return s;
}

/* The save under way, if any, becomes a checkpoint. */
static int end_saves(struct run *r)
{
    r->coll->phase = SAVE;
    int s = r->saver ? iz_ckpt_save_finish(r->saver) : 0;
    r->coll->phase = NULL;
    if (r->saver)
        iz_metrics_pause(r->metrics);
    report_save(r);
    return s;
}

/* One save at a time: the one before is waited for. */
static int save(struct run *r)
{
    int s = 0;
    r->progress.saved = r->e->step;
    if (!r->e->plan.staging[IZ_STAGING_CKPT].n)
        return iz_run_save_now(r);
    if (iz_ckpt_save_pending(r->saver)) {
        take_all(r);
        s = end_saves(r);
    }
    if (!s && !r->progress.failure && !r->save_error)
        iz_ckpt_save_begin(r->saver);
    return s;
}

/* ---- steps ---- */

static bool every(int64_t interval, int64_t step)
{
    return interval > 0 && step % interval == 0;
}

static void hash(struct run *r)
{
    bool due = r->o.replay ? iz_replay_due(r)
                           : every(r->c.run.hash_interval, r->e->step);
    if (due)
        take_all(r);
    if (due && !r->progress.failure && r->o.replay)
        iz_replay_compare(r);
    else if (due && !r->progress.failure)
        iz_chain_hash(r);
    r->progress.stopped |= r->replay.differs;
}

int iz_run_train(struct run *r)
{
    int s = 0;
    if (r->o.replay)
        hash(r); /* of the checkpoint */
    while (r->e->step < iz_run_last(r) && !s) {
        /* The same events on every rank before it submits the same step, so
         * all end at the same one. */
        while (r->e->step - r->progress.taken >= r->c.run.in_flight)
            take_event(r);
        if (r->progress.stopped || r->progress.failure || r->save_error)
            break;
        iz_train_step(r->e);
        bool end = r->e->step == iz_run_last(r);
        hash(r);
        if (r->c.run.eval_batches && !r->o.replay &&
            (end || every(r->c.run.eval_interval, r->e->step)))
            iz_train_eval(r->e);
        if (!end && every(r->c.run.save_interval, r->e->step))
            s = save(r);
    }
    /* Else the last step would have done it. */
    if (!s && r->progress.begun >= r->c.run.steps && r->c.run.eval_batches &&
        !r->o.replay)
        iz_train_eval(r->e);
    take_all(r);
    iz_trace_stop(r->e);
    if (!s)
        s = end_saves(r);
    return s ? s : r->save_error;
}
