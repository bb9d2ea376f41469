/* SPDX-License-Identifier: Apache-2.0 */
/* The emulation itself: that it catches the faults it is there to catch.  What
 * it computes is seen by every kernel's test. */
#include "codelets/kernels/launch.cuh"
#include "codelets/kernels/mma.cuh"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern "C" {
#include "tests/codelets/base/dies.h"
}

static __global__ void note_order(int *order, int *count)
{
    order[(*count)++] = blockIdx.x * blockDim.x + threadIdx.x;
}

static void order_is_shuffled_and_changes(void **)
{
    int a[128], b[128], count = 0, moved = 0, other = 0;
    IZ_LAUNCH(note_order, 4, 32, 0, NULL, a, &count);
    count = 0;
    IZ_LAUNCH(note_order, 4, 32, 0, NULL, b, &count);
    for (int i = 0; i < 128; i++) {
        moved += a[i] != i;
        other += a[i] != b[i];
    }
    assert_true(moved > 64 && other > 64);
}

static __global__ void look_at_shared(int *nan)
{
    IZ_SHARED(float, dynamic);
    __shared__ float fixed[64];
    int i = threadIdx.x;

    nan[blockIdx.x * 64 + i] = isnan(dynamic[i]) && isnan(fixed[i]);
    dynamic[i] = 0;
    fixed[i] = 0;
}

static void shared_memory_starts_as_nan(void **)
{
    int nan[3 * 64];
    IZ_LAUNCH(look_at_shared, 3, 64, 64 * sizeof(float), NULL, nan);
    for (int i = 0; i < 3 * 64; i++)
        assert_true(nan[i]);
}

static __global__ void shift(float *out, bool wait)
{
    IZ_SHARED(float, s);
    int n = blockDim.x, i = threadIdx.x;

    s[i] = (float)i;
    if (wait)
        __syncthreads();
    out[i] = s[(i + 1) % n];
}

static bool shifted(bool wait)
{
    float out[256];
    IZ_LAUNCH(shift, 1, 256, 256 * sizeof(float), NULL, out, wait);
    for (int i = 0; i < 256; i++)
        if (out[i] != (float)((i + 1) % 256))
            return false;
    return true;
}

static void missing_barrier_shows(void **)
{
    assert_true(shifted(true));
    assert_false(shifted(false));
}

/* Threads that have returned are not waited for, and have no value. */
static __global__ void leave_early(int *out)
{
    if (threadIdx.x >= 40)
        return;
    __syncthreads();
    out[threadIdx.x] = __shfl_down_sync(IZ_ALL_LANES, (int)threadIdx.x, 1);
}

static void returned_threads_are_not_waited_for(void **)
{
    int out[40];
    IZ_LAUNCH(leave_early, 1, 70, 0, NULL, out);
    for (int i = 0; i < 40; i++)
        assert_int_equal(out[i], i == 31 ? 31 : i == 39 ? -1 : i + 1);
}

enum { BARRIERS, BARRIER_AND_WARP, EXCHANGES };

/* The first five threads call another function than the others, or the same one
 * elsewhere. */
static __global__ void diverge(int how)
{
    bool first = threadIdx.x < 5;
    if (how == EXCHANGES && first)
        __shfl_xor_sync(IZ_ALL_LANES, 1, 1);
    else if (how == EXCHANGES)
        __shfl_down_sync(IZ_ALL_LANES, 1, 1);
    else if (first)
        __syncthreads();
    else if (how == BARRIERS)
        __syncthreads();
    else
        __syncwarp();
}

static __global__ void half_mask(void *)
{
    __shfl_xor_sync(0xffffu, 1, 1);
}

static __global__ void write_shared(int at)
{
    IZ_SHARED(char, s);

    *(volatile char *)(s + at) = 1;
}

static __global__ void multiply(void *)
{
    uint32_t a[4] = {}, b[2] = {};
    float c[4] = {};
    iz_mma<IZ_F16>(c, a, b);
}

static __global__ void load_unaligned(float *p)
{
    float v[4];
    iz_load_row(v, p + 1);
    p[0] = v[0];
}

alignas(16) static float some[16];

static void ends(void (*f)(const void *), int signal, const char *text)
{
    struct ending e = ending_of(f, NULL);
    assert_true(WIFSIGNALED(e.status) && WTERMSIG(e.status) == signal);
    if (!strstr(e.text, text))
        fail_msg("it said: %s", e.text);
}

/* A launch on a device of that capability ends the program by a signal, with a
 * message. */
#define ENDS(signal, text, capability, ...)                                    \
    ends(                                                                      \
        [](const void *) {                                                     \
            emu_device(capability);                                            \
            IZ_LAUNCH(__VA_ARGS__);                                            \
        },                                                                     \
        signal, text)

static void faults_end_the_program(void **)
{
    ENDS(SIGABRT, "divergent __syncthreads", 90, diverge, 1, 32, 0, NULL,
         BARRIERS);
    ENDS(SIGABRT, "5 threads at __syncthreads", 90, diverge, 1, 32, 0, NULL,
         BARRIER_AND_WARP);
    ENDS(SIGABRT, "divergent warp", 90, diverge, 1, 32, 0, NULL, EXCHANGES);
    ENDS(SIGABRT, "mask ffff", 90, half_mask, 1, 32, 0, NULL, (void *)NULL);
    ENDS(SIGABRT, "access of 16 bytes", 90, load_unaligned, 1, 1, 0, NULL,
         some);
    ENDS(SIGSEGV, "", 90, write_shared, 1, 1, 256, NULL, 256);
    ENDS(SIGABRT, "bytes of shared memory", 90, write_shared, 1, 1, 228 << 10,
         NULL, 0);
    ENDS(SIGABRT, "65540 bytes of shared memory", 75, write_shared, 1, 1,
         (64 << 10) + 4, NULL, 0);
    ENDS(SIGABRT, "mma needs compute capability 8.0, this is 7.5", 75, multiply,
         1, 32, 0, NULL, (void *)NULL);
    ENDS(SIGABRT, "grid", 90, write_shared, 0, 1, 0, NULL, 0);
    ENDS(SIGABRT, "block", 90, write_shared, 1, 1025, 0, NULL, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(order_is_shuffled_and_changes),
        cmocka_unit_test(shared_memory_starts_as_nan),
        cmocka_unit_test(missing_barrier_shows),
        cmocka_unit_test(returned_threads_are_not_waited_for),
        cmocka_unit_test(faults_end_the_program),
    };
    return cmocka_run_group_tests_name("emulation", tests, NULL, NULL);
}
