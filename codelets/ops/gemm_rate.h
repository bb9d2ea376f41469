/* SPDX-License-Identifier: Apache-2.0 */
/* How fast the matrix library is here: the yardstick of a run. */
#ifndef IZ_CODELETS_OPS_GEMM_RATE_H
#define IZ_CODELETS_OPS_GEMM_RATE_H

#include <stddef.h>

/* Best rate of y[m,n] = a[m,k] b[k,n] in fp32 on the calling thread within
 * about `seconds`, flop/s. */
double iz_blas_rate(int m, int n, int k, double seconds);

/* The same with bf16 operands (codelets/ops/gemm16.h). */
double iz_gemm16_rate(int m, int n, int k, double seconds);

/* How many times faster than in fp32 that product is with bf16 operands of
 * which a has to be rounded first; in CPU time of the calling thread, which
 * takes a few of each, at least 5 ms.  0 where it cannot be made. */
double iz_gemm16_gain(int m, int n, int k);
/* Less than this is not worth other bits. */
#define IZ_GEMM16_LEAST_GAIN 1.2

/* "OpenBLAS 0.3.21 SkylakeX" or what the library tells; "" if nothing. */
void iz_blas_name(char *out, size_t size);

/* Sentence about a setting of the environment that makes BLAS slow here, or "".
 */
void iz_blas_warning(char *out, size_t size);

#endif
