/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in for the CUDA runtime in one process: what would make it find
 * less without any other test that notices.  That streams run side by side,
 * that memory is poisoned and ends.  Whether it finds mistakes is asked by
 * faults of tests/faults. */
#include <semaphore.h>
#include <stdlib.h>

#include <cuda_runtime_api.h>

#include "codelets/flat/flat.h"
#include "codelets/kernels/launch_check.h"
#include "codelets/ops/gpu_ops.h"
#include "tests/codelets/base/dies.h"
#include "tests/fake/standin/standin.h"

enum { BYTES = 4096 };

static void *device_take(size_t n)
{
    void *p = NULL;
    assert_int_equal(cudaMalloc(&p, n), cudaSuccess);
    assert_non_null(p);
    return p;
}

static void *pinned_take(size_t n)
{
    void *p = calloc(n, 1);
    assert_int_equal(cudaHostRegister(p, n, cudaHostRegisterMapped), 0);
    return p;
}

static void pinned_free(void *p)
{
    assert_int_equal(cudaHostUnregister(p), cudaSuccess);
    free(p);
}

static cudaStream_t stream_take(void)
{
    cudaStream_t s;
    assert_int_equal(cudaStreamCreateWithFlags(&s, 0), cudaSuccess);
    return s;
}

static bool all_are(const char *p, size_t n, char value)
{
    size_t i = 0;
    while (i < n && p[i] == value)
        i++;
    return i == n;
}

/* ---- streams and events ------------------------------------------------- */

static void wait_for(void *sem)
{
    sem_wait(sem);
}

/* Recorded again on b, which runs beside a, an event is over at once. */
static void test_an_event_is_its_last_recording(void **state)
{
    cudaStream_t a = stream_take(), b = stream_take();
    cudaEvent_t e;
    sem_t sem;
    sem_init(&sem, 0, 0);
    assert_int_equal(cudaEventCreateWithFlags(&e, 0), cudaSuccess);
    assert_int_equal(cudaEventQuery(e), cudaSuccess);
    cudaLaunchHostFunc(a, wait_for, &sem);
    assert_int_equal(cudaStreamQuery(a), cudaErrorNotReady);
    assert_int_equal(cudaEventRecord(e, a), cudaSuccess);
    assert_int_equal(cudaEventQuery(e), cudaErrorNotReady);
    assert_int_equal(cudaEventRecord(e, b), cudaSuccess);
    cudaStreamSynchronize(b);
    assert_int_equal(cudaEventQuery(e), cudaSuccess);
    assert_int_equal(cudaEventRecord(e, a), cudaSuccess);
    assert_int_equal(cudaEventQuery(e), cudaErrorNotReady);
    sem_post(&sem);
    cudaStreamDestroy(a);
    assert_int_equal(cudaEventQuery(e), cudaSuccess);
    assert_int_equal(cudaEventDestroy(e), cudaSuccess);
    cudaStreamDestroy(b);
}

static void wrong_launch(const void *arg)
{
    iz_launch_check(cudaErrorInvalidValue, "k", "f.cu");
}

/* What another call of the thread has left is not the next launch's. */
static void test_a_launch_is_not_blamed_for_others(void **state)
{
    assert_int_equal(cudaFree(state), cudaErrorInvalidValue);
    iz_launch_forget();
    iz_launch_check(cudaGetLastError(), "k", "f.cu");
    iz_launch_check(cudaErrorNotReady, "k", "f.cu");
    dies(wrong_launch, NULL, "launch of k in f.cu: ");
}

/* ---- memory ------------------------------------------------------------- */

static void test_memory_is_poisoned(void **state)
{
    char *host = pinned_take(BYTES), *p = device_take(BYTES);
    cudaMemcpy(host, p, BYTES, cudaMemcpyDeviceToHost);
    assert_true(all_are(host, BYTES, '\xff'));
    assert_int_equal(cudaMemset(p, 7, BYTES), cudaSuccess);
    cudaMemcpy(host, p, BYTES, cudaMemcpyDeviceToHost);
    assert_true(all_are(host, BYTES, 7));
    assert_int_equal(cudaFree(p), cudaSuccess);
    assert_true(all_are(iz_standin_host(p), BYTES, '\xff'));
    assert_int_equal(cudaFree(p), cudaErrorInvalidValue);
    pinned_free(host);
}

static void test_memory_ends(void **state)
{
    size_t all, left, total;
    cudaMemGetInfo(&left, &all);
    char *most = device_take(all - BYTES);
    void *p = state;
    cudaMemGetInfo(&left, &total);
    assert_int_equal(left, BYTES);
    assert_int_equal(total, all);
    assert_int_equal(cudaMalloc(&p, BYTES + 1), cudaErrorMemoryAllocation);
    assert_null(p);
    assert_int_equal(cudaGetLastError(), cudaErrorMemoryAllocation);
    cudaFree(most);
    cudaFree(device_take(all));
}

/* The copy is over when the call returns, although it was to be asynchronous.
 */
static void test_pageable_copy_is_counted(void **state)
{
    char own[64] = {0}, *p = device_take(64);
    int64_t before = iz_standin_count[IZ_STANDIN_PAGEABLE];
    cudaStream_t s = stream_take();
    cudaMemsetAsync(p, 9, 64, s);
    cudaMemcpyAsync(own, p, 64, cudaMemcpyDeviceToHost, s);
    assert_true(all_are(own, 64, 9));
    assert_int_equal(iz_standin_count[IZ_STANDIN_PAGEABLE], before + 1);
    cudaStreamDestroy(s);
    cudaFree(p);
}

/* Nothing of an op stays in its scratch, and it need not be clear before. */
static void test_scratch_is_overwritten(void **state)
{
    enum { N = 5000 };
    struct iz_exec x = {.backend = IZ_CUDA, .stream = stream_take()};
    int64_t bytes = iz_flat_norm2_scratch_bytes(N);
    char *p = device_take(N * 4), *s = device_take((size_t)bytes);
    struct iz_view scratch = {s, IZ_U8, .rows = 1, .cols = bytes};
    double *norm2 = pinned_take(sizeof(*norm2));
    cudaMemset(s, 0x11, (size_t)bytes);
    cudaMemset(p, 0, N * 4);
    *norm2 = -1;
    iz_flat_norm2_cuda(&x, norm2, p, IZ_F32, N, scratch);
    assert_int_equal(cudaStreamSynchronize(x.stream), cudaSuccess);
    assert_true(*norm2 == 0);
    assert_true(all_are(iz_standin_host(s), (size_t)bytes, '\xff'));
    cudaFree(s);
    cudaFree(p);
    pinned_free(norm2);
    cudaStreamDestroy(x.stream);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_an_event_is_its_last_recording),
        cmocka_unit_test(test_a_launch_is_not_blamed_for_others),
        cmocka_unit_test(test_memory_is_poisoned),
        cmocka_unit_test(test_memory_ends),
        cmocka_unit_test(test_pageable_copy_is_counted),
        cmocka_unit_test(test_scratch_is_overwritten),
    };
    return cmocka_run_group_tests_name("standin", tests, NULL, NULL);
}
