/* SPDX-License-Identifier: Apache-2.0 */
/* Writing a rank's file block by block, and what makes all of them a
 * checkpoint; see write.h. */
#include "runtime/ckpt/write.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "runtime/base/durable.h"
#include "runtime/base/hash.h"
#include "runtime/ckpt/dir.h"
#include "runtime/ckpt/shares.h"

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
    char *text = iz_safetensors_header(w->piece, w->k->n_parts, w->step,
                                       w->rank, w->ranks, bytes);
    if (!text)
        fprintf(stderr, "izar: checkpoint: no memory for a header\n");
    return text;
}

/* The data go first, because the header holds their hashes; its length does
 * not depend on them. */
int iz_ckpt_writer_open(struct iz_ckpt_writer *w)
{
    char dir[IZ_CKPT_PATH];

    w->fd = -1;
    int err = iz_ckpt_dir_join(w->k->dir, w->step, dir);
    if (err)
        return err;
    snprintf(w->path, sizeof(w->path), "%s/" IZ_CKPT_FILE, dir, w->rank,
             w->ranks);
    char *header = header_make(w, &w->data);
    if (!header)
        return -ENOMEM;
    free(header);
    w->bytes = w->data;
    for (int i = 0; i < w->k->n_parts; i++)
        w->bytes += 4 * w->piece[i].count;
    w->fd = open(w->path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (w->fd < 0)
        return iz_durable_refuse("checkpoint", w->path, "cannot create", errno);
    return 0;
}

int iz_ckpt_writer_block(const struct iz_ckpt_writer *w, int i, int64_t b,
                         const float *in)
{
    const struct iz_piece *p = &w->piece[i];
    int64_t n = iz_piece_block_elems(p, b);
    p->hash[b] = iz_hash(in, 4 * n);
    return writer_put(w, in, 4 * n, w->data + p->offset + 4 * b * IZ_BLOCK);
}

static int header_write(const struct iz_ckpt_writer *w, uint64_t *hash)
{
    int64_t bytes;
    char *header = header_make(w, &bytes);

    if (!header)
        return -ENOMEM;
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
    file->bytes = w->bytes;
    return err;
}

/* ---- all of them ---- */

int iz_ckpt_commit(const struct iz_ckpt *k, int64_t step, int ranks,
                   const struct iz_ckpt_file *file)
{
    char dir[IZ_CKPT_PATH], path[IZ_CKPT_FILE_PATH];
    int err = iz_ckpt_dir_tmp(k->dir, step, dir);

    if (err)
        return err;
    snprintf(path, sizeof(path), "%s/index.json", dir);
    err = iz_ckpt_index_write(path, k, step, ranks, file);
    if (!err)
        err = iz_ckpt_dir_commit(k->dir, step);
    if (!err && k->keep_last > 0)
        iz_ckpt_dir_prune(k->dir, step, k->keep_last);
    return err;
}

int iz_ckpt_gather_commit(const struct iz_ckpt *k, int64_t step,
                          struct iz_coll *c, const struct iz_ckpt_file *mine)
{
    int64_t own[2] = {mine->bytes, (int64_t)mine->header_hash};
    int64_t *all = iz_agree_numbers(c, own, 2);
    struct iz_ckpt_file *file = calloc((size_t)c->size, sizeof(*file));
    int err = file ? 0 : -ENOMEM;
    for (int64_t q = 0; q < c->size && file; q++)
        file[q] = (struct iz_ckpt_file){all[2 * q], (uint64_t)all[2 * q + 1]};
    if (!err && c->rank == 0)
        err = iz_ckpt_commit(k, step, c->size, file);
    free(file);
    free(all);
    return iz_agree(c, err);
}
