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
#define PAGE 4096
#define POISON 0xff

/* All bytes of a device are in one of its blocks, which are in order. */
struct block {
    struct block *next;
    int64_t at, bytes;
    bool used;
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
    bool ours;   /* of cudaHostAlloc, not of cudaHostRegister */
    bool mapped; /* a device may reach it, not only copies */
};

static struct device devices[IZ_STANDIN_MAX_DEVICES];
static struct pin *pins;

static void *checked(void *p)
{
    if (!p)
        iz_standin_die("no memory");
    return p;
}

/* ---- devices ------------------------------------------------------------ */

static char *map(int fd, size_t n, int protection)
{
    void *p = mmap(NULL, n, protection, MAP_SHARED, fd, 0);

    if (p == MAP_FAILED)
        iz_standin_die("cannot map the memory of a device");
    return p;
}

static void map_device(struct device *d, size_t n)
{
    int fd = memfd_create("iz-standin", MFD_CLOEXEC);

    if (fd < 0 || ftruncate(fd, (off_t)n))
        iz_standin_die("cannot make the memory of a device");
    d->host = map(fd, n, PROT_READ | PROT_WRITE);
    d->address = map(fd, n, PROT_NONE);
    close(fd);
    d->blocks = checked(calloc(1, sizeof(*d->blocks)));
    d->blocks->bytes = (int64_t)n;
}

void iz_standin_map_devices(void)
{
    for (int i = 0; i < iz_standin_settings.devices; i++)
        map_device(&devices[i], (size_t)iz_standin_settings.mem_bytes);
}

int iz_standin_device_of(const void *p)
{
    uintptr_t at = (uintptr_t)p;

    for (int i = 0; i < iz_standin_settings.devices; i++) {
        uintptr_t begin = (uintptr_t)devices[i].address;

        if (at >= begin && at - begin < (size_t)iz_standin_settings.mem_bytes)
            return i;
    }
    return -1;
}

void *iz_standin_host(const void *p)
{
    iz_standin_open();
    int d = iz_standin_device_of(p);
    if (d < 0)
        return (void *)(uintptr_t)p;
    return devices[d].host + ((const char *)p - devices[d].address);
}

/* ---- allocation --------------------------------------------------------- */

/* Cuts a free block, so that its first part has the size that is wanted. */
static void split(struct block *b, int64_t bytes)
{
    struct block *rest = checked(malloc(sizeof(*rest)));

    *rest = (struct block){b->next, b->at + bytes, b->bytes - bytes, false};
    b->next = rest;
    b->bytes = bytes;
}

static struct block *first_fit(struct device *d, int64_t bytes)
{
    for (struct block *b = d->blocks; b; b = b->next)
        if (!b->used && b->bytes >= bytes) {
            if (b->bytes > bytes)
                split(b, bytes);
            return b;
        }
    return NULL;
}

static void count_used(struct device *d, int64_t bytes)
{
    struct iz_standin_stats *c = &iz_standin_counts;

    d->used += bytes;
    c->used_bytes += bytes;
    if (c->used_bytes > c->peak_bytes)
        c->peak_bytes = c->used_bytes;
}

cudaError_t cudaMalloc(void **p, size_t n)
{
    iz_standin_enter();
    struct device *d = &devices[iz_standin_device()];
    int64_t bytes = ((int64_t)n + ALIGN - 1) / ALIGN * ALIGN;

    *p = NULL;
    if (n == 0)
        return cudaSuccess;
    if (iz_standin_device() == iz_standin_settings.busy)
        return iz_standin_error(cudaErrorMemoryAllocation);
    pthread_mutex_lock(&iz_standin_lock);
    struct block *b = first_fit(d, bytes);
    if (b) {
        b->used = true;
        count_used(d, bytes);
        iz_standin_counts.mallocs++;
        memset(d->host + b->at, POISON, (size_t)bytes);
        *p = d->address + b->at;
    } else {
        iz_standin_counts.ooms++;
    }
    pthread_mutex_unlock(&iz_standin_lock);
    return iz_standin_error(b ? cudaSuccess : cudaErrorMemoryAllocation);
}

static void join_next(struct block *b)
{
    struct block *gone = b->next;

    if (b->used || !gone || gone->used)
        return;
    b->bytes += gone->bytes;
    b->next = gone->next;
    free(gone);
}

static bool release(struct device *d, int64_t at)
{
    struct block *before = NULL, *b = d->blocks;

    while (b && b->at != at) {
        before = b;
        b = b->next;
    }
    if (!b || !b->used)
        return false;
    memset(d->host + b->at, POISON, (size_t)b->bytes);
    b->used = false;
    count_used(d, -b->bytes);
    join_next(b);
    if (before)
        join_next(before);
    return true;
}

