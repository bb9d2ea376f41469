/* SPDX-License-Identifier: Apache-2.0 */
/* The vote on a checkpoint that is written beside training, a commit in two
 * phases.  With the scalars of every step each rank tells how far its file is,
 * so in the event of the same step all learn that all files are on the disk. */
#pragma once

#include "runtime/ckpt/rank_file.h"
#include "runtime/engine/engine.h"

struct iz_vote {
    _Atomic int64_t step;    /* as iz_event.sealed, of this rank */
    struct iz_ckpt_file own; /* set before the step is */
    struct iz_ckpt_file *of; /* of all ranks, as they have told */
    int64_t heard;           /* the step of `of`; of `clip` alone */
    int ranks;
};

/* From now on the engine's steps carry the vote.  No task is under way. */
void iz_vote_open(struct iz_vote *v, struct iz_engine *e);
void iz_vote_close(struct iz_vote *v, struct iz_engine *e);
