/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE
#include "runtime/tier/memory.h"

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

#define ALIGN 4096 /* of pieces of a pool: as disks want it */

struct block {
    struct block *next;
    void *p;
    size_t bytes;
    bool waits; /* to be settled */
};

/* One allocation that is given out from front to back. */
struct pool {
    char *base;
    char *shadow; /* of device memory: addresses without memory */
    int64_t bytes, used;
};

struct iz_memory {
    struct iz_graph *graph;
    bool pin_cpu, gpu;
    struct iz_bytes count;
    struct block *blocks;
    struct pool device, cpu;
    char *nowhere; /* the next address of a simulation; else NULL */
};

struct iz_memory *iz_memory_open(struct iz_graph *g, bool pin_cpu)
{
    struct iz_memory *m = iz_take(1, sizeof(*m), "lists of memory");
    m->graph = g;
    m->pin_cpu = pin_cpu;
    return m;
}

struct iz_memory *iz_memory_open_simulated(void)
{
    struct iz_memory *m = iz_memory_open(NULL, false);
    m->nowhere = (char *)(UINTPTR_MAX / 4 + 1);
    return m;
}

void iz_memory_close(struct iz_memory **m)
{
    if (!*m)
        return;
    if ((*m)->device.base)
        iz_device_give((*m)->device.base);
    if ((*m)->device.shadow)
        munmap((*m)->device.shadow, (size_t)(*m)->device.bytes);
    if ((*m)->cpu.base)
        iz_device_unpin((*m)->cpu.base);
    for (struct block *b = (*m)->blocks, *next; b; b = next) {
        next = b->next;
        munmap(b->p, b->bytes);
        free(b);
    }
    free(*m);
    *m = NULL;
}

static void *memory_refuse(enum iz_tier tier, enum iz_class c, int64_t bytes,
                           const char *what)
{
    fprintf(stderr, "izar: %s %.1f MiB for %s (%s tier) failed: %s\n", what,
            iz_units_mib(bytes), iz_class_names[c], iz_tier_names[tier],
            strerror(errno));
    return NULL;
}

#define HUGE_PAGE ((size_t)2 << 20)

/* Zeroed pages, from the beginning of a huge one on where a whole one fits: the
 * kernel itself aligns only what is a multiple of it.  What is read and written
 * without a copy (a disk, another rank's memory) costs by the page. */
static void *map_pages(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t spare = bytes < HUGE_PAGE ? 0 : HUGE_PAGE - page, head;
    char *p = mmap(NULL, bytes + spare, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || spare == 0)
        return p;
    head = -(uintptr_t)p & (HUGE_PAGE - 1);
    if (head)
        munmap(p, head);
    if (spare - head)
        munmap(p + head + bytes, spare - head);
    madvise(p + head, bytes, MADV_HUGEPAGE);
    return p + head;
}

/* Zeroed pages of the host; NULL with errno. */
static struct block *map(struct iz_memory *m, int64_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t round = (size_t)round_up(max64(bytes, 1), (int64_t)page);
    void *p = map_pages(round);
    if (p == MAP_FAILED)
        return NULL;
    struct block *b = iz_take(1, sizeof(*b), "lists of memory");
    *b = (struct block){.next = m->blocks, .p = p, .bytes = round};
    m->blocks = b;
    return b;
}

enum {
    STRETCH = 64 << 20, /* between two signs of progress */
    SHARED = 4          /* as many keep several workers busy */
};

struct settling {
    struct block *blocks;
    bool locks;
    struct iz_progress progress;
    _Atomic size_t next; /* stretch, counted over all blocks that wait */
    atomic_int error;    /* errno */
};

static size_t stretches(const struct block *b)
{
    return b->waits ? (b->bytes + STRETCH - 1) / STRETCH : 0;
}

static void settle_part(void *arg, int i, struct iz_exec *x)
{
    struct settling *s = arg;
    while (!s->error) {
        size_t at = atomic_fetch_add(&s->next, 1);
        const struct block *b = s->blocks;
        for (; b && at >= stretches(b); b = b->next)
            at -= stretches(b);
        if (!b)
            return;
        at *= STRETCH;
        char *p = (char *)b->p + at;
        size_t n = b->bytes - at < STRETCH ? b->bytes - at : STRETCH;
        if (!s->locks)
            memset(p, 0, n);
        else if (mlock(p, n))
            s->error = errno;
        iz_progress_add(&s->progress, (int64_t)n);
    }
}

