/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdint.h>

#include "codelets/flat/dtype.h"

/* Fills device memory with numbers from -1 to 1, the same every time, by
 * doubling what is there: a product of zeros would draw less power and run
 * faster.  Waits. */
void iz_pattern_fill(char *p, int64_t bytes, enum iz_dtype t);
