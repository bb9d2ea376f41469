/* SPDX-License-Identifier: Apache-2.0 */
/* Touched rows of a table against one flag for each of its rows: ranges that
 * begin anywhere, and keys of any size.  tests/e2e/step/test_sparse.py sees the
 * rest. */
#include <string.h>

#include "codelets/flat/touched_rows.h"
#include "tests/codelets/flat/flat_test.h"

enum { ROWS = 150 };

/* Which rows of a table are touched, as flags and as a list. */
struct table {
    unsigned char touched[ROWS];
    int32_t row[ROWS];
    struct iz_touched r;
};

static void touch(struct table *t, int64_t cols, unsigned of_16)
{
    t->r = (struct iz_touched){.row = t->row, .cols = cols};
    for (int i = 0; i < ROWS; i++) {
        t->touched[i] = random_bits() % 16 < of_16;
        if (t->touched[i])
            t->row[t->r.n++] = i;
    }
}

static int64_t count_before(const struct table *t, int64_t flat)
{
    int64_t n = 0;
    for (int64_t i = 0; i < flat; i++)
        n += i / t->r.cols < ROWS && t->touched[i / t->r.cols];
    return n;
}

/* Each touched element of [from, to) is in one piece and no other is. */
static void check_pieces(const struct table *t, int64_t from, int64_t to)
{
    struct iz_touched_range p = {0};
    int64_t at = from, touched = 0;
    while (iz_touched_next(&t->r, from, to, &p)) {
        assert_true(p.n > 0 && p.flat >= at && p.flat + p.n <= to);
        assert_int_equal(p.packed, count_before(t, p.flat));
        for (int64_t i = p.flat; i < p.flat + p.n; i++)
            assert_true(t->touched[i / t->r.cols]);
        at = p.flat + p.n;
        touched += p.n;
    }
    assert_int_equal(touched, count_before(t, to) - count_before(t, from));
}

/* Ranges begin and end within rows, and behind the table, as shards do. */
static void pieces_are_the_touched_elements(void **state)
{
    struct table t;
    for (int k = 0; k < 300; k++) {
        int64_t cols = 1 + (int64_t)(random_bits() % 9), n = ROWS * cols;
        int64_t a = (int64_t)(random_bits() % (uint64_t)(n + 20));
        int64_t b = (int64_t)(random_bits() % (uint64_t)(n + 20));
        touch(&t, cols, k % 17);
        check_pieces(&t, a < b ? a : b, a < b ? b : a);
        check_pieces(&t, 0, n + 64);
        assert_int_equal(iz_touched_packed(&t.r, a), count_before(&t, a));
        assert_int_equal(iz_touched_elems(&t.r), count_before(&t, n));
    }
}

/* What is not touched keeps what it had. */
static void unpack_is_the_inverse_of_pack(void **state)
{
    enum { COLS = 3, N = ROWS * COLS };
    struct table t;
    uint16_t flat[N], packed[N], back[N];
    for (int k = 0; k < 100; k++) {
        int64_t cut = (int64_t)(random_bits() % N);
        touch(&t, COLS, 1 + k % 15);
        for (int i = 0; i < N; i++) {
            flat[i] = (uint16_t)random_bits();
            back[i] = 7;
        }
        memset(packed, 0, sizeof(packed));
        iz_touched_pack(&t.r, 0, cut, 2, packed, flat);
        iz_touched_pack(&t.r, cut, N, 2, packed, flat + cut);
        for (int i = 0, j = 0; i < N; i++)
            if (t.touched[i / COLS])
                assert_int_equal(packed[j++], flat[i]);
        iz_touched_unpack(&t.r, 0, cut, 2, back, packed);
        iz_touched_unpack(&t.r, cut, N, 2, back + cut, packed);
        for (int i = 0; i < N; i++)
            assert_int_equal(back[i], t.touched[i / COLS] ? flat[i] : 7);
    }
}

static int by_value(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static void sort_leaves_each_key_once(void **state)
{
    enum { N = 3000 };
    static uint64_t key[N], scratch[N], want[N];
    for (int k = 0; k < 40; k++) {
        int64_t n = k < 3 ? k : (int64_t)(random_bits() % N), kept = 0;
        for (int64_t i = 0; i < n; i++)
            want[i] = key[i] = random_bits() >> (k * 7 % 64) << (k * 5 % 11);
        qsort(want, (size_t)n, sizeof(*want), by_value);
        for (int64_t i = 0; i < n; i++)
            if (i == 0 || want[i] != want[i - 1])
                want[kept++] = want[i];
        assert_int_equal(iz_touched_sort(key, scratch, n), kept);
        assert_memory_equal(key, want, (size_t)kept * sizeof(*key));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(pieces_are_the_touched_elements),
        cmocka_unit_test(unpack_is_the_inverse_of_pack),
        cmocka_unit_test(sort_leaves_each_key_once),
    };
    return cmocka_run_group_tests_name("rows", tests, NULL, NULL);
}
