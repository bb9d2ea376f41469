/* SPDX-License-Identifier: Apache-2.0 */
/* The status codes that StarPU prints, and the calls of the oldest interface
 * that it makes at its start and end. */
#pragma once

#include <cuda_runtime_api.h>

#pragma GCC visibility push(default)

typedef enum {
    CUBLAS_STATUS_SUCCESS = 0,
    CUBLAS_STATUS_NOT_INITIALIZED = 1,
    CUBLAS_STATUS_ALLOC_FAILED = 3,
    CUBLAS_STATUS_INVALID_VALUE = 7,
    CUBLAS_STATUS_ARCH_MISMATCH = 8,
    CUBLAS_STATUS_MAPPING_ERROR = 11,
    CUBLAS_STATUS_EXECUTION_FAILED = 13,
    CUBLAS_STATUS_INTERNAL_ERROR = 14
} cublasStatus_t;

typedef cublasStatus_t cublasStatus;

cublasStatus cublasInit(void);
cublasStatus cublasShutdown(void);
cublasStatus cublasSetKernelStream(cudaStream_t s);

#pragma GCC visibility pop
