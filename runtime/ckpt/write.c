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
#include "runtime/base/text.h"

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

static int header_write(const struct iz_ckpt_writer *w, uint64_t *hash)
{
    int64_t bytes;
    char *header = header_make(w, &bytes);
    *hash = iz_hash(header, bytes);
    int err = writer_put(w, header, bytes, 0);
    free(header);
    return err;
}

int iz_ckpt_writer_close(struct iz_ckpt_writer *w, int err,
                         struct iz_ckpt_file *file)
{
    if (!err)
        err = header_write(w, &file->header_hash);
    err = iz_durable_close("checkpoint", w->path, w->fd, err);
    w->fd = -1;
    for (int i = 0; i < w->k->n_parts; i++) {
        free(w->k->part[i].hash);
        w->k->part[i].hash = NULL;
    }
    file->bytes = w->bytes;
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

int iz_ckpt_commit(const struct iz_ckpt *k, int64_t step, int ranks,
                   const struct iz_ckpt_file *file)
{
    char dir[IZ_CKPT_PATH], path[IZ_CKPT_FILE_PATH];
    int err = iz_ckpt_dir_tmp(k->dir, step, false, dir);
    if (err)
        return err;
    snprintf(path, sizeof(path), "%s/index.json", dir);
    err = iz_ckpt_index_write(path, k, step, ranks, file);
    /* Each rank has written its own: here is what all of them see. */
    if (!err && iz_ckpt_files_bytes(dir, ranks, file, stderr) < 0)
        err = -EINVAL;
    if (!err)
        err = iz_ckpt_dir_commit(k->dir, step);
    if (!err && k->keep_last > 0)
        prune(k, step);
    return err;
}

int iz_ckpt_gather_commit(const struct iz_ckpt *k, int64_t step,
                          struct iz_coll *c, const struct iz_ckpt_file *mine)
{
    int64_t own[2] = {mine->bytes, (int64_t)mine->header_hash};
    int64_t *all = iz_agree_numbers(c, own, 2, "checkpoint");
    struct iz_ckpt_file *file = iz_take(c->size, sizeof(*file), "files");
    int err = 0;
    for (int64_t q = 0; q < c->size; q++)
        file[q] = (struct iz_ckpt_file){all[2 * q], (uint64_t)all[2 * q + 1]};
    if (c->rank == 0)
        err = iz_ckpt_commit(k, step, c->size, file);
    free(file);
    free(all);
    return iz_agree(c, err);
}
