/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels on flat buffers: sums, norm and hash, bit by bit against scalar
 * loops, at every SIMD level of the processor. */
#include <math.h>
#include <string.h>

#include "codelets/flat/flat.h"
#include "codelets/flat/half.h"
#include "tests/codelets/flat/flat_test.h"

/* One level of the order that flat.h promises: v [n] becomes the sums of its
 * blocks of 1024. */
static int64_t sum_blocks(volatile double *v, int64_t n)
{
    for (int64_t b = 0; b < n; b += 1024) {
        volatile double lane[32] = {0};
        for (int64_t i = b; i < n && i < b + 1024; i++)
            lane[i % 32] = lane[i % 32] + v[i];
        for (int half = 16; half > 0; half /= 2)
            for (int j = 0; j < half; j++)
                lane[j] = lane[j] + lane[j + half];
        v[b / 1024] = lane[0];
    }
    return (n + 1023) / 1024;
}

static double norm2_scalar(const void *x, enum iz_dtype t, int64_t n)
{
    double *v = take((size_t)(n + 1) * sizeof(*v)), sum;
    v[0] = 0;
    for (int64_t i = 0; i < n; i++)
        v[i] = pow(fixture_get(x, t, i), 2);
    while (n > 1)
        n = sum_blocks(v, n);
    sum = v[0];
    free(v);
    return sum;
}

static void norm_is_exact_enough_and_fixed(void **state)
{
    static const int64_t sizes[] = {
        0, 1, 7, 31, 32, 1023, 1024, 1025, 40001, 1 << 20, (1 << 20) + 7};
    float *x = take(((1 << 20) + 7) * 4);
    for (int k = 0; k < 11 * 3; k++) {
        enum iz_dtype t = fixture_types[k % 3];
        int64_t n = sizes[k / 3];
        long double sum = 0;
        flat_fill(x, t, n, 8.0);
        for (int64_t i = 0; i < n; i++)
            sum += (long double)pow(fixture_get(x, t, i), 2);
        double got = iz_flat_norm2(x, t, n);
        assert_true(fabs(got - (double)sum) <= 1e-14 * got);
        assert_true(got == norm2_scalar(x, t, n));
    }
    free(x);
}

/* The first blocks from the elements, the others as sums from elsewhere. */
static void check_blocks(const void *x, enum iz_dtype t, int64_t n,
                         int64_t first)
{
    int64_t at = first * IZ_NORM_BLOCK, rest = iz_norm2_blocks(n - at);
    const void *behind = fixture_at(x, t, at);
    double *sum = take((size_t)(rest + 1) * sizeof(*sum));
    struct iz_norm2 s = {0};
    sum[rest] = 77;
    iz_flat_squares(sum, behind, t, n - at);
    assert_true(sum[rest] == 77);
    assert_true(sum[1] == norm2_scalar(fixture_at(behind, t, 1024), t, 1024));
    iz_norm2_add(&s, x, t, at);
    iz_norm2_add_blocks(&s, sum, rest);
    assert_true(iz_norm2_end(&s) == iz_flat_norm2(x, t, n));
    free(sum);
}

/* Pieces of whole blocks, of any number. */
static void norm_of_pieces_is_that_of_the_whole(void **state)
{
    enum { N = 3000001 };
    float *x = take((size_t)N * 4);
    for (int k = 0; k < 3; k++) {
        static const int64_t sizes[] = {1 << 20, (1 << 20) + 7, N};
        enum iz_dtype t = fixture_types[k];
        int64_t n = sizes[k], piece;
        struct iz_norm2 s = {0};
        flat_fill(x, t, n, 8.0);
        check_blocks(x, t, n, n / 1024 * k / 3);
        for (int64_t i = 0; i < n; i += piece) {
            piece = 1024 * random_piece(300, n);
            piece = piece < n - i ? piece : n - i;
            iz_norm2_add(&s, fixture_at(x, t, i), t, piece);
        }
        assert_true(iz_norm2_end(&s) == iz_flat_norm2(x, t, n));
    }
    free(x);
}

/* Squares of blocks with the sum, and of what is there already. */
static void check_squares(void *out, enum iz_dtype type, bool accumulate,
                          const void *const *in, int n_in,
                          enum iz_dtype in_type, int64_t n, const void *want)
{
    size_t bytes = (size_t)iz_norm2_blocks(n) * sizeof(double);
    double *squares = take(bytes), *sum = take(bytes);
    iz_flat_squares(squares, want, type, n);
    iz_flat_add_squares(sum, out, type, accumulate, in, n_in, in_type, n);
    assert_memory_equal(sum, squares, bytes);
    memset(sum, 1, bytes);
    iz_flat_add_squares(sum, out, type, accumulate, in, 0, in_type, n);
    assert_memory_equal(sum, squares, bytes);
    iz_flat_add_squares(NULL, out, type, accumulate, in, 0, in_type, n);
    free(squares);
    free(sum);
}

