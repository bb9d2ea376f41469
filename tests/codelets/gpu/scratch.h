/* SPDX-License-Identifier: Apache-2.0 */
/* A work arena of exactly the size that a dry run found, without a number in
 * it, and with a strip before and after that nobody may touch. */
#ifndef IZ_TESTS_CODELETS_GPU_SCRATCH_H
#define IZ_TESTS_CODELETS_GPU_SCRATCH_H

#include "codelets/ops/exec.h"

/* Its address is a multiple of 64, and of no more than `turn` makes it. */
struct iz_arena scratch_new(int64_t bytes, int turn);

/* Checks the strips and frees. */
void scratch_free(struct iz_arena *a);

#endif
