/* SPDX-License-Identifier: Apache-2.0 */
/* What the CUDA ops share and nobody else sees: the libraries' handles of a
 * compute worker, and the matrix product that they are built of. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include "codelets/ops/exec.h"

IZ_C_BEGIN

struct iz_cublas; /* handle of cuBLASLt and the algorithms found so far */
struct iz_cudnn;  /* attention_cudnn.h */

/* One per compute worker; no two threads use the same at a time. */
struct iz_cuda {
    struct iz_cublas *blas;
    struct iz_cudnn *dnn; /* NULL until something asks for it */
};

/* -errno with the reason printed; close accepts NULL. */
int iz_cublas_open(struct iz_cublas **out);
void iz_cublas_close(struct iz_cublas **b);

/* What a product does with its vector. */
enum iz_product_bias {
    IZ_BIAS_NONE,
    IZ_BIAS_ADD,   /* bias[j] is added to column j of d; n elements */
    IZ_BIAS_SUM_A, /* bias[i] = sum over k of op(a)[i,k]; m elements */
    IZ_BIAS_SUM_B, /* bias[j] = sum over k of op(b)[k,j]; n elements */
};

/* d = scale op(a) op(b) + c + bias (scale 0 for 1), all row-major: op(a) is
 * [m,k], op(b) [k,n], d and c [m,n], and ta, tb say that the matrix is stored
 * transposed.  The ld count the elements from one row in memory to the next.  a
 * and b have type `in`, the others `out`.  c may be NULL or d, and has d's ld.
 */
struct iz_product {
    int64_t m, n, k, lda, ldb, ldd;
    const void *a, *b, *c;
    void *d, *bias;
    bool ta, tb;
    enum iz_dtype in, out;
    enum iz_product_bias use;
    float scale;
};

/* Enqueues the product; scratch is the workspace, IZ_PRODUCT_SCRATCH bytes at
 * least.  False when the library finds no way for a product with this `use`,
 * whatever the reason; then nothing is enqueued.  One with IZ_BIAS_NONE that it
 * cannot do ends the job. */
bool iz_product_cuda(struct iz_exec *x, const struct iz_product *p,
                     struct iz_view scratch);

/* sum[j] = the sum of column j of dy, in fp32, rounded once: sum [1,N] of the
 * type of dy or fp32.  scratch as for a product. */
void iz_column_sum_cuda(struct iz_exec *x, struct iz_view sum,
                        struct iz_view dy, struct iz_view scratch);

/* Every row of y [M,N] = that of r [M,N] + b [1,N], r IZ_NONE for zeros; all of
 * one type.  y may be r. */
void iz_bias_rows_cuda(struct iz_exec *x, struct iz_view y, struct iz_view r,
                       struct iz_view b);

IZ_C_END
