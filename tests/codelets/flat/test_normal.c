/* SPDX-License-Identifier: Apache-2.0 */
/* Normal random numbers at every SIMD level of the processor: one by one
 * against libm, and by their bits.  That such numbers have a normal
 * distribution and are independent was measured when the formula was chosen;
 * who chooses another one measures again. */
#include <math.h>

#include "codelets/base/mix.h"
#include "codelets/flat/flat.h"
#include "tests/codelets/flat/flat_test.h"

enum { N = 1 << 20, HALF = IZ_NORMAL_BLOCK / 2 };

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
    const uint64_t key = iz_mix(iz_mix(11 + IZ_GOLDEN) + 12);
    const int64_t first = ((int64_t)1 << 33) + 1;
    static float x[N];
    iz_flat_normal(x, N, 11, 12, first, 1.0f);
    for (int i = 0; i < N; i++)
        assert_true(fabs(x[i] - by_libm(key, first + i)) <= 1e-6);
}

/* The same on every machine, and in any pieces. */
static void normal_bits_are_known(void **state)
{
    static float x[4096];
    for (int64_t at = 0, k; at < 4096; at += k) {
        k = random_piece(600, 4096 - at);
        iz_flat_normal(x + at, k, 2024, 5, 77 + at, 0.02f);
    }
    assert_true(iz_flat_hash(0, x, 4096) == 0xc838a342a7e59ac0u);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(normal_agrees_with_libm),
        cmocka_unit_test(normal_bits_are_known),
    };
    return levels_run("normal", tests, sizeof(tests) / sizeof(tests[0]));
}
