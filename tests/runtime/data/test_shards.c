/* SPDX-License-Identifier: Apache-2.0 */
/* Several shards as one stream, and their loss masks. */
#include "tests/runtime/data/shards.h"

#include <stdio.h>
#include <string.h>

#include "runtime/data/shard.h"

/* Shards s0.bin, s1.bin, ... of these lengths, as one stream of positions. */
static void several(const int *length, int n)
{
    char name[16];
    int first = 0;

    for (int i = 0; i < n; i++) {
        snprintf(name, sizeof(name), "s%d.bin", i);
        positions_from(name, first, length[i]);
        first += length[i];
    }
}

static void several_shards_are_one_stream(void **state)
{
    const int length[] = {1, 7, 2, 40, 1, 1, 30}, total = 82;

    several(length, N_OF(length));
    for (int seq = 1; seq <= 40; seq++) {
        struct iz_data *a, *b;

        use(in_folder("s?.bin"), "", 0.2, false);
        a = opened(seq, MANY, 3, seq < 20);
        use(positions("whole", total), "", 0.2, false);
        b = opened(seq, MANY, 3, seq < 20);
        for (int split = IZ_TRAIN; split <= IZ_VAL; split++) {
            enum iz_split s = (enum iz_split)split;
            int64_t n = iz_data_windows(a, s);

            assert_int_equal(n, iz_data_windows(b, s));
            for (int64_t i = 0; i < 3 * n; i++)
                assert_int_equal(start(a, s, seq, i), start(b, s, seq, i));
        }
        iz_data_close(&a);
        iz_data_close(&b);
    }
}

static void a_list_names_files_and_patterns_in_order(void **state)
{
    const int length[] = {10, 10, 10};
    char list[512];
    struct iz_data *d;

    several(length, N_OF(length));
    positions_from("a,b[1]", 30, 5);
    use(in_folder("a,b[1]"), "", 0, false);
    d = opened(4, MANY, 1, false);
    assert_int_equal(iz_data_tokens(d, IZ_TRAIN), 5);
    iz_data_close(&d);
    snprintf(list, sizeof(list), "%s,%s", in_folder("s0.bin"),
             in_folder("s[12].bin"));
    use(list, "", 0, false);
    d = opened(29, MANY, 1, false);
    assert_int_equal(start(d, IZ_TRAIN, 29, 0), 0);
    iz_data_close(&d);
    use(in_folder("none*.bin"), "", 0, false);
    refused(4, MANY, false, "no file matches");
    snprintf(list, sizeof(list), "%s,%s", in_folder("s0.bin"),
             in_folder("s*.bin"));
    use(list, "", 0, false);
    listen_begin();
    assert_true(iz_data_open(&d, &config, 4, MANY, 1, false) < 0);
    listen_end();
    assert_said("s0.bin is named twice");
    snprintf(list, sizeof(list), "%s,%s", in_folder("s0.bin"),
             in_folder("gone.bin"));
    use(list, "", 0, false);
    listen_begin();
    assert_true(iz_data_open(&d, &config, 4, MANY, 1, false) < 0);
    listen_end();
    assert_said("gone.bin: No such file");
}

/* A mask file with this header and these bytes. */
static void mask(const char *name, int32_t magic, int32_t version,
                 int32_t count, const void *data, size_t bytes)
{
    shard(name, magic, version, count, data, bytes);
}

