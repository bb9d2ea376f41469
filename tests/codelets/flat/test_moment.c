/* SPDX-License-Identifier: Apache-2.0 */
/* States in fewer bytes: what is representable stays, and the bits depend on
 * key and position alone; at every SIMD level of the processor.  That the rest
 * is rounded without bias to a neighbour, m and v, two steps and neighbours
 * independently, was measured when the generator was chosen; who changes the
 * known bits measures again. */
#include <math.h>
#include <string.h>

#include "codelets/base/mix.h"
#include "codelets/flat/half.h"
#include "codelets/flat/moment.h"
#include "tests/codelets/flat/flat_test.h"

enum { BLOCK = IZ_MOMENT_BLOCK, N = 64 * BLOCK };

/* Two arrays of zeros, and numbers for them; all kinds have their turn. */
static struct iz_moments a, b;
static float x[N];

static struct iz_moments moments_new(enum iz_moment_type t, enum iz_moment w)
{
    size_t bytes = (size_t)iz_moment_bytes(t, N);
    return (struct iz_moments){memset(take(bytes), 0, bytes), t, w, N};
}

/* m of both signs or v, over many orders of magnitude within a block. */
static int fresh(void **state)
{
    a = moments_new(a.type, a.which);
    b = moments_new(a.type, a.which);
    for (int i = 0; i < N; i++) {
        x[i] = random_float(1.0) * expf(random_float(20.0)) * 1e-4f;
        x[i] = a.which == IZ_MOMENT_V ? x[i] * x[i] : x[i];
        x[i] = i % 37 == 5 ? 0 : x[i];
    }
    return 0;
}

static int gone(void **state)
{
    free(a.p);
    free(b.p);
    return 0;
}

/* So are the zeros of a new array.  Stored again with any key, what was read
 * gives the same bytes.  A v that is not 0 has not become 0. */
static void what_is_representable_stays(void **state)
{
    float y[N];
    iz_moment_load(y, &b, 0, N);
    for (int i = 0; i < N; i++)
        assert_true(y[i] == 0 && !signbit(y[i]));
    iz_moment_store(&a, 0, x, N, 1, 0);
    iz_moment_load(y, &a, 0, N);
    for (int i = 0; i < N; i++)
        assert_true(a.which == IZ_MOMENT_M || (y[i] > 0) == (x[i] > 0));
    iz_moment_store(&a, 0, y, N, 99, 6400);
    iz_moment_load(x, &a, 0, N);
    assert_memory_equal(x, y, sizeof(y));
}

/* Of whole blocks; then, as a checkpoint does it, of any length and in any
 * order. */
static void bits_do_not_depend_on_pieces(void **state)
{
    const size_t bytes = (size_t)iz_moment_bytes(a.type, N);
    const int64_t half = N / 2 + 17;
    float y[N];
    iz_moment_store(&a, 0, x, N, 7, 128);
    for (int64_t at = 0, n; at < N; at += n) {
        n = BLOCK * random_piece(9, (N - at) / BLOCK);
        (at / BLOCK % 2 ? iz_moment_put : iz_moment_store)(&b, at, x + at, n, 7,
                                                           128 + at);
    }
    assert_memory_equal(a.p, b.p, bytes);
    memset(b.p, 0, bytes);
    for (int64_t at = 0, n; at < N; at += n) {
        int64_t to = (at + half) % N;
        n = random_piece(100, N - at);
        n = n < N - to ? n : N - to;
        iz_moment_get(y, &a, to, n);
        iz_moment_put(&b, to, y, n, 99, 6400 + to);
    }
    iz_moment_load(x, &a, 0, N);
    iz_moment_load(y, &b, 0, N);
    assert_memory_equal(x, y, sizeof(y));
}

/* The bytes are the same on every machine and at every level. */
static void bits_are_known(void **state)
{
    static const uint64_t want[][2] = {
        [IZ_MOMENT_BF16] = {0x11b3a704d10e9fd1u, 0x1f9c42328e5aaa97u},
        [IZ_MOMENT_FP8] = {0x319c37ff2e0a4d95u, 0x03a6be282e9f4725u}};
    const unsigned char *c = a.p;
    uint64_t h = 0;
    for (int j = 0; j < N; j++)
        x[j] = iz_float_of_bits(0x30000000u +
                                (uint32_t)j * 0x1234567u % 0x0fffffffu);
    iz_moment_store(&a, 0, x, N, 5 + (uint64_t)a.which, 64000);
    for (int64_t j = 0; j < iz_moment_bytes(a.type, N); j++)
        h = iz_mix(h + c[j]);
    assert_true(a.type == IZ_MOMENT_F32 || h == want[a.type][a.which]);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, fresh, gone)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(what_is_representable_stays),
        TEST(bits_do_not_depend_on_pieces),
        TEST(bits_are_known),
    };
    int failed = 0;
    for (int i = 0; i < 6; i++) {
        static const char *const groups[] = {"f32-m",  "f32-v", "bf16-m",
                                             "bf16-v", "fp8-m", "fp8-v"};
        a.type = (enum iz_moment_type)(i / 2);
        a.which = (enum iz_moment)(i % 2);
        failed += levels_run(groups[i], tests, sizeof(tests) / sizeof(*tests));
    }
    return failed;
}
