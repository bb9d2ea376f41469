/* SPDX-License-Identifier: Apache-2.0 */
/* The scratch of the classifier on a GPU: the plan of a build without CUDA has
 * to know it too, so its arithmetic is C. */
#pragma once

#include <math.h>

#include "codelets/ops/product.h"

IZ_C_BEGIN

/* A loss, or a sum of losses, of targets that nothing is learnt from.  Sums of
 * such numbers are exact below 2^27, so neither order nor cut has a part in
 * them. */
IZ_EITHER double iz_classifier_even(double loss)
{
    return rint(loss * 0x1p26) * 0x1p-26;
}

/* logits and grad are [rows, cols], cols being the vocabulary rounded up, and
 * so are the rows of w and dw: the library's fast products want that.  Of the
 * columns beyond the vocabulary those of logits hold nothing, and those of grad
 * zeros.  Rows of w beyond it are finite. */
struct iz_classifier_parts {
    struct iz_view product; /* workspace of the matrix products */
    double *loss;           /* [M]: of every row */
    int32_t *target;        /* [M]: a copy in device memory */
    struct iz_view logits;  /* fp32 */
    struct iz_view grad;    /* of the logits; the same memory where fp32 */
    struct iz_view w;       /* where it lies if it has room behind it, else a
                             * copy */
    struct iz_view dw;      /* where dw is summed over the chunks: in place, or
                             * scratch where it has more rows, and in fp32 where
                             * it must be rounded at the end; rows = 0: not
                             * wanted */
    struct iz_view b;       /* fp32 [1,cols], zeros beyond; or none */
    struct iz_view db;      /* fp32 [1 + chunks,cols]: all, and of each chunk */
    int64_t rows;           /* of a chunk */
    int64_t bytes;          /* of all scratch */
};

/* base: the scratch, or NULL to learn its size. */
struct iz_classifier_parts iz_classifier_parts(const struct iz_exec *x,
                                               const struct iz_classifier *c,
                                               void *base);

/* The products of a chunk of rows: logits [n,cols] of a [n,C], and da and the
 * part of dw [cols,C] that the gradient d [n,cols] of these logits gives. */
struct iz_product iz_classifier_logits(struct iz_view logits, struct iz_view a,
                                       struct iz_view w);
struct iz_product iz_classifier_da(struct iz_view da, struct iz_view d,
                                   struct iz_view w);
struct iz_product iz_classifier_dw(struct iz_view dw, struct iz_view d,
                                   struct iz_view a, bool add);

IZ_C_END
