/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* O_DIRECT, O_TMPFILE, asprintf, fallocate */

#include "runtime/tier/disks.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "codelets/base/clock.h"
#include "codelets/base/int64.h"
#include "runtime/base/durable.h"
#include "runtime/tier/nvme.h"

/* Of a measurement: as much as a disk needs for its full rate, or the whole
 * file if that is less. */
#define TRIAL_REQUEST ((int64_t)4 << 20)
#define TRIAL_BYTES (16 * TRIAL_REQUEST)

bool iz_disks_folder(const char *folders, int i, char *to, int64_t size)
{
    const char *p = folders;
    for (; i > 0 && p; i--) {
        p = strchr(p, ',');
        p += p != NULL;
    }
    int64_t n = p ? (int64_t)strcspn(p, ",") : size;
    if (n >= size)
        return false;
    memcpy(to, p, (size_t)n);
    to[n] = '\0';
    return true;
}

/* ---- files ---- */

/* Without a name a crash leaves nothing; not all file systems can. */
static int open_without_name(const char *path)
{
    char folder[4096];
    const char *end = strrchr(path, '/');
    int n =
        end ? snprintf(folder, sizeof(folder), "%.*s", (int)(end - path), path)
            : -1;
    return n < 0 || n >= (int)sizeof(folder)
               ? -1
               : open(folder,
                      O_RDWR | O_TMPFILE | O_EXCL | O_DIRECT | O_CLOEXEC, 0600);
}

static int file_create(struct iz_disk *d)
{
    d->fd = open_without_name(d->path);
    if (d->fd >= 0)
        return 0;
    d->fd =
        open(d->path, O_RDWR | O_CREAT | O_EXCL | O_DIRECT | O_CLOEXEC, 0600);
    int err = errno;
    if (d->fd >= 0) {
        d->linked = unlink(d->path) != 0;
        return 0;
    }
    if (err == EINVAL)
        unlink(d->path); /* some file systems create, then refuse the flag */
    return iz_durable_refuse(
        "nvme", d->path,
        err == EINVAL   ? "the file system has no O_DIRECT (tmpfs?)"
        : err == EEXIST ? "another run uses this name, or a crash left it"
                        : "cannot create",
        err);
}

static int no_space(const struct iz_disk *d, int64_t bytes, int64_t free_bytes,
                    int err)
{
    fprintf(stderr,
            "izar: nvme: %s: cannot allocate %" PRId64 " bytes (%" PRId64
            " MiB), %" PRId64 " bytes (%" PRId64 " MiB) are free: %s\n",
            d->path, bytes, bytes >> 20, free_bytes, free_bytes >> 20,
            strerror(err));
    return -err;
}

/* For file systems that claim no space ahead, such as NFS before 4.2: there
 * posix_fallocate writes single bytes, which O_DIRECT refuses. */
static int write_zeros(const struct iz_disk *d, int64_t bytes)
{
    char *zeros = aligned_alloc(IZ_NVME_ALIGN, (size_t)TRIAL_REQUEST);
    int err = zeros ? 0 : ENOMEM;
    if (zeros)
        memset(zeros, 0, (size_t)TRIAL_REQUEST);
    for (int64_t at = d->bytes; !err && at < bytes; at += TRIAL_REQUEST)
        err =
            -iz_durable_put(d->fd, zeros, min64(bytes - at, TRIAL_REQUEST), at);
    free(zeros);
    return err;
}

/* Space is claimed now, not in the middle of a step.  The first write to
 * freshly allocated extents is slow all the same (the file system marks each as
 * written): 0.3 GB/s where a second write does 2.4-4.9. */
static int file_allocate(struct iz_disk *d, int64_t bytes)
{
    struct statvfs st;
    int err;
    if (fstatvfs(d->fd, &st) != 0)
        return iz_durable_refuse("nvme", d->path, "cannot ask for free space",
                                 errno);
    int64_t free_bytes = (int64_t)st.f_bavail * (int64_t)st.f_frsize;
    if (bytes - d->bytes > free_bytes) /* trying would fill it for others */
        return no_space(d, bytes, free_bytes + d->bytes, ENOSPC);
    do
        err = fallocate(d->fd, 0, 0, bytes) ? errno : 0;
    while (err == EINTR);
    if (err == EOPNOTSUPP)
        err = write_zeros(d, bytes);
    if (!err && bytes < d->bytes && ftruncate(d->fd, bytes) != 0)
        err = errno;
    d->bytes = bytes;
    return err ? no_space(d, bytes, free_bytes, err) : 0;
}

static void file_close(struct iz_disk *d)
{
    if (d->fd >= 0)
        close(d->fd);
    if (d->linked && d->path)
        unlink(d->path);
    free(d->path);
}

/* ---- rates ---- */

/* 0, or what went wrong. */
static int move_all(const struct iz_disk *d, void *buf, bool write)
{
    for (int64_t at = 0; at < d->bytes; at += TRIAL_REQUEST) {
        ssize_t n = write ? pwrite(d->fd, buf, (size_t)TRIAL_REQUEST, at)
                          : pread(d->fd, buf, (size_t)TRIAL_REQUEST, at);
        if (n != TRIAL_REQUEST)
            return n < 0 ? errno : EIO;
    }
    return 0;
}

