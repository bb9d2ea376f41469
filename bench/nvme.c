/* SPDX-License-Identifier: Apache-2.0 */
/* usage: nvme FOLDER [MIB [ROUNDS]]
 * The disk's own rate and ours, alternating in one run.  The yardstick: threads
 * that read or write pieces of a file with O_DIRECT and nothing else, the best
 * of a few numbers of threads and sizes of pieces.  Ours: as many callers of
 * iz_nvme_read and iz_nvme_write as a run has, with chunks as large as a run's.
 * Prints a JSON object per line: GB/s, of reading, of writing, and of both at
 * the same time. */
#define _GNU_SOURCE /* O_DIRECT */

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "runtime/nvme.h"

enum { CALLERS = 2, THREADS = 16 };

#define CHUNK ((int64_t)12 << 20) /* 2^20 elements, three arrays of fp32 */

enum what { READ, WRITE, BOTH };

static const char *const names[] = {"read", "write", "both"};

struct job {
    int fd;            /* of the yardstick, else -1 */
    struct iz_nvme *f; /* ours */
    enum what what;
    int64_t piece, pieces;
    _Atomic int64_t next;
};

struct thread {
    struct job *job;
    char *buf;
    pthread_t id;
};

static double now_s(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void transfer(const struct job *j, char *buf, int64_t at, bool write)
{
    ssize_t n;

    if (j->f != NULL && write)
        iz_nvme_write(j->f, buf, at, j->piece);
    else if (j->f != NULL)
        iz_nvme_read(j->f, buf, at, j->piece);
    if (j->f != NULL)
        return;
    n = write ? pwrite(j->fd, buf, (size_t)j->piece, at)
              : pread(j->fd, buf, (size_t)j->piece, at);
    if (n != j->piece) {
        perror("nvme");
        exit(1);
    }
}

/* Of both, every second piece is written. */
static void *work(void *arg)
{
    const struct thread *t = arg;
    struct job *j = t->job;
    int64_t i;

    while ((i = atomic_fetch_add(&j->next, 1)) < j->pieces)
        transfer(j, t->buf, i * j->piece,
                 j->what == WRITE || (j->what == BOTH && i % 2));
    return NULL;
}

static double gb_per_s(struct job *j, int threads)
{
    static struct thread t[THREADS];
    double start;

    for (int i = 0; i < threads; i++) {
        t[i].job = j;
        t[i].buf = aligned_alloc(4096, (size_t)j->piece);
        if (t[i].buf == NULL)
            exit(1);
        memset(t[i].buf, i + 1, (size_t)j->piece);
    }
    start = now_s();
    for (int i = 0; i < threads; i++)
        if (pthread_create(&t[i].id, NULL, work, &t[i]))
            exit(1);
    for (int i = 0; i < threads; i++)
        pthread_join(t[i].id, NULL);
    start = now_s() - start;
    for (int i = 0; i < threads; i++)
        free(t[i].buf);
    return (double)(j->piece * j->pieces) / start * 1e-9;
}

static const struct shape {
    int threads;
    int64_t piece;
} shapes[] = {{4, 4 << 20}, {8, 1 << 20}, {16, 1 << 20}, {4, 12 << 20}};

static double run(int fd, struct iz_nvme *f, enum what what, int64_t bytes,
                  int threads, int64_t piece)
{
    struct job j = {fd, f, what, piece, bytes / piece, 0};

    return gb_per_s(&j, threads);
}

static double yardstick(int fd, enum what what, int64_t bytes)
{
    double best = 0;

    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        double r =
            run(fd, NULL, what, bytes, shapes[i].threads, shapes[i].piece);

        best = r > best ? r : best;
    }
    return best;
}

static int open_own(const char *folder, int64_t bytes)
{
    char path[4096];
    int fd;

    snprintf(path, sizeof path, "%s/yardstick-%d", folder, (int)getpid());
    fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_DIRECT, 0600);
    if (fd < 0 || posix_fallocate(fd, 0, bytes)) {
        perror(path);
        exit(1);
    }
    unlink(path);
    return fd;
}

int main(int argc, char **argv)
{
    int64_t bytes = (argc > 2 ? atoll(argv[2]) : 1536) << 20;
    int rounds = argc > 3 ? atoi(argv[3]) : 3, fd;
    struct iz_nvme *f;

    if (argc < 2 || bytes < 16 * CHUNK || rounds < 1) {
        fprintf(stderr, "usage: nvme FOLDER [MIB [ROUNDS]]\n");
        return 2;
    }
    bytes = bytes / (16 * CHUNK) * (16 * CHUNK);
    fd = open_own(argv[1], bytes);
    if (iz_nvme_open(&f, argv[1], "bench-nvme", bytes, false))
        return 1;
    /* The first write to new extents is slow. */
    run(fd, NULL, WRITE, bytes, 4, CHUNK);
    run(-1, f, WRITE, bytes, CALLERS, CHUNK);
    for (int r = 0; r < rounds; r++)
        for (int w = READ; w <= BOTH; w++) {
            double disk = yardstick(fd, w, bytes);
            double ours = run(-1, f, w, bytes, CALLERS, CHUNK);

            printf("{\"what\": \"%s\", \"disk\": %.3f, \"ours\": %.3f}\n",
                   names[w], disk, ours);
            fflush(stdout);
        }
    iz_nvme_close(&f);
    close(fd);
    return 0;
}
