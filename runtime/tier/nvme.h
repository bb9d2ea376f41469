/* SPDX-License-Identifier: Apache-2.0 */
/* The nvme tier: a preallocated file of each rank for states, one for
 * parameters and one for boundaries, each with a part on each of several disks,
 * read and written in large aligned requests past the page cache (O_DIRECT,
 * io_uring).  A call blocks its thread, which sleeps in the kernel meanwhile.
 * Where io_uring is forbidden the thread reads and writes request by request,
 * with the same bytes and less for the disk to do at once. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "runtime/tier/disks.h"

#define IZ_NVME_ALIGN 4096

struct iz_nvme;

/* Creates folder/name with `bytes` (rounded up to the alignment) of allocated
 * space and removes the name at once where the file system allows, so that a
 * crash leaves nothing behind.  folders: one, or several with commas, over
 * which the bytes are striped by their measured rates (disks.h).  Refuses with
 * the reason printed: a folder missing, not writable, not enough space (asked
 * and free bytes), no O_DIRECT.  Negative errno. */
int iz_nvme_open(struct iz_nvme **out, const char *folders, const char *name,
                 int64_t bytes, bool checksum);
void iz_nvme_close(struct iz_nvme **f);

/* Offset, bytes and buf aligned to IZ_NVME_ALIGN.  Any thread; regions in
 * flight must not overlap (the task graph sees to that).  Errors end the job:
 * iz_die with file, offset and reason.  With checksum on, each region of
 * what is read that was written as one must have the checksum it was written
 * with. */
void iz_nvme_read(struct iz_nvme *f, void *buf, int64_t offset, int64_t bytes);
void iz_nvme_write(struct iz_nvme *f, const void *buf, int64_t offset,
                   int64_t bytes);

/* Bytes read and written so far. */
void iz_nvme_counts(const struct iz_nvme *f, int64_t *read, int64_t *written);

/* Whether io_uring is forbidden; false for NULL. */
bool iz_nvme_without_uring(const struct iz_nvme *f);

/* Its shares and rates, as long as it is open. */
const struct iz_disks *iz_nvme_disks(const struct iz_nvme *f);
