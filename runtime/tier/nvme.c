/* SPDX-License-Identifier: Apache-2.0 */
/* The nvme tier over io_uring: a call borrows a ring, keeps a few requests of
 * its region in flight and gives the ring back.  No page cache and no thread of
 * our own. */
#define _GNU_SOURCE
#include "runtime/tier/nvme.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <liburing.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "codelets/base/die.h"
#include "codelets/base/int64.h"
#include "codelets/base/take.h"
#include "runtime/base/hash.h"

#define RINGS 4  /* callers at a time; more of them wait for a ring */
#define DEPTH 32 /* requests in flight of a caller: a whole chunk */
#define REQUEST_BYTES ((int64_t)1 << 20)
#define PATIENCE 1000 /* completions in a row that bring nothing */

/* A region as it was last written. */
struct region {
    int64_t offset, bytes;
    uint64_t hash;
};

struct iz_nvme {
    struct iz_disks disks;
    bool checksum;
    bool no_uring; /* no io_uring: a thread reads and writes by itself */
    int64_t bytes;
    _Atomic int64_t read, written;

    /* Callers are tasks on several threads: rings and regions are shared. */
    pthread_mutex_t lock;
    pthread_cond_t ring_free;
    struct io_uring ring[RINGS];
    int idle[RINGS], n_idle, n_rings;
    struct region *region; /* sorted, never overlapping */
    int64_t n_regions;
    int max_regions;
};

/* A read or write of one call, cut in requests. */
struct request {
    int64_t offset, bytes;
    int idle_rounds; /* completions in a row without progress */
};

struct transfer {
    struct iz_nvme *f;
    struct io_uring *ring; /* NULL: none */
    char *buf;             /* of the region; a write does not change it */
    bool write;
    int64_t offset, bytes, issued;
    struct request request[DEPTH];
};

/* ---- opening ---- */

/* Linux has rings since 5.1, and these since 5.6. */
static bool can_read_write(struct io_uring *ring)
{
    struct io_uring_probe *p = io_uring_get_probe_ring(ring);
    bool can = p && io_uring_opcode_supported(p, IORING_OP_READ) &&
               io_uring_opcode_supported(p, IORING_OP_WRITE);
    if (p)
        io_uring_free_probe(p);
    return can;
}

/* Containers and kernels may forbid io_uring. */
static int rings_open(struct iz_nvme *f, const char *folders)
{
    while (f->n_rings < RINGS) {
        int err = f->no_uring
                      ? 0
                      : io_uring_queue_init(DEPTH, &f->ring[f->n_rings], 0);
        if (f->n_rings == 0 && !f->no_uring && !err &&
            !can_read_write(&f->ring[0])) {
            io_uring_queue_exit(&f->ring[0]);
            err = -ENOSYS;
        }
        if (f->n_rings == 0 && (err == -EPERM || err == -ENOSYS)) {
            f->no_uring = true;
            continue;
        }
        if (err) {
            fprintf(stderr, "izar: %s: io_uring does not start: %s%s\n",
                    folders, strerror(-err),
                    err == -ENOMEM ? " (ulimit -l: locked memory)" : "");
            return err;
        }
        f->idle[f->n_idle++] = f->n_rings++;
    }
    return 0;
}

int iz_nvme_open(struct iz_nvme **out, const char *folders, const char *name,
                 int64_t bytes, bool checksum)
{
    struct iz_nvme *f = iz_take(1, sizeof(*f), "files");
    assert(bytes > 0);
    pthread_mutex_init(&f->lock, NULL);
    pthread_cond_init(&f->ring_free, NULL);
    f->checksum = checksum;
    f->bytes = round_up(bytes, IZ_NVME_ALIGN);
    int err = rings_open(f, folders);
    if (!err)
        err = iz_disks_open(&f->disks, folders, name, f->bytes);
    if (err)
        iz_nvme_close(&f);
    *out = f;
    return err;
}

void iz_nvme_close(struct iz_nvme **out)
{
    struct iz_nvme *f = *out;
    if (!f)
        return;
    assert(f->n_idle == f->n_rings); /* nothing in flight */
    for (int i = 0; i < f->n_rings && !f->no_uring; i++)
        io_uring_queue_exit(&f->ring[i]);
    iz_disks_close(&f->disks);
    pthread_cond_destroy(&f->ring_free);
    pthread_mutex_destroy(&f->lock);
    free(f->region);
    free(f);
    *out = NULL;
}

/* ---- rings ---- */