static void masked_tokens_are_no_targets(void **state)
{
    enum { N = 60, SEQ = 7 };
    uint8_t learn[N];
    int32_t input[SEQ], target[SEQ];
    struct iz_data *d;
    int masked = 0;

    for (int i = 0; i < N; i++)
        learn[i] = random_next() % 3 > 0;
    positions_from("m0.bin", 0, 20);
    positions_from("m1.bin", 20, 40);
    mask("m0.mask", IZ_MASK_MAGIC, 1, 20, learn, 20);
    mask("m1.mask", IZ_MASK_MAGIC, 1, 40, learn + 20, 40);
    use(in_folder("m?.bin"), in_folder("m1.bin"), 0, false);
    d = opened(SEQ, MANY, 5, true);
    for (int i = 0; i < 40; i++) {
        iz_data_sample(d, i % 4 ? IZ_TRAIN : IZ_VAL, i, input, target);
        for (int j = 0; j < SEQ; j++) {
            int at = input[0] + j;

            assert_int_equal(input[j], at); /* inputs are never masked */
            assert_int_equal(target[j], learn[at + 1] ? at + 1 : -1);
            masked += target[j] < 0;
        }
    }
    assert_true(masked > 20 && masked < 200);
    iz_data_close(&d);
}

static void a_wrong_mask_is_named(void **state)
{
    uint8_t learn[20] = {1, 1, 0};

    use(positions("w.bin", 20), "", 0, false);
    mask("w.mask", 1, 1, 20, learn, 20);
    refused(4, MANY, false, "w.mask begins with magic 1");
    mask("w.mask", IZ_MASK_MAGIC, 2, 20, learn, 20);
    refused(4, MANY, false, "version 2");
    mask("w.mask", IZ_MASK_MAGIC, 1, 19, learn, 19);
    refused(4, MANY, false, "and 19 tokens");
    mask("w.mask", IZ_MASK_MAGIC, 1, 20, learn, 19);
    listen_begin();
    assert_true(iz_data_open(&(struct iz_data *){NULL}, &config, 4, MANY, 1,
                             false) < 0);
    listen_end();
    assert_said("w.mask: the header says 20 tokens");
    assert_said("(truncated)");
    learn[7] = 2;
    mask("w.mask", IZ_MASK_MAGIC, 1, 20, learn, 20);
    listen_begin();
    assert_true(iz_data_open(&(struct iz_data *){NULL}, &config, 4, MANY, 1,
                             false) < 0);
    listen_end();
    assert_said("w.mask: a byte is neither 0 nor 1");
}

static void a_mask_that_leaves_nothing_is_named(void **state)
{
    uint8_t learn[40] = {0};

    use(positions("n.bin", 40), "", 0.5, false);
    mask("n.mask", IZ_MASK_MAGIC, 1, 40, learn, 40);
    refused(4, MANY, false, "nothing to be learnt for training");
    learn[2] = 1; /* among the first windows, which are for training */
    mask("n.mask", IZ_MASK_MAGIC, 1, 40, learn, 40);
    refused(4, MANY, true, "nothing to be learnt for validation");
    learn[39] = 1;
    mask("n.mask", IZ_MASK_MAGIC, 1, 40, learn, 40);
    struct iz_data *d;
    assert_int_equal(iz_data_open(&d, &config, 4, MANY, 1, true), 0);
    iz_data_close(&d);
}

static void a_mask_beside_some_shards_only_is_named(void **state)
{
    uint8_t learn[20] = {0};

    positions("x0.bin", 20);
    positions("x1.bin", 20);
    mask("x1.mask", IZ_MASK_MAGIC, 1, 20, learn, 20);
    use(in_folder("x?.bin"), "", 0, false);
    listen_begin();
    assert_true(iz_data_open(&(struct iz_data *){NULL}, &config, 4, MANY, 1,
                             false) < 0);
    listen_end();
    assert_said("x1.bin has a loss mask beside it");
    assert_said("x0.bin has none");
}

#define CASE(f) cmocka_unit_test_setup_teardown(f, make_folder, remove_folder)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(several_shards_are_one_stream),
        CASE(a_list_names_files_and_patterns_in_order),
        CASE(masked_tokens_are_no_targets),
        CASE(a_wrong_mask_is_named),
        CASE(a_mask_that_leaves_nothing_is_named),
        CASE(a_mask_beside_some_shards_only_is_named),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
