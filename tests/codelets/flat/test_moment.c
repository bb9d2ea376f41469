/* SPDX-License-Identifier: Apache-2.0 */
/* States in fewer bytes: what is representable stays, the rest is rounded
 * without bias to a neighbour, and the bits depend on key and position alone;
 * at every SIMD level of the processor. */
#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "codelets/base/mix.h"
#include "codelets/flat/half.h"
#include "codelets/flat/moment.h"
#include "codelets/flat/simd.h"
#include "tests/codelets/flat/levels.h"
#include "tests/codelets/flat/random.h"

enum { BLOCK = IZ_MOMENT_BLOCK, N = 64 * BLOCK };

static const enum iz_moment_type types[] = {IZ_MOMENT_F32, IZ_MOMENT_BF16,
                                            IZ_MOMENT_FP8};

static struct iz_moments moments_new(enum iz_moment_type t, enum iz_moment w)
{
    size_t bytes = (size_t)iz_moment_bytes(t, N);
    struct iz_moments x = {take(bytes), t, w, N};

    memset(x.p, 0, bytes);
    return x;
}

/* m of both signs or v, over many orders of magnitude within a block. */
static void fill(float *x, enum iz_moment w)
{
    for (int i = 0; i < N; i++) {
        x[i] = random_float(1.0) * expf(random_float(20.0)) * 1e-4f;
        x[i] = w == IZ_MOMENT_V ? x[i] * x[i] : x[i];
        x[i] = i % 37 == 5 ? 0 : x[i];
    }
}

static void a_fresh_array_is_zero(void **state)
{
    float x[N];

    for (int i = 0; i < 6; i++) {
        struct iz_moments a = moments_new(types[i / 2], i % 2);

        iz_moment_load(x, &a, 0, N);
        for (int j = 0; j < N; j++)
            assert_true(x[j] == 0 && !signbit(x[j]));
        free(a.p);
    }
}

/* Stored again with any key, what was read gives the same bytes. */
static void what_is_representable_stays(void **state)
{
    float x[N], y[N];

    for (int i = 0; i < 6; i++) {
        struct iz_moments a = moments_new(types[i / 2], i % 2);

        fill(x, i % 2);
        iz_moment_store(&a, 0, x, N, 1, 0);
        iz_moment_load(x, &a, 0, N);
        iz_moment_store(&a, 0, x, N, 99, 6400);
        iz_moment_load(y, &a, 0, N);
        assert_memory_equal(x, y, sizeof(x));
        free(a.p);
    }
}

/* The distance between the values around x that the type has, in a block whose
 * largest number is `most`. */
static double step_at(enum iz_moment_type t, enum iz_moment w, double x,
                      double most)
{
    int e, top;

    frexp(x, &e);
    if (t == IZ_MOMENT_BF16)
        return ldexp(1, e - 8);
    frexp(most, &top);
    /* One binade may be left free above the largest number. */
    int least = top - (w == IZ_MOMENT_M ? 14 : 30) + 1;
    return x < ldexp(1, least) ? ldexp(1, least) : ldexp(1, e - 4);
}

static void check_rounding(enum iz_moment_type t, enum iz_moment w)
{
    enum { KEYS = 4000 };
    struct iz_moments a = moments_new(t, w);
    double *mean = take(N * sizeof(*mean));
    float x[N], y[N];

    fill(x, w);
    memset(mean, 0, N * sizeof(*mean));
    for (int k = 0; k < KEYS; k++) {
        iz_moment_store(&a, 0, x, N, iz_mix((uint64_t)k), 0);
        iz_moment_load(y, &a, 0, N);
        for (int i = 0; i < N; i++)
            mean[i] += y[i] / (double)KEYS;
    }
    for (int i = 0; i < N; i++) {
        double most = 0, step;

        for (int j = i / BLOCK * BLOCK; j < (i / BLOCK + 1) * BLOCK; j++)
            most = fmax(most, fabs((double)x[j]));
        step = step_at(t, w, fabs((double)x[i]), most);
        assert_true(fabs((double)(y[i] - x[i])) <= step);
        /* a uniform choice has a deviation of half a step at most */
        if (w == IZ_MOMENT_M || (double)x[i] > 2 * step)
            assert_true(fabs(mean[i] - (double)x[i]) <
                        5 * step / 2 / sqrt(KEYS));
        if (x[i] == 0)
            assert_true(y[i] == 0);
        if (w == IZ_MOMENT_V && x[i] > 0)
            assert_true(y[i] > 0);
    }
    free(mean);
    free(a.p);
}

static void rounding_has_no_bias(void **state)
{
    check_rounding(IZ_MOMENT_BF16, IZ_MOMENT_M);
    check_rounding(IZ_MOMENT_BF16, IZ_MOMENT_V);
    check_rounding(IZ_MOMENT_FP8, IZ_MOMENT_M);
    check_rounding(IZ_MOMENT_FP8, IZ_MOMENT_V);
}

