/* SPDX-License-Identifier: Apache-2.0 */
/* A checkpoint's directory.  Each rank writes its file there; when all in it is
 * on the disk it is renamed into place, and before anything in it is removed it
 * is renamed away.  See ckpt.h. */
#include "runtime/ckpt/ckpt.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "codelets/base/take.h"
#include "runtime/base/durable.h"
#include "runtime/base/hash.h"
#include "runtime/base/text.h"

#define WHO "checkpoint"

/* The names of all files that are ever in a checkpoint's directory. */
static const char *const files[] = {"index.json", "rank-*.safetensors", NULL};

/* Of one step's checkpoint; see ckpt.h. */
struct paths {
    char parent[IZ_CKPT_PATH], done[IZ_CKPT_PATH], tmp[IZ_CKPT_PATH],
        old[IZ_CKPT_PATH];
};

static int paths_of(struct paths *p, const char *dir, int64_t step)
{
    static const char format[] = "%s/checkpoints/step-%08" PRId64 "%s";
    snprintf(p->parent, IZ_CKPT_PATH, "%s/checkpoints", dir);
    snprintf(p->done, IZ_CKPT_PATH, format, dir, step, "");
    snprintf(p->tmp, IZ_CKPT_PATH, format, dir, step, ".tmp");
    int n = snprintf(p->old, IZ_CKPT_PATH, format, dir, step, ".old");
    /* Room for the names of files in it. */
    return n < IZ_CKPT_PATH - 64 ? 0 : -ENAMETOOLONG;
}

/* The step of a name "step-00000100<suffix>", or -1. */
static int64_t step_of(const char *name, const char *suffix)
{
    if (strncmp(name, "step-", 5) != 0)
        return -1;
    const char *p = name + 5;
    int64_t step = iz_text_decimal(&p);
    return p - name >= 5 + 8 && strcmp(p, suffix) == 0 ? step : -1;
}

static bool exists(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0;
}

static bool has_index(const char *path)
{
    char index[IZ_CKPT_PATH + 16];
    snprintf(index, sizeof(index), "%s/index.json", path);
    return exists(index);
}

/* Removes a complete checkpoint: it stops to be one before its first file goes.
 * One that holds somebody's file stays. */
static void discard(const struct paths *p, const char *path)
{
    if (iz_durable_check_directory(WHO, path, files) == 0 &&
        iz_durable_remove_directory(WHO, p->tmp, files) == 0 &&
        iz_durable_rename(WHO, path, p->tmp) == 0)
        iz_durable_remove_directory(WHO, p->tmp, files);
}

/* A crash between the two renames of a replacement left the old one aside. */
static void restore(const struct paths *p)
{
    if (exists(p->done))
        discard(p, p->old);
    else if (rename(p->old, p->done) != 0)
        iz_durable_refuse(WHO, p->old, "cannot rename back", errno);
}

int iz_ckpt_dir_sweep(const char *dir)
{
    struct paths p;
    int err = paths_of(&p, dir, 0);
    if (!err)
        err = iz_durable_make_directories(WHO, p.parent);
    if (err)
        return err;
    DIR *d = opendir(p.parent);
    if (!d)
        return iz_durable_refuse(WHO, p.parent, "cannot read", errno);
    for (struct dirent *e; (e = readdir(d));) {
        int64_t tmp = step_of(e->d_name, ".tmp");
        int64_t old = step_of(e->d_name, ".old");
        if (tmp >= 0 && paths_of(&p, dir, tmp) == 0)
            iz_durable_remove_directory(WHO, p.tmp, files);
        if (old >= 0 && paths_of(&p, dir, old) == 0)
            restore(&p);
    }
    closedir(d);
    return 0;
}

/* The directory in which a checkpoint is written, unless another rank has made
 * it. */
static int make_tmp(const struct paths *p)
{
    int err = iz_durable_make_directories(WHO, p->parent);
    if (!err && mkdir(p->tmp, 0777) != 0)
        err = errno == EEXIST
                  ? iz_durable_check_directory(WHO, p->tmp, files)
                  : iz_durable_refuse(WHO, p->tmp, "cannot make", errno);
    return err;
}

/* Gives the written directory its name, in place of an older checkpoint of the
 * same step. */
static int rename_tmp(const struct paths *p)
{
    int err = iz_durable_sync_directory(WHO, p->tmp);
    if (err)
        return err;
    bool replaces = exists(p->done);
    if (replaces && rename(p->done, p->old) != 0)
        return iz_durable_refuse(WHO, p->done, "cannot move aside", errno);
    if (rename(p->tmp, p->done) != 0) {
        err = iz_durable_refuse(WHO, p->tmp, "cannot rename", errno);
        if (replaces && rename(p->old, p->done) != 0)
            iz_durable_refuse(WHO, p->old, "cannot rename back", errno);
        return err;
    }
    err = iz_durable_sync_directory(WHO, p->parent);
    if (!err && exists(p->old))
        discard(p, p->old);
    return err;
}

void iz_ckpt_dir_abort(const char *dir, int64_t step)
{
    struct paths p;
    if (paths_of(&p, dir, step) == 0)
        iz_durable_remove_directory(WHO, p.tmp, files);
}

int64_t iz_ckpt_dir_newest(const char *dir, int64_t limit)
{
    struct paths p;
    int64_t newest = -ENOENT;
    DIR *d = paths_of(&p, dir, 0) ? NULL : opendir(p.parent);
    if (!d)
        return newest;
    for (struct dirent *e; (e = readdir(d));) {
        int64_t step = step_of(e->d_name, "");
        if (step < 0)
            step = step_of(e->d_name, ".old");
        if (step > newest && step < limit &&
            iz_ckpt_dir_find(dir, step, p.done) == 0)
            newest = step;
    }
    closedir(d);
    return newest;
}

