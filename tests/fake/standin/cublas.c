/* SPDX-License-Identifier: Apache-2.0 */
/* Stand-in for cuBLAS: what StarPU is linked with, and does not call for this
 * program. */
#include <cublas_v2.h>

#include <stdio.h>
#include <stdlib.h>

static cublasStatus_t lacking(void)
{
    fputs("stand-in: there is no cuBLAS\n", stderr);
    abort();
}

#pragma GCC diagnostic ignored "-Wattribute-alias"
#define LACKING(f) __typeof__(f) f __attribute__((alias("lacking")))
LACKING(cublasCreate);
LACKING(cublasDestroy);
LACKING(cublasInit);
LACKING(cublasSetKernelStream);
LACKING(cublasSetStream);
LACKING(cublasShutdown);
