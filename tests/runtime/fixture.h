/* SPDX-License-Identifier: Apache-2.0 */
/* What the file suites share: a folder, what was printed, other processes as
 * ranks (collectives over shared memory, without MPI), and tasks that end the
 * job. */
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "runtime/comm/coll.h"

#define N_OF(a) ((int)(sizeof(a) / sizeof(a)[0]))

/* Per test: a fresh folder on a file system with O_DIRECT where there is one.
 */
extern char folder[64];
int make_folder(void **state);
int remove_folder(void **state);

/* "folder/name"; the last few results stay valid. */
const char *in_folder(const char *name);

/* What goes to standard error between the two is in `said`. */
extern char said[1 << 16];
void listen_begin(void);
void listen_end(void);
void assert_said(const char *words);

/* Runs f in a process of its own; its exit status, or -signal.  iz_die ends it
 * with status 99.  What it prints is in `said`. */
#define DIED 99
int apart(int (*f)(void *arg), void *arg);

/* The same on n ranks; *result[rank] is what f returned (0..98), or -signal. */
void on_ranks(int n, int (*f)(struct iz_coll *c, void *arg), void *arg,
              int *result);

/* The collectives of one rank alone. */
extern struct iz_coll alone;

/* A repeatable sequence, printed seed. */
uint64_t random_next(void);

/* Mounts a tmpfs of this size on folder/name; skips the test where that is not
 * allowed.  Unmounted with the folder. */
const char *mount_small(const char *name, int kib, int flags);
