/* SPDX-License-Identifier: Apache-2.0 */
/* Prints on standard error how much of a long work on bytes is done.  A
 * terminal gets one line that changes, anything else a line every ten seconds
 * (IZ_PROGRESS sets another number).  Short work prints nothing: a terminal
 * shows its first line after 1.5 s. */
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
    bool quiet;  /* this rank prints nothing */
    bool live;   /* the terminal has an unfinished line */
};

/* Call before any progress begins.  Only rank 0 prints; with several ranks it
 * takes a terminal as watched only if IZ_LIVE is set. */
void iz_progress_rank(int rank, int ranks);
void iz_progress_begin(struct iz_progress *p, const char *what, int64_t bytes);
/* More bytes are done.  May be called from any thread. */
void iz_progress_add(struct iz_progress *p, int64_t bytes);
void iz_progress_end(struct iz_progress *p);

/* Columns of the terminal behind a file descriptor, or 0 if there is none that
 * somebody watches.  Open MPI gives every rank a terminal, so with several
 * ranks only the environment variable IZ_LIVE makes it a watched one. IZ_PLAIN:
 * 0. */
int iz_progress_columns(int fd, int ranks);
