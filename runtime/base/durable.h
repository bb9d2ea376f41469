/* SPDX-License-Identifier: Apache-2.0 */
/* Files that survive a crash of the machine.  When iz_durable_replace, _rename
 * or _make_directories returns, its work is on the disk, the entry of the
 * directory too; of iz_durable_create, _copy and _close the bytes are, but that
 * entry only after iz_durable_sync_directory.  Negative errno with "izar: WHO:
 * PATH: WHAT: REASON" printed, except where a comment differs. */
#pragma once

#include <stdint.h>

/* Prints that line for an errno, and returns it negative. */
int iz_durable_refuse(const char *who, const char *path, const char *what,
                      int err);

/* All bytes at an offset of a file.  Prints nothing; a file that ends too early
 * is -ENODATA. */
int iz_durable_put(int fd, const void *from, int64_t bytes, int64_t at);
int iz_durable_get(int fd, void *to, int64_t bytes, int64_t at);

/* Syncs the file unless err is set, closes it, and returns the first error. */
int iz_durable_close(const char *who, const char *path, int fd, int err);

/* Creates a file with this text; the file must not exist. */
int iz_durable_create(const char *who, const char *path, const char *text);
/* Creates or replaces a file, completely or not at all: the text is written to
 * PATH.tmp first. */
int iz_durable_replace(const char *who, const char *path, const char *text);

/* Creates a file with the bytes of another, at most 1 GiB and not all of them
 * in memory at once, but not with those of a Git LFS pointer.  It must not
 * exist; the other may be a symlink to a file.
 */
int iz_durable_copy(const char *who, const char *to, const char *from);

/* For a synced file, or a synced directory of such files. */
int iz_durable_rename(const char *who, const char *from, const char *to);
int iz_durable_sync_directory(const char *who, const char *path);
/* With all directories above it; those that are there stay. */
int iz_durable_make_directories(const char *who, const char *path);
/* A directory of files whose names are among these patterns (fnmatch, ended by
 * NULL), and of such directories of such files, or none.  Refuses before
 * anything is removed if something else is in it: that is not ours.  The file
 * of the first name goes last.  Follows no symlink.  Not synced. */
int iz_durable_remove_directory(const char *who, const char *path,
                                const char *const *names);
/* Only whether that would refuse. */
int iz_durable_check_directory(const char *who, const char *path,
                               const char *const *names);

/* A whole text file of at most 1 GiB and a '\0' behind it; malloc'ed.  NULL
 * with errno, nothing printed. */
char *iz_durable_read(const char *path, int64_t *bytes);
