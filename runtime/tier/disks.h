/* SPDX-License-Identifier: Apache-2.0 */
/* One file of the nvme tier on one disk, or striped over several: 64 turns of
 * 1 MiB each go round, and a disk has as many of them as its rate is of all
 * rates.  So every chunk is read and written on all disks at once. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#define IZ_DISKS_MAX 8
#define IZ_DISKS_TURNS 64
#define IZ_DISKS_TURN ((int64_t)1 << 20) /* bytes */

struct iz_disk {
    char *path; /* for messages: the name is removed while the file lives */
    int fd;
    bool linked; /* the name could not be removed at once */
    int64_t bytes;
    double rate; /* bytes/s, measured if there are several disks */
    int turns;   /* of IZ_DISKS_TURNS */
};

struct iz_disks {
    struct iz_disk disk[IZ_DISKS_MAX];
    int n;
    unsigned char whose[IZ_DISKS_TURNS];  /* disk of a turn */
    unsigned char before[IZ_DISKS_TURNS]; /* turns of that disk before it */
};

/* Creates `name` in each of the folders (a list with commas), with allocated
 * space for `bytes` (aligned) in all, and removes the names at once where the
 * file systems allow.  Refuses with the reason printed; negative errno.  Close
 * in either case. */
int iz_disks_open(struct iz_disks *s, const char *folders, const char *name,
                  int64_t bytes);
void iz_disks_close(struct iz_disks *s);

/* Deals the turns by the disks' rates, at least one to each, and spreads those
 * of each disk evenly. */
void iz_disks_stripe(struct iz_disks *s);

/* Where byte `offset` of the whole is: *at in the disk's file, *n more bytes of
 * the whole follow there. */
const struct iz_disk *iz_disks_find(const struct iz_disks *s, int64_t offset,
                                    int64_t *at, int64_t *n);

/* Copies folder i of a list with commas; false: there is none. */
bool iz_disks_folder(const char *folders, int i, char *to, int64_t size);
