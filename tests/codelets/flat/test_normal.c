/* SPDX-License-Identifier: Apache-2.0 */
/* Normal random numbers at every SIMD level of the processor: one by one
 * against libm, by their bits, and at one level their distribution.  Everything
 * is a function of the seeds, so that what passes once passes always; bounds
 * are five standard deviations unless said. */
#include <math.h>

#include "codelets/base/mix.h"
#include "codelets/flat/flat.h"
#include "tests/codelets/flat/flat_test.h"

enum { MANY = 10000000, HALF = IZ_NORMAL_BLOCK / 2 };

static float *numbers(uint64_t seed, uint64_t stream, int64_t n)
{
    float *x = take((size_t)n * sizeof(*x));
    iz_flat_normal(x, n, seed, stream, 0, 1.0f);
    return x;
}

/* ---- each number ---- */

/* The 32-bit word i of a block's hashes. */
static uint32_t word(uint64_t key, int64_t block, int64_t i)
{
    uint64_t h = iz_mix(key + (uint64_t)(block * HALF + i / 2) * IZ_GOLDEN);
    return (uint32_t)(i % 2 ? h >> 32 : h);
}

/* Element i by the same words and libm in double.  The radius' 31 bits are the
 * middles of intervals of [0, 1]; they and the angle are rounded to fp32. */
static double by_libm(uint64_t key, int64_t i)
{
    int64_t block = i / IZ_NORMAL_BLOCK, j = i % IZ_NORMAL_BLOCK;
    uint32_t w = word(key, block, j % HALF);
    float k = (float)(w >> 1) + 0.5f;
    double angle = (float)(int32_t)word(key, block, HALF + j % HALF);
    double r = sqrt(-2 * log(k * 0x1p-31)), turn = angle * 0x1p-31 * acos(0.0);
    return (w & 1 ? -r : r) * (j < HALF ? cos(turn) : sin(turn));
}

static void normal_agrees_with_libm(void **state)
{
    enum { N = 1 << 20 };
    const uint64_t key = iz_mix(iz_mix(11 + IZ_GOLDEN) + 12);
    float *x = numbers(11, 12, N);
    for (int i = 0; i < N; i++)
        assert_true(fabs(x[i] - by_libm(key, i)) <= 1e-6);
    free(x);
}

static void normal_does_not_depend_on_pieces(void **state)
{
    enum { N = 2999 };
    static float whole[N], cut[N];
    const int64_t first = ((int64_t)1 << 33) + 1;
    iz_flat_normal(whole, N, 42, 9, first, 0.02f);
    for (int64_t at = 0, k; at < N; at += k) {
        k = random_piece(600, N - at);
        iz_flat_normal(cut + at, k, 42, 9, first + at, 0.02f);
    }
    assert_memory_equal(whole, cut, sizeof(whole));
}

/* The bits are the same on every machine. */
static void normal_bits_are_known(void **state)
{
    static float x[4096];
    iz_flat_normal(x, 4096, 2024, 5, 77, 0.02f);
    assert_true(iz_flat_hash(0, x, 4096) == 0xc838a342a7e59ac0u);
}

/* ---- all of them ---- */

/* What share of a normal distribution is below z. */
static double below(double z)
{
    return 0.5 * erfc(-z / sqrt(2.0));
}

/* Chi-square of n counts with equal expectation has n - 1 degrees of freedom: a
 * sum far below their number is as wrong as one far above. */
static void assert_even(const int64_t *count, int n, int64_t total)
{
    double expected = (double)total / n, sum = 0;
    for (int i = 0; i < n; i++) {
        double d = (double)count[i] - expected;
        sum += d * d / expected;
    }
    assert_true(fabs(sum - (n - 1)) < 5 * sqrt(2.0 * (n - 1)));
}

static int compare_floats(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static void normal_has_normal_distribution(void **state)
{
    enum { CELLS = 4096, SORTED = 1 << 20 };
    static int64_t count[CELLS];
    float *x = numbers(7, 3, MANY);
    for (int i = 0; i < CELLS; i++)
        count[i] = 0;
    for (int i = 0; i < MANY; i++)
        count[(int)(below(x[i]) * CELLS)]++;
    assert_even(count, CELLS, MANY);
    qsort(x, SORTED, sizeof(*x), compare_floats);
    /* Kolmogorov and Smirnov's largest distance, at 1 in 10^5 */
    for (int i = 0; i < SORTED; i++)
        assert_true(fabs(below(x[i]) - (i + 0.5) / SORTED) <
                    2.47 / sqrt(SORTED));
    free(x);
}

enum { SIDE = 16 }; /* cells of equal probability */

struct cells {
    float *x;
    uint8_t *cell;
};

static struct cells cells_of(uint64_t seed, uint64_t stream)
{
    struct cells c = {numbers(seed, stream, MANY), take(MANY)};
    for (int i = 0; i < MANY; i++)
        c.cell[i] = (uint8_t)(below(c.x[i]) * SIDE);
    return c;
}

/* Of numbers i of a and i + lag of b: no correlation, none of the squares, and
 * all pairs of cells equally often. */
static void assert_independent(const struct cells *a, const struct cells *b,
                               int lag)
{
    int64_t count[SIDE * SIDE] = {0}, n = MANY - lag;
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < n; i++) {
        double p = a->x[i], q = b->x[i + lag];
        sum += p * q;
        squares += (p * p - 1) * (q * q - 1);
        count[a->cell[i] * SIDE + b->cell[i + lag]]++;
    }
    assert_true(fabs(sum) < 5 * sqrt((double)n));
    assert_true(fabs(squares) < 5 * 2 * sqrt((double)n));
    assert_even(count, SIDE * SIDE, n);
}

/* Lag HALF has the two numbers of a pair, lag 1 the two halves of a hash. */
static void normal_numbers_are_independent(void **state)
{
    static const int lags[] = {1,    2,        3,    16,       HALF - 1,
                               HALF, HALF + 1, 1600, 2 * HALF, 4096};
    struct cells c[] = {cells_of(1, 1), cells_of(1, 2), cells_of(2, 1)};
    for (size_t i = 0; i < sizeof(lags) / sizeof(*lags); i++)
        assert_independent(&c[0], &c[0], lags[i]);
    assert_independent(&c[0], &c[1], 0);
    assert_independent(&c[0], &c[2], 0);
    assert_independent(&c[1], &c[2], 0);
    assert_independent(&c[0], &c[1], 1);
    for (int i = 0; i < 3; i++) {
        free(c[i].x);
        free(c[i].cell);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(normal_agrees_with_libm),
        cmocka_unit_test(normal_does_not_depend_on_pieces),
        cmocka_unit_test(normal_bits_are_known),
        cmocka_unit_test(normal_has_normal_distribution),
        cmocka_unit_test(normal_numbers_are_independent),
    };
    return levels_run("normal", tests, sizeof(tests) / sizeof(tests[0]), 2);
}
