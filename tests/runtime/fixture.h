/* SPDX-License-Identifier: Apache-2.0 */
/* What the suites share: cmocka, a folder and its files, what was printed,
 * processes as ranks (collectives over shared memory, without MPI), and tasks
 * that end the job. */
#pragma once

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/comm/coll.h"
#include "tests/codelets/base/dies.h"

#define N_OF(a) ((int)(sizeof(a) / sizeof(a)[0]))

/* Per test: a fresh folder, its absolute path without links, on a file system
 * with O_DIRECT where there is one. */
#define CASE(f) cmocka_unit_test_setup_teardown(f, make_folder, remove_folder)
extern char folder[256];
int make_folder(void **state);
int remove_folder(void **state);

/* "folder/name", formatted; the last few results stay valid. */
const char *in_folder(const char *name, ...)
    __attribute__((format(printf, 1, 2)));

/* A text of JSON in which ' stands for "; the last few stay valid. */
const char *json(const char *text);

/* Whole files.  contents: malloc'ed, with a NUL behind; bytes may be NULL. */
char *contents(const char *path, int64_t *bytes);
void replace(const char *path, const void *p, int64_t bytes);
/* Writes a text; returns the path. */
const char *write_text(const char *path, const char *text);
/* -1 if there is none. */
int64_t size_of(const char *path);

/* What goes to standard error between the two is in `said`. */
extern char said[1 << 16];
void listen_begin(void);
void listen_end(void);
void assert_said(const char *words);

/* The value of a call, and in `said` what it printed. */
extern int64_t heard;
#define HEARD(call) (listen_begin(), heard = (call), listen_end(), heard)
#define assert_fails(call, err, words)                                         \
    (assert_int_equal(HEARD(call), err), assert_said(words))

/* Runs f on n ranks, each a process of its own: what all of them returned
 * (0..98), or -signal; they may not differ.  iz_die ends a process with DIED.
 * What they print is in `said`. */
#define DIED 99
int on_ranks(int n, int (*f)(struct iz_coll *c, void *arg), void *arg);
void all_return(int n, int (*f)(struct iz_coll *c, void *arg), void *arg,
                int want);

/* The collectives of one rank alone. */
extern struct iz_coll alone;

/* A repeatable sequence, and a number of it below n. */
uint64_t random_next(void);
int64_t random_below(int64_t n);
/* Changes one of n bytes, or puts a piece of them over another. */
void damage(char *p, int64_t n);

/* Mounts a tmpfs of this size on folder/name; skips the test where that is not
 * allowed.  Unmounted with the folder. */
const char *mount_small(const char *name, int kib, int flags);
