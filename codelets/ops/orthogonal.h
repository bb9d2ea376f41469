/* SPDX-License-Identifier: Apache-2.0 */
/* What Muon makes of a matrix: one with the same singular vectors whose
 * singular values are near 1, by Newton-Schulz's iteration with the quintic of
 * Jordan et al. (Muon: An optimizer for hidden layers in neural networks,
 * 2024).  On the CPU alone, in fp32, by one thread: its bits depend on the
 * matrix and its shape, and on whose kernels make products (blas.h). */
#pragma once

#include "codelets/ops/exec.h"

/* Rows of `cols` numbers, `stride` apart. */
struct iz_orthogonal {
    float *p;
    int64_t rows, cols, stride;
    int steps;    /* of the iteration */
    double scale; /* multiplies the result */
};

/* In place.  Scratch is that of the task; a dry run counts. */
void iz_orthogonal(struct iz_exec *x, const struct iz_orthogonal *m);
