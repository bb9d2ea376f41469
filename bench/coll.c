/* SPDX-License-Identifier: Apache-2.0 */
/* usage: mpirun -np N coll [ROUNDS]
 * Times the collectives between ranks against a copy of the same bytes on the
 * same cores, in one run and alternating.  Each round of each size measures (1)
 * the copy: all ranks, at the same time, copy as many bytes as they would
 * receive, from memory that another rank has just written; (2) the collectives
 * by reading memory, where ranks share a host, and by messages.  Prints a JSON
 * object per line: GB/s of the full buffer, the middle half of the rounds;
 * `moved`: shards that each rank reads and writes, so that rate * moved of two
 * lines can be compared. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bench/timing.h"
#include "codelets/base/units.h"
#include "codelets/flat/dtype.h"
#include "runtime/comm/coll.h"

enum { MOST_ROUNDS = 200 };

struct buffers {
    char *full, *out;
    char *own, *other;    /* memory of this rank and of the next, both see */
    int64_t bytes, shard; /* of full; of a rank's part */
};

/* `bytes` of each rank in memory that the ranks of a host share. */
static char *shared_pages(struct iz_coll *c, int64_t bytes)
{
    int64_t pid = getpid();
    char name[64], *p;
    iz_coll_broadcast(c, &pid, sizeof(pid), 0, "name");
    snprintf(name, sizeof(name), "/izar-bench-%lld", (long long)pid);
    int fd = shm_open(name, O_RDWR | O_CREAT, 0600);
    errno = fd < 0 ? errno : posix_fallocate(fd, 0, bytes * c->size);
    if (errno) {
        fprintf(stderr, "%s, %lld bytes: %s\n", name,
                (long long)bytes * c->size, strerror(errno));
        exit(1);
    }
    p = mmap(NULL, (size_t)(bytes * c->size), PROT_READ | PROT_WRITE,
             MAP_SHARED, fd, 0);
    if (p == MAP_FAILED)
        exit(1);
    close(fd);
    iz_coll_barrier(c, "opened");
    if (c->rank == 0)
        shm_unlink(name);
    return p;
}

static void coll_copy(struct iz_coll *c, const struct buffers *b)
{
    memcpy(b->out, b->other, (size_t)(b->shard * (c->size - 1)));
}

static void coll_gather(struct iz_coll *c, const struct buffers *b)
{
    iz_coll_all_gather(c, b->full, b->shard, "gather");
}

static void reduce_of(struct iz_coll *c, const struct buffers *b,
                      enum iz_dtype wire)
{
    struct iz_coll_sum s = {b->full, wire, .out = b->out, .what = "reduce"};
    s.shard = b->shard / iz_dtype_bytes(wire);
    s.accumulate = wire != IZ_F32;
    iz_coll_reduce_scatter(c, &s);
}

static void reduce(struct iz_coll *c, const struct buffers *b)
{
    reduce_of(c, b, IZ_F32);
}

static void reduce_bf16(struct iz_coll *c, const struct buffers *b)
{
    reduce_of(c, b, IZ_BF16);
}

/* Bytes read and written in shards, of one rank of n: n * each + more.  The sum
 * reads n shards and writes one; of 16-bit numbers it reads and writes fp32
 * ones besides. */
static const struct way {
    const char *name, *path;
    bool local;
    void (*run)(struct iz_coll *c, const struct buffers *b);
    int each, more;
} ways[] = {
    {"copy", "own memory", false, coll_copy, 2, -2},
    {"all-gather", "memory", true, coll_gather, 2, -2},
    {"all-gather", "messages", false, coll_gather, 2, -2},
    {"reduce-scatter fp32", "memory", true, reduce, 1, 1},
    {"reduce-scatter fp32", "messages", false, reduce, 1, 1},
    {"reduce-scatter bf16", "memory", true, reduce_bf16, 1, 4},
    {"reduce-scatter bf16", "messages", false, reduce_bf16, 1, 4},
};

enum { WAYS = sizeof(ways) / sizeof(ways[0]) };

/* Ranks leave a barrier one by one; those of one host have one clock. */
static double common_start(struct iz_coll *c)
{
    double at = bench_now_s() + 300e-6;
    iz_coll_broadcast(c, &at, sizeof(at), 0, "start");
    if (c->local_size < c->size)
        return bench_now_s();
    while (bench_now_s() < at)
        ;
    return bench_now_s();
}

