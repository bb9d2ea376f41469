/* SPDX-License-Identifier: Apache-2.0 */
/* The stand-in for the CUDA runtime in one process: order of streams and
 * events, memory, copies, and the mistakes that it must find, each of which is
 * made in a child process that this program starts with the mistake's name. */
#define _GNU_SOURCE
#include <semaphore.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>
#include <cuda_runtime_api.h>

#include "tests/fake/standin/standin.h"
#include "tests/standin/child.h"

enum { STEPS = 100, BYTES = 4096, MEM_MB = 4 };

static void *device_take(size_t n)
{
    void *p = NULL;

    assert_int_equal(cudaMalloc(&p, n), cudaSuccess);
    assert_non_null(p);
    return p;
}

static char *pinned_take(size_t n)
{
    void *p = NULL;

    assert_int_equal(cudaHostAlloc(&p, n, cudaHostAllocDefault), cudaSuccess);
    return p;
}

static cudaStream_t stream_take(void)
{
    cudaStream_t s;

    assert_int_equal(cudaStreamCreate(&s), cudaSuccess);
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

struct trail {
    int n;
    int order[STEPS];
};

struct step {
    struct trail *trail;
    int number;
};

static void leave_mark(void *arg)
{
    struct step *s = arg;

    s->trail->order[s->trail->n++] = s->number;
}

static void test_stream_keeps_order(void **state)
{
    struct trail t = {0};
    struct step steps[STEPS];
    cudaStream_t s = stream_take();

    for (int i = 0; i < STEPS; i++) {
        steps[i] = (struct step){&t, i};
        assert_int_equal(cudaLaunchHostFunc(s, leave_mark, &steps[i]), 0);
    }
    assert_int_equal(cudaStreamSynchronize(s), cudaSuccess);
    assert_int_equal(cudaStreamQuery(s), cudaSuccess);
    assert_int_equal(t.n, STEPS);
    for (int i = 0; i < STEPS; i++)
        assert_int_equal(t.order[i], i);
    assert_int_equal(cudaStreamDestroy(s), cudaSuccess);
}

static void wait_for(void *sem)
{
    sem_wait(sem);
}

static void post(void *sem)
{
    sem_post(sem);
}

static void test_streams_run_side_by_side(void **state)
{
    cudaStream_t a = stream_take(), b = stream_take();
    sem_t sem;

    sem_init(&sem, 0, 0);
    cudaLaunchHostFunc(a, wait_for, &sem);
    assert_int_equal(cudaStreamQuery(a), cudaErrorNotReady);
    cudaLaunchHostFunc(b, post, &sem);
    assert_int_equal(cudaDeviceSynchronize(), cudaSuccess);
    cudaStreamDestroy(a);
    cudaStreamDestroy(b);
}

/* b waits for the first recording of e, although e is recorded again on c,
 * where it is over at once. */
static void test_wait_is_for_the_recording_before_it(void **state)
{
    cudaStream_t a = stream_take(), b = stream_take(), c = stream_take();
    struct trail t = {0};
    struct step first = {&t, 1}, second = {&t, 2};
    cudaEvent_t e;
    sem_t sem;

    sem_init(&sem, 0, 0);
    assert_int_equal(cudaEventCreate(&e), cudaSuccess);
    cudaLaunchHostFunc(a, wait_for, &sem);
    cudaLaunchHostFunc(a, leave_mark, &first);
    assert_int_equal(cudaEventRecord(e, a), cudaSuccess);
    assert_int_equal(cudaStreamWaitEvent(b, e, 0), cudaSuccess);
    cudaLaunchHostFunc(b, leave_mark, &second);
    assert_int_equal(cudaEventQuery(e), cudaErrorNotReady);
    assert_int_equal(cudaEventRecord(e, c), cudaSuccess);
    assert_int_equal(cudaEventSynchronize(e), cudaSuccess);
    assert_int_equal(cudaStreamQuery(b), cudaErrorNotReady);
    sem_post(&sem);
    cudaStreamSynchronize(b);
    assert_int_equal(t.order[0], 1);
    assert_int_equal(t.order[1], 2);
    assert_int_equal(cudaEventDestroy(e), cudaSuccess);
    cudaStreamDestroy(a);
    cudaStreamDestroy(b);
    cudaStreamDestroy(c);
}

static void test_unknown_stream_is_refused(void **state)
{
    cudaStream_t s = stream_take();

    cudaStreamDestroy(s);
    assert_int_equal(cudaStreamQuery(s), cudaErrorInvalidResourceHandle);
    assert_int_equal(cudaGetLastError(), cudaErrorInvalidResourceHandle);
    assert_int_equal(cudaGetLastError(), cudaSuccess);
}

/* ---- memory ------------------------------------------------------------- */

static void test_memory_is_poisoned(void **state)
{
    char *host = pinned_take(BYTES), *p = device_take(BYTES);

    assert_true(all_are(host, BYTES, '\xff'));
    memset(host, 0, BYTES);
    cudaMemcpy(host, p, BYTES, cudaMemcpyDeviceToHost);
    assert_true(all_are(host, BYTES, '\xff'));
    assert_int_equal(cudaMemset(p, 7, BYTES), cudaSuccess);
    cudaMemcpy(host, p, BYTES, cudaMemcpyDeviceToHost);
    assert_true(all_are(host, BYTES, 7));
    assert_int_equal(cudaFree(p), cudaSuccess);
    assert_true(all_are(iz_standin_host(p), BYTES, '\xff'));
    assert_int_equal(cudaFree(p), cudaErrorInvalidValue);
    cudaFreeHost(host);
}

static void test_memory_ends(void **state)
{
    size_t all = (size_t)MEM_MB << 20, left, total;
    char *half[2] = {device_take(all / 2), device_take(all / 2)};
    void *p = half;

    assert_int_equal(cudaMalloc(&p, 1), cudaErrorMemoryAllocation);
    assert_null(p);
    assert_int_equal(cudaGetLastError(), cudaErrorMemoryAllocation);
    cudaFree(half[0]);
    cudaMemGetInfo(&left, &total);
    assert_int_equal(left, all / 2);
    assert_int_equal(total, all);
    cudaFree(half[1]);
    cudaFree(device_take(all));
}

static void test_pinned_ranges(void **state)
{
    static char own[BYTES];
    char *p = pinned_take(BYTES);

    assert_true(iz_standin_pinned(p + 1, BYTES - 1));
    assert_false(iz_standin_pinned(p + 1, BYTES));
    assert_false(iz_standin_pinned(own, 1));
    assert_int_equal(cudaHostRegister(own, BYTES / 2, 0), cudaSuccess);
    assert_true(iz_standin_pinned(own, BYTES / 2));
    assert_int_equal(cudaHostRegister(own + 8, 8, 0),
                     cudaErrorHostMemoryAlreadyRegistered);
    assert_int_equal(cudaHostUnregister(own), cudaSuccess);
    assert_int_equal(cudaHostUnregister(own), cudaErrorHostMemoryNotRegistered);
    assert_int_equal(cudaFreeHost(p), cudaSuccess);
    assert_false(iz_standin_pinned(p, 1));
}

static void test_addresses(void **state)
{
    char *p = device_take(BYTES), *host = pinned_take(BYTES);
    struct cudaPointerAttributes a;

    assert_ptr_not_equal(iz_standin_host(p), p);
    assert_ptr_equal((char *)iz_standin_host(p) + 5, iz_standin_host(p + 5));
    assert_ptr_equal(iz_standin_host(host), host);
    assert_ptr_equal(iz_standin_kernel(p, BYTES), iz_standin_host(p));
    cudaPointerGetAttributes(&a, p);
    assert_int_equal(a.type, cudaMemoryTypeDevice);
    cudaPointerGetAttributes(&a, host);
    assert_int_equal(a.type, cudaMemoryTypeHost);
    cudaPointerGetAttributes(&a, &a);
    assert_int_equal(a.type, cudaMemoryTypeUnregistered);
    cudaFree(p);
    cudaFreeHost(host);
}

/* ---- copies ------------------------------------------------------------- */

static void test_copy_there_and_back(void **state)
{
    char *from = pinned_take(BYTES), *to = pinned_take(BYTES);
    char *a = device_take(BYTES), *b = device_take(BYTES);
    int64_t before = iz_standin_stats()->bytes[IZ_STANDIN_D2D];
    cudaStream_t s = stream_take();

    for (int i = 0; i < BYTES; i++)
        from[i] = (char)(i * 7);
    cudaMemcpyAsync(a, from, BYTES, cudaMemcpyHostToDevice, s);
    cudaMemcpyAsync(b, a, BYTES, cudaMemcpyDefault, s);
    cudaMemcpyAsync(to, b, BYTES, cudaMemcpyDeviceToHost, s);
    cudaStreamSynchronize(s);
    assert_memory_equal(from, to, BYTES);
    assert_int_equal(iz_standin_stats()->bytes[IZ_STANDIN_D2D], before + BYTES);
    assert_int_equal(cudaMemcpyAsync(a, from, 8, cudaMemcpyDeviceToHost, s),
                     cudaErrorInvalidValue);
    cudaStreamDestroy(s);
    cudaFree(a);
    cudaFree(b);
    cudaFreeHost(from);
    cudaFreeHost(to);
}

/* Rows of 5 bytes, 16 apart on the device and 8 apart on the host. */
static void test_copy_of_rows(void **state)
{
    char *host = pinned_take(32), *back = pinned_take(64);
    char *p = device_take(64);

    for (int i = 0; i < 32; i++)
        host[i] = (char)i;
    assert_int_equal(cudaMemcpy2D(p, 16, host, 8, 5, 4, cudaMemcpyHostToDevice),
                     0);
    cudaMemcpy(back, p, 64, cudaMemcpyDeviceToHost);
    for (int i = 0; i < 64; i++)
        assert_int_equal(back[i], i % 16 < 5 ? i / 16 * 8 + i % 16 : -1);
    cudaFree(p);
    cudaFreeHost(host);
    cudaFreeHost(back);
}

/* The copy is over when the call returns, although it was to be asynchronous.
 */
static void test_pageable_copy_is_counted(void **state)
{
    char own[64] = {0}, *p = device_take(64);
    int64_t before = iz_standin_stats()->pageable;
    cudaStream_t s = stream_take();

    cudaMemsetAsync(p, 9, 64, s);
    cudaMemcpyAsync(own, p, 64, cudaMemcpyDeviceToHost, s);
    assert_true(all_are(own, 64, 9));
    assert_int_equal(iz_standin_stats()->pageable, before + 1);
    cudaStreamDestroy(s);
    cudaFree(p);
}

/* ---- mistakes ----------------------------------------------------------- */

static void copy_pageable(void)
{
    static char own[64];
    char *p = device_take(64);

    cudaMemcpyAsync(p, own, 64, cudaMemcpyHostToDevice, NULL);
}

static void touch_device_memory(void)
{
    volatile char *p = device_take(64);

    signal(SIGSEGV, SIG_DFL); /* a sanitizer has its own handler */
    p[0] = 1;
}

static void reach_too_far(void)
{
    iz_standin_kernel(device_take(1024), 1025);
}

static void reach_freed(void)
{
    char *p = device_take(1024);

    cudaFree(p);
    iz_standin_kernel(p, 1);
}

static void call_cuda(void *arg)
{
    cudaStreamSynchronize(arg);
}

static void reach_unmapped(void)
{
    static char own[BYTES];

    cudaHostRegister(own, BYTES, cudaHostRegisterMapped);
    assert_ptr_equal(iz_standin_kernel(own, BYTES), own);
    cudaHostUnregister(own);
    cudaHostRegister(own, BYTES, cudaHostRegisterPortable);
    iz_standin_kernel(own, BYTES);
}

static void call_cuda_from_a_stream(void)
{
    cudaStream_t s = stream_take();

    cudaLaunchHostFunc(s, call_cuda, s);
    cudaStreamSynchronize(s);
}

static void leak(void)
{
    char *host = pinned_take(512), *p = device_take(512);

    cudaMemcpy(p, host, 512, cudaMemcpyHostToDevice);
    cudaFree(device_take(1024));
}

static const struct child_body bodies[] = {
    {"copy_pageable", copy_pageable},
    {"touch_device_memory", touch_device_memory},
    {"reach_too_far", reach_too_far},
    {"reach_freed", reach_freed},
    {"reach_unmapped", reach_unmapped},
    {"call_cuda_from_a_stream", call_cuda_from_a_stream},
    {"leak", leak},
    {0}};

static void expect_abort(const char *body, const char *message)
{
    struct child c;

    child_run(&c, body);
    assert_non_null(strstr(c.text, message));
    assert_true(WIFSIGNALED(c.status));
    assert_int_equal(WTERMSIG(c.status), SIGABRT);
}

static void test_mistakes_end_the_program(void **state)
{
    struct child c;

    setenv("IZ_STANDIN_PAGEABLE", "abort", 1);
    expect_abort("copy_pageable", "not pinned");
    unsetenv("IZ_STANDIN_PAGEABLE");
    child_run(&c, "copy_pageable");
    assert_int_equal(c.status, 0);
    expect_abort("reach_too_far", "1025 bytes");
    expect_abort("reach_freed", "in no allocation");
    expect_abort("reach_unmapped", "mapped pinned memory");
    expect_abort("call_cuda_from_a_stream", "has called CUDA");
    child_run(&c, "touch_device_memory");
    assert_true(WIFSIGNALED(c.status));
    assert_int_equal(WTERMSIG(c.status), SIGSEGV);
}

static void test_statistics_are_written(void **state)
{
    static const char *const parts[] = {
        "\"h2d_bytes\": 512, \"h2d_copies\": 1", "\"mallocs\": 2",
        "\"leaked_bytes\": 512", "\"leaked_pinned\": 1",
        "\"peak_bytes\": 1536"};
    char path[] = "/tmp/iz-standin-XXXXXX", text[1024] = "";
    int fd = mkstemp(path);
    struct child c;

    assert_true(fd >= 0);
    setenv("IZ_STANDIN_STATS", path, 1);
    child_run(&c, "leak");
    unsetenv("IZ_STANDIN_STATS");
    assert_int_equal(c.status, 0);
    assert_true(read(fd, text, sizeof(text) - 1) > 0);
    for (size_t i = 0; i < sizeof(parts) / sizeof(*parts); i++)
        assert_non_null(strstr(text, parts[i]));
    close(fd);
    unlink(path);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stream_keeps_order),
        cmocka_unit_test(test_streams_run_side_by_side),
        cmocka_unit_test(test_wait_is_for_the_recording_before_it),
        cmocka_unit_test(test_unknown_stream_is_refused),
        cmocka_unit_test(test_memory_is_poisoned),
        cmocka_unit_test(test_memory_ends),
        cmocka_unit_test(test_pinned_ranges),
        cmocka_unit_test(test_addresses),
        cmocka_unit_test(test_copy_there_and_back),
        cmocka_unit_test(test_copy_of_rows),
        cmocka_unit_test(test_pageable_copy_is_counted),
        cmocka_unit_test(test_mistakes_end_the_program),
        cmocka_unit_test(test_statistics_are_written),
    };

    setenv("IZ_STANDIN_MEM_MB", "4", 1);
    setenv("IZ_STANDIN_JITTER_US", "200", 1);
    if (argc == 2)
        return child_main(bodies, argv[1]);
    return cmocka_run_group_tests_name("standin", tests, NULL, NULL);
}
