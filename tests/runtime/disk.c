/* SPDX-License-Identifier: Apache-2.0 */
/* See disk.h. */
#define _DEFAULT_SOURCE /* syscall */

#include "tests/runtime/disk.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmocka.h>

enum call { SYNCED, RENAMED, MADE };

static struct {
    enum call call;
    char *path, *to;
} told[1024];
static int n_told, fail_at = -1;
static bool on;

/* Whether the call is to fail. */
static bool tell(enum call call, const char *path, const char *to)
{
    if (!on)
        return false;
    assert_true(n_told < (int)(sizeof(told) / sizeof(*told)));
    told[n_told].call = call;
    told[n_told].path = strdup(path);
    told[n_told].to = strdup(to);
    errno = EIO;
    return n_told++ == fail_at;
}

/* With all of its links resolved; as it is where there is nothing yet. */
static const char *full(const char *path)
{
    static char out[PATH_MAX];

    return realpath(path, out) ? out : path;
}

int fsync(int fd)
{
    char link[64], path[PATH_MAX] = "";

    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    if (readlink(link, path, sizeof(path) - 1) < 0)
        *path = '\0';
    return tell(SYNCED, path, "") ? -1 : (int)syscall(SYS_fsync, fd);
}

int rename(const char *from, const char *to)
{
    return tell(RENAMED, full(from), to)
               ? -1
               : (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int mkdir(const char *path, mode_t mode)
{
    int result = tell(MADE, "", "")
                     ? -1
                     : (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);

    if (on && result == 0) {
        free(told[n_told - 1].path);
        told[n_told - 1].path = strdup(full(path));
    }
    return result;
}

void disk_begin(int fail)
{
    while (n_told > 0) {
        free(told[--n_told].path);
        free(told[n_told].to);
    }
    fail_at = fail;
    on = true;
}

int disk_end(void)
{
    on = false;
    return n_told;
}

/* The last call of this kind on the path within [from, to); -1: none. */
static int find(enum call call, const char *path, int from, int to)
{
    for (int i = to - 1; i >= from; i--)
        if (told[i].call == call && strcmp(told[i].path, path) == 0)
            return i;
    return -1;
}

/* Each file of the directory `now` was synced as one of `then`; the last of
 * these calls. */
static int assert_files_synced(const char *now, const char *then, int before)
{
    DIR *d = opendir(now);
    int last = -1;

    assert_non_null(d);
    for (struct dirent *e; (e = readdir(d));) {
        char path[PATH_MAX];
        int at;

        if (e->d_name[0] == '.')
            continue;
        snprintf(path, sizeof(path), "%s/%s", then, e->d_name);
        at = find(SYNCED, path, 0, before);
        if (at < 0)
            fail_msg("%s was not synced", path);
        last = at > last ? at : last;
    }
    closedir(d);
    return last;
}

/* Of what has no name from a rename. */
static void assert_made_are_synced(void)
{
    for (int i = 0; i < n_told; i++) {
        char above[PATH_MAX];

        if (told[i].call != MADE || !*told[i].path ||
            find(RENAMED, told[i].path, i, n_told) >= 0)
            continue;
        snprintf(above, sizeof(above), "%s", told[i].path);
        if (find(SYNCED, dirname(above), i, n_told) < 0)
            fail_msg("%s was made in %s, which was not synced", told[i].path,
                     above);
    }
}

void assert_durable(const char *path)
{
    char now[PATH_MAX];
    struct stat st;
    int renamed = n_told - 1, files = -1;

    snprintf(now, sizeof(now), "%s", full(path));
    assert_int_equal(stat(now, &st), 0);
    while (renamed >= 0 && (told[renamed].call != RENAMED ||
                            strcmp(told[renamed].to, path) != 0))
        renamed--;
    if (renamed < 0)
        fail_msg("nothing was renamed to %s", path);
    if (S_ISDIR(st.st_mode))
        files = assert_files_synced(now, told[renamed].path, renamed);
    if (find(SYNCED, told[renamed].path, files + 1, renamed) < 0)
        fail_msg("%s was not synced before its rename", told[renamed].path);
    if (find(SYNCED, dirname(now), renamed, n_told) < 0)
        fail_msg("%s was not synced after the rename to %s", now, path);
    assert_made_are_synced();
}

void assert_renamed_durably(const char *path)
{
    int renamed = find(RENAMED, path, 0, n_told);
    char above[PATH_MAX];

    snprintf(above, sizeof(above), "%s", path);
    if (renamed < 0 || find(SYNCED, full(dirname(above)), renamed, n_told) < 0)
        fail_msg("%s was not renamed, and that synced", path);
}

void assert_durable_or_refused(int (*make)(int i), const char *(*name)(int i))
{
    int calls = 1;

    disk_begin(-1);
    assert_int_equal(make(0), 0);
    disk_end();
    assert_durable(name(0));
    /* The first one may make directories that the others find. */
    for (int i = 0; calls > 0; i++) {
        bool named = false;
        int err;

        disk_begin(i);
        err = make(1 + i);
        calls = disk_end() - i;
        if ((err != 0) != (calls > 0))
            fail_msg("call %d failed: %d; result %d", i, calls > 0, err);
        for (int k = 0; k < n_told; k++)
            named |= k != i && told[k].call == RENAMED &&
                     strcmp(told[k].to, name(1 + i)) == 0;
        assert_int_equal(access(name(1 + i), F_OK), named ? 0 : -1);
    }
}
