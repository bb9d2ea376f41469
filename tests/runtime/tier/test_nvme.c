/* SPDX-License-Identifier: Apache-2.0 */
/* The nvme tier: what is written comes back, and every fault has its message.
 */
#define _GNU_SOURCE /* MS_RDONLY, seccomp */

#include "tests/runtime/fixture.h"

#include <fcntl.h>
#include <glob.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>

#include "codelets/base/die.h"
#include "codelets/base/int64.h"
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

static struct iz_nvme *opened(const char *folders, int64_t bytes, bool checksum)
{
    struct iz_nvme *f = NULL;
    assert_int_equal(iz_nvme_open(&f, folders, "state-0", bytes, checksum), 0);
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
    int fd = -1;
    glob_t g;
    assert_int_equal(glob("/proc/self/fd/*", 0, NULL, &g), 0);
    for (size_t i = 0; i < g.gl_pathc && fd < 0; i++) {
        char target[512] = "";
        if (readlink(g.gl_pathv[i], target, sizeof(target) - 1) > 0 &&
            strstr(target, folder) && strstr(target, " (deleted)"))
            fd = open(g.gl_pathv[i], flags);
    }
    globfree(&g);
    return fd;
}

/* ---- transfers ---- */

static void all_comes_back(const char *folders, int64_t size)
{
    char *model = aligned(size), *buf = aligned(size);
    for (int checksum = 0; checksum < 2; checksum++) {
        struct iz_nvme *f = opened(folders, size, checksum != 0);
        const struct iz_disks *s = iz_nvme_disks(f);
        int64_t all = 0;
        for (int i = 0; i < s->n; i++) {
            struct stat is;
            assert_int_equal(fstat(s->disk[i].fd, &is), 0);
            assert_int_equal(is.st_size, s->disk[i].bytes);
            all += is.st_size;
        }
        assert_int_equal(all, size);
        iz_nvme_write(f, memset(model, 0, (size_t)size), 0, size);
        for (int i = 0; i < 60; i++) {
            int64_t pages = random_below(800) + 1;
            int64_t at = random_below(size / PAGE - pages) * PAGE;
            fill(buf, pages * PAGE, random_next());
            iz_nvme_write(f, buf, at, pages * PAGE);
            memcpy(model + at, buf, (size_t)(pages * PAGE));
            at = random_below(size / PAGE - pages) * PAGE;
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

/* ---- several disks ---- */

/* Folders below the test's own, as a list. */
static const char *folders(int n)
{
    static char list[4096];
    char name[16], *p = list;
    for (int i = 0; i < n; i++) {
        snprintf(name, sizeof(name), "disk%d", i);
        mkdir(in_folder("%s", name), 0700);
        p += sprintf(p, "%s%s", i ? "," : "", in_folder("%s", name));
    }
    return list;
}

static void what_is_written_comes_back(void **state)
{
    all_comes_back(folder, 12 * MIB);
    all_comes_back(folders(3), 70 * MIB + 3 * PAGE); /* more than all turns */
}

/* No byte has the place of another, none is left out, and any few turns are
 * shared as all are. */
static void turns_are_dealt_by_rates(void **state)
{
    static const struct {
        int n, turns[IZ_DISKS_MAX];
        double rate[IZ_DISKS_MAX];
    } cases[] = {
        {1, {64}, {0}},
        {2, {32, 32}, {1e9, 1e9}},
        {2, {48, 16}, {3e9, 1e9}},
        {3, {39, 19, 6}, {6e9, 3e9, 1e9}},
        {2, {63, 1}, {1e12, 1}},
        {8, {8, 8, 8, 8, 8, 8, 8, 8}, {1, 1, 1, 1, 1, 1, 1, 1}},
    };
    for (int c = 0; c < N_OF(cases); c++) {
        struct iz_disks s = {.n = cases[c].n};
        int64_t at, n, end[IZ_DISKS_MAX] = {0};
        for (int i = 0; i < s.n; i++)
            s.disk[i].rate = cases[c].rate[i];
        iz_disks_stripe(&s);
        for (int i = 0; i < s.n; i++)
            assert_int_equal(s.disk[i].turns, cases[c].turns[i]);
        for (int64_t t = 0; t < 3 * IZ_DISKS_TURNS; t++) {
            const struct iz_disk *d = iz_disks_find(&s, t * MIB + 17, &at, &n);
            int i = (int)(d - s.disk);
            int64_t share = (t + 1) * d->turns / IZ_DISKS_TURNS;
            assert_int_equal(at, end[i] * MIB + 17);
            assert_true(s.n == 1 ? n > MIB : n == MIB - 17);
            end[i]++;
            assert_in_range(end[i], max64(share - 1, 0), share + 1);
        }
    }
}

static void the_faulty_one_of_several_disks_is_named(void **state)
{
    char many[8192], *p = many;
    struct iz_nvme *f;
    snprintf(many, sizeof(many), "%s,%s", folders(1), in_folder("none"));
    assert_fails(iz_nvme_open(&f, many, "state-0", MIB, false), -ENOENT,
                 "none/state-0: cannot create");
    assert_int_equal(rmdir(in_folder("disk0")), 0); /* nothing was left */
    for (int i = 0; i <= IZ_DISKS_MAX; i++)
        p += sprintf(p, "%s%s", i ? "," : "", folder);
    assert_fails(iz_nvme_open(&f, many, "x", MIB, false), -E2BIG,
                 "too many folders");
}

/* ---- callers ---- */

struct caller {
    struct iz_nvme *f;
    int number;
    bool same;
};

static void *call_often(void *arg)
{
    const int64_t size = 3 * MIB + 5 * PAGE;
    struct caller *c = arg;
    char *out = aligned(size), *in = aligned(size);
    fill(out, size, (uint64_t)c->number);
    for (int i = 0; i < 5; i++)
        iz_nvme_write(c->f, out, c->number * size, size);
    for (int i = 0; i < 5; i++)
        iz_nvme_read(c->f, in, c->number * size, size);
    c->same = memcmp(in, out, (size_t)size) == 0;
    free(out);
    free(in);
    return NULL;
}

static volatile sig_atomic_t alarms;

static void on_alarm(int sig)
{
    alarms++;
}

/* The first of them is the one that signals disturb. */
static void many_threads_call_at_once(void **state)
{
    struct itimerval often = {{0, 200}, {0, 200}}, never = {{0, 0}, {0, 0}};
    struct caller caller[10];
    pthread_t thread[N_OF(caller)];
    struct iz_nvme *f = opened(folder, 40 * MIB, true);
    sigaction(SIGALRM, &(struct sigaction){.sa_handler = on_alarm}, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
    for (int i = 0; i < N_OF(caller); i++) {
        caller[i] = (struct caller){f, i, false};
        assert_true(i == 0 || pthread_create(&thread[i], NULL, call_often,
                                             &caller[i]) == 0);
    }
    call_often(&caller[0]);
    for (int i = 0; i < N_OF(caller); i++) {
        assert_true(i == 0 || pthread_join(thread[i], NULL) == 0);
        assert_true(caller[i].same);
    }
    setitimer(ITIMER_REAL, &never, NULL);
    signal(SIGALRM, SIG_DFL);
    assert_true(alarms > 0);
    iz_nvme_close(&f);
}

/* ---- the file ---- */

static void space_is_taken_and_the_name_is_gone(void **state)
{
    struct iz_nvme *f = opened(folder, 5 * MIB + 1, false);
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

static void open_fails(const char *dir, int64_t bytes, int err,
                       const char *words)
{
    struct iz_nvme *f = NULL;
    assert_fails(iz_nvme_open(&f, dir, "state-0", bytes, false), err, words);
    assert_null(f);
    assert_said(dir);
    assert_int_equal(size_of(in_folder("state-0")), -1);
}

static void a_place_without_room_is_named(void **state)
{
    open_fails(in_folder("none"), MIB, -ENOENT, "cannot create");
    write_text(in_folder("file"), "");
    open_fails(in_folder("file"), MIB, -ENOTDIR, "");
    open_fails(folder, (int64_t)1 << 50, -ENOSPC,
               "cannot allocate 1125899906842624 bytes");
    assert_said("are free");
    open_fails(mount_small("ro", 1024, MS_RDONLY), MIB, -EROFS, "Read-only");
}

/* Where the file system makes files without one; others refuse it. */
static void a_name_in_use_stays_as_it_is(void **state)
{
    struct iz_nvme *f;
    write_text(in_folder("state-0"), "");
    int fd = open(folder, O_RDWR | O_TMPFILE, 0600);
    if (fd < 0) {
        assert_fails(iz_nvme_open(&f, folder, "state-0", MIB, false), -EEXIST,
                     "another run");
    } else {
        close(fd);
        assert_int_equal(iz_nvme_open(&f, folder, "state-0", MIB, false), 0);
        iz_nvme_close(&f);
    }
    assert_int_equal(size_of(in_folder("state-0")), 0);
}

/* Files of a process may not be longer. */
static void limit_files(int64_t bytes)
{
    struct rlimit limit = {(rlim_t)bytes, (rlim_t)bytes};
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &limit);
}

static int open_limited(struct iz_coll *c, void *arg)
{
    limit_files(MIB);
    open_fails(folder, 2 * MIB, -EFBIG, "cannot allocate 2097152 bytes");
    assert_said("File too large");
    return 0;
}

static void a_file_size_limit_is_told(void **state)
{
    all_return(1, open_limited, NULL, 0);
}

/* As containers do with io_uring_setup; where io_uring_register fails, what a
 * ring can do is not known.  As NFS does with fallocate. */
static bool forbid(unsigned call, unsigned err)
{
    struct sock_filter rule[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0), /* number of the call */
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | err),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {N_OF(rule), rule};
    return !prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) &&
           !prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter);
}

enum { NOT_ALLOWED = 77 };

static int without_call(struct iz_coll *c, void *arg)
{
    const unsigned *call = arg;
    bool uring = *call != SYS_fallocate;
    if (!forbid(*call, uring ? EPERM : EOPNOTSUPP))
        return NOT_ALLOWED;
    struct iz_nvme *f = opened(folder, MIB, false);
    assert_true(iz_nvme_without_uring(f) == uring);
    iz_nvme_close(&f);
    space_is_taken_and_the_name_is_gone(NULL);
    what_is_written_comes_back(NULL);
    return 0;
}

static void all_comes_back_without_io_uring_or_fallocate(void **state)
{
    static unsigned calls[] = {SYS_io_uring_setup, SYS_io_uring_register,
                               SYS_fallocate};
    for (int i = 0; i < N_OF(calls); i++) {
        int status = on_ranks(1, without_call, &calls[i]);
        if (status == NOT_ALLOWED)
            skip();
        assert_int_equal(status, 0);
        remove_folder(NULL); /* the next one has a fresh one */
        make_folder(NULL);
    }
}

/* ---- faults in a run ---- */

/* What is done to a file, and then with it: a read behind its end where end is
 * set, or a write over the limit of its length. */
static const struct fault {
    int64_t end;
    const char *words;
    bool direct; /* without io_uring */
    int disk;    /* the last one of several */
} run_faults[] = {
    {2 * MIB, "izar: nvme: read of ", false, 0},
    {2 * MIB, "state-0: the file ends before it", false, 0},
    {MIB + 5 * PAGE, "state-0: the file ends before it", false, 0},
    {PAGE, "disk1/state-0: the file ends before it", false, 1},
    {3 * MIB + 17, "state-0: gets no further (was the file cut?)", false, 0},
    /* A piece is cut in two: a short write, then an error where it ended. */
    {0, "izar: nvme: write of 1036288 bytes at offset 1060864 of ", false, 0},
    {0, "state-0: File too large", false, 0},
    {2 * MIB, "state-0: the file ends before it", true, 0},
    {3 * MIB + 17, "state-0: gets no further (was the file cut?)", true, 0},
    {0, "state-0: File too large", true, 0},
};

static int move_beyond(struct iz_coll *c, void *arg)
{
    const struct fault *how = arg;
    if (how->direct && !forbid(SYS_io_uring_setup, EPERM))
        iz_die("%s", how->words);
    struct iz_nvme *f = opened(folders(how->disk + 1), 4 * MIB, false);
    const struct iz_disk *d = &iz_nvme_disks(f)->disk[how->disk];
    while (d->bytes <= how->end) { /* it seemed slow, and holds none of this */
        iz_nvme_close(&f);
        f = opened(folders(how->disk + 1), 4 * MIB, false);
        d = &iz_nvme_disks(f)->disk[how->disk];
    }
    if (how->end == 0) {
        limit_files(MIB + 3 * PAGE);
        iz_nvme_write(f, aligned(MIB), MIB, MIB);
    } else if (ftruncate(d->fd, how->end) == 0) {
        iz_nvme_read(f, aligned(4 * MIB), 0, 4 * MIB);
    }
    return 0;
}

static void what_the_file_does_not_take_or_give_ends_the_job(void **state)
{
    for (int i = 0; i < N_OF(run_faults); i++) {
        struct fault how = run_faults[i];
        all_return(1, move_beyond, &how, DIED);
        assert_said(how.words);
    }
}

/* ---- checksums ---- */

/* The offset of a byte that is flipped, and what is then read. */
struct damage {
    bool checksum;
    int64_t flip, read_at, read_bytes;
    bool seen;
};

static int read_damaged(struct iz_coll *c, void *arg)
{
    const struct damage *d = arg;
    struct iz_nvme *f = opened(folder, 4 * MIB, d->checksum);
    char *buf = aligned(4 * MIB), byte;
    int fd = open_nameless(O_RDWR);
    fill(buf, 4 * MIB, 1);
    iz_nvme_write(f, buf, 0, MIB);
    iz_nvme_write(f, buf, MIB, 2 * MIB);
    iz_nvme_write(f, buf + PAGE, MIB + PAGE, PAGE); /* in place of the above */
    iz_nvme_write(f, buf, 3 * MIB, MIB);
    if (pread(fd, &byte, 1, d->flip) != 1)
        return 1;
    byte ^= 8;
    if (pwrite(fd, &byte, 1, d->flip) != 1 || fsync(fd) != 0)
        return 1;
    iz_nvme_read(f, buf, d->read_at, d->read_bytes);
    return 0;
}

static void a_changed_byte_is_noticed_in_the_region_as_written(void **state)
{
    static struct damage cases[] = {
        {true, 0, 0, MIB, true},
        {true, MIB - 1, 0, MIB, true},
        {true, MIB + PAGE, MIB + PAGE, PAGE, true},
        {true, 4 * MIB - 1, 3 * MIB, MIB, true},
        /* Of several, in all that were read whole. */
        {true, 5, 0, 2 * MIB, true},
        {true, MIB + PAGE, MIB, 2 * MIB, true},
        {false, 0, 0, MIB, false},
        {true, MIB, 0, MIB, false},
        {true, 5, 0, PAGE, false},
        {true, MIB, MIB, 2 * MIB, false}, /* was overwritten in part */
    };
    for (int i = 0; i < N_OF(cases); i++) {
        all_return(1, read_damaged, &cases[i], cases[i].seen ? DIED : 0);
        if (cases[i].seen) {
            assert_said("are not those written: checksum ");
            assert_said("state-0");
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(what_is_written_comes_back),
        CASE(turns_are_dealt_by_rates),
        CASE(the_faulty_one_of_several_disks_is_named),
        CASE(many_threads_call_at_once),
        CASE(space_is_taken_and_the_name_is_gone),
        CASE(a_place_without_room_is_named),
        CASE(a_name_in_use_stays_as_it_is),
        CASE(a_file_size_limit_is_told),
        CASE(all_comes_back_without_io_uring_or_fallocate),
        CASE(what_the_file_does_not_take_or_give_ends_the_job),
        CASE(a_changed_byte_is_noticed_in_the_region_as_written),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
