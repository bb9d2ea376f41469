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

/* Of each half of a table, cut within a row or behind the table, as shards are.
 * What is not touched, or not in the half, keeps what it had. */
static void packing_moves_the_touched_elements(void **state)
{
    enum { MOST = ROWS * 9 + 20 };
    struct table t;
    uint16_t flat[MOST], packed[MOST], back[MOST];
    for (int k = 0; k < 2 * 300; k++) {
        int64_t cols = 1 + (int64_t)(random_bits() % 9), n = ROWS * cols + 20;
        int64_t cut = (int64_t)(random_bits() % (uint64_t)n);
        int64_t from = k % 2 ? cut : 0, to = k % 2 ? n : cut;
        int64_t before = 0, all = 0;
        touch(&t, cols, k / 2 % 17);
        for (int64_t i = 0; i < n; i++) {
            flat[i] = (uint16_t)random_bits();
            packed[i] = 5;
            back[i] = 7;
        }
        iz_touched_pack(&t.r, from, to, 2, packed, flat + from);
        iz_touched_unpack(&t.r, from, to, 2, back + from, packed);
        for (int64_t i = 0; i < n; i++) {
            bool here = i / cols < ROWS && t.touched[i / cols];
            bool moved = here && i >= from && i < to;
            before += here && i < cut;
            assert_int_equal(back[i], moved ? flat[i] : 7);
            if (here)
                assert_int_equal(packed[all++], moved ? flat[i] : 5);
        }
        assert_int_equal(iz_touched_packed(&t.r, cut), before);
        assert_int_equal(iz_touched_elems(&t.r), all);
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
        cmocka_unit_test(packing_moves_the_touched_elements),
        cmocka_unit_test(sort_leaves_each_key_once),
    };
    return cmocka_run_group_tests_name("rows", tests, NULL, NULL);
}
