/* SPDX-License-Identifier: Apache-2.0 */
/* What a program asks of the disk: every fsync, rename and mkdir is written
 * down, and one of them can fail.  Linked into a test, it stands before the C
 * library. */
#pragma once

/* From here on; call `fail`, counted from 0, fails with EIO.  -1: none. */
void disk_begin(int fail);
/* The calls since then. */
int disk_end(void);

/* A name was given up: its directory was synced after the rename. */
void assert_renamed_durably(const char *path);

/* make(i) makes what `name`, a format of i, names in the folder, for each i
 * anew: durable when nothing fails, and an error, before the rename without a
 * trace, whichever call fails. */
void assert_durable_or_refused(int (*make)(int i), const char *name);
