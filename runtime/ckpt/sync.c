/* SPDX-License-Identifier: Apache-2.0 */
/* Saving: every rank writes and syncs its file in a directory under a temporary
 * name, the first one adds the index and renames the directory. */
#include "runtime/ckpt/ckpt.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

#include "codelets/base/die.h"
#include "runtime/base/progress.h"
#include "runtime/ckpt/dir.h"
#include "runtime/ckpt/rank_file.h"
#include "runtime/ckpt/shares.h"
#include "runtime/ckpt/write.h"

static_assert(IZ_BLOCK == IZ_CKPT_PIECE, "a block is copied in one call");

struct save {
    const struct iz_ckpt *k;
    int64_t step;
    struct iz_coll *c;
    struct iz_piece *piece; /* k->n_parts of this rank's file */
    char dir[IZ_CKPT_PATH];
};

/* ---- a rank's file ---- */

static int piece_write(struct iz_ckpt_writer *w, int i, float *block,
                       struct iz_progress *progress)
{
    const struct iz_piece *p = &w->piece[i];
    const struct iz_ckpt_part *part = &w->k->part[i];
    int64_t skip = p->first - part->first; /* of a replicated array */
    int err = 0;

    for (int64_t b = 0; b < iz_piece_blocks(p) && !err; b++) {
        part->get(part->arg, skip + b * IZ_BLOCK, block,
                  iz_piece_block_elems(p, b));
        err = iz_ckpt_writer_block(w, i, b, block);
        iz_progress_add(progress, 4 * iz_piece_block_elems(p, b));
    }
    return err;
}

static int rank_write(struct save *s, struct iz_ckpt_file *file)
{
    struct iz_ckpt_writer w = {.k = s->k,
                               .piece = s->piece,
                               .step = s->step,
                               .rank = s->c->rank,
                               .ranks = s->c->size};
    float *block = malloc(IZ_BLOCK * sizeof *block);
    struct iz_progress progress;
    int64_t bytes = 0;
    int err = block ? iz_ckpt_writer_open(&w, s->dir) : -ENOMEM;

    for (int i = 0; i < s->k->n_parts; i++)
        bytes += 4 * s->piece[i].count;
    iz_progress_begin(&progress, "saving", bytes);
    for (int i = 0; i < s->k->n_parts && !err; i++)
        err = piece_write(&w, i, block, &progress);
    iz_progress_end(&progress);
    if (block)
        err = iz_ckpt_writer_close(&w, err, file);
    free(block);
    return err;
}

/* ---- saving ---- */

static int files_write(struct save *s)
{
    struct iz_ckpt_file file = {0};
    int err = iz_ckpt_agree(s->c, rank_write(s, &file));

    return err ? err : iz_ckpt_gather_commit(s->k, s->step, s->c, &file);
}

static int save_run(struct save *s)
{
    const struct iz_ckpt *k = s->k;
    bool first = s->c->rank == 0;
    int err = iz_ckpt_shares(k, s->c, s->piece);

    if (err)
        return err;
    if (first)
        err = iz_ckpt_dir_begin(k->dir, s->step, s->dir);
    err = iz_ckpt_agree(s->c, err);
    if (!err) {
        iz_coll_broadcast(s->c, s->dir, sizeof s->dir, 0, "checkpoint");
        err = files_write(s);
    }
    if (first && err)
        iz_ckpt_dir_abort(k->dir, s->step);
    return err;
}

int iz_ckpt_save(const struct iz_ckpt *k, int64_t step, struct iz_coll *c)
{
    struct save s = {.k = k, .step = step, .c = c};
    int err;

    s.piece = calloc((size_t)k->n_parts + 1, sizeof *s.piece);
    if (!s.piece)
        iz_die("checkpoint: no memory for %d arrays", k->n_parts);
    err = save_run(&s);
    for (int i = 0; i < k->n_parts; i++)
        free(s.piece[i].hash);
    free(s.piece);
    return err;
}

int iz_ckpt_latest(const struct iz_ckpt *k, int64_t *step)
{
    int64_t newest = iz_ckpt_dir_newest(k->dir, INT64_MAX);

    if (newest < 0)
        return -ENOENT;
    *step = newest;
    return 0;
}
