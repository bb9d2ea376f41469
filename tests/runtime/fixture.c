/* SPDX-License-Identifier: Apache-2.0 */
/* See fixture.h. */
#define _GNU_SOURCE /* O_DIRECT, mount */

#include "tests/runtime/fixture.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include "codelets/base/die.h"

#define SHARED_BYTES (1 << 20)

char folder[64];
char said[1 << 16];
static char mounted[128];

/* ---- folder ---- */

static int takes_direct_io(void)
{
    int fd = open(in_folder("probe"), O_RDWR | O_CREAT | O_DIRECT, 0600);

    unlink(in_folder("probe"));
    return fd >= 0 && close(fd) == 0;
}

int make_folder(void **state)
{
    static const char *const places[] = {"/tmp", "build", "."};

    for (int i = 0; i < N_OF(places); i++) {
        snprintf(folder, sizeof(folder), "%s/izar-files-XXXXXX", places[i]);
        if (!mkdtemp(folder))
            continue;
        if (takes_direct_io())
            return 0;
        rmdir(folder);
    }
    return -1;
}

static int remove_one(const char *path, const struct stat *st, int type,
                      struct FTW *ftw)
{
    return remove(path);
}

int remove_folder(void **state)
{
    if (*mounted)
        umount(mounted);
    *mounted = '\0';
    return nftw(folder, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

const char *in_folder(const char *name)
{
    static char path[8][512];
    static int next;

    next = (next + 1) % N_OF(path);
    snprintf(path[next], sizeof(path[next]), "%s/%s", folder, name);
    return path[next];
}

const char *mount_small(const char *name, int kib, int flags)
{
    char size[32];

    snprintf(mounted, sizeof(mounted), "%s", in_folder(name));
    snprintf(size, sizeof(size), "size=%dk", kib);
    assert_int_equal(mkdir(mounted, 0700), 0);
    if (mount("none", mounted, "tmpfs", (unsigned long)flags, size) != 0) {
        *mounted = '\0';
        skip();
    }
    return mounted;
}

/* ---- what is said ---- */

static int heard = -1, was = -1;

void listen_begin(void)
{
    char path[] = "/tmp/izar-said-XXXXXX";

    heard = mkstemp(path);
    assert_true(heard >= 0);
    unlink(path);
    fflush(stderr);
    was = dup(STDERR_FILENO);
    dup2(heard, STDERR_FILENO);
}

void listen_end(void)
{
    ssize_t n = pread(heard, said, sizeof(said) - 1, 0);

    said[n > 0 ? n : 0] = '\0';
    dup2(was, STDERR_FILENO);
    close(was);
    close(heard);
}

void assert_said(const char *words)
{
    if (!strstr(said, words))
        fail_msg("expected \"%s\", but it said: %s", words, said);
}

/* ---- processes ---- */

static void end(int status)
{
    _exit(DIED);
}

static int ended(pid_t pid)
{
    int status = 0;

    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

int apart(int (*f)(void *), void *arg)
{
    pid_t pid;
    int status;

    listen_begin();
    pid = fork();
    if (pid == 0) {
        iz_die_set("", end);
        alarm(60);
        _exit(f(arg));
    }
    assert_true(pid > 0);
    status = ended(pid);
    listen_end();
    return status;
}

/* ---- ranks ---- */

/* Of a run's processes: everybody passes the barrier, then reads `data`. */
struct iz_coll_state {
    pthread_barrier_t barrier;
    char data[SHARED_BYTES];
};

struct iz_coll alone = {.size = 1, .local_size = 1};

void iz_coll_barrier(struct iz_coll *c, const char *what)
{
    if (c->state)
        pthread_barrier_wait(&c->state->barrier);
}

void iz_coll_all_gather(struct iz_coll *c, void *full, int64_t shard_bytes,
                        const char *what)
{
    int64_t at = shard_bytes * c->rank;

    if (!c->state)
        return;
    if (shard_bytes * c->size > SHARED_BYTES)
        iz_die("stand-in all-gather of %lld bytes", (long long)shard_bytes);
    memcpy(c->state->data + at, (char *)full + at, (size_t)shard_bytes);
    iz_coll_barrier(c, what);
    memcpy(full, c->state->data, (size_t)(shard_bytes * c->size));
    iz_coll_barrier(c, what);
}

void iz_coll_broadcast(struct iz_coll *c, void *p, int64_t bytes, int root,
                       const char *what)
{
    if (!c->state)
        return;
    if (c->rank == root)
        memcpy(c->state->data, p, (size_t)bytes);
    iz_coll_barrier(c, what);
    memcpy(p, c->state->data, (size_t)bytes);
    iz_coll_barrier(c, what);
}

bool iz_coll_all_ok(struct iz_coll *c, bool ok)
{
    bool all[64] = {0}, result = true;

    all[c->rank] = ok;
    iz_coll_all_gather(c, all, 1, "all_ok");
    for (int i = 0; i < c->size; i++)
        result = result && all[i];
    return result;
}

void on_ranks(int n, int (*f)(struct iz_coll *, void *), void *arg, int *result)
{
    struct iz_coll_state *s = mmap(NULL, sizeof(*s), PROT_READ | PROT_WRITE,
                                   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_barrierattr_t shared;
    pid_t pid[64];

    assert_true(s != MAP_FAILED);
    pthread_barrierattr_init(&shared);
    pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&s->barrier, &shared, (unsigned)n);
    listen_begin();
    for (int i = 0; i < n; i++) {
        pid[i] = fork();
        if (pid[i] == 0) {
            struct iz_coll c = {.rank = i,
                                .size = n,
                                .local_rank = i,
                                .local_size = n,
                                .state = s};

            iz_die_set("", end);
            alarm(60); /* a rank that died leaves the others waiting */
            _exit(f(&c, arg));
        }
    }
    for (int i = 0; i < n; i++)
        result[i] = ended(pid[i]);
    listen_end();
    pthread_barrierattr_destroy(&shared);
    munmap(s, sizeof(*s));
}

uint64_t random_next(void)
{
    static uint64_t x = 20260;

    x ^= x << 13;
    x ^= x >> 7;
    return x ^= x << 17;
}
