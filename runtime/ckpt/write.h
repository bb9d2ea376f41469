/* SPDX-License-Identifier: Apache-2.0 */
/* Which elements each rank writes; then the parts of saving that need no other
 * rank, so that tasks can do them beside training: a rank's file block by
 * block, and the index with which all files become a checkpoint. */
#pragma once

#include "runtime/ckpt/ckpt.h"
#include "runtime/ckpt/dir.h"
#include "runtime/ckpt/index.h"
#include "runtime/ckpt/rank_file.h"
#include "runtime/comm/agree.h"

/* Fills piece[k->n_parts] with the pieces that this rank writes; the caller
 * frees each hash.  If each rank holds a piece of an array, it writes that
 * piece; if every rank holds the whole array, each writes a part of it.  Pieces
 * with gaps are refused.  Negative errno on every rank with the reason printed.
 */
int iz_ckpt_shares(const struct iz_ckpt *k, struct iz_coll *c,
                   struct iz_piece *piece);

struct iz_ckpt_writer {
    const struct iz_ckpt *k; /* borrowed, and the pieces */
    struct iz_piece *piece;  /* of this rank; their hashes are filled */
    int64_t step;
    int rank, ranks;
    int fd;
    int64_t data, bytes; /* where data begin; of the whole file */
    char path[IZ_CKPT_FILE_PATH];
};

/* Creates the file, and its directory if no other rank has; the first five
 * members are set.  Negative errno with the reason printed, here and below. */
int iz_ckpt_writer_open(struct iz_ckpt_writer *w);
/* Block b of part i; in any order, different ones at the same time. */
int iz_ckpt_writer_block(const struct iz_ckpt_writer *w, int i, int64_t b,
                         const float *in);
/* Header and sync; also after an error, which it returns. */
int iz_ckpt_writer_close(struct iz_ckpt_writer *w, int err,
                         struct iz_ckpt_file *file);

/* One rank, when every rank's file is on the disk: index, rename, and removal
 * of checkpoints that are too old.  file[ranks]. */
int iz_ckpt_commit(const struct iz_ckpt *k, int64_t step, int ranks,
                   const struct iz_ckpt_file *file);
/* iz_ckpt_commit by all ranks, each of which knows only its own file. */
int iz_ckpt_gather_commit(const struct iz_ckpt *k, int64_t step,
                          struct iz_coll *c, const struct iz_ckpt_file *mine);
