/* SPDX-License-Identifier: Apache-2.0 */
/* The functions of cuBLASLt that this program calls, each of which loads the
 * library when it is first called and hands over to it.  Linked with it, every
 * process would relocate 350,000 addresses when it starts, also where there is
 * no GPU: 0.1 s and 80 MB of memory. */
#include <dlfcn.h>

#include <cublasLt.h>

#include "codelets/base/die.h"

#define TEXT(x) TEXT_OF(x)
#define TEXT_OF(x) #x
#define LIBRARY "libcublasLt.so." TEXT(CUBLAS_VER_MAJOR)

static void *cublaslt_function(const char *name)
{
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    void *f = library ? dlsym(library, name) : NULL;
    if (!f)
        iz_die("%s", dlerror());
    return f;
}

/* Several threads may be first: all find the same. */
#define HAND_OVER(type, name, parameters, ...)                                 \
    type name parameters                                                       \
    {                                                                          \
        static _Atomic(__typeof__(&name)) f;                                   \
        if (!f)                                                                \
            f = (__typeof__(&name))cublaslt_function(#name);                   \
        return f(__VA_ARGS__);                                                 \
    }

HAND_OVER(const char *, cublasLtGetStatusString, (cublasStatus_t s), s)
HAND_OVER(cublasStatus_t, cublasLtCreate, (cublasLtHandle_t * h), h)
HAND_OVER(cublasStatus_t, cublasLtDestroy, (cublasLtHandle_t h), h)
HAND_OVER(cublasStatus_t, cublasLtMatmulDescInit_internal,
          (cublasLtMatmulDesc_t d, size_t n, cublasComputeType_t c,
           cudaDataType_t t),
          d, n, c, t)
HAND_OVER(cublasStatus_t, cublasLtMatmulDescSetAttribute,
          (cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t a,
           const void *value, size_t n),
          d, a, value, n)
HAND_OVER(cublasStatus_t, cublasLtMatrixLayoutInit_internal,
          (cublasLtMatrixLayout_t l, size_t n, cudaDataType t, uint64_t rows,
           uint64_t cols, int64_t ld),
          l, n, t, rows, cols, ld)
HAND_OVER(cublasStatus_t, cublasLtMatmulPreferenceInit_internal,
          (cublasLtMatmulPreference_t p, size_t n), p, n)
HAND_OVER(cublasStatus_t, cublasLtMatmulPreferenceSetAttribute,
          (cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t a,
           const void *value, size_t n),
          p, a, value, n)
HAND_OVER(cublasStatus_t, cublasLtMatmulAlgoGetHeuristic,
          (cublasLtHandle_t h, cublasLtMatmulDesc_t o, cublasLtMatrixLayout_t a,
           cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
           cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t p, int most,
           cublasLtMatmulHeuristicResult_t r[], int *n),
          h, o, a, b, c, d, p, most, r, n)
HAND_OVER(cublasStatus_t, cublasLtMatmulAlgoCheck,
          (cublasLtHandle_t h, cublasLtMatmulDesc_t o, cublasLtMatrixLayout_t a,
           cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c,
           cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *algo,
           cublasLtMatmulHeuristicResult_t *r),
          h, o, a, b, c, d, algo, r)
HAND_OVER(cublasStatus_t, cublasLtMatmulAlgoConfigGetAttribute,
          (const cublasLtMatmulAlgo_t *algo,
           cublasLtMatmulAlgoConfigAttributes_t a, void *value, size_t n,
           size_t *wrote),
          algo, a, value, n, wrote)
HAND_OVER(cublasStatus_t, cublasLtMatmul,
          (cublasLtHandle_t h, cublasLtMatmulDesc_t o, const void *alpha,
           const void *A, cublasLtMatrixLayout_t a, const void *B,
           cublasLtMatrixLayout_t b, const void *beta, const void *C,
           cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d,
           const cublasLtMatmulAlgo_t *algo, void *workspace, size_t n,
           cudaStream_t stream),
          h, o, alpha, A, a, B, b, beta, C, c, D, d, algo, workspace, n, stream)
