/* SPDX-License-Identifier: Apache-2.0 */
/* See fixture.h. */
#define _GNU_SOURCE /* O_DIRECT, mount */

#include "tests/runtime/fixture.h"

#include <fcntl.h>
#include <ftw.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>

#include "codelets/base/die.h"

#define SHARED_BYTES (1 << 20)

char folder[256];
char said[1 << 16];
int64_t heard;
static char mounted[512];

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
        char *place = realpath(places[i], NULL);
        snprintf(folder, sizeof(folder), "%s/izar-files-XXXXXX",
                 place ? place : "");
        free(place);
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

const char *in_folder(const char *name, ...)
{
    static char path[8][512];
    static int next;
    char *p = path[next++ % N_OF(path)];
    int n = snprintf(p, sizeof(path[0]), "%s/", folder);
    va_list args;
    va_start(args, name);
    vsnprintf(p + n, sizeof(path[0]) - (size_t)n, name, args);
    va_end(args);
    return p;
}

const char *mount_small(const char *name, int kib, int flags)
{
    char size[32];
    snprintf(mounted, sizeof(mounted), "%s", in_folder("%s", name));
    snprintf(size, sizeof(size), "size=%dk", kib);
    assert_int_equal(mkdir(mounted, 0700), 0);
    if (mount("none", mounted, "tmpfs", (unsigned long)flags, size) != 0) {
        *mounted = '\0';
        skip();
    }
    return mounted;
}

/* ---- files ---- */

const char *json(const char *text)
{
    static char out[4][8192];
    static int next;
    char *p = out[next++ % N_OF(out)];
    snprintf(p, sizeof(out[0]), "%s", text);
    for (char *at = p; (at = strchr(at, '\''));)
        *at = '"';
    return p;
}

int64_t size_of(const char *path)
{
    struct stat st;
    return stat(path, &st) == 0 ? st.st_size : -1;
}

char *contents(const char *path, int64_t *bytes)
{
    FILE *f = fopen(path, "rb");
    int64_t n = size_of(path);
    if (!f)
        fail_msg("%s: %s", path, strerror(errno));
    char *p = malloc((size_t)n + 1);
    assert_int_equal(fread(p, 1, (size_t)n, f), n);
    p[n] = '\0';
    fclose(f);
    if (bytes)
        *bytes = n;
    return p;
}

void replace(const char *path, const void *p, int64_t bytes)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(p, 1, (size_t)bytes, f), bytes);
    assert_int_equal(fclose(f), 0);
}

const char *write_text(const char *path, const char *text)
{
    replace(path, text, (int64_t)strlen(text));
    return path;
}

/* ---- what is said ---- */

static int listening = -1, was = -1;

void listen_begin(void)
{
    char path[] = "/tmp/izar-said-XXXXXX";
    listening = mkstemp(path);
    assert_true(listening >= 0);
    unlink(path);
    fflush(stderr);
    was = dup(STDERR_FILENO);
    dup2(listening, STDERR_FILENO);
}

void listen_end(void)
{
    ssize_t n = pread(listening, said, sizeof(said) - 1, 0);
    said[n > 0 ? n : 0] = '\0';
    dup2(was, STDERR_FILENO);
    close(was);
    close(listening);
}

void assert_said(const char *words)
{
    if (!strstr(said, words))
        fail_msg("expected \"%s\", but it said: %s", words, said);
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

bool iz_coll_all_ok(struct iz_coll *c, bool ok)
{
    bool all[64] = {0}, result = true;
    all[c->rank] = ok;
    iz_coll_all_gather(c, all, 1, "all_ok");
    for (int i = 0; i < c->size; i++)
        result = result && all[i];
    return result;
}

static void end(int status)
{
    _exit(DIED);
}

int on_ranks(int n, int (*f)(struct iz_coll *, void *), void *arg)
{
    struct iz_coll_state *s = mmap(NULL, sizeof(*s), PROT_READ | PROT_WRITE,
                                   MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pthread_barrierattr_t shared;
    int result[64] = {0};
    pid_t pid[64];
    assert_true(s != MAP_FAILED);
    pthread_barrierattr_init(&shared);
    pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&s->barrier, &shared, (unsigned)n);
    listen_begin();
    for (int i = 0; i < n; i++) {
        struct iz_coll c = {i, n, .local_rank = i, .local_size = n, .state = s};
        pid[i] = fork();
        assert_true(pid[i] >= 0);
        if (pid[i] == 0) {
            iz_die_set("", end);
            alarm(300); /* a rank that died leaves the others waiting */
            _exit(f(&c, arg));
        }
    }
    for (int i = 0; i < n; i++) {
        int status = 0;
        assert_int_equal(waitpid(pid[i], &status, 0), pid[i]);
        result[i] = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    }
    listen_end();
    for (int i = 1; i < n; i++)
        if (result[i] != result[0])
            fail_msg("rank 0 returned %d, rank %d %d: %s", result[0], i,
                     result[i], said);
    pthread_barrierattr_destroy(&shared);
    munmap(s, sizeof(*s));
    return result[0];
}

void all_return(int n, int (*f)(struct iz_coll *, void *), void *arg, int want)
{
    int result = on_ranks(n, f, arg);
    if (result != want)
        fail_msg("%d, not %d: %s", result, want, said);
}

uint64_t random_next(void)
{
    static uint64_t x = 20260;
    x ^= x << 13;
    x ^= x >> 7;
    return x ^= x << 17;
}

int64_t random_below(int64_t n)
{
    return (int64_t)(random_next() % (uint64_t)n);
}

void damage(char *p, int64_t n)
{
    int64_t length = 1 + random_below(n < 20 ? n : 20);
    int64_t at = random_below(n - length + 1);
    if (random_below(2))
        p[at] = (char)random_next();
    else
        memmove(p + at, p + random_below(n - length + 1), (size_t)length);
}
