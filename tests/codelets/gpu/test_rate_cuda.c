/* SPDX-License-Identifier: Apache-2.0 */
/* The measurement of matrix products: its memory, its operands and its
 * arithmetic, on a runtime of CUDA whose clock this test sets. */
#include "tests/codelets/ops/fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "codelets/kernels/cuda_lib.h"
#include "codelets/ops/gpu_ops.h"

/* What the measured code asked the runtime for. */
static struct {
    char *mem;
    size_t bytes;
    bool full;        /* the GPU has no memory */
    int held, events; /* not given back yet */
    int series;       /* measured so far */
    int products;
    int plain; /* operands that are not uniform in [-1, 1) */
} seen;

cudaError_t cudaMalloc(void **p, size_t bytes)
{
    if (seen.full)
        return cudaErrorMemoryAllocation;
    *p = seen.mem = fixture_take((int64_t)bytes);
    seen.bytes = bytes;
    seen.held++;
    return cudaSuccess;
}

cudaError_t cudaFree(void *p)
{
    assert_ptr_equal(p, seen.mem);
    free(p);
    seen.held--;
    return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes,
                       enum cudaMemcpyKind kind)
{
    bool from_device =
        (char *)from >= seen.mem && (char *)from < seen.mem + seen.bytes;
    assert_true((char *)to >= seen.mem &&
                (char *)to + bytes <= seen.mem + seen.bytes);
    assert_int_equal(from_device, kind == cudaMemcpyDeviceToDevice);
    memcpy(to, from, bytes);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *e)
{
    *e = malloc(1);
    seen.events++;
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    free(e);
    seen.events--;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    return cudaSuccess;
}

/* The first series takes long, the third is the fastest, as if the GPU were
 * cool. */
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b)
{
    static const float times[] = {900, 4, 2, 4, 5};
    assert_ptr_not_equal(a, b);
    *ms = times[seen.series++ % 5];
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
    return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t e)
{
    return "an error";
}

/* Elements that are not in [-1, 1), or nearly all the same. */
static int plain(const char *p, int64_t n, enum iz_dtype t)
{
    int bad = 0, small = 0;
    for (int64_t i = 0; i < n; i++) {
        double x = fabs(fixture_get(p, t, i));
        bad += !(x <= 1);
        small += x < 0.5;
    }
    return bad + (small < n / 3 || small > 2 * n / 3);
}

bool iz_product_cuda(struct iz_exec *x, const struct iz_product *p,
                     struct iz_view scratch)
{
    const char *end = seen.mem + seen.bytes;
    int64_t d = iz_view_bytes(p->d);
    assert_true(p->a.dtype == x->act && p->b.dtype == x->act);
    assert_true(!p->ta && !p->tb && !p->add && !p->c.rows);
    assert_true((const char *)p->d.p + d <= end);
    assert_true((const char *)scratch.p + iz_view_bytes(scratch) <=
                (const char *)p->a.p);
    if (seen.products++ == 0)
        seen.plain = plain(p->a.p, iz_view_len(p->a), x->act) +
                     plain(p->b.p, iz_view_len(p->b), x->act);
    memset(p->d.p, 0xff, (size_t)d);
    return true;
}

/* 4 + 2 + 4 + 5 ms, of which the last two series end behind 2/3 of 13. */
static void rate_is_that_of_the_last_third(void **state)
{
    for (int t = 0; t < 3; t++) {
        struct iz_exec x = {.backend = IZ_CUDA, .act = fixture_types[t]};
        memset(&seen, 0, sizeof(seen));
        double rate = iz_gemm_rate_cuda(&x, 700, 300, 500, 0.013);
        assert_true(fabs(rate - 2 * 10 * 2 * 700. * 300 * 500 / 9e-3) <
                    1e-3 * rate);
        assert_int_equal(seen.series, 5);
        assert_int_equal(seen.products, 50);
        assert_int_equal(seen.plain, 0);
        assert_int_equal(seen.held, 0);
        assert_int_equal(seen.events, 0);
    }
}

static void no_memory_is_no_rate(void **state)
{
    struct iz_exec x = {.backend = IZ_CUDA, .act = IZ_BF16};
    memset(&seen, 0, sizeof(seen));
    seen.full = true;
    assert_true(iz_gemm_rate_cuda(&x, 8, 8, 8, 1) == 0);
    assert_int_equal(seen.products, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rate_is_that_of_the_last_third),
        cmocka_unit_test(no_memory_is_no_rate),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
