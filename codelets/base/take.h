/* SPDX-License-Identifier: Apache-2.0 */
/* Memory for a process's own lists and texts, which are small beside what a
 * plan counts (runtime/tier/memory.h).  Without it a rank cannot go on, nor can
 * those that wait for it: nobody has to ask whether it came. */
#pragma once

#include <stdint.h>

#include "codelets/base/build.h"

/* n elements of `size` bytes, zeroed and never NULL; free() gives them back.
 * Where there is no memory the job ends: "no memory for WHAT". */
void *iz_take(int64_t n, int64_t size, const char *what, ...) IZ_PRINTF(3, 4);

/* The list p of n elements with room for *room, or a longer copy in its place
 * if that is full.  What is behind the n is not set. */
void *iz_take_more(void *p, int64_t n, int *room, int64_t size,
                   const char *what);

/* The list p, or a longer copy in its place, with room for n elements. */
void *iz_take_longer(void *p, int64_t n, int64_t size, const char *what);

/* A copy of the first n bytes of a text, and '\0'. */
char *iz_take_text(const char *text, int64_t n);