static void bits_do_not_depend_on_pieces(void **state)
{
    float x[N];

    for (int i = 0; i < 6; i++) {
        struct iz_moments a = moments_new(types[i / 2], i % 2);
        struct iz_moments b = moments_new(types[i / 2], i % 2);

        fill(x, i % 2);
        iz_moment_store(&a, 0, x, N, 7, 128);
        for (int64_t at = 0, n; at < N; at += n) {
            n = BLOCK * (1 + (int64_t)(random_bits() % 9));
            n = n < N - at ? n : N - at;
            iz_moment_store(&b, at, x + at, n, 7, 128 + at);
        }
        assert_memory_equal(a.p, b.p, (size_t)iz_moment_bytes(types[i / 2], N));
        free(a.p);
        free(b.p);
    }
}

/* As a checkpoint does it: pieces of any length, in any order. */
static void pieces_of_any_length_read_the_same(void **state)
{
    float x[N], y[N];

    for (int i = 0; i < 6; i++) {
        struct iz_moments a = moments_new(types[i / 2], i % 2);
        struct iz_moments b = moments_new(types[i / 2], i % 2);
        const int64_t half = N / 2 + 17;

        fill(x, i % 2);
        iz_moment_store(&a, 0, x, N, 7, 128);
        for (int64_t at = 0, n; at < N; at += n) {
            int64_t to = (at + half) % N;

            n = 1 + (int64_t)(random_bits() % 100);
            n = n < N - at ? n : N - at;
            n = n < N - to ? n : N - to;
            iz_moment_get(y, &a, to, n);
            iz_moment_put(&b, to, y, n);
        }
        iz_moment_load(x, &a, 0, N);
        iz_moment_load(y, &b, 0, N);
        assert_memory_equal(x, y, sizeof(x));
        free(a.p);
        free(b.p);
    }
}

/* States whose keys follow each other are rounded by numbers of their own. */
static void states_are_independent(void **state)
{
    struct iz_moments m = moments_new(IZ_MOMENT_BF16, IZ_MOMENT_M);
    struct iz_moments v = moments_new(IZ_MOMENT_BF16, IZ_MOMENT_V);
    const uint16_t *a = m.p, *b = v.p;
    float x[N];
    int same = 0;

    for (int i = 0; i < N; i++)
        x[i] = 1 + 1.f / 256; /* half a step */
    iz_moment_store(&m, 0, x, N, 7, 0);
    iz_moment_store(&v, 0, x, N, 8, 0);
    for (int i = 0; i < N; i++)
        same += a[i] == b[i];
    assert_in_range(same, N / 2 - 5 * 32, N / 2 + 5 * 32);
    free(m.p);
    free(v.p);
}

static void what_is_not_finite_shows(void **state)
{
    const float bad[] = {INFINITY, -INFINITY, NAN};
    float x[N], y[N];

    for (int i = 0; i < 18; i++) {
        struct iz_moments a = moments_new(types[i / 6], i / 3 % 2);

        fill(x, i / 3 % 2);
        x[100] = bad[i % 3];
        iz_moment_store(&a, 0, x, N, 1, 0);
        iz_moment_load(y, &a, 0, N);
        assert_false(isfinite(y[100]));
        assert_true(isfinite(y[0]) && isfinite(y[128]));
        free(a.p);
    }
}

/* The bytes are the same on every machine and at every level. */
static void bits_are_known(void **state)
{
    static const uint64_t want[] = {0x13671068288fdf16u, 0x1936ceac2a652dd1u,
                                    0xd029eb620037522cu, 0x737e56e43d51b1bbu};
    float x[N];

    for (int i = 0; i < 4; i++) {
        struct iz_moments a = moments_new(types[1 + i / 2], i % 2);
        const unsigned char *c = a.p;
        uint64_t h = 0;

        for (int j = 0; j < N; j++)
            x[j] = iz_bits_float(0x30000000u +
                                 (uint32_t)j * 0x1234567u % 0x0fffffffu);
        iz_moment_store(&a, 0, x, N, 5 + (uint64_t)(i % 2), 64000);
        for (int64_t j = 0; j < iz_moment_bytes(a.type, N); j++)
            h = iz_mix(h + c[j]);
        assert_true(h == want[i]);
        free(a.p);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_fresh_array_is_zero),
        cmocka_unit_test(what_is_representable_stays),
        cmocka_unit_test(rounding_has_no_bias),
        cmocka_unit_test(bits_do_not_depend_on_pieces),
        cmocka_unit_test(pieces_of_any_length_read_the_same),
        cmocka_unit_test(states_are_independent),
        cmocka_unit_test(what_is_not_finite_shows),
        cmocka_unit_test(bits_are_known),
    };

    return levels_run(tests, sizeof(tests) / sizeof(tests[0]));
}
