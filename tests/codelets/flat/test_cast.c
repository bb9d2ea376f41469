/* SPDX-License-Identifier: Apache-2.0 */
/* Casts against the definition of every 16-bit value, at every SIMD level of
 * the processor. */
#include <float.h>
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

static void cast_of_every_pattern(void **state)
{
    static uint16_t h[PATTERNS], back[PATTERNS];
    static float x[PATTERNS];
    for (int i = 0; i < PATTERNS; i++)
        h[i] = (uint16_t)i;
    for (const struct half *t = halves; t < halves + 2; t++) {
        iz_cast(x, IZ_F32, h, t->type, PATTERNS);
        iz_cast(back, t->type, x, IZ_F32, PATTERNS);
        for (int i = 0; i < PATTERNS; i++) {
            double want = half_value(t, i);
            assert_true((signbit(x[i]) != 0) == (i >= 0x8000));
            if (isnan(want)) {
                assert_true(isnan(x[i]));
                assert_true(isnan(half_value(t, back[i])));
                assert_int_equal(back[i] & 0x8000, i & 0x8000);
            } else {
                assert_true((double)x[i] == want);
                assert_int_equal(back[i], i);
            }
        }
    }
}

/* Between each pair of neighbours: a quarter, the half, its two fp32
 * neighbours. */
