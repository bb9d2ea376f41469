/* SPDX-License-Identifier: Apache-2.0 */
/* A rank's file, block by block, and what makes all of them a checkpoint; see
 * ckpt.h. */
#include "runtime/ckpt/ckpt.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "codelets/base/take.h"
#include "runtime/base/durable.h"
#include "runtime/base/hash.h"

/* ---- a rank's file ---- */

/* A full disk is the fault to expect: the message says what would be needed. */
static int writer_refuse(const struct iz_ckpt_writer *w, int err)
{
    struct statvfs st;
    if (fstatvfs(w->fd, &st) != 0)
        return iz_durable_refuse("checkpoint", w->path, "cannot write", err);
    fprintf(stderr,
            "izar: checkpoint: %s: cannot write %" PRId64 " bytes (%" PRId64
            " bytes are free): %s\n",
            w->path, w->bytes, (int64_t)st.f_bavail * (int64_t)st.f_frsize,
            strerror(err));
    return -err;
}

static int writer_put(const struct iz_ckpt_writer *w, const void *p,
                      int64_t bytes, int64_t offset)
{
    int err = iz_durable_put(w->fd, p, bytes, offset);
    return err ? writer_refuse(w, -err) : 0;
}

static char *header_make(const struct iz_ckpt_writer *w, int64_t *bytes)
{
    return iz_rank_file_header(w->k->part, w->k->n_parts, w->step, w->rank,
                               w->ranks, bytes);
}

/* The data go first, because the header holds their hashes; its length does
 * not depend on them. */
int iz_ckpt_writer_open(struct iz_ckpt_writer *w)
{
    char dir[IZ_CKPT_PATH];
    int64_t data = 0;
    w->fd = -1;
    for (int i = 0; i < w->k->n_parts; i++) {
        struct iz_rank_range *p = &w->k->part[i];
        p->offset = data;
        p->hash = iz_take(iz_rank_range_blocks(p), sizeof(*p->hash), "hashes");
        data += 4 * p->count;
    }
    int err = iz_ckpt_dir_tmp(w->k->dir, w->step, true, dir);
    if (err)
        return err;
    snprintf(w->path, sizeof(w->path), "%s/" IZ_CKPT_FILE, dir, w->rank,
             w->ranks);
    free(header_make(w, &w->data));
    w->bytes = w->data + data;
    w->fd = open(w->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (w->fd < 0)
        return iz_durable_refuse("checkpoint", w->path, "cannot create", errno);
    return 0;
}

int iz_ckpt_writer_block(const struct iz_ckpt_writer *w, int i, int64_t b,
                         const float *in)
{
    const struct iz_rank_range *p = &w->k->part[i];
    int64_t n = iz_rank_range_block_elems(p, b);
    p->hash[b] = iz_hash(in, 4 * n);
    return writer_put(w, in, 4 * n,
                      w->data + p->offset + 4 * b * IZ_CKPT_BLOCK);
}

static int header_write(const struct iz_ckpt_writer *w)
{
    int64_t bytes;
    char *header = header_make(w, &bytes);
    int err = writer_put(w, header, bytes, 0);
    free(header);
    return err;
}

int iz_ckpt_writer_close(struct iz_ckpt_writer *w, int err)
{
    if (!err)
        err = header_write(w);
    err = iz_durable_close("checkpoint", w->path, w->fd, err);
    w->fd = -1;
    for (int i = 0; i < w->k->n_parts; i++) {
        free(w->k->part[i].hash);
        w->k->part[i].hash = NULL;
    }
    return err;
}

/* ---- all of them ---- */

/* Removes all but the newest ones of this run up to `step`; those of another
 * stay, and do not count. */
static void prune(const struct iz_ckpt *k, int64_t step)
{
    char id[IZ_CKPT_ID];
    for (int n = 1; (step = iz_ckpt_dir_newest(k->dir, step)) >= 0;) {
        bool told = iz_ckpt_whose(k->dir, step, id, NULL) == 0 && *id;
        if (told && k->of.id && strcmp(id, k->of.id) != 0)
            continue;
        if (++n > k->keep_last)
            iz_ckpt_dir_discard(k->dir, step);
    }
}

/* Whether a file's ranges begin at end[n_parts], which they move, and fill the
 * arrays with the last one's. */
static int file_joins(const struct iz_ckpt *k, const struct iz_rank_file *f,
                      int64_t *end)
{
    for (int i = 0; i < k->n_parts; i++) {
        const struct iz_rank_range *part = &k->part[i];
        const struct iz_rank_range *p = iz_rank_file_find(f, part->name);
        bool fits = p && p->total == part->total &&
                    (p->count == 0 || p->first == end[i]);
        end[i] += p ? p->count : 0;
        if (!fits || (f->rank + 1 == f->ranks && end[i] != part->total))
            return iz_st_fault(&f->st,
                               "the ranks' ranges of %s do not lie end to end "
                               "over %" PRId64 " elements",
                               part->name, part->total);
    }
    return 0;
}

/* Each rank has written its own: what one sees of all; file[ranks]. */
static int files_see(const struct iz_ckpt *k, const char *dir, int64_t step,
                     int ranks, struct iz_ckpt_file *file)
{
    int64_t *end = iz_take(k->n_parts, sizeof(*end), "arrays");
    int err = 0;
    for (int q = 0; q < ranks && !err; q++) {
        struct iz_rank_file *f = NULL;
        err = iz_ckpt_file_open(&f, dir, step, q, ranks);
        if (!err)
            err = file_joins(k, f, end);
        if (!err)
            file[q] = (struct iz_ckpt_file){f->st.bytes, f->st.header_hash};
        iz_rank_file_close(&f);
    }
    free(end);
    return err;
}

int iz_ckpt_commit(const struct iz_ckpt *k, int64_t step, int ranks)
{
    char dir[IZ_CKPT_PATH], path[IZ_CKPT_FILE_PATH];
    int err = iz_ckpt_dir_tmp(k->dir, step, false, dir);
    if (err)
        return err;
    snprintf(path, sizeof(path), "%s/index.json", dir);
    struct iz_ckpt_file *file = iz_take(ranks, sizeof(*file), "files");
    err = files_see(k, dir, step, ranks, file);
    if (!err)
        err = iz_ckpt_index_write(path, k, step, ranks, file);
    free(file);
    if (!err)
        err = iz_ckpt_dir_commit(k->dir, step);
    if (!err && k->keep_last > 0)
        prune(k, step);
    return err;
}
