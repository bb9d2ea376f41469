/* SPDX-License-Identifier: Apache-2.0 */
/* Casts against the definition of every 16-bit value, at every SIMD level of
 * the processor. */
#include <math.h>
#include <string.h>

#include "codelets/flat/half.h"
#include "tests/codelets/flat/flat_test.h"

enum { PATTERNS = 65536 };

/* A type of 16 bits. */
struct half {
    enum iz_dtype type;
    int exponent_bits, infinity;
};

static const struct half halves[] = {{IZ_BF16, 8, 0x7f80}, {IZ_F16, 5, 0x7c00}};

/* The value of a pattern from its definition. */
static double half_value(const struct half *t, int h)
{
    int mant_bits = 15 - t->exponent_bits;
    int bias = (1 << (t->exponent_bits - 1)) - 1;
    int e = (h & 0x7fff) >> mant_bits, m = h & ((1 << mant_bits) - 1);
    double x;
    if (e == (1 << t->exponent_bits) - 1)
        x = m == 0 ? INFINITY : NAN;
    else if (e == 0)
        x = ldexp(m, 1 - bias - mant_bits);
    else
        x = ldexp(m + (1 << mant_bits), e - bias - mant_bits);
    return h & 0x8000 ? -x : x;
}

static int rounded(float x, enum iz_dtype t)
{
    uint16_t h;
    iz_cast(&h, t, &x, IZ_F32, 1);
    return h;
}

/* To fp32 and back; and to the other type, rounded once, at an odd length and
 * place. */
static void cast_of_every_pattern(void **state)
{
    static uint16_t h[PATTERNS], back[PATTERNS], y[PATTERNS];
    static float x[PATTERNS];
    for (int i = 0; i < PATTERNS; i++)
        h[i] = (uint16_t)i;
    for (int k = 0; k < 2; k++) {
        const struct half *t = &halves[k], *to = &halves[1 - k];
        int quiet = to->infinity | 1 << (14 - to->exponent_bits);
        iz_cast(x, IZ_F32, h, t->type, PATTERNS);
        iz_cast(back, t->type, x, IZ_F32, PATTERNS);
        iz_cast(y + 1, to->type, h + 1, t->type, PATTERNS - 1);
        for (int i = 0; i < PATTERNS; i++) {
            double want = half_value(t, i);
            assert_true((signbit(x[i]) != 0) == (i >= 0x8000));
            if (isnan(want)) {
                assert_true(isnan(x[i]));
                assert_true(isnan(half_value(t, back[i])));
                assert_int_equal(back[i] & 0x8000, i & 0x8000);
                assert_int_equal(y[i] & quiet, quiet);
            } else {
                assert_true((double)x[i] == want);
                assert_int_equal(back[i], i);
                assert_int_equal(y[i], i ? rounded(x[i], to->type) : 0);
            }
        }
    }
}

/* Between each pair of neighbours: a quarter, the half, its two fp32
 * neighbours.  Infinity is the neighbour that would follow the largest number.
 */
static void cast_rounds_to_nearest_even(void **state)
{
    for (const struct half *t = halves; t < halves + 2; t++)
        for (int h = 0; h < t->infinity; h++) {
            double lo = half_value(t, h);
            double hi = h + 1 < t->infinity ? half_value(t, h + 1)
                                            : 2 * lo - half_value(t, h - 1);
            float mid = (float)(lo + (hi - lo) / 2);
            float quarter = (float)(lo + (hi - lo) / 4);
            int even = h + (h & 1);
            assert_int_equal(rounded(mid, t->type), even);
            assert_int_equal(rounded(-mid, t->type), even | 0x8000);
            assert_int_equal(rounded(nextafterf(mid, -INFINITY), t->type), h);
            assert_int_equal(rounded(nextafterf(mid, INFINITY), t->type),
                             h + 1);
            assert_int_equal(rounded(quarter, t->type), h);
        }
}

/* Of fp32 numbers, infinity and NaN, every 51st 4096, which meet every exponent
 * and all that lies behind a bf16: the halves are the same number again, the
 * upper one is the nearest bf16, and only of two equally near ones not the even
 * one.  What is NaN stays one; from 65520 on fp16 is infinite, and 0 up to half
 * of its least. */
static void halves_of_numbers_lose_nothing(void **state)
{
    enum { N = 4096, STRIDE = 51 };
    float x[N], back[N];
    uint16_t upper[N], lower[N], even[N], param[N], half[N];
    for (uint64_t base = 0; base < UINT64_C(1) << 32; base += STRIDE * N) {
        uint32_t wrong = 0;
        for (uint32_t i = 0; i < N; i++)
            x[i] = iz_float_of_bits((uint32_t)base + i);
        iz_cast_split(upper, lower, x, N);
        iz_cast_params(param, IZ_BF16, x, N);
        iz_cast_join(back, upper, lower, N);
        iz_cast(even, IZ_BF16, x, IZ_F32, N);
        iz_cast(half, IZ_F16, x, IZ_F32, N);
        for (uint32_t i = 0; i < N; i++) {
            uint32_t u = (uint32_t)base + i, a = u & 0x7fffffffu;
            uint32_t b = iz_float_bits(back[i]), h = half[i] & 0x7fffu;
            uint32_t tie = a <= 0x7f800000u && (u & 0x1ffffu) == 0x8000u;
            uint32_t nan =
                (b & 0x7fffffffu) > 0x7f800000u && b >> 31 == u >> 31;
            wrong |= a > 0x7f800000u ? !nan : b ^ u;
            wrong |= a > 0x7f800000u
                         ? h <= 0x7c00u || (even[i] & 0x7fffu) <= 0x7f80u
                     : a >= 0x477ff000u ? h ^ 0x7c00u
                     : a <= 0x33000000u ? h
                                        : 0;
            wrong |= (uint32_t)upper[i] ^ ((uint32_t)even[i] + tie);
            wrong |= (uint32_t)param[i] ^ upper[i];
        }
        assert_int_equal(wrong, 0);
    }
}

/* At lengths that no vector divides, and not beyond the end; with a NaN
 * anywhere in a vector. */
static void casts_touch_n_elements_only(void **state)
{
    enum { N = 70 };
    for (int n = 0; n < N; n++) {
        enum iz_dtype type = halves[n % 2].type;
        float x[N], y[N], back[N] = {0}, wide[N] = {0};
        uint16_t upper[N] = {0}, lower[N] = {0}, half[N] = {0};
        for (int i = 0; i < N; i++) {
            x[i] = iz_float_of_bits((uint32_t)random_bits() & 0xff7fffffu);
            y[i] = i % 35 == n / 2 ? iz_float_of_bits(0x7f800001u) : x[i];
        }
        iz_cast_split(upper, lower, x, n);
        iz_cast_join(back, upper, lower, n);
        iz_cast(half, type, y, IZ_F32, n);
        iz_cast(wide, IZ_F32, upper, IZ_BF16, n);
        for (int i = 0; i < N; i++) {
            assert_true(back[i] == (i < n ? x[i] : 0));
            assert_int_equal(half[i], i < n ? rounded(y[i], type) : 0);
            assert_true(wide[i] == (float)half_value(&halves[0], upper[i]));
            assert_true(i < n || (upper[i] == 0 && lower[i] == 0));
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cast_of_every_pattern),
        cmocka_unit_test(cast_rounds_to_nearest_even),
        cmocka_unit_test(halves_of_numbers_lose_nothing),
        cmocka_unit_test(casts_touch_n_elements_only),
    };
    return levels_run("cast", tests, sizeof(tests) / sizeof(tests[0]));
}