/* Gives the pages of all blocks that wait memory, by the calling thread or by
 * all workers, so that they come to lie near the cores of this rank, and locks
 * them there if asked.  Calling workers takes milliseconds.  0, or -1 with
 * errno. */
static int settle(struct iz_memory *m, bool locks)
{
    struct settling s = {.blocks = m->blocks, .locks = locks};
    size_t bytes = 0;
    for (struct block *b = m->blocks; b; b = b->next)
        bytes += b->waits ? b->bytes : 0;
    if (!bytes)
        return 0;
    iz_progress_begin(&s.progress, locks ? "locking memory" : "taking memory",
                      (int64_t)bytes);
    if (bytes < (size_t)SHARED * STRETCH)
        settle_part(&s, 0, NULL);
    else
        iz_graph_on_workers(m->graph, settle_part, &s);
    iz_progress_end(&s.progress);
    for (struct block *b = m->blocks; b; b = b->next)
        b->waits = false;
    errno = s.error;
    return s.error ? -1 : 0;
}

static int open_cpu_pool(struct iz_memory *m, int64_t bytes, const char *wish)
{
    struct block *b = map(m, bytes);
    if (!b) {
        memory_refuse(IZ_TIER_CPU, IZ_MEM_PARAM, bytes, "allocating");
        return -ENOMEM;
    }
    b->waits = true;
    settle(m, false);
    const char *why = iz_device_pin(b->p, (int64_t)b->bytes);
    if (why) {
        fprintf(stderr,
                "izar: %s: pinning %.1f MiB of host memory for the GPU failed: "
                "%s: run.device: cpu needs none\n",
                wish, iz_units_mib(b->bytes), why);
        return -EIO;
    }
    m->cpu = (struct pool){.base = b->p, .bytes = (int64_t)b->bytes};
    return 0;
}

int iz_memory_open_gpu(struct iz_memory *m, const struct iz_places *places,
                       const char *wish)
{
    int64_t device =
        iz_places_room(places, IZ_TIER_DEVICE, IZ_MEM_CLASSES, ALIGN);
    int64_t cpu = iz_places_room(places, IZ_TIER_CPU, IZ_MEM_STATE, ALIGN);
    m->gpu = true;
    m->device.base = iz_device_take(device);
    if (!m->device.base)
        return -ENOMEM;
    m->device.bytes = device;
    void *shadow = mmap(NULL, (size_t)device, PROT_READ,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (shadow == MAP_FAILED) {
        memory_refuse(IZ_TIER_DEVICE, IZ_MEM_PARAM, device, "addresses of");
        return -ENOMEM;
    }
    m->device.shadow = shadow;
    return open_cpu_pool(m, cpu, wish);
}

static void *give_out(struct pool *p, enum iz_tier tier, enum iz_class c,
                      int64_t bytes)
{
    int64_t round = round_up(bytes, ALIGN);
    errno = ENOMEM;
    if (round > p->bytes - p->used)
        return memory_refuse(tier, c, bytes, "beyond the plan: taking");
    void *piece = p->base + p->used;
    p->used += round;
    return piece;
}

void *iz_memory_take(struct iz_memory *m, enum iz_tier tier, enum iz_class c,
                     int64_t bytes)
{
    void *p;
    /* On a GPU states stay on the host: nothing copies them. */
    if (m->nowhere) {
        p = m->nowhere;
        m->nowhere += round_up(bytes + 1, ALIGN);
    } else if (m->gpu && (tier == IZ_TIER_DEVICE || c != IZ_MEM_STATE)) {
        p = give_out(tier == IZ_TIER_DEVICE ? &m->device : &m->cpu, tier, c,
                     bytes);
    } else {
        struct block *b = map(m, bytes);
        if (!b)
            return memory_refuse(tier, c, bytes, "allocating");
        p = b->p;
        b->waits = tier == IZ_TIER_CPU && m->pin_cpu;
    }
    if (p)
        m->count.b[tier][c] += bytes;
    return p;
}

int iz_memory_lock(struct iz_memory *m)
{
    int64_t bytes = 0;
    for (struct block *b = m->blocks; b; b = b->next)
        bytes += b->waits ? (int64_t)b->bytes : 0;
    if (!settle(m, true))
        return 0;
    fprintf(stderr, "izar: pin_memory: locking %.1f MiB failed: %s\n",
            iz_units_mib(bytes), strerror(errno));
    return -ENOMEM;
}

struct iz_shadow iz_memory_shadow(const struct iz_memory *m)
{
    const struct pool *p = &m->device;
    return (struct iz_shadow){p->shadow, p->base, p->shadow ? p->bytes : 0};
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
