/* SPDX-License-Identifier: Apache-2.0 */
/* Updates of whole matrices. */
#pragma once

#include "runtime/engine/engine.h"

/* Buffer for the directions of a unit's matrices, free by then; NULL: it has
 * none. */
struct iz_matrix_buffer *iz_matrices_begin(struct iz_engine *e, int unit);
/* Where a chunk's directions are written and updates read: by its states. */
enum iz_side iz_matrices_side(const struct iz_engine *e,
                              const struct iz_chunk *k);
/* How many elements of a chunk are of matrices. */
int64_t iz_matrices_elems(const struct iz_engine *e, int unit,
                          const struct iz_chunk *k);
/* After the directions of all chunks: the owners make updates of them. */
void iz_matrices_update(struct iz_engine *e, int unit,
                        struct iz_matrix_buffer *b);
/* The updates go to the ranks that have the chunks. */
void iz_matrices_back(struct iz_engine *e, int unit,
                      struct iz_matrix_buffer *b);
/* Adds to t that it reads the updates of a chunk. */
void iz_matrices_add(struct iz_engine *e, int unit, const struct iz_chunk *k,
                     const struct iz_matrix_buffer *b, struct iz_task *t);
