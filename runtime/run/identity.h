/* SPDX-License-Identifier: Apache-2.0 */
/* The identity of a run: one canonical text of everything that decides what it
 * computes, and more.  It is sorted lines "name value": every key of the config
 * in effect, the program, what decides bits on this machine, variables of the
 * environment, each file of the data and of imported weights by length and
 * hash.  All ranks have the same before step 0, checkpoints hold it, and a
 * resumed run is compared with that of its checkpoint.  What another value
 * means is said by enum iz_change, of keys in the table of keys, of the other
 * lines in identity.c. */
#pragma once

#include "runtime/run/state.h"

/* Of the lines that decide results (IZ_CHANGE_SAME, IZ_CHANGE_TOLD): equal for
 * runs that differ in stage, homes, schedule, workers or intervals.  A resumed
 * run that changes such a line has another. */
uint64_t iz_identity_hash(const char *text);

/* The text as far as it is known: of the config that was read, with r->facts
 * or, before they are there, the command line.  malloc'ed. */
char *iz_identity_text(const struct run *r);

/* The lines of what is no key: data and imported weights (of a resumed run
 * those that it began with), and what decides bits here.  The files are read,
 * up to 1 GiB in all; of larger ones blocks that lie evenly.  malloc'ed; NULL,
 * with the reason printed: a file cannot be read. */
char *iz_identity_facts(const struct run *r);

/* Whether all ranks have the same lines, but for IZ_CHANGE_OWN and GPUs.  All
 * ranks; -EINVAL on all with each key, both values and both ranks printed by
 * the first. */
int iz_identity_agree(const struct run *r, const char *text);

/* What differs from the run that it goes on with, printed by the first rank.
 * -EINVAL if it is another run.  *changes: what has changed, as JSON {"key":
 * ["before", "now"], ...}, malloc'ed. */
int iz_identity_compare(const struct run *r, const char *text, char **changes);
