/* SPDX-License-Identifier: Apache-2.0 */
/* Checkpoints of a run, while training waits or beside it: then tasks copy the
 * states of a step, block by block, into buffers that take turns, and others
 * write these to this rank's file.  The next update of a chunk waits for its
 * copy and for nothing else. When all ranks' files are on the disk, which they
 * learn from the scalars of a later step, the first rank makes them a
 * checkpoint. */
#pragma once

#include "runtime/ckpt/ckpt.h"
#include "runtime/step/train.h"

struct iz_ckpt_saver;

/* Before the first save; all ranks.  Waits for all tasks.  What `of`
 * has is borrowed until close. Negative errno on every rank, reason printed. */
int iz_ckpt_save_open(struct iz_ckpt_saver **out, struct iz_engine *e,
                      const struct iz_ckpt_of *of);
/* After the last task; removes unfinished checkpoints. */
void iz_ckpt_save_close(struct iz_ckpt_saver **s);

/* Saves the step done last; waits for all tasks, and none is pending.  All
 * ranks.  Negative errno on every one, reason printed: the last good checkpoint
 * stays. */
int iz_ckpt_save_now(struct iz_ckpt_saver *s);

/* Submits the saving of the step submitted last.  The plan has buffers for it,
 * and none is pending. */
void iz_ckpt_save_begin(struct iz_ckpt_saver *s);
/* True on all ranks while a save has begun and some rank has not written its
 * file. */
bool iz_ckpt_save_pending(const struct iz_ckpt_saver *s);
/* Call it with every event of a step, in order.  It drops the save of a failed
 * step, and commits a save that all ranks have written.  -EIO, on all ranks at
 * the same event, when one of them could not write. */
int iz_ckpt_save_event(struct iz_ckpt_saver *s, const struct iz_event *v);
/* Waits for all tasks, and makes the save that is pending a checkpoint; all
 * ranks, after all events.  Negative errno on every one. */
int iz_ckpt_save_finish(struct iz_ckpt_saver *s);

/* The step of the newest save that became a checkpoint since the last call; 0:
 * none.  Only known to the first rank. */
int64_t iz_ckpt_save_done(struct iz_ckpt_saver *s);
