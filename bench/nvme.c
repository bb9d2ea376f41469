/* SPDX-License-Identifier: Apache-2.0 */
/* usage: nvme FOLDER [MIB [ROUNDS]]
 * The disk's own rate and ours, alternating in one run, with the same file and
 * the same kind of memory.  The reference: threads that read or write the file
 * with O_DIRECT and nothing else, by requests of a few sizes.  Ours: as many
 * callers of iz_nvme_read and iz_nvme_write as a run has, with chunks as large
 * as a run's.  Prints a JSON object per round: GB/s of reading, of writing, or
 * of both at the same time, of every shape and of ours. */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench/timing.h"
#include "runtime/tier/nvme.h"

enum { CALLERS = 2, THREADS = 16 };

#define CHUNK ((int64_t)12 << 20) /* 2^20 elements, three arrays of fp32 */

enum what { READ, WRITE, BOTH };

static const char *const names[] = {"read", "write", "both"};

struct job {
    int fd;            /* of the reference */
    struct iz_nvme *f; /* ours, else NULL */
    char *memory;
    enum what what;
    int64_t request, requests; /* bytes of one; how many */
    _Atomic int64_t next;
};

struct thread {
    struct job *job;
    char *buf;
};

static void transfer(const struct job *j, char *buf, int64_t at, bool write)
{
    if (j->f && write)
        iz_nvme_write(j->f, buf, at, j->request);
    else if (j->f)
        iz_nvme_read(j->f, buf, at, j->request);
    if (j->f)
        return;
    ssize_t n = write ? pwrite(j->fd, buf, (size_t)j->request, at)
                      : pread(j->fd, buf, (size_t)j->request, at);
    if (n != j->request) {
        perror("nvme");
        exit(1);
    }
}

/* Of both, every second request writes. */
static void *nvme_work(void *arg)
{
    const struct thread *t = arg;
    struct job *j = t->job;
    int64_t i;
    while ((i = atomic_fetch_add(&j->next, 1)) < j->requests)
        transfer(j, t->buf, i * j->request,
                 j->what == WRITE || (j->what == BOTH && i % 2));
    return NULL;
}

static double gb_per_s(struct job *j, int threads)
{
    static struct thread t[THREADS];
    for (int i = 0; i < threads; i++)
        t[i] = (struct thread){j, j->memory + i * CHUNK};
    double start = bench_now_s();
    bench_threads(threads, nvme_work, t, sizeof(*t));
    start = bench_now_s() - start;
    return (double)(j->request * j->requests) / start * 1e-9;
}

static const struct shape {
    const char *name;
    int threads;
    int64_t request;
} shapes[] = {{"4 x 4 MiB", 4, 4 << 20},
              {"8 x 1 MiB", 8, 1 << 20},
              {"16 x 1 MiB", 16, 1 << 20},
              {"4 x 12 MiB", 4, CHUNK},
              {"ours", CALLERS, CHUNK}};

enum { SHAPES = sizeof(shapes) / sizeof(shapes[0]), OURS = SHAPES - 1 };

/* What all rounds work on. */
struct disk {
    int fd;
    struct iz_nvme *f; /* the same file */
    char *memory;
    int64_t bytes;
};

static double run(const struct disk *d, enum what what, int i)
{
    const struct shape *s = &shapes[i];
    struct job j = {.fd = d->fd,
                    .f = i == OURS ? d->f : NULL,
                    .memory = d->memory,
                    .what = what,
                    .request = s->request,
                    .requests = d->bytes / s->request};
    return gb_per_s(&j, s->threads);
}

/* A round of one kind; every round begins with another one of the shapes.  Of
 * several disks only ours is measured. */
static void nvme_measure(const struct disk *d, enum what what, int round)
{
    double gb[SHAPES];
    int first = iz_nvme_disks(d->f)->n > 1 ? OURS : 0;
    for (int i = first; i < SHAPES; i++) {
        int s = first ? i : (round + i) % SHAPES;
        gb[s] = run(d, what, s);
    }
    printf("{\"what\": \"%s\"", names[what]);
    for (int i = first; i < SHAPES; i++)
        printf(", \"%s\": %.3f", shapes[i].name, gb[i]);
    printf("}\n");
    fflush(stdout);
}

int main(int argc, char **argv)
{
    int64_t bytes = (argc > 2 ? atoll(argv[2]) : 1536) << 20;
    int rounds = argc > 3 ? atoi(argv[3]) : 3;
    struct disk d;
    char name[64];
    if (argc < 2 || bytes < 16 * CHUNK || rounds < 1) {
        fprintf(stderr, "usage: nvme FOLDER[,FOLDER...] [MIB [ROUNDS]]\n");
        return 2;
    }
    bytes = bytes / (16 * CHUNK) * (16 * CHUNK);
    snprintf(name, sizeof(name), "bench-nvme-%d", (int)getpid());
    if (iz_nvme_open(&d.f, argv[1], name, bytes, false))
        return 1;
    d.fd = iz_nvme_disks(d.f)->disk[0].fd;
    /* A chunk for every thread, on huge pages as a run's buffers are: some
     * disks take a page per entry of their queue, and are slow with small ones.
     */
    d.memory = bench_new(THREADS * CHUNK);
    memset(d.memory, 1, (size_t)(THREADS * CHUNK));
    d.bytes = bytes;
    /* The first write to new extents is slow. */
    run(&d, WRITE, OURS);
    for (int r = 0; r < rounds; r++)
        for (int w = READ; w <= BOTH; w++)
            nvme_measure(&d, (enum what)w, r);
    free(d.memory);
    iz_nvme_close(&d.f);
    return 0;
}
