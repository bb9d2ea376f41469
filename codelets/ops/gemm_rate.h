/* SPDX-License-Identifier: Apache-2.0 */
/* How fast the matrix library is here: the reference GEMM. */
#pragma once

/* Best rate of y[m,n] = a[m,k] b[k,n] in fp32 on the calling thread within
 * about `seconds`, flop/s of processor time: others beside it do not count. */
double iz_rate_blas(int m, int n, int k, double seconds);

/* Rate of the three products of a layer, whose matrix is [in,out], with `rows`
 * rows of x: y, dx and dw, each the fastest within a third of about `seconds`;
 * 0 if a result is wrong, or without memory. */
double iz_rate_blas_layer(int rows, int in, int out, double seconds);

/* Like iz_rate_blas, with bf16 operands (codelets/ops/gemm16.h). */
double iz_rate_gemm16(int m, int n, int k, double seconds);

/* How many times faster than in fp32 the product is with bf16 operands, if a
 * has to be rounded first.  It is measured in CPU time of the calling thread,
 * over a few products of each type, at least 5 ms.  0 if bf16 products are
 * impossible. */
double iz_rate_gemm16_gain(int m, int n, int k);
/* Less than this is not worth other bits. */
#define IZ_GEMM16_LEAST_GAIN 1.2
