/* SPDX-License-Identifier: Apache-2.0 */
/* What Muon makes of a matrix: one with the same singular vectors whose
 * singular values are near 1, by Newton-Schulz's iteration with the quintic of
 * Jordan et al. (Muon: An optimizer for hidden layers in neural networks,
 * 2024), or by the same iteration on X X^T (Zhang, Amsel, Chen, Dao: Gram
 * Newton-Schulz, 2026).  On the CPU in fp32, by one thread: its bits depend on
 * the matrix and its shape, and on whose kernels make products (blas.h).  On a
 * GPU products are of 16-bit operands: see iz_orthogonal_type. */
#pragma once

#include "codelets/ops/exec.h"

IZ_C_BEGIN

/* Rows of `cols` numbers, `stride` apart. */
struct iz_orthogonal {
    float *p;
    int64_t rows, cols, stride;
    int steps;    /* of the iteration */
    bool gram;    /* iterate on X X^T, or X^T X where that is smaller */
    double scale; /* multiplies the result */
};

/* In place, with scratch of the task; a dry run counts. */
void iz_orthogonal(struct iz_exec *x, const struct iz_orthogonal *m);

/* ---- the iteration, whoever forms its products ---- */

#define IZ_ORTHOGONAL_LEAST 1e-7 /* of a norm that is divided by */
#define IZ_ORTHOGONAL_SQUARES 4

/* A matrix of the iteration, in the type of its products. */
struct iz_strided {
    void *p;
    int64_t rows, cols, stride;
};

/* d = scale op(a) op(b) + keep c, or without c where keep is 0; d is none of
 * the others.  Without b: d = c, and scale is added to its diagonal. */
struct iz_strided_product {
    struct iz_strided d, a, b, c;
    bool ta, tb;
    float scale, keep;
};

struct iz_product; /* product.h */
typedef void iz_strided_product_fn(struct iz_exec *x,
                                   const struct iz_strided_product *p,
                                   void *arg);

/* Iterates on a matrix of norm 1 in `at`; the other one has its shape, and the
 * squares its shorter side.  Returns where the result is, of these two. */
struct iz_strided
iz_orthogonal_iterate(struct iz_exec *x, const struct iz_orthogonal *m,
                      struct iz_strided at, struct iz_strided other,
                      const struct iz_strided square[IZ_ORTHOGONAL_SQUARES],
                      iz_strided_product_fn *product, void *arg);

/* The squares that are used: the others may be without memory. */
int iz_orthogonal_squares(const struct iz_orthogonal *m);

/* Type of the products on a GPU, whose sums are in fp32: bf16, as Jordan's, or
 * fp16 for X X^T, whose powers need the bits more than the range. */
static inline enum iz_dtype iz_orthogonal_type(bool gram)
{
    return gram ? IZ_F16 : IZ_BF16;
}

/* The product of operands of this type, whose rows have no gaps. */
struct iz_product iz_orthogonal_product(const struct iz_strided_product *p,
                                        enum iz_dtype t);

/* Scratch of a GPU: two matrices and the squares in that type, sums of squares,
 * and a product's workspace. */
#define IZ_ORTHOGONAL_SUMS 1024

IZ_C_END
