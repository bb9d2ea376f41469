/* SPDX-License-Identifier: Apache-2.0 */
/* Products by oneDNN, where it was there at build time: of bf16 matrices,
 * summed in fp32, and of fp32; one thread per caller.  The bits of a product
 * depend on its shape, on the processor, and on the variable ONEDNN_MAX_CPU_ISA
 * (DNNL_MAX_CPU_ISA) by which a user takes instructions from oneDNN. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "codelets/flat/dtype.h"
#include "codelets/ops/gemm.h"

/* m, n, k > 0: C = op(A) op(B) + bias in every row, or C += op(A) op(B) with
 * `add`.  A, B are bf16, row-major without gaps; op(A) is [m,k], op(B) [k,n],
 * and ta, tb say that the matrix is stored transposed. */
struct iz_gemm16 {
    int64_t m, n, k;
    const void *a, *b;
    bool ta, tb;
    const void *bias; /* [n] of bias_type */
    enum iz_dtype bias_type;
    bool biased;
    void *c; /* [m,n] of c_type: fp32, or bf16 without `add` */
    enum iz_dtype c_type;
    bool add;
    void *scratch; /* iz_gemm16_scratch bytes, 64-byte aligned */
};

/* NULL if products of bf16 can be made here, else why not. */
const char *iz_gemm16_missing(void);

/* NULL if those of fp32 can, else why not. */
const char *iz_gemm16_onednn_missing(void);

/* As iz_gemm_cpu (codelets/ops/gemm.h); m, n, k > 0. */
void iz_gemm_onednn(const struct iz_gemm *g);

/* "oneDNN 2.6.3", or "". */
void iz_gemm16_name(char *out, size_t size);

/* Bytes that a product of this shape works in; its pointers are not read.  0
 * where products cannot be made. */
int64_t iz_gemm16_scratch(const struct iz_gemm16 *g);

/* iz_die where the library refuses, which it does not after a call of
 * iz_gemm16_scratch with the same shape. */
void iz_gemm16(const struct iz_gemm16 *g);
