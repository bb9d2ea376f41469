/* SPDX-License-Identifier: Apache-2.0 */
/* Stand-in for cuBLAS: the handles that StarPU makes and never uses. */
#include <cublas_v2.h>

#include <stdlib.h>

struct cublasContext {
    cudaStream_t stream;
};

cublasStatus cublasInit(void)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus cublasShutdown(void)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus cublasSetKernelStream(cudaStream_t s)
{
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasCreate(cublasHandle_t *h)
{
    *h = calloc(1, sizeof **h);
    return *h ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

cublasStatus_t cublasDestroy(cublasHandle_t h)
{
    free(h);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasSetStream(cublasHandle_t h, cudaStream_t s)
{
    h->stream = s;
    return CUBLAS_STATUS_SUCCESS;
}
