/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "runtime/tier/memory.h"

#include <assert.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "codelets/base/int64.h"
#include "codelets/base/take.h"
#include "codelets/base/units.h"
#include "codelets/gpu/device.h"
#include "runtime/base/cgroup.h"
#include "runtime/base/progress.h"
#include "runtime/plan/limits.h"

#define ALIGN 4096 /* of places in a pool: as disks want it */

/* One allocation that is given out from front to back. */
struct pool {
    char *base;
    int64_t bytes, used;
};

/* On a GPU states stay on the host and are not pinned: nothing copies them. */
enum { DEVICE, HOST, STATES, POOLS };
static const char *const pool_names[POOLS] = {
    "the device tier", "the cpu tier without states", "states in the cpu tier"};

struct iz_memory {
    struct iz_graph *graph;
    bool pin_cpu, gpu, pinned;
    struct iz_bytes count;
    struct pool pool[POOLS];
    char *shadow;  /* of device memory: addresses without memory */
    char *nowhere; /* the next address of a simulation; else NULL */
};

static struct pool *pool_of(struct iz_memory *m, enum iz_tier tier,
                            enum iz_class c)
{
    return &m->pool[tier == IZ_TIER_DEVICE ? DEVICE
                    : c == IZ_MEM_STATE    ? STATES
                                           : HOST];
}

struct iz_memory *iz_memory_open_simulated(void)
{
    struct iz_memory *m = iz_take(1, sizeof(*m), "lists of memory");
    m->nowhere = (char *)(UINTPTR_MAX / 4 + 1);
    return m;
}

void iz_memory_close(struct iz_memory **out)
{
    struct iz_memory *m = *out;
    if (!m)
        return;
    if (m->pinned)
        iz_device_unpin(m->pool[HOST].base);
    if (m->shadow)
        munmap(m->shadow, (size_t)m->pool[DEVICE].bytes);
    for (int i = 0; i < POOLS; i++) {
        struct pool *p = &m->pool[i];
        if (p->base && m->gpu && i == DEVICE)
            iz_device_give(p->base);
        else if (p->base)
            munmap(p->base, (size_t)max64(p->bytes, 1));
    }
    free(m);
    *out = NULL;
}

static int memory_refuse(int pool, int64_t bytes, const char *what)
{
    fprintf(stderr, "izar: %s %.1f MiB for %s failed: %s\n", what,
            iz_units_mib(bytes), pool_names[pool], strerror(errno));
    return -ENOMEM;
}

#define HUGE_PAGE ((size_t)2 << 20)

/* Zeroed pages of the host, from the beginning of a huge one on where a whole
 * one fits: the kernel itself aligns only what is a multiple of it.  What is
 * read and written without a copy (a disk, another rank's memory) costs by the
 * page.  NULL with errno. */
static void *map_pages(int64_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), head;
    size_t round = (size_t)round_up(max64(bytes, 1), (int64_t)page);
    size_t spare = round < HUGE_PAGE ? 0 : HUGE_PAGE - page;
    char *p = mmap(NULL, round + spare, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    if (spare == 0)
        return p;
    head = -(uintptr_t)p & (HUGE_PAGE - 1);
    if (head)
        munmap(p, head);
    if (spare - head)
        munmap(p + head + round, spare - head);
    madvise(p + head, round, MADV_HUGEPAGE);
    return p + head;
}

enum {
    STRETCH = 64 << 20, /* between two signs of progress */
    SHARED = 4          /* as many keep several workers busy */
};

struct settling {
    const struct pool *pool;
    bool locks;
    struct iz_progress progress;
    _Atomic int64_t next; /* byte */
    atomic_int error;     /* errno */
};

static void settle_part(void *arg, int i, struct iz_exec *x)
{
    struct settling *s = arg;
    while (!s->error) {
        int64_t at = atomic_fetch_add(&s->next, STRETCH);
        int64_t n = min64(s->pool->bytes - at, STRETCH);
        if (n <= 0)
            return;
        if (!s->locks)
            memset(s->pool->base + at, 0, (size_t)n);
        else if (mlock(s->pool->base + at, (size_t)n))
            s->error = errno;
        iz_progress_add(&s->progress, n);
    }
}

/* Gives the pages of a pool memory, by the calling thread or by all workers, so
 * that they come to lie near the cores of this rank, and locks them there if
 * asked.  Calling workers takes milliseconds.  0, or -1 with errno. */
static int settle(struct iz_memory *m, const struct pool *p, bool locks)
{
    struct settling s = {.pool = p, .locks = locks};
    if (!p->bytes)
        return 0;
    iz_progress_begin(&s.progress, locks ? "locking memory" : "taking memory",
                      p->bytes);
    if (p->bytes < (int64_t)SHARED * STRETCH)
        settle_part(&s, 0, NULL);
    else
        iz_graph_on_workers(m->graph, settle_part, &s);
    iz_progress_end(&s.progress);
    errno = s.error;
    return s.error ? -1 : 0;
}

