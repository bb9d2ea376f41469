/* SPDX-License-Identifier: Apache-2.0 */
/* Stand-in for the CUDA runtime: memory.  A device is a file in memory that is
 * mapped twice.  cudaMalloc returns addresses of a mapping that nobody may
 * touch, so host code that takes a device pointer for its own crashes; copies
 * and emulated kernels go through the other mapping.  Memory is filled with
 * ones, which are NaN in every type, when it is taken and when it is given
 * back. */
#define _GNU_SOURCE
#include "tests/fake/standin/cudart.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define ALIGN 512
#define POISON 0xff
/* A kernel may be given where rows would begin of which the later ones alone
 * are there: an address in front of the memory, of which it may read nothing.
 */
#define BEFORE ((size_t)16 << 20)

/* What is in use, in the order of addresses. */
struct block {
    struct block *next;
    int64_t at, bytes;
};

struct device {
    char *address, *host; /* the mapping for pointers, the one for access */
    struct block *blocks;
    int64_t used;
};

struct pin {
    struct pin *next;
    const char *p;
    size_t n;
    bool mapped; /* a device may reach it, not only copies */
};

static struct device devices[IZ_STANDIN_MAX_DEVICES];
static struct pin *pins;

/* ---- devices ------------------------------------------------------------ */

