/* SPDX-License-Identifier: Apache-2.0 */
/* Saving: every rank writes and syncs its file in a directory under a temporary
 * name, the first one adds the index and renames the directory. */
#include "runtime/ckpt.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "codelets/die.h"
#include "runtime/ckpt_dir.h"
#include "runtime/ckpt_index.h"
#include "runtime/ckpt_share.h"
#include "runtime/hash.h"
#include "runtime/safetensors.h"

static_assert(IZ_BLOCK == IZ_CKPT_PIECE, "a block is copied in one call");

struct save {
    const struct iz_ckpt *k;
    int64_t step;
    struct iz_coll *c;
    struct iz_piece *piece; /* k->n_parts of this rank's file */
    char dir[IZ_CKPT_PATH];
};

/* ---- a rank's file ---- */

struct writer {
    int fd;
    char path[IZ_CKPT_FILE_PATH];
    int64_t bytes; /* of the whole file */
};

/* A full disk is the fault to expect: the message says what would be needed. */
static int writer_refuse(const struct writer *w, int err)
{
    struct statvfs st;

    if (fstatvfs(w->fd, &st) != 0)
        return iz_ckpt_dir_refuse(w->path, "cannot write", err);
    fprintf(stderr,
            "izar: checkpoint: %s: cannot write %" PRId64 " bytes (%" PRId64
            " bytes are free): %s\n",
            w->path, w->bytes, (int64_t)st.f_bavail * (int64_t)st.f_frsize,
            strerror(err));
    return -err;
}

static int writer_put(const struct writer *w, const void *p, int64_t bytes,
                      int64_t offset)
{
    const char *from = p;

    while (bytes > 0) {
        ssize_t n = pwrite(w->fd, from, (size_t)bytes, offset);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return writer_refuse(w, errno);
        from += n;
        offset += n;
        bytes -= n;
    }
    return 0;
}

/* Writes the piece's elements and notes their hashes; `data` is where data
 * begin. */
static int piece_write(const struct writer *w, struct iz_piece *p,
                       const struct iz_ckpt_part *part, int64_t data,
                       float *block)
{
    int64_t skip = p->first - part->first; /* of a replicated array */

    for (int64_t b = 0; b < iz_piece_blocks(p); b++) {
        int64_t at = b * IZ_BLOCK;
        int64_t n = p->count - at < IZ_BLOCK ? p->count - at : IZ_BLOCK;
        int err;

        part->get(part->arg, skip + at, block, n);
        p->hash[b] = iz_hash(block, 4 * n);
        err = writer_put(w, block, 4 * n, data + p->offset + 4 * at);
        if (err)
            return err;
    }
    return 0;
}

static char *header_make(const struct save *s, int64_t *bytes)
{
    char *text = iz_safetensors_header(s->piece, s->k->n_parts, s->step,
                                       s->c->rank, s->c->size, bytes);

    if (!text)
        fprintf(stderr, "izar: checkpoint: no memory for a header\n");
    return text;
}

/* The data go first, because the header holds their hashes. */
static int contents_write(struct save *s, struct writer *w,
                          uint64_t *header_hash)
{
    int n = s->k->n_parts, err = 0;
    int64_t data = 0;
    float *block = malloc(IZ_BLOCK * sizeof *block);
    char *header = block ? header_make(s, &data) : NULL;

    if (!header)
        err = -ENOMEM;
    w->bytes = data;
    for (int i = 0; i < n; i++)
        w->bytes += 4 * s->piece[i].count;
    for (int i = 0; i < n && !err; i++)
        err = piece_write(w, &s->piece[i], &s->k->part[i], data, block);
    free(header);
    free(block);
    if (err)
        return err;
    header = header_make(s, &data);
    if (!header)
        return -ENOMEM;
    *header_hash = iz_hash(header, data);
    err = writer_put(w, header, data, 0);
    free(header);
    return err;
}

static int rank_write(struct save *s, struct iz_ckpt_file *file)
{
    struct writer w = {.fd = -1};
    int err;

    snprintf(w.path, sizeof w.path, "%s/" IZ_CKPT_FILE, s->dir, s->c->rank,
             s->c->size);
    w.fd = open(w.path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (w.fd < 0)
        return iz_ckpt_dir_refuse(w.path, "cannot create", errno);
    err = contents_write(s, &w, &file->header_hash);
    if (!err && fsync(w.fd) != 0)
        err = writer_refuse(&w, errno);
    if (close(w.fd) != 0 && !err)
        err = iz_ckpt_dir_refuse(w.path, "cannot close", errno);
    file->bytes = w.bytes;
    return err;
}

/* ---- saving ---- */

static int index_write(const struct save *s, const int64_t *all)
{
    char path[IZ_CKPT_FILE_PATH];
    struct iz_ckpt_file *file = calloc((size_t)s->c->size, sizeof *file);
    int err;

    if (!file)
        return -ENOMEM;
    for (int64_t q = 0; q < s->c->size; q++) {
        file[q].bytes = all[2 * q];
        file[q].header_hash = (uint64_t)all[2 * q + 1];
    }
    snprintf(path, sizeof path, "%s/index.json", s->dir);
    err = iz_ckpt_index_write(path, s->k, s->step, s->c->size, file);
    free(file);
    return err;
}

static int files_write(struct save *s)
{
    struct iz_ckpt_file file = {0};
    int err = iz_ckpt_agree(s->c, rank_write(s, &file));
    int64_t mine[2] = {file.bytes, (int64_t)file.header_hash}, *all;

    if (err)
        return err;
    all = iz_ckpt_gather(s->c, mine, 2);
    if (s->c->rank == 0)
        err = index_write(s, all);
    if (!err && s->c->rank == 0)
        err = iz_ckpt_dir_commit(s->k->dir, s->step);
    free(all);
    return iz_ckpt_agree(s->c, err);
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
    if (first && !err && k->keep_last > 0)
        iz_ckpt_dir_prune(k->dir, s->step, k->keep_last);
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
