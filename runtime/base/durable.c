/* SPDX-License-Identifier: Apache-2.0 */
/* The one place that knows what must be synced before what; see durable.h. */
#include "runtime/base/durable.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <libgen.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "codelets/base/take.h"
#include "runtime/base/text.h"

#define TEXT_MAX ((int64_t)1 << 30)
#define PATH 4096

int iz_durable_refuse(const char *who, const char *path, const char *what,
                      int err)
{
    fprintf(stderr, "izar: %s: %s: %s: %s\n", who, path, what, strerror(err));
    return -err;
}

/* ---- bytes ---- */

static int move_bytes(int fd, char *p, int64_t bytes, int64_t at, bool put)
{
    while (bytes > 0) {
        ssize_t n = put ? pwrite(fd, p, (size_t)bytes, at)
                        : pread(fd, p, (size_t)bytes, at);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 || (n == 0 && !put))
            return n < 0 ? -errno : -ENODATA;
        p += n;
        at += n;
        bytes -= n;
    }
    return 0;
}

int iz_durable_put(int fd, const void *from, int64_t bytes, int64_t at)
{
    return move_bytes(fd, (char *)(uintptr_t)from, bytes, at, true);
}

int iz_durable_get(int fd, void *to, int64_t bytes, int64_t at)
{
    return move_bytes(fd, to, bytes, at, false);
}

/* O_NONBLOCK: a pipe without a writer is no file, and not waited for. */
static int open_plain(const char *path, int64_t *bytes)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat st;
    int err = fd < 0 || fstat(fd, &st) ? errno : 0;
    if (!err && (!S_ISREG(st.st_mode) || st.st_size > TEXT_MAX))
        err = EINVAL;
    if (!err) {
        *bytes = st.st_size;
        return fd;
    }
    if (fd >= 0)
        close(fd);
    errno = err;
    return -1;
}

char *iz_durable_read(const char *path, int64_t *bytes)
{
    int fd = open_plain(path, bytes);
    if (fd < 0)
        return NULL;
    char *text = malloc((size_t)*bytes + 1);
    int err = text ? -iz_durable_get(fd, text, *bytes, 0) : ENOMEM;
    close(fd);
    if (err) {
        free(text);
        errno = err;
        return NULL;
    }
    text[*bytes] = 0;
    return text;
}

/* ---- files ---- */

int iz_durable_close(const char *who, const char *path, int fd, int err)
{
    if (!err && fsync(fd))
        err = iz_durable_refuse(who, path, "cannot sync", errno);
    if (fd >= 0 && close(fd) && !err)
        err = iz_durable_refuse(who, path, "cannot close", errno);
    return err;
}

static int write_text(const char *who, const char *path, const char *text,
                      int how)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | how, 0666);
    if (fd < 0)
        return iz_durable_refuse(who, path, "cannot create", errno);
    int err = iz_durable_put(fd, text, (int64_t)strlen(text), 0);
    if (err)
        iz_durable_refuse(who, path, "cannot write", -err);
    return iz_durable_close(who, path, fd, err);
}

int iz_durable_create(const char *who, const char *path, const char *text)
{
    return write_text(who, path, text, O_EXCL);
}

int iz_durable_replace(const char *who, const char *path, const char *text)
{
    size_t n = strlen(path) + sizeof(".tmp");
    char *tmp = iz_take((int64_t)n, 1, "a path");
    snprintf(tmp, n, "%s.tmp", path);
    int err = write_text(who, tmp, text, O_TRUNC);
    if (!err)
        err = iz_durable_rename(who, tmp, path);
    if (err)
        unlink(tmp);
    free(tmp);
    return err;
}

/* In pieces. */
static int copy_bytes(int to, int from, int64_t bytes)
{
    char piece[1 << 16];
    int err = 0;
    for (int64_t at = 0, n; at < bytes && !err; at += n) {
        n = bytes - at < (int64_t)sizeof(piece) ? bytes - at
                                                : (int64_t)sizeof(piece);
        err = iz_durable_get(from, piece, n, at);
        if (!err)
            err = iz_durable_put(to, piece, n, at);
    }
    return err;
}

