/* SPDX-License-Identifier: Apache-2.0 */
/* The end of the job from inside a task: other ranks wait for us, so one
 * message and then everything stops. */
#pragma once

#include "codelets/base/build.h"

IZ_C_BEGIN

/* Prints "izar: rank R: <message>" on standard error and ends the job. */
IZ_NORETURN void iz_die(const char *fmt, ...) IZ_PRINTF(1, 2);

/* The same of a run that does not go on: writes what is known of that first,
 * and the message names the file. */
IZ_NORETURN void iz_die_stuck(const char *fmt, ...) IZ_PRINTF(1, 2);
/* What writes it: returns the file's name, or NULL: there is none. */
void iz_die_set_box(const char *(*box)(const char *why));

/* What iz_die calls to end the job (MPI_Abort when ranks exist); abort() until
 * set. The prefix is printed before the message, e.g. "rank 1: ". */
void iz_die_set(const char *prefix, void (*end)(int status));

IZ_C_END
