/* SPDX-License-Identifier: Apache-2.0 */
/* The nvme tier: what is written comes back, and every fault has its message.
 */
#define _GNU_SOURCE /* MS_RDONLY, seccomp */

#include "tests/runtime/fixture.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include "runtime/tier/nvme.h"

#define PAGE ((int64_t)IZ_NVME_ALIGN)
#define MIB ((int64_t)1 << 20)

static char *aligned(int64_t bytes)
{
    char *p = aligned_alloc(IZ_NVME_ALIGN, (size_t)bytes);

    assert_non_null(p);
    memset(p, 0, (size_t)bytes);
    return p;
}

static struct iz_nvme *opened(int64_t bytes, bool checksum)
{
    struct iz_nvme *f = NULL;

    assert_int_equal(iz_nvme_open(&f, folder, "state-0", bytes, checksum), 0);
    return f;
}

static void fill(char *p, int64_t bytes, uint64_t seed)
{
    for (int64_t i = 0; i < bytes; i += 8) {
        uint64_t x = (seed + (uint64_t)i) * 0x9e3779b97f4a7c15u;

        memcpy(p + i, &x, 8);
    }
}

/* A second descriptor of the file without a name, as anybody with rights has
 * it. */
static int open_nameless(int flags)
{
    DIR *d = opendir("/proc/self/fd");
    struct dirent *e;
    int fd = -1;

    while (fd < 0 && (e = readdir(d))) {
        char path[300], target[512] = "";

        snprintf(path, sizeof(path), "/proc/self/fd/%s", e->d_name);
        if (readlink(path, target, sizeof(target) - 1) > 0 &&
            strstr(target, "state-0"))
            fd = open(path, flags);
    }
    closedir(d);
    return fd;
}

/* ---- transfers ---- */

static void what_is_written_comes_back(void **state)
{
    const int64_t size = 12 * MIB;
    char *model = aligned(size), *buf = aligned(size);

    for (int checksum = 0; checksum < 2; checksum++) {
        struct iz_nvme *f = opened(size, checksum != 0);

        iz_nvme_write(f, memset(model, 0, (size_t)size), 0, size);
        for (int i = 0; i < 60; i++) {
            int64_t pages = (int64_t)(random_next() % 800) + 1;
            int64_t at = (int64_t)(random_next() % 2000) * PAGE;

            fill(buf, pages * PAGE, random_next());
            iz_nvme_write(f, buf, at, pages * PAGE);
            memcpy(model + at, buf, (size_t)(pages * PAGE));
            at = (int64_t)(random_next() % 2000) * PAGE;
            iz_nvme_read(f, buf, at, pages * PAGE);
            assert_memory_equal(buf, model + at, pages * PAGE);
        }
        iz_nvme_read(f, buf, 0, size);
        assert_memory_equal(buf, model, size);
        iz_nvme_close(&f);
        assert_null(f);
    }
    free(model);
    free(buf);
}

struct caller {
    struct iz_nvme *f;
    int number;
    bool same;
};

static void *call_often(void *arg)
{
    const int64_t size = 3 * MIB + 5 * PAGE;
    struct caller *c = arg;
    char *out = aligned_alloc(IZ_NVME_ALIGN, (size_t)size);
    char *in = aligned_alloc(IZ_NVME_ALIGN, (size_t)size);

    fill(out, size, (uint64_t)c->number);
    for (int i = 0; i < 20; i++)
        iz_nvme_write(c->f, out, c->number * size, size);
    for (int i = 0; i < 20; i++)
        iz_nvme_read(c->f, in, c->number * size, size);
    c->same = memcmp(in, out, (size_t)size) == 0;
    free(out);
    free(in);
    return NULL;
}

static void many_threads_call_at_once(void **state)
{
    struct caller caller[10];
    pthread_t thread[N_OF(caller)];
    struct iz_nvme *f = opened(40 * MIB, false);

    for (int i = 0; i < N_OF(caller); i++) {
        caller[i] = (struct caller){f, i, false};
        assert_int_equal(
            pthread_create(&thread[i], NULL, call_often, &caller[i]), 0);
    }
    for (int i = 0; i < N_OF(caller); i++) {
        pthread_join(thread[i], NULL);
        assert_true(caller[i].same);
    }
    iz_nvme_close(&f);
}

static volatile sig_atomic_t alarms;

static void on_alarm(int sig)
{
    alarms++;
}

static void signals_do_not_disturb(void **state)
{
    struct itimerval often = {{0, 200}, {0, 200}}, never = {{0, 0}, {0, 0}};
    struct sigaction act = {.sa_handler = on_alarm}, was;
    struct iz_nvme *f = opened(40 * MIB, true);
    struct caller c = {f, 0, false};

    sigaction(SIGALRM, &act, &was);
    setitimer(ITIMER_REAL, &often, NULL);
    call_often(&c);
    setitimer(ITIMER_REAL, &never, NULL);
    sigaction(SIGALRM, &was, NULL);
    assert_true(alarms > 0);
    assert_true(c.same);
    iz_nvme_close(&f);
}