/* Waits for the device, as CUDA does. */
cudaError_t cudaFree(void *p)
{
    iz_standin_enter();
    if (!p)
        return cudaSuccess;
    int i = iz_standin_device_of(p);
    if (i < 0)
        return iz_standin_error(cudaErrorInvalidValue);
    iz_standin_drain_device(i);
    pthread_mutex_lock(&iz_standin_lock);
    bool ok = release(&devices[i], (char *)p - devices[i].address);
    pthread_mutex_unlock(&iz_standin_lock);
    return iz_standin_error(ok ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    iz_standin_enter();
    pthread_mutex_lock(&iz_standin_lock);
    *total_bytes = (size_t)iz_standin_settings.mem_bytes;
    *free_bytes = *total_bytes - (size_t)devices[iz_standin_device()].used;
    pthread_mutex_unlock(&iz_standin_lock);
    return cudaSuccess;
}

/* ---- pinned memory ------------------------------------------------------ */

static bool pin_holds(const struct pin *q, const char *p, size_t n)
{
    return p >= q->p && p + n <= q->p + q->n;
}

static bool pin_overlaps(const struct pin *q, const char *p, size_t n)
{
    return p < q->p + q->n && q->p < p + n;
}

/* Whether bytes are in one pinned range, and in a mapped one if that is asked.
 */
static bool find_pin(const void *p, size_t n, bool mapped)
{
    bool found = false;

    pthread_mutex_lock(&iz_standin_lock);
    for (struct pin *q = pins; q && !found; q = q->next)
        found = pin_holds(q, p, n) && (q->mapped || !mapped);
    pthread_mutex_unlock(&iz_standin_lock);
    return found;
}

bool iz_standin_pinned(const void *p, size_t n)
{
    return find_pin(p, n, false);
}

static bool pin_add(const char *p, size_t n, bool ours, bool mapped)
{
    struct pin *q = checked(malloc(sizeof(*q)));
    bool clash = false;

    pthread_mutex_lock(&iz_standin_lock);
    for (struct pin *o = pins; o && !clash; o = o->next)
        clash = pin_overlaps(o, p, n);
    *q = (struct pin){pins, p, n, ours, mapped};
    if (!clash) {
        pins = q;
        iz_standin_counts.pinned_ranges++;
    }
    pthread_mutex_unlock(&iz_standin_lock);
    if (clash)
        free(q);
    return !clash;
}

static bool pin_remove(const void *p, bool ours)
{
    struct pin **at = &pins, *q;

    pthread_mutex_lock(&iz_standin_lock);
    while (*at && ((*at)->p != p || (*at)->ours != ours))
        at = &(*at)->next;
    if ((q = *at)) {
        *at = q->next;
        iz_standin_counts.pinned_ranges--;
    }
    pthread_mutex_unlock(&iz_standin_lock);
    free(q);
    return q;
}

cudaError_t cudaHostAlloc(void **p, size_t n, unsigned flags)
{
    (void)flags; /* with one address space all of it is mapped */
    iz_standin_enter();
    if (posix_memalign(p, PAGE, n ? n : 1))
        return iz_standin_error(cudaErrorMemoryAllocation);
    memset(*p, POISON, n);
    pin_add(*p, n, true, true);
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **p, size_t n)
{
    return cudaHostAlloc(p, n, cudaHostAllocDefault);
}

cudaError_t cudaFreeHost(void *p)
{
    iz_standin_enter();
    if (!p)
        return cudaSuccess;
    for (int i = 0; i < iz_standin_settings.devices; i++)
        iz_standin_drain_device(i);
    if (!pin_remove(p, true))
        return iz_standin_error(cudaErrorInvalidValue);
    free(p);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *p, size_t n, unsigned flags)
{
    iz_standin_enter();
    if (!p || !n)
        return iz_standin_error(cudaErrorInvalidValue);
    if (iz_standin_settings.no_pinning)
        return iz_standin_error(cudaErrorMemoryAllocation);
    return iz_standin_error(pin_add(p, n, false, flags & cudaHostRegisterMapped)
                                ? cudaSuccess
                                : cudaErrorHostMemoryAlreadyRegistered);
}

cudaError_t cudaHostUnregister(void *p)
{
    iz_standin_enter();
    return iz_standin_error(
        pin_remove(p, false) ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}

void iz_standin_reset_memory(int device)
{
    struct device *d = &devices[device];

    pthread_mutex_lock(&iz_standin_lock);
    for (struct block *b = d->blocks; b;) {
        bool found = release(d, b->at);

        b = found ? d->blocks : b->next;
    }
    while (pins) {
        struct pin *gone = pins;

        pins = gone->next;
        iz_standin_counts.pinned_ranges--;
        if (gone->ours)
            free((void *)(uintptr_t)gone->p);
        free(gone);
    }
    pthread_mutex_unlock(&iz_standin_lock);
}

/* ---- pointers ----------------------------------------------------------- */

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags)
{
    iz_standin_enter();
    *device = host;
    return iz_standin_error(find_pin(host, 1, true) ? cudaSuccess
                                                    : cudaErrorInvalidValue);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a,
                                     const void *p)
{
    iz_standin_enter();
    void *q = (void *)(uintptr_t)p;
    int d = iz_standin_device_of(p);

    if (d >= 0)
        *a = (struct cudaPointerAttributes){cudaMemoryTypeDevice, d, q, NULL};
    else if (iz_standin_pinned(p, 1))
        *a = (struct cudaPointerAttributes){cudaMemoryTypeHost, 0, q, q};
    else
        *a = (struct cudaPointerAttributes){cudaMemoryTypeUnregistered, -1,
                                            NULL, q};
    return cudaSuccess;
}

/* Whether [at, at + n) of a device is inside one block in use. */
static bool live(const struct device *d, int64_t at, int64_t n)
{
    const struct block *b = d->blocks;

    while (b && b->at + b->bytes <= at)
        b = b->next;
    return b && b->used && at + n <= b->at + b->bytes;
}

void *iz_standin_kernel(const void *p, size_t n)
{
    iz_standin_open();
    int i = iz_standin_device_of(p);
    bool ok;

    if (i < 0) {
        ok = find_pin(p, n, true);
    } else {
        pthread_mutex_lock(&iz_standin_lock);
        ok =
            live(&devices[i], (const char *)p - devices[i].address, (int64_t)n);
        pthread_mutex_unlock(&iz_standin_lock);
    }
    if (!ok)
        iz_standin_die("a device reaches for %zu bytes at %p, which are in no "
                       "allocation of device or mapped pinned memory",
                       n, p);
    return iz_standin_host(p);
}