/* One way and back, as a chunk of states goes; the first write is not timed.
 * Then the file is zero again, as a new one is. */
static int measure(struct iz_disk *d)
{
    void *buf = aligned_alloc(IZ_NVME_ALIGN, (size_t)TRIAL_REQUEST);
    if (!buf)
        return -ENOMEM;
    memset(buf, 0x5a, (size_t)TRIAL_REQUEST);
    int err = move_all(d, buf, true);
    int64_t begin = iz_clock_ns();
    if (!err)
        err = move_all(d, buf, true);
    if (!err)
        err = move_all(d, buf, false);
    d->rate = 2e9 * (double)d->bytes / (double)(iz_clock_ns() - begin + 1);
    memset(buf, 0, (size_t)TRIAL_REQUEST);
    if (!err)
        err = move_all(d, buf, true);
    free(buf);
    return err ? iz_durable_refuse("nvme", d->path, "cannot measure its rate",
                                   err)
               : 0;
}

/* ---- turns ---- */

/* The next turn is of the disk that lacks most of its share so far. */
static void spread(struct iz_disks *s)
{
    int lacks[IZ_DISKS_MAX] = {0}, had[IZ_DISKS_MAX] = {0};
    for (int t = 0; t < IZ_DISKS_TURNS; t++) {
        int most = 0;
        for (int i = 0; i < s->n; i++) {
            lacks[i] += s->disk[i].turns;
            if (lacks[i] > lacks[most])
                most = i;
        }
        lacks[most] -= IZ_DISKS_TURNS;
        s->whose[t] = (unsigned char)most;
        s->before[t] = (unsigned char)had[most]++;
    }
}

/* The disk that would be ready first with one more turn. */
static int next_to_take(const struct iz_disks *s)
{
    int best = 0;
    for (int i = 1; i < s->n; i++)
        if ((s->disk[i].turns + 1) * s->disk[best].rate <
            (s->disk[best].turns + 1) * s->disk[i].rate)
            best = i;
    return best;
}

void iz_disks_stripe(struct iz_disks *s)
{
    for (int i = 0; i < s->n; i++)
        s->disk[i].turns = 1;
    for (int t = s->n; t < IZ_DISKS_TURNS; t++)
        s->disk[next_to_take(s)].turns++;
    spread(s);
}

const struct iz_disk *iz_disks_find(const struct iz_disks *s, int64_t offset,
                                    int64_t *at, int64_t *n)
{
    int64_t turn = offset / IZ_DISKS_TURN, in = offset % IZ_DISKS_TURN;
    int64_t k = turn % IZ_DISKS_TURNS;
    const struct iz_disk *d = &s->disk[s->whose[k]];
    *at = offset;
    *n = INT64_MAX - offset;
    if (s->n > 1) {
        *at =
            (turn / IZ_DISKS_TURNS * d->turns + s->before[k]) * IZ_DISKS_TURN +
            in;
        *n = IZ_DISKS_TURN - in;
    }
    return d;
}

/* Each disk's part of `bytes`. */
static void share_out(const struct iz_disks *s, int64_t bytes, int64_t *part)
{
    int64_t round = IZ_DISKS_TURNS * IZ_DISKS_TURN, left = bytes % round;
    for (int i = 0; i < s->n; i++)
        part[i] = bytes / round * s->disk[i].turns * IZ_DISKS_TURN;
    for (int t = 0; left > 0; t++) {
        part[s->whose[t]] += min64(left, IZ_DISKS_TURN);
        left -= IZ_DISKS_TURN;
    }
}

/* ---- opening ---- */

static int create_all(struct iz_disks *s, const char *folders, const char *name)
{
    char folder[4096];
    int err = 0;
    for (int i = 0; !err && iz_disks_folder(folders, i, folder, sizeof(folder));
         i++) {
        struct iz_disk *d = &s->disk[s->n];
        if (i == IZ_DISKS_MAX)
            return iz_durable_refuse("nvme", folders, "too many folders",
                                     E2BIG);
        d->fd = -1;
        if (asprintf(&d->path, "%s/%s", folder, name) < 0) {
            d->path = NULL;
            return -ENOMEM;
        }
        s->n++;
        err = file_create(d);
    }
    return err;
}

int iz_disks_open(struct iz_disks *s, const char *folders, const char *name,
                  int64_t bytes)
{
    int64_t part[IZ_DISKS_MAX], trial = min64(bytes, TRIAL_BYTES);
    int err = create_all(s, folders, name);
    for (int i = 0; s->n > 1 && !err && i < s->n; i++) {
        err = file_allocate(&s->disk[i], round_up(trial, TRIAL_REQUEST));
        if (!err)
            err = measure(&s->disk[i]);
    }
    if (err)
        return err;
    iz_disks_stripe(s);
    share_out(s, bytes, part);
    for (int i = 0; !err && i < s->n; i++)
        err = file_allocate(&s->disk[i], max64(part[i], IZ_NVME_ALIGN));
    return err;
}

void iz_disks_close(struct iz_disks *s)
{
    for (int i = 0; i < s->n; i++)
        file_close(&s->disk[i]);
    s->n = 0;
}