static void bytes_are_counted(void **state)
{
    struct iz_nvme *f = opened(MIB, false);
    char *buf = aligned(8 * PAGE);
    int64_t r = -1, w = -1;

    iz_nvme_counts(f, &r, &w);
    assert_true(r == 0 && w == 0);
    iz_nvme_write(f, buf, 0, 8 * PAGE);
    iz_nvme_write(f, buf, 0, 0);
    iz_nvme_read(f, buf, PAGE, 3 * PAGE);
    iz_nvme_counts(f, &r, &w);
    assert_true(r == 3 * PAGE && w == 8 * PAGE);
    iz_nvme_close(&f);
    free(buf);
}

/* ---- the file ---- */

static void space_is_taken_and_the_name_is_gone(void **state)
{
    struct iz_nvme *f = opened(5 * MIB + 1, false);
    struct stat st;
    int fd = open_nameless(O_RDONLY);

    assert_true(fd >= 0);
    assert_int_equal(fstat(fd, &st), 0);
    assert_int_equal(st.st_size, 5 * MIB + PAGE);
    assert_true(st.st_blocks * (int64_t)512 >= 5 * MIB + PAGE);
    assert_int_equal(access(in_folder("state-0"), F_OK), -1);
    assert_int_equal(rmdir(folder), 0); /* nothing is left in it */
    assert_int_equal(mkdir(folder, 0700), 0);
    close(fd);
    iz_nvme_close(&f);
    assert_int_equal(open_nameless(O_RDONLY), -1);
}

static int open_fails(const char *dir, int64_t bytes)
{
    struct iz_nvme *f = NULL;
    int err;

    listen_begin();
    err = iz_nvme_open(&f, dir, "state-0", bytes, false);
    listen_end();
    assert_null(f);
    assert_said(dir);
    assert_int_equal(access(in_folder("state-0"), F_OK), -1);
    return err;
}

static void a_directory_that_is_none_is_named(void **state)
{
    assert_int_equal(open_fails(in_folder("none"), MIB), -ENOENT);
    assert_said("cannot create");
    close(open(in_folder("file"), O_CREAT | O_RDWR, 0600));
    assert_int_equal(open_fails(in_folder("file"), MIB), -ENOTDIR);
}

static void a_name_in_use_is_refused(void **state)
{
    struct iz_nvme *f;

    close(open(in_folder("state-0"), O_CREAT | O_RDWR, 0600));
    listen_begin();
    assert_int_equal(iz_nvme_open(&f, folder, "state-0", MIB, false), -EEXIST);
    listen_end();
    assert_said("another run");
    assert_int_equal(access(in_folder("state-0"), F_OK), 0);
}

static void too_little_space_is_told_in_bytes(void **state)
{
    assert_int_equal(open_fails(folder, (int64_t)1 << 50), -ENOSPC);
    assert_said("cannot allocate 1125899906842624 bytes");
    assert_said("are free");
}

static void a_full_small_disk_is_told(void **state)
{
    const char *small = mount_small("small", 1024, 0);
    struct iz_nvme *f = NULL;
    int err;

    listen_begin();
    err = iz_nvme_open(&f, small, "x", 2 * MIB, false);
    listen_end();
    /* Older kernels' tmpfs has no O_DIRECT; that is told then. */
    assert_true(err == -ENOSPC || err == -EINVAL);
    assert_said(err == -ENOSPC ? "1048576 bytes (1 MiB) are free" : "O_DIRECT");
    assert_int_equal(rmdir(small), -1);
    assert_int_equal(errno, EBUSY);
}

static void a_read_only_disk_is_told(void **state)
{
    assert_int_equal(open_fails(mount_small("ro", 1024, MS_RDONLY), MIB),
                     -EROFS);
    assert_said("Read-only");
}

static int open_limited(void *arg)
{
    struct rlimit limit = {MIB, MIB};
    struct iz_nvme *f;

    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    return iz_nvme_open(&f, folder, "state-0", 2 * MIB, false) == -EFBIG ? 0
                                                                         : 1;
}

static void a_file_size_limit_is_told(void **state)
{
    assert_int_equal(apart(open_limited, NULL), 0);
    assert_said("cannot allocate 2097152 bytes");
    assert_said("File too large");
}

static int open_forbidden(void *arg)
{
    struct sock_filter rule[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0), /* number of the call */
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {N_OF(rule), rule};
    struct iz_nvme *f;

    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter))
        return 77;
    return iz_nvme_open(&f, folder, "state-0", MIB, false) == -EPERM ? 0 : 1;
}