static int ring_take(struct iz_nvme *f)
{
    pthread_mutex_lock(&f->lock);
    while (f->n_idle == 0)
        pthread_cond_wait(&f->ring_free, &f->lock);
    int i = f->idle[--f->n_idle];
    pthread_mutex_unlock(&f->lock);
    return i;
}

static void ring_give(struct iz_nvme *f, int i)
{
    pthread_mutex_lock(&f->lock);
    f->idle[f->n_idle++] = i;
    pthread_cond_signal(&f->ring_free);
    pthread_mutex_unlock(&f->lock);
}

/* ---- transfers ---- */

IZ_NORETURN static void transfer_die(const struct transfer *t, int64_t offset,
                                     int64_t bytes, const char *why)
{
    int64_t at, n;
    const struct iz_disk *d = iz_disks_find(&t->f->disks, offset, &at, &n);
    iz_die("nvme: %s of %" PRId64 " bytes at offset %" PRId64 " of %s: %s",
           t->write ? "write" : "read", bytes, at, d->path, why);
}

static void request_queue(struct transfer *t, struct request *p)
{
    if (!t->ring)
        return; /* transfer_direct does it next */
    struct io_uring_sqe *sqe = io_uring_get_sqe(t->ring);
    int64_t at, n;
    const struct iz_disk *d = iz_disks_find(&t->f->disks, p->offset, &at, &n);
    assert(sqe); /* the ring has DEPTH entries, as many as there are requests */
    io_uring_prep_rw(t->write ? IORING_OP_WRITE : IORING_OP_READ, sqe, d->fd,
                     t->buf + (p->offset - t->offset), (unsigned)p->bytes,
                     (uint64_t)at);
    io_uring_sqe_set_data(sqe, p);
}

/* True if a request of the region was left to be queued. */
static bool request_next(struct transfer *t, struct request *p)
{
    int64_t left = t->bytes - t->issued, offset = t->offset + t->issued, at, n;
    if (left == 0)
        return false;
    iz_disks_find(&t->f->disks, offset, &at, &n);
    *p = (struct request){offset, min64(min64(left, REQUEST_BYTES), n), 0};
    t->issued += p->bytes;
    request_queue(t, p);
    return true;
}

/* One completion.  True if the request is still in flight: the rest of a short
 * transfer, a retry, or the next request of the region. */
static bool request_end(struct transfer *t, struct request *p, int res)
{
    if (res < 0 && res != -EINTR && res != -EAGAIN)
        transfer_die(t, p->offset, p->bytes, strerror(-res));
    if (res == 0 && !t->write)
        transfer_die(t, p->offset, p->bytes, "the file ends before it");
    if (res == p->bytes)
        return request_next(t, p);
    /* O_DIRECT continues only at aligned offsets: what came beyond is repeated.
     */
    res = res > 0 ? res / IZ_NVME_ALIGN * IZ_NVME_ALIGN : 0;
    p->idle_rounds = res > 0 ? 0 : p->idle_rounds + 1;
    if (p->idle_rounds > PATIENCE)
        transfer_die(t, p->offset, p->bytes,
                     "gets no further (was the file cut?)");
    p->offset += res;
    p->bytes -= res;
    request_queue(t, p);
    return true;
}

/* How many completions to sleep for.  The cores are busy with compute, so every
 * time this thread has to be woken costs milliseconds in which the disk must
 * have work: it sleeps until all is done, or half of what is in flight where
 * there is more to come. */
static unsigned sleep_for(const struct transfer *t, int in_flight)
{
    bool more = t->issued < t->bytes;
    return (unsigned)(more ? (in_flight + 1) / 2 : in_flight);
}

/* One request after the other. */
static void transfer_direct(struct transfer *t)
{
    struct request p;
    bool more = request_next(t, &p);
    while (more) {
        int64_t at, n;
        int fd = iz_disks_find(&t->f->disks, p.offset, &at, &n)->fd;
        char *buf = t->buf + (p.offset - t->offset);
        ssize_t res = t->write ? pwrite(fd, buf, (size_t)p.bytes, at)
                               : pread(fd, buf, (size_t)p.bytes, at);
        more = request_end(t, &p, res < 0 ? -errno : (int)res);
    }
}

static void transfer_run(struct transfer *t)
{
    int in_flight = 0;
    for (int i = 0; i < DEPTH; i++)
        in_flight += request_next(t, &t->request[i]);
    while (in_flight > 0) {
        struct io_uring_cqe *cqe;
        int err = io_uring_submit_and_wait(t->ring, sleep_for(t, in_flight));
        if (err < 0 && err != -EINTR && err != -EAGAIN && err != -EBUSY)
            transfer_die(t, t->offset, t->bytes, strerror(-err));
        while (io_uring_peek_cqe(t->ring, &cqe) == 0) {
            struct request *p = io_uring_cqe_get_data(cqe);
            int res = cqe->res;
            io_uring_cqe_seen(t->ring, cqe);
            in_flight -= !request_end(t, p, res);
        }
    }
}

