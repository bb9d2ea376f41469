/* SPDX-License-Identifier: Apache-2.0 */
/* Matrices that are updated as such: which there are, who makes them, and what
 * states their elements lack. */
#pragma once

#include "runtime/plan/plan.h"

/* Finds the matrices that are updated as such (matrices.c). */
void iz_plan_find_matrices(struct iz_plan *p, const struct iz_config *c,
                           const struct iz_model *m);
/* What the update of one does to its unit's buffer. */
struct iz_orthogonal iz_plan_orthogonal(const struct iz_plan *p,
                                        const struct iz_plan_matrix *a,
                                        float *unit);
/* Scratch of each worker of the host, of a run that computes on a GPU. */
int64_t iz_plan_host_scratch(const struct iz_plan *p);
void iz_plan_matrices_print(const struct iz_plan *p, FILE *out);
/* Where the update of a matrix sets the scratch of all workers, and the run
 * would have `left` bytes for that: names its parameter. */
void iz_plan_matrices_refuse(const struct iz_plan *p, const struct iz_model *m,
                             int64_t left, FILE *err);
/* Blocks of IZ_MOMENT_BLOCK elements that lie wholly in matrices of one
 * parameter lack the optimizer's states of elements, and the arrays of those
 * are packed.  Elements of a unit that lack them before its element `at`, which
 * begins a block or ends the unit. */
int64_t iz_plan_lacks(const struct iz_plan *p, const struct iz_plan_unit *g,
                      int64_t at);
/* Whether the block that begins at `at` lacks them.  *end: as far as the next
 * ones do alike. */
bool iz_plan_lacks_from(const struct iz_plan *p, const struct iz_plan_unit *g,
                        int64_t at, int64_t *end);
/* Of a chunk, on any rank at least: all plan the same bytes. */
int64_t iz_plan_chunk_lacks(const struct iz_plan *p,
                            const struct iz_plan_unit *g, int chunk);