int iz_durable_copy(const char *who, const char *to, const char *from)
{
    int64_t bytes;
    int in = open_plain(from, &bytes);
    if (in < 0)
        return iz_durable_refuse(who, from, "cannot read", errno);
    int out = open(to, O_WRONLY | O_CREAT | O_CLOEXEC | O_EXCL, 0666);
    int err = out < 0 ? iz_durable_refuse(who, to, "cannot create", errno) : 0;
    char begin[64] = "";
    int64_t some = bytes < 64 ? bytes : 64;
    if (!err && !iz_durable_get(in, begin, some, 0) &&
        iz_text_is_pointer(begin, some))
        err = iz_text_refuse(stderr, "%s: %s " IZ_TEXT_POINTER, who, from);
    int moved = err ? 0 : copy_bytes(out, in, bytes);
    if (moved)
        err = iz_durable_refuse(who, to, "cannot copy", -moved);
    close(in);
    return out < 0 ? err : iz_durable_close(who, to, out, err);
}

/* ---- directories ---- */

int iz_durable_sync_directory(const char *who, const char *path)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC), err = 0;
    if (fd < 0)
        return iz_durable_refuse(who, path, "cannot open", errno);
    /* EINVAL: a file system on which directories need no sync. */
    if (fsync(fd) && errno != EINVAL)
        err = iz_durable_refuse(who, path, "cannot sync", errno);
    close(fd);
    return err;
}

/* The directory that holds the name. */
static int sync_above(const char *who, const char *path)
{
    char *above = iz_take_text(path, (int64_t)strlen(path));
    int err = iz_durable_sync_directory(who, dirname(above));
    free(above);
    return err;
}

int iz_durable_rename(const char *who, const char *from, const char *to)
{
    if (rename(from, to))
        return iz_durable_refuse(who, to, "cannot rename to it", errno);
    return sync_above(who, to);
}

int iz_durable_make_directories(const char *who, const char *path)
{
    char *part = iz_take_text(path, (int64_t)strlen(path));
    int err = *part ? 0 : iz_durable_refuse(who, path, "cannot make", ENOENT);
    for (char *p = part; !err && *p;) {
        p += 1 + strcspn(p + 1, "/");
        char c = *p;
        *p = 0;
        if (!mkdir(part, 0777))
            err = sync_above(who, part);
        else if (errno != EEXIST)
            err = iz_durable_refuse(who, part, "cannot make", errno);
        *p = c;
    }
    free(part);
    return err;
}

static bool is_among(const char *name, const char *const *names)
{
    if (!strcmp(name, ".") || !strcmp(name, ".."))
        return true;
    while (*names && fnmatch(*names, name, 0))
        names++;
    return *names != NULL;
}

/* Whether an entry of a directory is one, whose path is then `inner`. */
static bool is_directory(char inner[PATH], const char *path,
                         const struct dirent *e)
{
    struct stat st;
    snprintf(inner, PATH, "%s/%s", path, e->d_name);
    return strcmp(e->d_name, ".") && strcmp(e->d_name, "..") &&
           !lstat(inner, &st) && S_ISDIR(st.st_mode);
}

/* The directory, and 0 if all in it is ours; NULL and 0 if there is none. */
static int open_ours(DIR **d, const char *who, const char *path,
                     const char *const *names)
{
    char inner[PATH];
    int err = 0;
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    *d = fd < 0 ? NULL : fdopendir(fd);
    if (!*d)
        return errno == ENOENT ? 0
                               : iz_durable_refuse(
                                     who, path, "is not ours to remove", errno);
    for (struct dirent *e; !err && (e = readdir(*d));)
        if (!is_among(e->d_name, names)) {
            iz_text_refuse(stderr,
                           "%s: %s: not removed: %s in it is not of this "
                           "program: move it away",
                           who, path, e->d_name);
            err = -ENOTEMPTY;
        } else if (is_directory(inner, path, e)) {
            err = iz_durable_check_directory(who, inner, names);
        }
    rewinddir(*d);
    return err;
}

int iz_durable_check_directory(const char *who, const char *path,
                               const char *const *names)
{
    DIR *d;
    int err = open_ours(&d, who, path, names);
    if (d)
        closedir(d);
    return err;
}

int iz_durable_remove_directory(const char *who, const char *path,
                                const char *const *names)
{
    DIR *d;
    char inner[PATH];
    int err = open_ours(&d, who, path, names);
    if (!d)
        return err;
    for (struct dirent *e; !err && (e = readdir(d));)
        if (is_directory(inner, path, e))
            err = iz_durable_remove_directory(who, inner, names);
        else if (is_among(e->d_name, names) && strcmp(e->d_name, *names))
            unlinkat(dirfd(d), e->d_name, 0);
    if (!err)
        unlinkat(dirfd(d), *names, 0);
    closedir(d);
    return err || !rmdir(path)
               ? err
               : iz_durable_refuse(who, path, "cannot remove", errno);
}
