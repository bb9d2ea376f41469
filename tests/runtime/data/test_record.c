/* SPDX-License-Identifier: Apache-2.0 */
/* Files of fixed-size records: what is read, in which order, and what is
 * refused. */
#include "tests/runtime/data/shards.h"

enum { BYTES = 3, TAGS = 5 };

/* A record is a tag and its number in two bytes. */
static const char *check(const void *self, const void *record)
{
    const unsigned char *r = record;
    return r[0] < TAGS ? NULL : "its tag is not below 5";
}

/* Numbers of all samples first, then their tags: no sample's bytes lie
 * together. */
static void unpack(const void *self, const void *record, int64_t i, int64_t n,
                   void *input, void *target)
{
    const unsigned char *r = record;
    ((unsigned char *)input)[i] = r[1];
    ((unsigned char *)input)[n + i] = r[2];
    ((unsigned char *)target)[i] = r[0];
}

static const struct iz_model model = {.name = "tags",
                                      .record = {BYTES, check, unpack}};

/* Records first to first + n - 1, and `more` bytes. */
static const char *records(const char *name, int first, int n, int more)
{
    unsigned char r[400 * BYTES + 6], *at = r;
    for (int i = first; i < first + n; i++) {
        *at++ = (unsigned char)(i % TAGS);
        *at++ = (unsigned char)(i % 256);
        *at++ = (unsigned char)(i / 256);
    }
    memcpy(at, "abcdef", (size_t)more);
    replace(in_folder("%s", name), r, at + more - r);
    return in_folder("%s", name);
}

static struct iz_data *records_opened(uint64_t seed)
{
    struct iz_data *d = NULL;
    assert_int_equal(iz_data_open_records(&d, &used, &model, seed, false), 0);
    return d;
}

/* The number of one sample, after a look at its tag. */
static int number(const struct iz_data *d, enum iz_split s, int64_t i)
{
    unsigned char input[2], target;
    iz_data_batch(d, s, i, 1, input, &target);
    int n = input[0] + 256 * input[1];
    assert_int_equal(target, n % TAGS);
    return n;
}

/* In the orders that test_data shows: each of the first once an epoch. */
static void the_last_records_are_for_validation(void **state)
{
    char seen[2][80] = {0};
    use(records("r", 0, 100, 0), "", 0.2);
    struct iz_data *d = records_opened(1);
    assert_int_equal(iz_data_windows(d, IZ_TRAIN), 80);
    assert_int_equal(iz_data_windows(d, IZ_VAL), 20);
    for (int i = 0; i < 160; i++) {
        int n = number(d, IZ_TRAIN, i);
        assert_true(n < 80 && !seen[i / 80][n]++);
    }
    for (int i = 0; i < 40; i++)
        assert_int_equal(number(d, IZ_VAL, i), 80 + i % 20);
    iz_data_close(&d);
}

static void a_batch_is_its_samples_side_by_side(void **state)
{
    enum { N = 7 };
    unsigned char input[2 * N], target[N];
    use(records("r", 0, 400, 0), "", 0);
    struct iz_data *d = records_opened(3);
    iz_data_batch(d, IZ_TRAIN, 395, N, input, target);
    for (int i = 0; i < N; i++) {
        int want = number(d, IZ_TRAIN, 395 + i);
        assert_int_equal(input[i] + 256 * input[N + i], want);
        assert_int_equal(target[i], want % TAGS);
    }
    iz_data_close(&d);
}

static void several_files_are_one_stream(void **state)
{
    const char *v = records("v", 500, 4, 0);
    int sum = 0;
    records("a", 0, 30, 0);
    records("b", 30, 12, 0);
    use(in_folder("[ab]"), v, 0);
    struct iz_data *d = records_opened(1);
    assert_int_equal(iz_data_windows(d, IZ_TRAIN), 42);
    assert_int_equal(number(d, IZ_VAL, 5), 501);
    for (int i = 0; i < 42; i++)
        sum += number(d, IZ_TRAIN, i);
    assert_int_equal(sum, 42 * 41 / 2);
    iz_data_close(&d);
}

static void a_wrong_file_is_named(void **state)
{
    static const struct {
        int n, more; /* records, bytes; n < 0: no file */
        double fraction;
        const char *val; /* NULL: data.bytes */
        const char *words;
    } cases[] = {
        {10, 2, 0, "", "32 bytes, which is no multiple of the 3 of a record"},
        {10, 3, 0, "", "record 10: its tag is not below 5"}, /* 'a' */
        {-1, 0, 0, "", "No such file"},
        {0, 0, 0, "", "is empty"},
        {1, 0, 0.5, "", "0 records for validation"},
        {9, 0, 0, NULL, "data.bytes"},
    };
    for (int i = 0; i < N_OF(cases); i++) {
        struct iz_data *d = NULL;
        records("r", 0, cases[i].n < 0 ? 0 : cases[i].n, cases[i].more);
        if (cases[i].n < 0)
            unlink(in_folder("r"));
        use(in_folder("r"), cases[i].val, cases[i].fraction);
        assert_true(HEARD(iz_data_open_records(&d, &used, &model, 1,
                                               cases[i].fraction > 0)) < 0);
        assert_null(d);
        assert_said(cases[i].words);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(the_last_records_are_for_validation),
        CASE(a_batch_is_its_samples_side_by_side),
        CASE(several_files_are_one_stream),
        CASE(a_wrong_file_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
