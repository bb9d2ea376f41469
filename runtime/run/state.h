/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of run.h share: a run from its command line to its end. */
#pragma once

#include <errno.h>

#include "runtime/base/json.h"
#include "runtime/base/text.h"
#include "runtime/ckpt/ckpt.h"
#include "runtime/ckpt/save.h"
#include "runtime/machine/arithmetic.h"
#include "runtime/machine/cores.h"
#include "runtime/machine/gpu_choice.h"
#include "runtime/plan/limits.h"
#include "runtime/report/metrics.h"
#include "runtime/run/options.h"
#include "runtime/run/run.h"

/* The rate of matrix products that was measured at the start. */
struct run_gemm {
    double rate; /* flop/s of all compute workers of this rank */
    int side;    /* of the product that a GPU was measured with; 0: none */
};

struct run_progress {
    int64_t begun; /* step at which this process began */
    int64_t saved; /* the last one that it saves, or has saved */
    int64_t taken; /* steps whose event came */
    bool stopped;
    enum iz_failure failure;
};

/* The links of the run's chain of hashes: the first rank has them, and in a
 * replay all. */
struct run_chain {
    json_t *links;
    int64_t broken; /* step of the first one that does not follow; 0: none */
};

struct run_replay {
    int64_t begun, hashes;
    int64_t first, equal; /* steps that are equal: the first, the last */
    bool differs;
};

/* The checkpoint that a run is resumed from. */
struct run_from {
    int64_t step;   /* negative: none */
    char *identity; /* of the run that wrote it; NULL: it does not tell */
    char id[IZ_CKPT_ID];
};

struct run {
    const struct iz_program *p;
    struct iz_options o;
    struct iz_config c;
    struct run_from from;
    struct iz_coll *coll;
    struct iz_cores *cores;
    struct iz_gpu_choice gpu;
    struct iz_arithmetic arithmetic;
    struct iz_model *model;
    struct iz_plan plan;
    struct iz_limits limit;
    struct iz_rate rate[IZ_RATES]; /* that choices are made by; 0: not known */
    int64_t free_bytes, reserve_bytes; /* that made limit.host; see memory.h */
    struct iz_data *data;
    struct iz_engine *e;
    struct iz_ckpt_saver *saver; /* of checkpoints; NULL: none so far */
    int save_error;
    struct iz_metrics *metrics;
    int workers;
    struct run_gemm gemm;
    double open_s, init_s;    /* to allocate and connect; to set the weights */
    const char *why_messages; /* between ranks of one host; NULL: by choice */
    char *facts, *identity;   /* see identity.h */
    char *changes;            /* since `from`, as members of a JSON object */
    char *model_text, *model_before;
    char id[IZ_CKPT_ID];
    struct iz_ckpt_of of; /* these, as checkpoints hold them */
    struct run_progress progress;
    struct run_chain chain;
    struct run_replay replay;
    int claim;         /* of the output folder, a descriptor; 0: none */
    _Atomic int *stop; /* the signal that asks for the end, or 0; NULL: no
                        * signal does */
};

/* The model, and which of its parameters are updated how; then where it runs
 * and the plan of it; then all of what --plan does without: up to the first
 * step.  All ranks; negative errno on every rank with the reason printed. */
int iz_run_prepare_model(struct run *r);
int iz_run_prepare(struct run *r);
int iz_run_start(struct run *r);
/* What of the config is odd by this plan. */
void iz_run_remark(const struct run *r, const struct iz_plan *p);
/* The plan and the memory it is for. */
void iz_run_print_plan(const struct run *r);

/* Those that were started, or that a plan is for. */
static inline int iz_run_ranks(const struct run *r)
{
    return r->o.ranks ? r->o.ranks : r->coll->size;
}

/* Whether it goes on from a checkpoint: a replay may begin without one. */
static inline bool iz_run_loads(const struct run *r)
{
    return r->o.resume && r->from.step >= 0;
}

/* The step after which it ends. */
static inline int64_t iz_run_last(const struct run *r)
{
    return r->o.replay ? r->o.to : r->c.run.steps;
}

/* Rows and columns of the product that a GPU is measured with, or less than 0
 * if IZ_REFERENCE_GEMM is none: a debugging tool takes long for a large one.  A
 * core is measured for a time in proportion. */
int iz_run_reference_gemm(void);
/* The rate of matrix products on this rank's GPU or on all its workers. */
void iz_run_measure(struct run *r);
/* Plan, place and speed, told by the first rank.  All ranks. */
void iz_run_print_header(struct run *r);

/* Whether this rank is the one that prints, and where it prints faults: NULL on
 * the others. */
static inline bool iz_run_first(const struct run *r)
{
    return r->coll->rank == 0;
}

static inline FILE *iz_run_err(const struct run *r)
{
    return iz_run_first(r) ? stderr : NULL;
}

/* One rank's failure is everybody's: nobody waits for a rank that has gone.
 * what: the memory that was missing, for the message of -ENOMEM; NULL if it was
 * printed already. */
static inline int iz_run_agree(struct run *r, int status, const char *what)
{
    if (status == -ENOMEM && what)
        fprintf(stderr, "izar: rank %d: no memory for %s\n", r->coll->rank,
                what);
    int q = iz_coll_refuser(r->coll, status != 0);
    if (q < 0)
        return 0;
    if (q > 0 && iz_run_first(r))
        fprintf(stderr,
                "izar: the other ranks end with rank %d, which says why\n", q);
    return status ? status : -ECANCELED;
}

/* Sets `from`, and of the config what a resumed run keeps.  Negative errno with
 * the reason printed, on all ranks. */
int iz_run_find_checkpoint(struct run *r);
/* Trains from the step where the engine is to the last one.  Negative errno
 * with the reason printed, on all ranks. */
int iz_run_train(struct run *r);
/* ---- chain.c ---- */

/* What a resumed run or a replay has of the chain: all that is in the output.
 */
void iz_chain_open(struct run *r);
void iz_chain_close(struct run *r);
/* The last link of a step, or up to it; NULL: there is none. */
const json_t *iz_chain_find(const struct run *r, int64_t step, bool before);
/* Appends a link of the step where the engine is.  All ranks; no event is under
 * way. */
void iz_chain_hash(struct run *r);

/* ---- replay.c ---- */

/* Nothing is to be written. */
void iz_replay_settings(struct iz_run_config *c);
/* Step of the checkpoint that tells what the steps were computed with;
 * negative: there is no checkpoint. */
int64_t iz_replay_whose(const struct run *r);
/* Whether there is something to compare.  All ranks. */
int iz_replay_open(struct run *r);
/* Whether the step where the engine is is one of them. */
bool iz_replay_due(const struct run *r);
/* Compares it.  All ranks, as iz_chain_hash. */
void iz_replay_compare(struct run *r);
/* Says what came of it; negative errno unless all was equal. */
int iz_replay_end(struct run *r);

/* Writes a checkpoint while nothing else runs. */
int iz_run_save_now(struct run *r);
/* Last checkpoint, sample, export and summary; after training that ended with
 * a status s, a save that failed, no more than the summary. */
int iz_run_finish(struct run *r, int s);
