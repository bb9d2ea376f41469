/* SPDX-License-Identifier: Apache-2.0 */
/* What the CUDA ops share and nobody else sees: the libraries' handles of a
 * compute worker, and the matrix product that they are built of. */
#pragma once

#include "codelets/ops/orthogonal.h"
#include "codelets/ops/product.h"

IZ_C_BEGIN

struct iz_cublas; /* handle of cuBLASLt and the algorithms found so far */
struct iz_cudnn;  /* attention_cudnn.h */

/* One per compute worker; no two threads use the same at a time. */
struct iz_cuda {
    struct iz_cublas *blas;
    struct iz_cudnn *dnn; /* NULL until something asks for it */
    /* Of the routes of a mixture of experts whose `end` is at this address of
     * the GPU in this task; NULL: of none. */
    const void *ends_of;
    uint64_t ends_task;
    bool ends_pinned;
    int32_t ends[IZ_EXPERTS_MOST];
};

/* -errno with the reason printed; close accepts NULL. */
int iz_cublas_open(struct iz_cublas **out);
void iz_cublas_close(struct iz_cublas **b);

/* Enqueues the product; scratch has the bytes of iz_product_pad at least.
 * False when the library finds no way for a product with a bias, whatever the
 * reason; then no result is written.  One without that it cannot do ends the
 * job. */
bool iz_product_cuda(struct iz_exec *x, const struct iz_product *p,
                     struct iz_view scratch);

/* Copies the first rows and columns of a into y; with `clear` the rest of y
 * becomes 0. */
void iz_matmul_corner_cuda(struct iz_exec *x, struct iz_view y,
                           struct iz_view a, int64_t rows, int64_t cols,
                           bool clear);

/* sum[j] = the sum of column j of dy, in fp32, rounded once: sum [1,N] of the
 * type of dy or fp32.  scratch as for a product. */
void iz_matmul_column_sum_cuda(struct iz_exec *x, struct iz_view sum,
                               struct iz_view dy, struct iz_view scratch);

/* y = r + b in each row: y, r [M,N] of one type, b [1,N] of it or y fp32; r
 * IZ_NONE for zeros.  y may be r. */
void iz_matmul_bias_rows_cuda(struct iz_exec *x, struct iz_view y,
                              struct iz_view r, struct iz_view b);

/* y [rows,cols] of 16 bits = m divided by its norm; sums: scratch of
 * IZ_ORTHOGONAL_SUMS + 1.  And back: m = its scale times y. */
void iz_orthogonal_normalise_cuda(struct iz_exec *x, struct iz_view y,
                                  const struct iz_orthogonal *m, double *sums);
void iz_orthogonal_spread_cuda(struct iz_exec *x, const struct iz_orthogonal *m,
                               struct iz_view y);
/* d = c + a I, squares of one type. */
void iz_orthogonal_shift_square_cuda(struct iz_exec *x, struct iz_view d,
                                     struct iz_view c, float a);

IZ_C_END
