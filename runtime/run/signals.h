/* SPDX-License-Identifier: Apache-2.0 */
/* Signals: what ends a run with a checkpoint, and what is an error of a call.
 */
#pragma once

#include <stdatomic.h>

/* Before there is anything to save: a warning (SIGUSR1, SIGUSR2, SIGXCPU) ends
 * the process with a line; SIGINT, SIGTERM and SIGHUP do so by themselves. */
void iz_signals_open(void);

/* From now on all six ask for the end of the run: `stop` becomes the number.
 * SIGINT, SIGTERM or SIGHUP once more ends the process at once. */
void iz_signals_catch(_Atomic int *stop);
