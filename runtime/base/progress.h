/* SPDX-License-Identifier: Apache-2.0 */
/* How far work on many bytes is, on standard error: a line that changes on a
 * terminal, else a line every ten seconds (IZ_PROGRESS: other seconds).
 * Nothing for work that ends within a second or two. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct iz_progress {
    const char *what; /* borrowed until the end */
    int64_t total, begin_ns, every_ns;
    _Atomic int64_t done, shown_ns, shown; /* shown: bytes, -1: nothing yet */
    atomic_flag showing;
    int columns; /* of the terminal, 0: plain lines */
    bool quiet;  /* of the ranks that do not speak */
    bool live;   /* an unfinished line stands there */
};

/* Who this process is, before the first line: only the first rank speaks, and
 * with several only IZ_LIVE tells that a terminal is watched. */
void iz_progress_rank(int rank, int ranks);
void iz_progress_begin(struct iz_progress *p, const char *what, int64_t bytes);
/* Any thread. */
void iz_progress_add(struct iz_progress *p, int64_t bytes);
void iz_progress_end(struct iz_progress *p);

/* Columns of the terminal behind a file descriptor that somebody watches, or 0.
 * Open MPI gives every rank a terminal, watched or not, so with several ranks
 * the caller has to say so: IZ_LIVE.  IZ_PLAIN: none. */
int iz_terminal_columns(int fd, int ranks);
