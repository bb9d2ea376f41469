/* SPDX-License-Identifier: Apache-2.0 */
/* For which GPU and when emulated kernels and products run, and what memory
 * they reach: at once and any (at_once.c), or in the order of a stream of the
 * stand-in for CUDA and its memory alone (tests/fake/standin/launch.c).  A
 * program has one of the two. */
#pragma once

#include <stddef.h>

#include "codelets/base/build.h"

IZ_C_BEGIN

/* Kernels launched from now on have the shared memory and the instructions of
 * this compute capability, 90 for 9.0, which it is at first. */
void emu_device(int capability);

/* Of their blocks run so many of the first and of the last along x and y; 0:
 * all, as at first. */
void emu_ends(unsigned blocks);

/* Calls run(arg), which owns arg. */
void emu_enqueue(void *stream, void (*run)(void *arg), void *arg);

/* In `run`: where the n bytes at a pointer of a launch can be reached, which
 * ends the program if a GPU could not; NULL stays NULL. */
void *emu_reach(const void *p, size_t n);

/* In `run`: the same for all words of a struct that are addresses of a device;
 * bytes: of the struct, which is aligned to words. */
void emu_reach_words(void *words, size_t bytes);

IZ_C_END
