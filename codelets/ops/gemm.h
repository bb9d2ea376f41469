/* SPDX-License-Identifier: Apache-2.0 */
/* The one door to fp32 matrix products on the CPU: single-threaded, and any
 * number of workers may call at the same time.  Whose kernels compute them is
 * chosen in codelets/ops/blas.h. */
#pragma once

#include <stdbool.h>
#include <stdint.h>

/* C = alpha op(A) op(B) + beta C, all row-major; op(A) is [m,k], op(B) [k,n],
 * and ta, tb say that the matrix is stored transposed.  With beta = 0 C is not
 * read. */
struct iz_gemm {
    int64_t m, n, k;
    const float *a;
    int64_t lda;
    bool ta;
    const float *b;
    int64_t ldb;
    bool tb;
    float *c;
    int64_t ldc;
    float alpha, beta;
};

void iz_gemm_cpu(const struct iz_gemm *g);

/* oneDNN's products in place of the BLAS library's; not while others call. */
void iz_gemm_use_onednn(bool use);
bool iz_gemm_by_onednn(void);