static void transfer(struct iz_nvme *f, void *buf, int64_t offset,
                     int64_t bytes, bool write)
{
    int ring = ring_take(f);
    struct transfer t = {.f = f,
                         .ring = f->no_uring ? NULL : &f->ring[ring],
                         .buf = buf,
                         .write = write,
                         .offset = offset,
                         .bytes = bytes};
    assert(offset % IZ_NVME_ALIGN == 0 && bytes % IZ_NVME_ALIGN == 0);
    assert((uintptr_t)buf % IZ_NVME_ALIGN == 0);
    assert(offset >= 0 && bytes >= 0 && bytes <= f->bytes - offset);
    if (f->no_uring)
        transfer_direct(&t);
    else
        transfer_run(&t);
    ring_give(f, ring);
}

/* ---- checksums ---- */

/* First region that ends after `offset`. */
static int64_t region_find(const struct iz_nvme *f, int64_t offset)
{
    int64_t lo = 0, hi = f->n_regions;
    while (lo < hi) {
        int64_t mid = lo + (hi - lo) / 2;
        if (f->region[mid].offset + f->region[mid].bytes <= offset)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* Takes the place of every region that it overlaps. */
static void region_set(struct iz_nvme *f, struct region r)
{
    pthread_mutex_lock(&f->lock);
    f->region = iz_take_more(f->region, f->n_regions, &f->max_regions,
                             sizeof(*f->region), "checksums");
    int64_t at = region_find(f, r.offset), end = at;
    while (end < f->n_regions && f->region[end].offset < r.offset + r.bytes)
        end++;
    memmove(f->region + at + 1, f->region + end,
            (size_t)(f->n_regions - end) * sizeof(r));
    f->region[at] = r;
    f->n_regions += 1 - (end - at);
    pthread_mutex_unlock(&f->lock);
}

static void region_compare(struct iz_nvme *f, const struct region *r,
                           const void *buf)
{
    uint64_t hash = iz_hash(buf, r->bytes);
    int64_t at, n;
    const struct iz_disk *d = iz_disks_find(&f->disks, r->offset, &at, &n);
    if (hash != r->hash)
        iz_die("nvme: %" PRId64 " bytes read at offset %" PRId64
               " of %s are not "
               "those written: checksum %016" PRIx64 ", written %016" PRIx64,
               r->bytes, at, d->path, hash, r->hash);
}

/* All regions that lie wholly in what was read. */
static void region_check(struct iz_nvme *f, const void *buf, int64_t offset,
                         int64_t bytes)
{
    struct region r = {0};
    int64_t end = offset + bytes, from = offset, at;
    for (; from < end; from = r.offset + r.bytes) {
        pthread_mutex_lock(&f->lock);
        at = region_find(f, from);
        r = at < f->n_regions ? f->region[at] : (struct region){end, 1, 0};
        pthread_mutex_unlock(&f->lock);
        if (r.offset >= offset && r.offset + r.bytes <= end)
            region_compare(f, &r, (const char *)buf + (r.offset - offset));
    }
}

/* ---- public ---- */

void iz_nvme_read(struct iz_nvme *f, void *buf, int64_t offset, int64_t bytes)
{
    if (bytes == 0)
        return;
    transfer(f, buf, offset, bytes, false);
    atomic_fetch_add(&f->read, bytes);
    if (f->checksum)
        region_check(f, buf, offset, bytes);
}

void iz_nvme_write(struct iz_nvme *f, const void *buf, int64_t offset,
                   int64_t bytes)
{
    if (bytes == 0)
        return;
    if (f->checksum) /* before: the bytes as they were meant */
        region_set(f, (struct region){offset, bytes, iz_hash(buf, bytes)});
    transfer(f, (void *)(uintptr_t)buf, offset, bytes, true);
    atomic_fetch_add(&f->written, bytes);
}

void iz_nvme_counts(const struct iz_nvme *f, int64_t *read, int64_t *written)
{
    *read = atomic_load(&f->read);
    *written = atomic_load(&f->written);
}

bool iz_nvme_without_uring(const struct iz_nvme *f)
{
    return f && f->no_uring;
}

const struct iz_disks *iz_nvme_disks(const struct iz_nvme *f)
{
    return &f->disks;
}