/* The ways to sum: alone, with the sum of the squares, with those of blocks,
 * into the last input where that can be. */
enum { SUM, NORM, SQUARES, OVER, WAYS };

/* The same elements each way.  One input that is added is added by the function
 * for that. */
static void check_sum(enum iz_dtype out_type, enum iz_dtype in_type, int n_in,
                      bool accumulate, int64_t n, int way)
{
    void *in[4], *out = take((size_t)n * 4), *want = take((size_t)n * 4);
    const void *const *from = (const void *const *)in;
    size_t bytes = (size_t)(n * iz_dtype_bytes(out_type));
    struct iz_norm2 norm2 = {0};
    flat_fill(out, out_type, n, 4.0);
    for (int s = 0; s < n_in; s++) {
        in[s] = take((size_t)n * 4);
        flat_fill(in[s], in_type, n, 4.0);
    }
    for (int64_t i = 0; i < n; i++) {
        volatile float sum = (float)fixture_get(in[0], in_type, i);
        for (int s = 1; s < n_in; s++)
            sum = sum + (float)fixture_get(in[s], in_type, i);
        if (accumulate)
            sum = (float)fixture_get(out, out_type, i) + sum;
        iz_cast(fixture_at(want, out_type, i), out_type, &(float){sum}, IZ_F32,
                1);
    }
    bool over = way == OVER && in_type == out_type && !accumulate;
    void *to = over ? in[n_in - 1] : out;
    if (way == SQUARES)
        check_squares(out, out_type, accumulate, from, n_in, in_type, n, want);
    else if (way == NORM)
        iz_flat_sum_norm2(&norm2, out, out_type, accumulate, from, n_in,
                          in_type, n);
    else
        iz_flat_sum(to, out_type, accumulate, from, n_in, in_type, n);
    assert_memory_equal(to, want, bytes);
    if (way == NORM)
        assert_true(iz_norm2_end(&norm2) == norm2_scalar(want, out_type, n));
    for (int s = 0; s < n_in; s++)
        free(in[s]);
    free(out);
    free(want);
}

static void sum_is_in_order_and_rounded_once(void **state)
{
    static const int64_t sizes[] = {0, 1, 7, 1024, 2051};
    for (int k = 0; k < 3 * 3 * 4 * 2; k++)
        for (int s = 0; s < 5 * WAYS; s++)
            check_sum(fixture_types[k % 3], fixture_types[k / 3 % 3],
                      1 + k / 9 % 4, k / 36 != 0, sizes[s / WAYS], s % WAYS);
}

static void hash_does_not_depend_on_pieces(void **state)
{
    enum { N = 3001 };
    static float x[N];
    const int64_t first = ((int64_t)1 << 40) - 100;
    uint64_t sum = 0;
    random_again();
    flat_fill(x, IZ_F32, N, 1.0);
    uint64_t whole = iz_flat_hash(first, x, N);
    for (int64_t at = N, k; at > 0; at -= k) {
        k = random_piece(200, at);
        sum += iz_flat_hash(first + at - k, x + at - k, k);
    }
    assert_true(sum == whole);
    assert_true(whole == 0x5f17d0be04d724c5u); /* on every machine */
    assert_true(iz_flat_hash(5, x, 0) == 0);
}

/* Any changed bit and any two elements swapped change the hash. */
static void hash_sees_bits_and_positions(void **state)
{
    float x[64];
    flat_fill(x, IZ_F32, 64, 1.0);
    uint64_t whole = iz_flat_hash(0, x, 64);
    assert_true(iz_flat_hash(1, x, 64) != whole);
    for (int k = 0; k < 64 * 32; k++) {
        uint32_t bit = (uint32_t)1 << k % 32;
        x[k / 32] = iz_float_of_bits(iz_float_bits(x[k / 32]) ^ bit);
        assert_true(iz_flat_hash(0, x, 64) != whole);
        x[k / 32] = iz_float_of_bits(iz_float_bits(x[k / 32]) ^ bit);
    }
    for (int i = 1; i < 64; i++) {
        float t = x[0];
        x[0] = x[i];
        x[i] = t;
        assert_true(iz_flat_hash(0, x, 64) != whole);
        x[i] = x[0];
        x[0] = t;
    }
    x[5] = 0.0f;
    whole = iz_flat_hash(0, x, 64);
    x[5] = -0.0f;
    assert_true(iz_flat_hash(0, x, 64) != whole);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norm_is_exact_enough_and_fixed),
        cmocka_unit_test(norm_of_pieces_is_that_of_the_whole),
        cmocka_unit_test(sum_is_in_order_and_rounded_once),
        cmocka_unit_test(hash_does_not_depend_on_pieces),
        cmocka_unit_test(hash_sees_bits_and_positions),
    };
    return levels_run("flat", tests, sizeof(tests) / sizeof(tests[0]), 0);
}
