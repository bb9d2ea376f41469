/* SPDX-License-Identifier: Apache-2.0 */
/* The handles that StarPU makes for each worker.  There is no arithmetic: the
 * stand-in's kernels are those of the CPU. */
#pragma once

#include <cublas.h>

#pragma GCC visibility push(default)

typedef struct cublasContext *cublasHandle_t;

cublasStatus_t cublasCreate(cublasHandle_t *h);
cublasStatus_t cublasDestroy(cublasHandle_t h);
cublasStatus_t cublasSetStream(cublasHandle_t h, cudaStream_t s);

#pragma GCC visibility pop
