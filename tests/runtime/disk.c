/* SPDX-License-Identifier: Apache-2.0 */
/* See disk.h. */
#define _DEFAULT_SOURCE /* syscall */

#include "tests/runtime/disk.h"

#include <fcntl.h>
#include <glob.h>
#include <libgen.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "tests/runtime/fixture.h"

enum call { SYNCED, RENAMED, MADE };

static struct {
    enum call call;
    char path[256], to[256];
} told[1024];
static int n_told, fail_at = -1;
static bool on;

/* Whether the call is to fail. */
static bool tell(enum call call, const char *path, const char *to)
{
    if (!on)
        return false;
    assert_true(n_told < N_OF(told));
    told[n_told].call = call;
    snprintf(told[n_told].path, sizeof(told[0].path), "%s", path);
    snprintf(told[n_told].to, sizeof(told[0].to), "%s", to);
    errno = EIO;
    return n_told++ == fail_at;
}

int fsync(int fd)
{
    char link[64], path[256] = "";
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    if (readlink(link, path, sizeof(path) - 1) < 0)
        *path = '\0';
    return tell(SYNCED, path, "") ? -1 : (int)syscall(SYS_fsync, fd);
}

int rename(const char *from, const char *to)
{
    return tell(RENAMED, from, to)
               ? -1
               : (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int mkdir(const char *path, mode_t mode)
{
    int result = tell(MADE, path, "")
                     ? -1
                     : (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
    if (on && result != 0)
        told[n_told - 1].path[0] = '\0';
    return result;
}

void disk_begin(int fail)
{
    n_told = 0;
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

/* The last call but `but` that gave this name; -1: none. */
static int find_name(const char *path, int but)
{
    int i = n_told - 1;
    while (i >= 0 && (i == but || told[i].call != RENAMED ||
                      strcmp(told[i].to, path) != 0))
        i--;
    return i;
}

static void assert_above_synced(const char *path, int from)
{
    char above[256];
    snprintf(above, sizeof(above), "%s", path);
    if (find(SYNCED, dirname(above), from, n_told) < 0)
        fail_msg("%s: %s was not synced after", path, above);
}

/* Each file of the directory `now` was synced as one of `then`; the last of
 * these calls. */
static int assert_files_synced(const char *now, const char *then, int before)
{
    char path[512];
    int last = -1;
    glob_t g;
    snprintf(path, sizeof(path), "%s/*", now);
    assert_int_equal(glob(path, 0, NULL, &g), 0);
    for (size_t i = 0; i < g.gl_pathc; i++) {
        snprintf(path, sizeof(path), "%s%s", then, strrchr(g.gl_pathv[i], '/'));
        int at = find(SYNCED, path, 0, before);
        if (at < 0)
            fail_msg("%s was not synced", path);
        last = at > last ? at : last;
    }
    globfree(&g);
    return last;
}

/* All in what has this name was synced before the rename that gave it, and the
 * directory above after. */
static void assert_durable(const char *path)
{
    int renamed = find_name(path, -1), files = -1;
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    if (renamed < 0)
        fail_msg("nothing was renamed to %s", path);
    if (S_ISDIR(st.st_mode))
        files = assert_files_synced(path, told[renamed].path, renamed);
    if (find(SYNCED, told[renamed].path, files + 1, renamed) < 0)
        fail_msg("%s was not synced before its rename", told[renamed].path);
    assert_above_synced(path, renamed);
    for (int i = 0; i < n_told; i++)
        if (told[i].call == MADE && *told[i].path &&
            find(RENAMED, told[i].path, i, n_told) < 0)
            assert_above_synced(told[i].path, i);
}

void assert_renamed_durably(const char *path)
{
    int renamed = find(RENAMED, path, 0, n_told);
    assert_true(renamed >= 0);
    assert_above_synced(path, renamed);
}

void assert_durable_or_refused(int (*make)(int i), const char *name)
{
    int calls = 1;
    disk_begin(-1);
    assert_int_equal(make(0), 0);
    disk_end();
    assert_durable(in_folder(name, 0));
    /* The first one may make directories that the others find. */
    for (int i = 0; calls > 0; i++) {
        disk_begin(i);
        int err = (int)HEARD(make(1 + i));
        calls = disk_end() - i;
        if ((err != 0) != (calls > 0))
            fail_msg("call %d failed: %d; result %d", i, calls > 0, err);
        const char *made = in_folder(name, 1 + i);
        assert_int_equal(access(made, F_OK), find_name(made, i) < 0 ? -1 : 0);
    }
}
