/* SPDX-License-Identifier: Apache-2.0 */
/* What the stand-in's table of ops has of its own; that its ops have the bits
 * of the CPU is shown by test_ops_gpu. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include <cuda_runtime_api.h>

#include "codelets/flat/flat.h"
#include "codelets/ops/gpu_ops.h"

/* Nothing of an op stays in its scratch, and it need not be clear before. */
static void scratch_is_overwritten(void **state)
{
    enum { N = 5000, BYTE = 0x11 };
    struct iz_exec x = {.backend = IZ_CUDA, .act = IZ_F32};
    int64_t bytes = iz_flat_norm2_scratch_bytes(N);
    struct iz_view scratch = {.dtype = IZ_U8, .rows = 1, .cols = bytes};
    unsigned char *found = calloc(1, (size_t)bytes);
    double *norm2;
    void *p;

    assert_int_equal(cudaStreamCreate((cudaStream_t *)&x.stream), cudaSuccess);
    assert_int_equal(cudaMalloc(&scratch.p, (size_t)bytes), cudaSuccess);
    assert_int_equal(cudaMalloc(&p, N * 4), cudaSuccess);
    assert_int_equal(cudaHostAlloc((void **)&norm2, 8, 0), cudaSuccess);
    cudaMemset(scratch.p, BYTE, (size_t)bytes);
    cudaMemset(p, 0, N * 4);
    *norm2 = -1;
    iz_flat_norm2_cuda(&x, norm2, p, IZ_F32, N, scratch);
    assert_int_equal(cudaStreamSynchronize(x.stream), cudaSuccess);
    assert_true(*norm2 == 0);
    cudaMemcpy(found, scratch.p, (size_t)bytes, cudaMemcpyDefault);
    for (int64_t i = 0; i < bytes; i++)
        assert_int_equal(found[i], 0xff);
    cudaFree(scratch.p);
    cudaFree(p);
    cudaFreeHost(norm2);
    cudaStreamDestroy(x.stream);
    free(found);
}

static void handles_and_rate(void **state)
{
    struct iz_exec x = {.backend = IZ_CUDA, .act = IZ_F32};
    struct iz_cuda *c = NULL;

    assert_int_equal(iz_cuda_open(&c), 0);
    assert_non_null(c);
    iz_cuda_close(&c);
    assert_null(c);
    assert_int_equal(iz_cuda_act(IZ_BF16), IZ_F32);
    assert_true(iz_gemm_rate_cuda(&x, 32, 32, 32, 0.1) > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(scratch_is_overwritten),
        cmocka_unit_test(handles_and_rate),
    };

    return cmocka_run_group_tests_name("standin-ops", tests, NULL, NULL);
}