static void cast_rounds_to_nearest_even(void **state)
{
    for (const struct half *t = halves; t < halves + 2; t++)
        for (int h = 0; h + 1 < t->infinity; h++) {
            double lo = half_value(t, h), hi = half_value(t, h + 1);
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

static void cast_overflows_to_infinity(void **state)
{
    assert_int_equal(rounded(65519.996f, IZ_F16), 0x7bff);
    assert_int_equal(rounded(65520.0f, IZ_F16), 0x7c00);
    assert_int_equal(rounded(-65536.0f, IZ_F16), 0xfc00);
    assert_int_equal(rounded(FLT_MAX, IZ_F16), 0x7c00);
    assert_int_equal(rounded(FLT_MAX, IZ_BF16), 0x7f80);
    assert_int_equal(rounded(-INFINITY, IZ_BF16), 0xff80);
    assert_int_equal(rounded(FLT_MIN / 4, IZ_F16), 0);
}

/* A NaN whose payload is in the low bits only must not become infinity. */
static void cast_keeps_nan(void **state)
{
    for (uint32_t low = 1; low < 0x800000u; low += low) {
        float x = iz_float_of_bits(0xff800000u | low);
        for (const struct half *t = halves; t < halves + 2; t++)
            assert_true((rounded(x, t->type) & 0x7fff) > t->infinity);
    }
}

/* One NaN among numbers, wherever it is in a vector. */
static void cast_finds_every_nan(void **state)
{
    enum { N = 67 };
    for (int k = 0; k < 2 * N; k++) {
        enum iz_dtype type = halves[k % 2].type;
        float x[N];
        uint16_t y[N];
        for (int i = 0; i < N; i++)
            x[i] = 1.0f / (float)(i + 3);
        x[k / 2] = iz_float_of_bits(0x7f800001u);
        iz_cast(y, type, x, IZ_F32, N);
        for (int i = 0; i < N; i++)
            assert_int_equal(y[i], rounded(x[i], type));
    }
}

/* Of fp32 numbers, infinity and NaN, every 51st 4096, which meet every exponent
 * and all that lies behind a bf16: the halves are the same number again, the
 * upper one is the nearest bf16, and only of two equally near ones not the even
 * one. */
static void halves_of_numbers_lose_nothing(void **state)
{
    enum { N = 4096, STRIDE = 51 };
    float x[N], back[N];
    uint16_t upper[N], lower[N], even[N], param[N];
    for (uint64_t base = 0; base < UINT64_C(1) << 32; base += STRIDE * N) {
        uint32_t wrong = 0;
        for (uint32_t i = 0; i < N; i++)
            x[i] = iz_float_of_bits((uint32_t)base + i);
        iz_cast_split(upper, lower, x, N);
        iz_cast_params(param, IZ_BF16, x, N);
        iz_cast_join(back, upper, lower, N);
        iz_cast(even, IZ_BF16, x, IZ_F32, N);
        for (uint32_t i = 0; i < N; i++) {
            uint32_t u = (uint32_t)base + i, a = u & 0x7fffffffu;
            uint32_t b = iz_float_bits(back[i]);
            uint32_t tie = a <= 0x7f800000u && (u & 0x1ffffu) == 0x8000u;
            uint32_t nan =
                (b & 0x7fffffffu) > 0x7f800000u && b >> 31 == u >> 31;
            wrong |= a > 0x7f800000u ? !nan : b ^ u;
            wrong |= (uint32_t)upper[i] ^ ((uint32_t)even[i] + tie);
            wrong |= (uint32_t)param[i] ^ upper[i];
        }
        assert_int_equal(wrong, 0);
    }
}

/* At lengths that no vector divides, and not beyond the end. */
static void halves_of_any_length(void **state)
{
    enum { N = 70 };
    for (int n = 0; n < N; n++) {
        float x[N], back[N] = {0};
        uint16_t upper[N] = {0}, lower[N] = {0};
        for (int i = 0; i < N; i++)
            x[i] = iz_float_of_bits((uint32_t)random_bits() & 0xff7fffffu);
        iz_cast_split(upper, lower, x, n);
        iz_cast_join(back, upper, lower, n);
        assert_memory_equal(back, x, (size_t)n * sizeof(*x));
        for (int i = n; i < N; i++)
            assert_true(upper[i] == 0 && lower[i] == 0 && back[i] == 0);
    }
}

/* Every pattern of one 16-bit type to the other, at odd lengths and places. */
static void cast_between_halves_rounds_once(void **state)
{
    static uint16_t h[PATTERNS], y[PATTERNS];
    for (int i = 0; i < PATTERNS; i++)
        h[i] = (uint16_t)i;
    for (int k = 0; k < 2; k++) {
        const struct half *from = &halves[k], *to = &halves[1 - k];
        int nan = to->infinity | 1 << (14 - to->exponent_bits); /* quiet */
        iz_cast(y + 1, to->type, h + 1, from->type, PATTERNS - 1);
        for (int i = 1; i < PATTERNS; i++) {
            float x = (float)half_value(from, i);
            assert_int_equal(isnan(x) ? y[i] & nan : y[i],
                             isnan(x) ? nan : rounded(x, to->type));
        }
    }
}

static void cast_touches_n_elements_only(void **state)
{
    for (int64_t n = 0; n < 70; n++) {
        float x[72];
        uint16_t y[72];
        for (int i = 0; i < 72; i++)
            x[i] = 1.0f;
        memset(y, 0xee, sizeof(y));
        iz_cast(y, IZ_BF16, x, IZ_F32, n);
        for (int64_t i = 0; i < 72; i++)
            assert_int_equal(y[i], i < n ? 0x3f80 : 0xeeee);
        iz_cast(x, IZ_F32, y, IZ_F16, n);
        assert_true(x[n] == 1.0f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(cast_of_every_pattern),
        cmocka_unit_test(cast_rounds_to_nearest_even),
        cmocka_unit_test(cast_overflows_to_infinity),
        cmocka_unit_test(cast_keeps_nan),
        cmocka_unit_test(cast_finds_every_nan),
        cmocka_unit_test(halves_of_numbers_lose_nothing),
        cmocka_unit_test(halves_of_any_length),
        cmocka_unit_test(cast_between_halves_rounds_once),
        cmocka_unit_test(cast_touches_n_elements_only),
    };
    return levels_run("cast", tests, sizeof(tests) / sizeof(tests[0]), 0);
}
