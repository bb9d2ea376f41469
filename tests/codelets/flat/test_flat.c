/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels on flat buffers: sums, norm and hash, bit by bit against scalar
 * loops, and normal numbers, at every SIMD level of the processor. */
#include <inttypes.h>
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

/* Whole; in pieces of any number of whole blocks; and the first blocks from the
 * elements, the others as sums from elsewhere. */
static void norm_has_the_order_that_is_promised(void **state)
{
    static const int64_t sizes[] = {
        0, 1, 7, 31, 32, 1023, 1024, 1025, 40001, 1 << 20, (1 << 20) + 7};
    float *x = take(((1 << 20) + 7) * 4);
    for (int k = 0; k < 11 * 3; k++) {
        enum iz_dtype t = fixture_types[k % 3];
        int64_t n = sizes[k / 3], at = n / 1024 * (k % 3 + 1) / 4 * 1024, piece;
        int64_t rest = iz_norm2_blocks(n - at);
        double *sum = take((size_t)rest * sizeof(*sum)), want;
        struct iz_norm2 cut = {0}, halves = {0};
        flat_fill(x, t, n, 8.0);
        want = norm2_scalar(x, t, n);
        assert_true(iz_flat_norm2(x, t, n) == want);
        for (int64_t i = 0; i < n; i += piece) {
            piece = 1024 * random_piece(300, n);
            piece = piece < n - i ? piece : n - i;
            iz_norm2_add(&cut, fixture_at(x, t, i), t, piece);
        }
        assert_true(iz_norm2_end(&cut) == want);
        iz_flat_squares(sum, fixture_at(x, t, at), t, n - at);
        iz_norm2_add(&halves, x, t, at);
        iz_norm2_add_blocks(&halves, sum, rest);
        assert_true(iz_norm2_end(&halves) == want);
        free(sum);
    }
    free(x);
}

/* Alone; with the sum of the squares; with those of blocks; of no inputs, the
 * squares of what is there; into the last input, where that can be. */
static void check_sum(enum iz_dtype out_type, enum iz_dtype in_type, int n_in,
                      bool accumulate, int64_t n)
{
    size_t room = (size_t)n * 4, bytes = (size_t)(n * iz_dtype_bytes(out_type));
    size_t of_blocks = (size_t)iz_norm2_blocks(n) * sizeof(double);
    void *in[4], *first = take(room), *out = take(room), *want = take(room);
    const void *const *from = (const void *const *)in;
    double *squares = take(of_blocks), *sum = take(of_blocks);
    struct iz_norm2 norm2 = {0};
    flat_fill(first, out_type, n, 4.0);
    for (int s = 0; s < n_in; s++)
        flat_fill(in[s] = take(room), in_type, n, 4.0);
    for (int64_t i = 0; i < n; i++) {
        volatile float to = (float)fixture_get(in[0], in_type, i);
        for (int s = 1; s < n_in; s++)
            to = to + (float)fixture_get(in[s], in_type, i);
        if (accumulate)
            to = (float)fixture_get(first, out_type, i) + to;
        iz_cast(fixture_at(want, out_type, i), out_type, &(float){to}, IZ_F32,
                1);
    }
    iz_flat_squares(squares, want, out_type, n);

    memcpy(out, first, bytes);
    iz_flat_sum(out, out_type, accumulate, from, n_in, in_type, n);
    assert_memory_equal(out, want, bytes);

    memcpy(out, first, bytes);
    iz_flat_sum_norm2(&norm2, out, out_type, accumulate, from, n_in, in_type,
                      n);
    assert_memory_equal(out, want, bytes);
    assert_true(iz_norm2_end(&norm2) == norm2_scalar(want, out_type, n));

    memcpy(out, first, bytes);
    iz_flat_add_squares(sum, out, out_type, accumulate, from, n_in, in_type, n);
    assert_memory_equal(out, want, bytes);
    assert_memory_equal(sum, squares, of_blocks);

    memset(sum, 1, of_blocks);
    iz_flat_add_squares(sum, out, out_type, accumulate, from, 0, in_type, n);
    iz_flat_add_squares(NULL, out, out_type, accumulate, from, 0, in_type, n);
    assert_memory_equal(out, want, bytes);
    assert_memory_equal(sum, squares, of_blocks);

    if (in_type == out_type && !accumulate) {
        void *last = in[n_in - 1];
        iz_flat_sum(last, out_type, false, from, n_in, in_type, n);
        assert_memory_equal(last, want, bytes);
    }
    for (int s = 0; s < n_in; s++)
        free(in[s]);
    free(first);
    free(out);
    free(want);
    free(squares);
    free(sum);
}

static void sum_is_in_order_and_rounded_once(void **state)
{
    static const int64_t sizes[] = {0, 1, 7, 1024, 2051};
    for (int k = 0; k < 3 * 3 * 4 * 2 * 5; k++)
        check_sum(fixture_types[k % 3], fixture_types[k / 3 % 3], 1 + k / 9 % 4,
                  k / 36 % 2, sizes[k / 72]);
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

static void hash_sees_bits_and_positions(void **state)
{
    float x[64];
    flat_fill(x, IZ_F32, 64, 1.0);
    uint64_t whole = iz_flat_hash(0, x, 64);
    assert_true(iz_flat_hash(1, x, 64) != whole);
    for (int k = 0; k < 64 * 32; k++) {
        float before = x[k / 32];
        x[k / 32] = iz_float_of_bits(iz_float_bits(before) ^ 1u << k % 32);
        assert_true(iz_flat_hash(0, x, 64) != whole);
        x[k / 32] = before;
    }
}

/* The same on every machine, in any pieces, near the first number and far
 * behind it.  That they are libm's to 1e-6, have a normal distribution and are
 * independent was measured when the formula was chosen; who chooses another one
 * measures again. */
static void normal_bits_are_known(void **state)
{
    enum { N = 1 << 20 };
    static const struct {
        int64_t n, first;
        uint64_t seed, stream, hash;
        float std;
    } row[] = {{4096, 77, 2024, 5, 0xc838a342a7e59ac0u, 0.02f},
               {N, (INT64_C(1) << 33) + 1, 11, 12, 0x3acc45660a17604bu, 1}};
    static float x[N];
    for (int i = 0; i < 2; i++) {
        for (int64_t at = 0, k; at < row[i].n; at += k) {
            k = random_piece(600, row[i].n - at);
            iz_flat_normal(x + at, k, row[i].seed, row[i].stream,
                           row[i].first + at, row[i].std);
        }
        uint64_t hash = iz_flat_hash(0, x, row[i].n);
        if (hash != row[i].hash)
            fail_msg("row %d has the hash %#" PRIx64, i, hash);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(norm_has_the_order_that_is_promised),
        cmocka_unit_test(sum_is_in_order_and_rounded_once),
        cmocka_unit_test(hash_does_not_depend_on_pieces),
        cmocka_unit_test(hash_sees_bits_and_positions),
        cmocka_unit_test(normal_bits_are_known),
    };
    return levels_run("flat", tests, sizeof(tests) / sizeof(tests[0]));
}
