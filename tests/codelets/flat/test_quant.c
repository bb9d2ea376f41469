/* SPDX-License-Identifier: Apache-2.0 */
/* Weights in 8 bits: by their definition in double precision, however long the
 * group. */
#include <math.h>
#include <string.h>

#include "codelets/flat/quant.h"
#include "tests/codelets/flat/flat_test.h"

enum { N = IZ_QUANT_GROUP, BLOCK = IZ_QUANT_BLOCK };

static struct iz_int8_group g;
static float x[N], y[N], scale[IZ_QUANT_SCALES];

static void quantise(int64_t n)
{
    iz_quant_codes(IZ_QUANT_INT8, &g, scale, x, n);
    iz_quant_scales(IZ_QUANT_INT8, &g, scale, n, 0);
}

static double most_of(int64_t block, int64_t n)
{
    double most = 0;
    for (int64_t i = block * BLOCK; i < n && i < (block + 1) * BLOCK; i++)
        most = fmax(most, fabs((double)x[i]));
    return most;
}

/* Rounded once to a type of 16 bits. */
static void check_half(enum iz_dtype t, int64_t n)
{
    static uint16_t half[N], want[N];
    iz_quant_load(IZ_QUANT_INT8, half, t, &g, n);
    iz_cast(want, t, y, IZ_F32, n);
    assert_memory_equal(half, want, (size_t)n * sizeof(*half));
}

static void a_weight_is_its_code_times_the_scale(void **state)
{
    static const int64_t n[] = {1, 63, 64, 65, 1000, N - 1, N};
    for (size_t k = 0; k < sizeof(n) / sizeof(n[0]); k++) {
        flat_fill(x, IZ_F32, N, 2.0);
        quantise(n[k]);
        iz_quant_load(IZ_QUANT_INT8, y, IZ_F32, &g, n[k]);
        for (int64_t i = 0; i < n[k]; i++) {
            double most = most_of(i / BLOCK, n[k]), step = most / 127;
            assert_true(fabs((double)g.scale[i / BLOCK] - step) <= 1e-7 * step);
            /* Half a step away at most, but for rounding. */
            assert_true(fabs((double)y[i] - (double)x[i]) <= 0.50001 * step);
            assert_true(y[i] == (float)g.code[i] * g.scale[i / BLOCK]);
        }
        for (int64_t i = n[k]; i < N; i++)
            assert_int_equal(g.code[i], 0);
        check_half(IZ_BF16, n[k]);
        check_half(IZ_F16, n[k]);
    }
}

static void zeros_and_the_smallest_stay_finite(void **state)
{
    static const float least[] = {0, 1e-45f, 1e-40f, 1e-37f, 1e-30f};
    for (size_t k = 0; k < sizeof(least) / sizeof(least[0]); k++) {
        for (int i = 0; i < 200; i++)
            x[i] = i % 3 ? least[k] : -least[k];
        quantise(200);
        iz_quant_load(IZ_QUANT_INT8, y, IZ_F32, &g, 200);
        for (int i = 0; i < 200; i++)
            assert_true(fabsf(y[i]) <= 1.00001f * least[k]);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_weight_is_its_code_times_the_scale),
        cmocka_unit_test(zeros_and_the_smallest_stay_finite),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