/* From the common start to the end of the last rank; *cpu_s: what this rank
 * took of its core, which a loaded machine changes little. */
static double time_once(struct iz_coll *c, const struct way *w,
                        const struct buffers *b, double *cpu_s)
{
    double all[1024] = {0}, last = 0, start, cpu;
    /* Each has just written its part or its gradient, as in training. */
    if (w->run == coll_copy)
        memset(b->own, 0, (size_t)b->bytes);
    else
        memset(b->full, 0, (size_t)b->bytes);
    iz_coll_read_local(c, w->local);
    iz_coll_barrier(c, "start");
    start = common_start(c);
    cpu = bench_cpu_s();
    w->run(c, b);
    *cpu_s = bench_cpu_s() - cpu;
    all[c->rank] = bench_now_s() - start;
    iz_coll_gather_doubles(c, all, 1, "times");
    for (int r = 0; r < c->size; r++)
        last = all[r] > last ? all[r] : last;
    return last;
}

static void report(const struct iz_coll *c, const struct way *w, int64_t bytes,
                   double *s, double *cpu, int rounds)
{
    double gb = (double)bytes * 1e-9;
    bench_sort(s, rounds);
    bench_sort(cpu, rounds);
    printf("{\"what\": \"%s\", \"path\": \"%s\", \"mib\": %g, \"ranks\": %d, "
           "\"hosts_ranks\": %d, \"median\": %.3f, \"best\": %.3f, "
           "\"least\": %.3f, \"most\": %.3f, \"cpu\": %.3f, \"moved\": %g}\n",
           w->name, w->path, iz_units_mib(bytes), c->size, c->local_size,
           gb / s[rounds / 2], gb / s[0], gb / s[rounds * 3 / 4],
           gb / s[rounds / 4], gb / cpu[rounds / 2],
           (double)c->size * w->each + w->more);
    fflush(stdout);
}

static void time_size(struct iz_coll *c, int64_t mib, int rounds, bool local)
{
    static double s[WAYS][MOST_ROUNDS], cpu[WAYS][MOST_ROUNDS];
    struct buffers b = {.shard = (mib << 20) / c->size / 64 * 64};
    b.bytes = b.shard * c->size;
    b.full = bench_zeros(b.bytes);
    b.out = bench_zeros(b.bytes * 2);
    char *shared = shared_pages(c, b.bytes);
    b.own = shared + c->rank * b.bytes;
    b.other = shared + (c->rank + 1) % c->size * b.bytes;
    for (int r = 0; r < rounds; r++)
        for (int w = 0; w < WAYS; w++)
            if (local || !ways[w].local)
                s[w][r] = time_once(c, &ways[w], &b, &cpu[w][r]);
    for (int w = 0; w < WAYS && c->rank == 0; w++)
        if (local || !ways[w].local)
            report(c, &ways[w], b.bytes, s[w], cpu[w], rounds);
    free(b.full);
    free(b.out);
    munmap(shared, (size_t)(b.bytes * c->size));
}

int main(int argc, char **argv)
{
    struct iz_coll *c;
    int rounds = 40;
    if (iz_coll_open(&c, &argc, &argv) != 0)
        return 1;
    if (argc > 1)
        rounds = atoi(argv[1]);
    if (c->size < 2 || rounds < 1 || rounds > MOST_ROUNDS) {
        fprintf(stderr, "usage: mpirun -np N coll [ROUNDS]\n");
        return 2;
    }
    c->timeout_s = 60;
    c->scratch_bytes = iz_coll_scratch_bytes(c->size, INT64_C(64) << 20);
    c->scratch = bench_zeros(c->scratch_bytes);
    const char *why = iz_coll_read_local(c, true);
    if (why && c->rank == 0)
        fprintf(stderr, "messages only: %s\n", why);
    for (int64_t mib = 1; mib <= 64; mib *= 4)
        time_size(c, mib, mib > 8 ? (rounds + 1) / 2 : rounds, !why);
    free(c->scratch);
    iz_coll_close(&c);
    return 0;
}
