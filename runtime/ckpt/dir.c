/* SPDX-License-Identifier: Apache-2.0 */
/* What makes a checkpoint atomic: a directory is renamed into place when all in
 * it is on the disk, and renamed away before anything in it is removed. */
#include "runtime/ckpt/ckpt.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/durable.h"
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

int iz_ckpt_dir_tmp(const char *dir, int64_t step, bool make,
                    char path[IZ_CKPT_PATH])
{
    struct paths p;
    int err = paths_of(&p, dir, step);
    memcpy(path, p.tmp, IZ_CKPT_PATH);
    if (!err && make)
        err = iz_durable_make_directories(WHO, p.parent);
    if (!err && make && mkdir(p.tmp, 0777) != 0)
        err = errno == EEXIST
                  ? iz_durable_check_directory(WHO, p.tmp, files)
                  : iz_durable_refuse(WHO, p.tmp, "cannot make", errno);
    return err;
}

int iz_ckpt_dir_commit(const char *dir, int64_t step)
{
    struct paths p;
    int err = paths_of(&p, dir, step);
    if (!err)
        err = iz_durable_sync_directory(WHO, p.tmp);
    if (err)
        return err;
    bool replaces = exists(p.done);
    if (replaces && rename(p.done, p.old) != 0)
        return iz_durable_refuse(WHO, p.done, "cannot move aside", errno);
    if (rename(p.tmp, p.done) != 0) {
        err = iz_durable_refuse(WHO, p.tmp, "cannot rename", errno);
        if (replaces && rename(p.old, p.done) != 0)
            iz_durable_refuse(WHO, p.old, "cannot rename back", errno);
        return err;
    }
    err = iz_durable_sync_directory(WHO, p.parent);
    if (!err && exists(p.old))
        discard(&p, p.old);
    return err;
}

void iz_ckpt_dir_abort(const char *dir, int64_t step)
{
    struct paths p;
    if (paths_of(&p, dir, step) == 0)
        iz_durable_remove_directory(WHO, p.tmp, files);
}

void iz_ckpt_dir_discard(const char *dir, int64_t step)
{
    struct paths p;
    if (paths_of(&p, dir, step) == 0)
        discard(&p, p.done);
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
