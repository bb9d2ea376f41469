/* SPDX-License-Identifier: Apache-2.0 */
/* What makes a checkpoint atomic: a directory is renamed into place when all in
 * it is on the disk, and renamed away before anything in it is removed. */
#include "runtime/ckpt/dir.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/base/durable.h"

#define WHO "checkpoint"

/* dir/checkpoints/step-XXXXXXXX<suffix> */
static int path_of(char path[IZ_CKPT_PATH], const char *dir, int64_t step,
                   const char *suffix)
{
    int n = snprintf(path, IZ_CKPT_PATH, "%s/checkpoints/step-%08" PRId64 "%s",
                     dir, step, suffix);

    /* Room for the names of files in it. */
    return n < IZ_CKPT_PATH - 64 ? 0 : -ENAMETOOLONG;
}

static int parent_of(char path[IZ_CKPT_PATH], const char *dir)
{
    int n = snprintf(path, IZ_CKPT_PATH, "%s/checkpoints", dir);

    return n < IZ_CKPT_PATH ? 0 : -ENAMETOOLONG;
}

/* The step of a name "step-00000100<suffix>", or -1. */
static int64_t step_of(const char *name, const char *suffix)
{
    int64_t step = 0;
    const char *p;

    if (strncmp(name, "step-", 5) != 0)
        return -1;
    for (p = name + 5; *p >= '0' && *p <= '9'; p++) {
        if (step > (INT64_MAX - 9) / 10)
            return -1;
        step = 10 * step + (*p - '0');
    }
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
 */
static void discard(const char *dir, int64_t step, const char *suffix)
{
    char path[IZ_CKPT_PATH], tmp[IZ_CKPT_PATH];

    if (path_of(path, dir, step, suffix) || path_of(tmp, dir, step, ".tmp"))
        return;
    iz_durable_remove_directory(WHO, tmp);
    if (iz_durable_rename(WHO, path, tmp) == 0)
        iz_durable_remove_directory(WHO, tmp);
}

/* A crash between the two renames of a replacement left the old one aside. */
static void restore(const char *dir, int64_t step)
{
    char path[IZ_CKPT_PATH], old[IZ_CKPT_PATH];

    if (path_of(path, dir, step, "") || path_of(old, dir, step, ".old"))
        return;
    if (exists(path))
        discard(dir, step, ".old");
    else if (rename(old, path) != 0)
        iz_durable_refuse(WHO, old, "cannot rename back", errno);
}

/* After a crash: half-written directories go, replaced ones come back or go. */
static int sweep(const char *dir)
{
    char path[IZ_CKPT_PATH];
    int err = parent_of(path, dir);
    DIR *d = err ? NULL : opendir(path);
    struct dirent *e;

    if (!d)
        return err ? err : iz_durable_refuse(WHO, path, "cannot read", errno);
    while ((e = readdir(d))) {
        int64_t tmp = step_of(e->d_name, ".tmp"),
                old = step_of(e->d_name, ".old");

        if (tmp >= 0 && path_of(path, dir, tmp, ".tmp") == 0)
            iz_durable_remove_directory(WHO, path);
        if (old >= 0)
            restore(dir, old);
    }
    closedir(d);
    return 0;
}

static int make_parents(const char *dir)
{
    char path[IZ_CKPT_PATH];
    int err = parent_of(path, dir);

    return err ? err : iz_durable_make_directories(WHO, path);
}

int iz_ckpt_dir_sweep(const char *dir)
{
    int err = make_parents(dir);

    return err ? err : sweep(dir);
}

int iz_ckpt_dir_tmp(const char *dir, int64_t step, char path[IZ_CKPT_PATH])
{
    return path_of(path, dir, step, ".tmp");
}

int iz_ckpt_dir_join(const char *dir, int64_t step, char path[IZ_CKPT_PATH])
{
    int err = make_parents(dir);

    if (!err)
        err = path_of(path, dir, step, ".tmp");
    if (!err && mkdir(path, 0777) != 0 && errno != EEXIST)
        err = iz_durable_refuse(WHO, path, "cannot make", errno);
    return err;
}

static int replace(const char *tmp, const char *path, const char *old)
{
    bool replaces = exists(path);
    int err;

    if (replaces && rename(path, old) != 0)
        return iz_durable_refuse(WHO, path, "cannot move aside", errno);
    if (rename(tmp, path) == 0)
        return 0;
    err = iz_durable_refuse(WHO, tmp, "cannot rename", errno);
    if (replaces && rename(old, path) != 0)
        iz_durable_refuse(WHO, old, "cannot rename back", errno);
    return err;
}

int iz_ckpt_dir_commit(const char *dir, int64_t step)
{
    char path[IZ_CKPT_PATH], tmp[IZ_CKPT_PATH], old[IZ_CKPT_PATH];
    int err = path_of(tmp, dir, step, ".tmp");

    if (!err)
        err = path_of(path, dir, step, "");
    if (!err)
        err = path_of(old, dir, step, ".old");
    if (!err)
        err = iz_durable_sync_directory(WHO, tmp);
    if (!err)
        err = replace(tmp, path, old);
    if (!err)
        err = parent_of(tmp, dir);
    if (!err)
        err = iz_durable_sync_directory(WHO, tmp);
    if (!err && exists(old))
        discard(dir, step, ".old");
    return err;
}

void iz_ckpt_dir_abort(const char *dir, int64_t step)
{
    char path[IZ_CKPT_PATH];

    if (path_of(path, dir, step, ".tmp") == 0)
        iz_durable_remove_directory(WHO, path);
}

void iz_ckpt_dir_prune(const char *dir, int64_t step, int keep)
{
    for (int i = 1; i < keep && step >= 0; i++)
        step = iz_ckpt_dir_newest(dir, step);
    while (step >= 0) {
        step = iz_ckpt_dir_newest(dir, step);
        if (step >= 0)
            discard(dir, step, "");
    }
}

int64_t iz_ckpt_dir_newest(const char *dir, int64_t limit)
{
    char path[IZ_CKPT_PATH];
    int64_t newest = -ENOENT;
    DIR *d = parent_of(path, dir) ? NULL : opendir(path);
    struct dirent *e;

    if (!d)
        return -ENOENT;
    while ((e = readdir(d))) {
        int64_t step = step_of(e->d_name, "");

        if (step < 0)
            step = step_of(e->d_name, ".old");
        if (step > newest && step < limit &&
            iz_ckpt_dir_find(dir, step, path) == 0)
            newest = step;
    }
    closedir(d);
    return newest;
}

int iz_ckpt_dir_find(const char *dir, int64_t step, char path[IZ_CKPT_PATH])
{
    if (path_of(path, dir, step, "") == 0 && has_index(path))
        return 0;
    if (path_of(path, dir, step, ".old") == 0 && has_index(path))
        return 0;
    return -ENOENT;
}
