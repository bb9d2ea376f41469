/* SPDX-License-Identifier: Apache-2.0 */
/* The real cuBLASLt is found, and answers through each function that needs no
 * GPU; the others fail for the lack of one, and not of a function. */
#include <cublasLt.h>

#include "tests/codelets/base/dies.h"

static void test_the_library_answers(void **state)
{
    cublasLtMatmulDesc_t d = &(cublasLtMatmulDescOpaque_t){{0}};
    cublasLtMatrixLayout_t l = &(cublasLtMatrixLayoutOpaque_t){{0}};
    cublasLtMatmulPreference_t p = &(cublasLtMatmulPreferenceOpaque_t){{0}};
    cublasLtMatmulAlgo_t a = {{0}};
    cublasLtMatmulHeuristicResult_t r = {0};
    int32_t id = CUBLAS_OP_T, n = 0;
    uint64_t size = 1;

    assert_string_equal(cublasLtGetStatusString(CUBLAS_STATUS_SUCCESS),
                        "success");
    assert_false(cublasLtMatmulDescInit(d, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    assert_false(cublasLtMatmulDescSetAttribute(d, CUBLASLT_MATMUL_DESC_TRANSA,
                                                &id, sizeof(id)));
    assert_false(cublasLtMatrixLayoutInit(l, CUDA_R_16BF, 8, 8, 8));
    assert_false(cublasLtMatmulPreferenceInit(p));
    assert_false(cublasLtMatmulPreferenceSetAttribute(
        p, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &size, sizeof(size)));
    assert_false(cublasLtMatmulAlgoConfigGetAttribute(
        &a, CUBLASLT_ALGO_CONFIG_ID, &id, sizeof(id), NULL));
    assert_true(
        cublasLtMatmulAlgoGetHeuristic(NULL, d, l, l, l, l, p, 1, &r, &n));
    assert_true(cublasLtMatmulAlgoCheck(NULL, d, l, l, l, l, &a, &r));
    assert_true(cublasLtMatmul(NULL, d, NULL, NULL, l, NULL, l, NULL, NULL, l,
                               NULL, l, NULL, NULL, 0, NULL));
    assert_true(cublasLtDestroy(NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_library_answers)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
