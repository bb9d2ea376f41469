/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels around parts of attention's. */
#pragma once

#include <stdint.h>

#include "codelets/flat/dtype.h"

IZ_C_BEGIN

/* Single instructions of codelets/kernels/mma.cuh: c [16,8] in fp32 from a
 * [16,16] and b [16,8], row-major, of a 16-bit type t.
 *
 * Every lane picks its elements by the formulas of the PTX ISA. */
void mma_by_formulas(float *c, const uint16_t *a, const uint16_t *b,
                     enum iz_dtype t, void *stream);
/* Through asynchronous copies to shared memory, loads of matrices for a and for
 * b = bt^T [8,16] with `as_rows`, else transposed loads of b. */
void mma_by_loads(float *c, const uint16_t *a, const uint16_t *b, int as_rows,
                  enum iz_dtype t, void *stream);

/* What block i has, i < blocks: a tile, how many follow it, and its head, or
 * its group of `group` heads; of `all` heads, `chunk` at a time. */
void attention_order(int *head, int *tile, int *after, int blocks, int all,
                     int chunk, int group);

IZ_C_END
