/* SPDX-License-Identifier: Apache-2.0 */
/* Every op and every function on flat buffers on a GPU, against double
 * precision or the bits of the CPU; also runs on the stand-in, where all bits
 * are the CPU's.  Ends with 77 where there is no GPU.
 *
 * usage: test_ops_gpu [GROUP ...] */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "codelets/gpu/device.h"
#include "codelets/ops/blas.h"
#include "codelets/ops/gpu_ops.h"
#include "tests/codelets/ops/scene.h"

struct backend backend = {
    .x = {.backend = IZ_CUDA, .numerics.logits_bytes = 256 << 20},
    .device = true,
    .piece = 128};

/* Opens the GPU and its libraries; false with the reason printed. */
static bool gpu_open(void)
{
    struct iz_exec *x = &backend.x;
    struct iz_device_info info;
    if (!iz_device_count()) {
        printf("no GPU: %s\n", iz_device_why_none());
        return false;
    }
    if (iz_device_use(0, &info))
        return false;
    printf("GPU: %s, compute capability %d.%d\n", info.name,
           info.capability / 10, info.capability % 10);
    x->numerics.capability = info.capability;
    x->stream = iz_device_stream_open();
    backend.act = iz_cuda_act;
    /* the stand-in's table: the CPU's ops in its streams */
    backend.exact = !backend_acts(IZ_BF16);
    backend.large = !backend.exact;
    backend.piece = backend.exact ? INT64_MAX : backend.piece;
    return x->stream && !backend_renew(NULL);
}

/* The first call loads what a library keeps. */
static void a_measurement_gives_its_memory_back(void **state)
{
    struct iz_device_info info[2];
    backend.x.act = iz_cuda_act(IZ_F32);
    for (int i = 0; i < 2; i++) {
        double rate = iz_gemm_rate_cuda(&backend.x, 1024, 1024, 1024, 0.05);
        assert_true(isfinite(rate) && rate > 0);
        assert_int_equal(iz_device_use(0, &info[i]), 0);
    }
    assert_true(info[0].free_bytes == info[1].free_bytes);
}

int main(int argc, char **argv)
{
    if (!gpu_open())
        return 77;
    iz_blas_open();
    int failed = ops_groups(argc, argv);
    if (argc == 1 || !strcmp(argv[1], "matmul")) {
        const struct CMUnitTest tests[] = {
            cmocka_unit_test(a_measurement_gives_its_memory_back)};
        failed += cmocka_run_group_tests_name("rate", tests, NULL, NULL);
    }
    iz_cuda_close(&backend.x.cuda);
    iz_device_stream_close(backend.x.stream);
    return failed;
}