int iz_ckpt_dir_find(const char *dir, int64_t step, char path[IZ_CKPT_PATH])
{
    struct paths p;
    path[0] = '\0';
    if (paths_of(&p, dir, step))
        return -ENOENT;
    const char *at = has_index(p.done) ? p.done : p.old;
    memcpy(path, at, IZ_CKPT_PATH);
    return has_index(at) ? 0 : -ENOENT;
}

/* ---- whose it is ---- */

static char *lines_of(const json_t *lines)
{
    struct iz_text t;
    FILE *f = iz_text_open(&t);
    for (int64_t i = 0; i < iz_json_count(lines); i++)
        fprintf(f, "%s\n", json_string_value(json_array_get(lines, (size_t)i)));
    return iz_text_close(&t);
}

int iz_ckpt_whose(const char *dir, int64_t step, char id[IZ_CKPT_ID],
                  char **identity)
{
    struct iz_ckpt_index *x = NULL;
    char path[IZ_CKPT_PATH];
    int err = iz_ckpt_dir_find(dir, step, path);
    if (!err)
        err = iz_ckpt_index_open(&x, path, true);
    const json_t *root = err ? NULL : x->root;
    const json_t *lines = json_object_get(root, "identity");
    snprintf(id, IZ_CKPT_ID, "%s", iz_json_text_of(root, "run"));
    if (identity)
        *identity = json_is_array(lines) ? lines_of(lines) : NULL;
    iz_ckpt_index_close(&x);
    return err;
}

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
    return iz_rank_file_header(w->k->array, w->k->n_arrays, w->step, w->rank,
                               w->ranks, bytes);
}

/* The data go first, because the header holds their hashes; its length does
 * not depend on them. */
int iz_ckpt_writer_open(struct iz_ckpt_writer *w)
{
    struct paths dir;
    int64_t data = 0;
    w->fd = -1;
    for (int i = 0; i < w->k->n_arrays; i++) {
        struct iz_rank_range *p = &w->k->array[i];
        p->offset = data;
        p->hash = iz_take(iz_rank_range_blocks(p), sizeof(*p->hash), "hashes");
        data += 4 * p->count;
    }
    int err = paths_of(&dir, w->k->dir, w->step);
    if (!err)
        err = make_tmp(&dir);
    if (err)
        return err;
    snprintf(w->path, sizeof(w->path), "%s/" IZ_CKPT_FILE, dir.tmp, w->rank,
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
    const struct iz_rank_range *p = &w->k->array[i];
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
    for (int i = 0; i < w->k->n_arrays; i++) {
        free(w->k->array[i].hash);
        w->k->array[i].hash = NULL;
    }
    return err;
}

/* ---- all files ---- */

int iz_ckpt_file_open(struct iz_rank_file **f, const char *dir, int64_t step,
                      int rank, int ranks)
{
    char path[IZ_CKPT_FILE_PATH];
    snprintf(path, sizeof(path), "%s/" IZ_CKPT_FILE, dir, rank, ranks);
    int err = iz_rank_file_open(f, path);
    if (!err &&
        ((*f)->rank != rank || (*f)->ranks != ranks || (*f)->step != step))
        err = iz_st_fault(&(*f)->st,
                          "belongs to another rank, number of ranks or step");
    return err;
}

/* Removes all but the newest ones of this run up to `step`; those of another
 * stay, and do not count. */
static void prune(const struct iz_ckpt *k, int64_t step)
{
    char id[IZ_CKPT_ID];
    struct paths p;
    for (int n = 1; (step = iz_ckpt_dir_newest(k->dir, step)) >= 0;) {
        if (iz_ckpt_whose(k->dir, step, id, NULL) != 0)
            continue; /* whose it is cannot be read */
        if (*id && k->of.id && strcmp(id, k->of.id) != 0)
            continue;
        if (++n > k->keep_last && paths_of(&p, k->dir, step) == 0)
            discard(&p, p.done);
    }
}

/* Whether a file's ranges begin at end[n_arrays], which they move, and fill the
 * arrays with the last one's. */
static int file_joins(const struct iz_ckpt *k, const struct iz_rank_file *f,
                      int64_t *end)
{
    for (int i = 0; i < k->n_arrays; i++) {
        const struct iz_rank_range *array = &k->array[i];
        const struct iz_rank_range *p = iz_rank_file_find(f, array->name);
        bool fits = p && p->total == array->total &&
                    (p->count == 0 || p->first == end[i]);
        end[i] += p ? p->count : 0;
        if (!fits || (f->rank + 1 == f->ranks && end[i] != array->total))
            return iz_st_fault(&f->st,
                               "the ranks' ranges of %s do not lie end to end "
                               "over %" PRId64 " elements",
                               array->name, array->total);
    }
    return 0;
}

/* Each rank has written its own: what one sees of all; file[ranks]. */
static int files_see(const struct iz_ckpt *k, const char *dir, int64_t step,
                     int ranks, struct iz_ckpt_file *file)
{
    int64_t *end = iz_take(k->n_arrays, sizeof(*end), "arrays");
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
    struct paths dir;
    char path[IZ_CKPT_FILE_PATH];
    int err = paths_of(&dir, k->dir, step);
    if (err)
        return err;
    snprintf(path, sizeof(path), "%s/index.json", dir.tmp);
    struct iz_ckpt_file *file = iz_take(ranks, sizeof(*file), "files");
    err = files_see(k, dir.tmp, step, ranks, file);
    if (!err)
        err = iz_ckpt_index_write(path, k, step, ranks, file);
    free(file);
    if (!err)
        err = rename_tmp(&dir);
    if (!err && k->keep_last > 0)
        prune(k, step);
    return err;
}
