/* SPDX-License-Identifier: Apache-2.0 */
/* What products on a GPU share with the choice of their algorithms
 * (product_choice.c). */
#pragma once

#include <stdbool.h>
#include <stdint.h>

#include <cublasLt.h>

#include "codelets/kernels/cuda_lib.h"
#include "codelets/ops/gpu_ops.h"

#define IZ_PRODUCT_PLANS 512
#define IZ_PRODUCT_ALGOS 8 /* that the library is asked for */
#define IZ_PRODUCT_ALIGN 256
#define IZ_PRODUCT_WORKSPACE (IZ_PRODUCT_SCRATCH - IZ_PRODUCT_ALIGN)

/* All that the choice of an algorithm depends on; no padding. */
struct iz_product_key {
    int64_t m, n, k, lda, ldb, ldd, ta, tb, in, out, use, compute;
    int64_t align_a, align_b, align_c, align_d, align_bias;
};

struct iz_product_plan {
    struct iz_product_key key;
    bool taken, possible;
    cublasLtMatmulDescOpaque_t op;
    cublasLtMatrixLayoutOpaque_t a, b, d; /* c has the layout of d */
    cublasLtMatmulAlgo_t algo;
    /* How often a dry run asked for it, and its operands, without memory. */
    int64_t calls;
    struct iz_product asked;
};

/* Open addressing; entries are never removed. */
struct iz_cublas {
    cublasLtHandle_t lt;
    struct iz_product_plan plan[IZ_PRODUCT_PLANS];
};

uint64_t iz_product_hash(const struct iz_product_key *k);

/* Whether an algorithm adds in the same order every time. */
bool iz_matmul_in_order(const cublasLtMatmulAlgo_t *a);

/* The library's algorithms that may be used, the best by its estimate first;
 * returns how many.  None ends the job, unless there is another way. */
int iz_product_search(struct iz_cublas *b, struct iz_product_plan *q,
                      cublasLtMatmulAlgo_t algo[IZ_PRODUCT_ALGOS]);

/* Its first one; none leaves the plan impossible. */
void iz_product_take_first(struct iz_cublas *b, struct iz_product_plan *q);

/* p, of the kind that q is for, by the algorithm of q. */
cublasStatus_t iz_product_enqueue(struct iz_exec *x, struct iz_product_plan *q,
                                  const struct iz_product *p,
                                  struct iz_view scratch);