static void a_forbidden_io_uring_is_told_with_the_way_out(void **state)
{
    int status = apart(open_forbidden, NULL);

    if (status == 77)
        skip();
    assert_int_equal(status, 0);
    assert_said("io_uring is not available: Operation not permitted");
    assert_said("zero_optimization.offload_optimizer.device");
    assert_said("\"cpu\"");
    assert_int_equal(rmdir(folder), 0); /* no file was made */
    assert_int_equal(mkdir(folder, 0700), 0);
}

/* ---- faults in a run ---- */

static int read_beyond_the_end(void *arg)
{
    struct iz_nvme *f = opened(4 * MIB, false);
    char *buf = aligned(4 * MIB);

    if (ftruncate(open_nameless(O_RDWR), *(int64_t *)arg) != 0)
        return 1;
    iz_nvme_read(f, buf, 0, 4 * MIB);
    return 0;
}

static void a_read_that_the_file_cannot_give_ends_the_job(void **state)
{
    int64_t end[] = {2 * MIB, MIB + 5 * PAGE, 3 * MIB + 17};

    for (int i = 0; i < N_OF(end); i++) {
        assert_int_equal(apart(read_beyond_the_end, &end[i]), DIED);
        assert_said("izar: nvme: read of ");
        assert_said(end[i] % PAGE
                        ? "state-0: gets no further (was the file cut?)"
                        : "state-0: the file ends before it");
    }
}

/* The limit cuts a piece in two: a short write, then an error where it ended.
 */
static int write_beyond_the_limit(void *arg)
{
    struct iz_nvme *f = opened(4 * MIB, false);
    char *buf = aligned(MIB);
    struct rlimit limit = {MIB + 3 * PAGE, MIB + 3 * PAGE};

    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
    iz_nvme_write(f, buf, MIB, MIB);
    return 0;
}

static void a_write_that_the_disk_does_not_take_ends_the_job(void **state)
{
    assert_int_equal(apart(write_beyond_the_limit, NULL), DIED);
    assert_said("izar: nvme: write of 1036288 bytes at offset 1060864 of ");
    assert_said("state-0: File too large");
}

/* ---- checksums ---- */

struct damage {
    bool checksum;
    int64_t flip, read_at, read_bytes; /* flip: offset of a byte; -1: none */
};

static int read_damaged(void *arg)
{
    const struct damage *d = arg;
    struct iz_nvme *f = opened(4 * MIB, d->checksum);
    char *buf = aligned(4 * MIB), byte;
    int fd = open_nameless(O_RDWR);

    fill(buf, 4 * MIB, 1);
    iz_nvme_write(f, buf, 0, MIB);
    iz_nvme_write(f, buf, MIB, 2 * MIB);
    iz_nvme_write(f, buf + PAGE, MIB + PAGE, PAGE); /* in place of the above */
    iz_nvme_write(f, buf, 3 * MIB, MIB);
    if (d->flip >= 0) {
        if (pread(fd, &byte, 1, d->flip) != 1)
            return 1;
        byte ^= 8;
        if (pwrite(fd, &byte, 1, d->flip) != 1 || fsync(fd) != 0)
            return 1;
    }
    iz_nvme_read(f, buf, d->read_at, d->read_bytes);
    return 0;
}

static void a_changed_byte_is_noticed_in_the_region_as_written(void **state)
{
    static struct damage seen[] = {{true, 0, 0, MIB},
                                   {true, MIB - 1, 0, MIB},
                                   {true, MIB + PAGE, MIB + PAGE, PAGE},
                                   {true, 4 * MIB - 1, 3 * MIB, MIB}};
    static struct damage unseen[] = {
        {false, 0, 0, MIB}, {true, -1, 0, MIB},        {true, MIB, 0, MIB},
        {true, 5, 0, PAGE}, {true, MIB, MIB, 2 * MIB}, /* was overwritten in
                                                          part */
    };

    for (int i = 0; i < N_OF(seen); i++) {
        assert_int_equal(apart(read_damaged, &seen[i]), DIED);
        assert_said("are not those written: checksum ");
        assert_said("state-0");
    }
    for (int i = 0; i < N_OF(unseen); i++)
        assert_int_equal(apart(read_damaged, &unseen[i]), 0);
}

#define CASE(f) cmocka_unit_test_setup_teardown(f, make_folder, remove_folder)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(what_is_written_comes_back),
        CASE(many_threads_call_at_once),
        CASE(signals_do_not_disturb),
        CASE(bytes_are_counted),
        CASE(space_is_taken_and_the_name_is_gone),
        CASE(a_directory_that_is_none_is_named),
        CASE(a_name_in_use_is_refused),
        CASE(too_little_space_is_told_in_bytes),
        CASE(a_full_small_disk_is_told),
        CASE(a_read_only_disk_is_told),
        CASE(a_file_size_limit_is_told),
        CASE(a_forbidden_io_uring_is_told_with_the_way_out),
        CASE(a_read_that_the_file_cannot_give_ends_the_job),
        CASE(a_write_that_the_disk_does_not_take_ends_the_job),
        CASE(a_changed_byte_is_noticed_in_the_region_as_written),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