static int pin_for_gpu(struct iz_memory *m, const char *wish)
{
    struct pool *p = &m->pool[HOST];
    settle(m, p, false);
    const char *why = iz_device_pin(p->base, p->bytes);
    if (why) {
        fprintf(stderr,
                "izar: %s: pinning %.1f MiB of host memory for the GPU failed: "
                "%s: run.device: cpu needs none\n",
                wish, iz_units_mib(p->bytes), why);
        return -EIO;
    }
    m->pinned = true;
    return 0;
}

static int shadow_open(struct iz_memory *m)
{
    size_t bytes = (size_t)m->pool[DEVICE].bytes;
    void *p = mmap(NULL, bytes, PROT_READ,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return memory_refuse(DEVICE, bytes, "addresses of");
    m->shadow = p;
    return 0;
}

int iz_memory_open(struct iz_memory **out, struct iz_graph *g,
                   const struct iz_places *l, bool pin_cpu, const char *wish)
{
    struct iz_memory *m = *out = iz_take(1, sizeof(*m), "lists of memory");
    m->graph = g;
    m->pin_cpu = pin_cpu;
    m->gpu = wish != NULL;
    for (const struct iz_place *a = l->list; a < l->list + l->n; a++)
        if (a->tier != IZ_TIER_NVME)
            pool_of(m, a->tier, iz_datum_infos[a->what].class)->bytes +=
                round_up(a->bytes, ALIGN);
    for (int i = 0; i < POOLS; i++) {
        struct pool *p = &m->pool[i];
        bool above = m->gpu && i == DEVICE;
        p->base = above ? iz_device_take(p->bytes) : map_pages(p->bytes);
        if (!p->base)
            return above ? -ENOMEM : memory_refuse(i, p->bytes, "allocating");
    }
    int err = m->gpu ? shadow_open(m) : 0;
    return err || !m->gpu ? err : pin_for_gpu(m, wish);
}

void *iz_memory_take(struct iz_memory *m, enum iz_tier tier, enum iz_class c,
                     int64_t bytes)
{
    struct pool *p = pool_of(m, tier, c);
    int64_t round = round_up(bytes, ALIGN);
    m->count.b[tier][c] += bytes;
    if (m->nowhere) {
        m->nowhere += round_up(bytes + 1, ALIGN);
        return m->nowhere - round_up(bytes + 1, ALIGN);
    }
    assert(round <= p->bytes - p->used); /* the plan has listed it */
    p->used += round;
    return p->base + p->used - round;
}

int iz_memory_lock(struct iz_memory *m)
{
    int64_t bytes = m->pool[STATES].bytes + (m->gpu ? 0 : m->pool[HOST].bytes);
    int err = 0;
    if (m->pin_cpu && !m->gpu)
        err = settle(m, &m->pool[HOST], true);
    if (m->pin_cpu && !err)
        err = settle(m, &m->pool[STATES], true);
    if (!err)
        return 0;
    fprintf(stderr, "izar: pin_memory: locking %.1f MiB failed: %s\n",
            iz_units_mib(bytes), strerror(errno));
    return -ENOMEM;
}

struct iz_shadow iz_memory_shadow(const struct iz_memory *m)
{
    const struct pool *p = &m->pool[DEVICE];
    return (struct iz_shadow){m->shadow, p->base, m->shadow ? p->bytes : 0};
}

void iz_memory_note(struct iz_memory *m, enum iz_tier tier, enum iz_class c,
                    int64_t bytes)
{
    m->count.b[tier][c] += bytes;
}

const struct iz_bytes *iz_memory_bytes(const struct iz_memory *m)
{
    return &m->count;
}

int64_t iz_memory_resident(void)
{
    return max64(iz_cgroup_number("/proc/self/status", "VmRSS:"), 0) * 1024;
}

int64_t iz_memory_own(void)
{
    return max64(iz_cgroup_number("/proc/self/status", "RssAnon:"), 0) * 1024;
}

/* Not getrusage: that of the program which started this one may be larger. */
int64_t iz_memory_peak_resident(void)
{
    return max64(iz_cgroup_number("/proc/self/status", "VmHWM:"), 0) * 1024;
}

int64_t iz_memory_available(bool gpu, int64_t *reserve)
{
    int64_t group = iz_cgroup_memory();
    int64_t kib = iz_cgroup_number("/proc/meminfo", "MemAvailable:");
    int64_t total = iz_cgroup_number("/proc/meminfo", "MemTotal:");
    *reserve = iz_plan_host_reserve(max64(total, 0) * 1024, gpu);
    int64_t host = kib < 0 ? INT64_MAX : max64(kib * 1024 - *reserve, 0);
    if (group <= host)
        *reserve = 0;
    return min64(group, host);
}