/* Behind addresses that nothing else has. */
static char *map(int fd, size_t n, int protection)
{
    char *p = mmap(NULL, n + BEFORE, PROT_NONE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED || mmap(p + BEFORE, n, protection,
                                MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
        iz_standin_die("cannot map the memory of a device");
    return p + BEFORE;
}

void iz_standin_map_devices(void)
{
    size_t n = (size_t)iz_standin_settings.mem_bytes;
    for (int i = 0; i < iz_standin_settings.devices; i++) {
        int fd = memfd_create("iz-standin", MFD_CLOEXEC);
        if (fd < 0 || ftruncate(fd, (off_t)n))
            iz_standin_die("cannot make the memory of a device");
        devices[i].host = map(fd, n, PROT_READ | PROT_WRITE);
        devices[i].address = map(fd, n, PROT_NONE);
        close(fd);
    }
}

int iz_standin_device_of(const void *p)
{
    uintptr_t at = (uintptr_t)p;
    for (int i = 0; i < iz_standin_settings.devices; i++) {
        uintptr_t begin = (uintptr_t)devices[i].address - BEFORE;
        if (at >= begin &&
            at - begin < BEFORE + (size_t)iz_standin_settings.mem_bytes)
            return i;
    }
    return -1;
}

void *iz_standin_host(const void *p)
{
    int d = iz_standin_device_of(p);
    if (d < 0)
        return (void *)(uintptr_t)p;
    return devices[d].host + ((const char *)p - devices[d].address);
}

/* ---- allocation --------------------------------------------------------- */

static void count_used(struct device *d, int64_t bytes)
{
    d->used += bytes;
    iz_standin_count[IZ_STANDIN_BYTES] += bytes;
}

cudaError_t cudaMalloc(void **p, size_t n)
{
    struct device *d = &devices[iz_standin_device()];
    int64_t bytes = ((int64_t)n + ALIGN - 1) / ALIGN * ALIGN;

    *p = NULL;
    if (n == 0)
        return cudaSuccess;
    if (iz_standin_device() == iz_standin_settings.busy)
        return iz_standin_error(cudaErrorMemoryAllocation);
    pthread_mutex_lock(&iz_standin_lock);
    struct block new = {.bytes = bytes}, **b = &d->blocks;
    while (*b && (*b)->at - new.at < bytes) { /* the gap in front is small */
        new.at = (*b)->at + (*b)->bytes;
        b = &(*b)->next;
    }
    if (new.at + bytes <= iz_standin_settings.mem_bytes) {
        new.next = *b;
        *b = iz_standin_dup(&new, sizeof(new));
        count_used(d, bytes);
        memset(d->host + new.at, POISON, (size_t)bytes);
        *p = d->address + new.at;
    }
    pthread_mutex_unlock(&iz_standin_lock);
    return iz_standin_error(*p ? cudaSuccess : cudaErrorMemoryAllocation);
}

/* Waits for the device, as CUDA does. */
cudaError_t cudaFree(void *p)
{
    if (!p)
        return cudaSuccess;
    int i = iz_standin_device_of(p);
    if (i < 0)
        return iz_standin_error(cudaErrorInvalidValue);
    iz_standin_drain_device(i);
    pthread_mutex_lock(&iz_standin_lock);
    struct block **b = &devices[i].blocks;
    while (*b && devices[i].address + (*b)->at != p)
        b = &(*b)->next;
    struct block *gone = *b;
    if (gone) {
        memset(devices[i].host + gone->at, POISON, (size_t)gone->bytes);
        count_used(&devices[i], -gone->bytes);
        *b = gone->next;
    }
    pthread_mutex_unlock(&iz_standin_lock);
    free(gone);
    return iz_standin_error(gone ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    pthread_mutex_lock(&iz_standin_lock);
    *total_bytes = (size_t)iz_standin_settings.mem_bytes;
    *free_bytes = *total_bytes - (size_t)devices[iz_standin_device()].used;
    pthread_mutex_unlock(&iz_standin_lock);
    return cudaSuccess;
}

/* ---- pinned memory ------------------------------------------------------ */

/* Whether bytes are in one pinned range, and in a mapped one if that is asked.
 */
static bool find_pin(const void *p, size_t n, bool mapped)
{
    bool found = false;
    pthread_mutex_lock(&iz_standin_lock);
    for (struct pin *q = pins; q && !found; q = q->next)
        found = (const char *)p >= q->p && (const char *)p + n <= q->p + q->n &&
                (q->mapped || !mapped);
    pthread_mutex_unlock(&iz_standin_lock);
    return found;
}

bool iz_standin_pinned(const void *p, size_t n)
{
    return find_pin(p, n, false);
}

cudaError_t cudaHostRegister(void *p, size_t n, unsigned flags)
{
    struct pin q = {NULL, p, n, flags & cudaHostRegisterMapped};
    bool clash = false;
    if (!p || !n)
        return iz_standin_error(cudaErrorInvalidValue);
    if (iz_standin_settings.no_pinning)
        return iz_standin_error(cudaErrorMemoryAllocation);
    pthread_mutex_lock(&iz_standin_lock);
    for (struct pin *o = pins; o && !clash; o = o->next)
        clash = q.p < o->p + o->n && o->p < q.p + n;
    if (!clash) {
        q.next = pins;
        pins = iz_standin_dup(&q, sizeof(q));
        iz_standin_count[IZ_STANDIN_PINNED]++;
    }
    pthread_mutex_unlock(&iz_standin_lock);
    return iz_standin_error(clash ? cudaErrorHostMemoryAlreadyRegistered
                                  : cudaSuccess);
}

cudaError_t cudaHostUnregister(void *p)
{
    struct pin **at = &pins;
    pthread_mutex_lock(&iz_standin_lock);
    while (*at && (*at)->p != p)
        at = &(*at)->next;
    struct pin *gone = *at;
    if (gone) {
        *at = gone->next;
        iz_standin_count[IZ_STANDIN_PINNED]--;
    }
    pthread_mutex_unlock(&iz_standin_lock);
    free(gone);
    return iz_standin_error(gone ? cudaSuccess
                                 : cudaErrorHostMemoryNotRegistered);
}

/* ---- kernels ------------------------------------------------------------ */

/* Whether [at, at + n) of a device is inside one block. */
static bool live(const struct device *d, int64_t at, int64_t n)
{
    const struct block *b = d->blocks;
    while (b && b->at + b->bytes <= at)
        b = b->next;
    return b && b->at <= at && at + n <= b->at + b->bytes;
}

void *iz_standin_kernel(const void *p, size_t n)
{
    int i = iz_standin_device_of(p);
    bool ok;

    if (i < 0) {
        ok = find_pin(p, n, true);
    } else {
        int64_t at = (const char *)p - devices[i].address;
        pthread_mutex_lock(&iz_standin_lock);
        ok = at < 0 || live(&devices[i], at, (int64_t)n);
        pthread_mutex_unlock(&iz_standin_lock);
    }
    if (!ok)
        iz_standin_die("a device reaches for %zu bytes at %p, which are in no "
                       "allocation of device or mapped pinned memory",
                       n, p);
    return iz_standin_host(p);
}
