/* SPDX-License-Identifier: Apache-2.0 */
/* What tasks do to flat buffers, on whichever side the exec of the task works:
 * a GPU's worker enqueues, a mover with a stream enqueues copies, everything
 * else is done when the function returns. */
#pragma once

#include <stdbool.h>

#include "codelets/flat/quant.h"
#include "codelets/flat/update.h"
#include "codelets/ops/exec.h"

/* Buffers must not overlap.  With a stream either may be device memory. */
void iz_buffer_copy(struct iz_exec *x, void *dst, const void *src,
                    int64_t bytes);
void iz_buffer_clear(struct iz_exec *x, void *p, int64_t bytes);

/* iz_flat_sum, iz_flat_norm2 and iz_update with the same bits on both sides.
 * *norm2 is host memory, pinned where there is a GPU. */
void iz_buffer_sum(struct iz_exec *x, void *out, enum iz_dtype out_type,
                   bool accumulate, const void *const *in, int n_in,
                   enum iz_dtype in_type, int64_t n);
void iz_buffer_norm2(struct iz_exec *x, double *norm2, const void *p,
                     enum iz_dtype type, int64_t n);
/* iz_flat_squares, into such memory. */
void iz_buffer_squares(struct iz_exec *x, double *sum, const void *p,
                       enum iz_dtype type, int64_t n);
/* The sum, and *norm2 of what it leaves in out. */
void iz_buffer_sum_norm2(struct iz_exec *x, double *norm2, void *out,
                         enum iz_dtype out_type, bool accumulate,
                         const void *const *in, int n_in, enum iz_dtype in_type,
                         int64_t n);
/* The n weights of a matrix whose groups follow one another. */
void iz_buffer_quant(struct iz_exec *x, enum iz_quant q, void *out,
                     enum iz_dtype type, const void *groups, int64_t n);
/* iz_update. */
void iz_buffer_update(struct iz_exec *x, const struct iz_update *u);
