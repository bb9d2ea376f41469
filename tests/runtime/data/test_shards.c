/* SPDX-License-Identifier: Apache-2.0 */
/* Several shards as one stream, and their loss masks. */
#include "tests/runtime/data/shards.h"

#include "runtime/data/shard.h"

static void several_shards_are_one_stream(void **state)
{
    const int length[] = {1, 7, 2, 40, 1, 1, 30};
    int total = 0;
    for (int i = 0; i < N_OF(length); total += length[i++]) {
        char name[16];
        snprintf(name, sizeof(name), "s%d.bin", i);
        positions_from(name, total, length[i]);
    }
    for (int seq = 1; seq <= 40; seq++) {
        use(in_folder("s?.bin"), "", 0.2);
        struct iz_data *a = opened(seq, 3, seq < 20);
        use(positions("whole", total), "", 0.2);
        struct iz_data *b = opened(seq, 3, seq < 20);
        assert_same(a, b, IZ_TRAIN, seq, 3 * iz_data_windows(a, IZ_TRAIN));
        assert_same(a, b, IZ_VAL, seq, 3 * iz_data_windows(a, IZ_VAL));
        iz_data_close(&a);
        iz_data_close(&b);
    }
}

/* As a list of two names. */
static void use_two(const char *one, const char *two)
{
    char list[1024];
    snprintf(list, sizeof(list), "%s,%s", one, two);
    use(list, "", 0);
}

static void a_list_names_files_and_patterns_in_order(void **state)
{
    positions_from("s0.bin", 0, 10);
    positions_from("s1.bin", 10, 10);
    positions_from("s2.bin", 20, 10);
    use(positions_from("a,b[1]", 30, 5), "", 0);
    struct iz_data *d = opened(4, 1, false);
    assert_int_equal(iz_data_windows(d, IZ_TRAIN), 1);
    iz_data_close(&d);
    use_two(in_folder("s0.bin"), in_folder("s[12].bin"));
    d = opened(29, 1, false);
    assert_int_equal(start(d, IZ_TRAIN, 29, 0), 0);
    iz_data_close(&d);
    use(in_folder("none*.bin"), "", 0);
    refused(4, MANY, false, "none*.bin: no file matches");
    use_two(in_folder("s0.bin"), in_folder("s*.bin"));
    refused(4, MANY, false, "s0.bin is named twice");
    use_two(in_folder("s0.bin"), in_folder("gone.bin"));
    refused(4, MANY, false, "gone.bin: No such file");
}

static void masked_tokens_are_no_targets(void **state)
{
    enum { N = 60, SEQ = 7 };
    uint8_t learn[N];
    int32_t input[SEQ], target[SEQ];
    int masked = 0;
    for (int i = 0; i < N; i++)
        learn[i] = random_next() % 3 > 0;
    positions_from("m0.bin", 0, 20);
    positions_from("m1.bin", 20, 40);
    shard("m0.mask", IZ_MASK_MAGIC, 1, 20, learn, 20);
    shard("m1.mask", IZ_MASK_MAGIC, 1, 40, learn + 20, 40);
    use(in_folder("m?.bin"), in_folder("m1.bin"), 0);
    struct iz_data *d = opened(SEQ, 5, true);
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
    static const struct {
        int magic, version, count, byte, bytes;
        const char *words;
    } cases[] = {
        {1, 1, 20, 0, 20, "w.mask begins with magic 1"},
        {IZ_MASK_MAGIC, 2, 20, 0, 20, "version 2"},
        {IZ_MASK_MAGIC, 1, 19, 0, 19, "and 19 tokens"},
        {IZ_MASK_MAGIC, 1, 20, 0, 19, "w.mask: the header says 20 tokens"},
        {IZ_MASK_MAGIC, 1, 20, 0, 19, "(truncated)"},
        {IZ_MASK_MAGIC, 1, 20, 2, 20, "w.mask: a byte is neither 0 nor 1"},
    };
    use(positions("w.bin", 20), "", 0);
    for (int i = 0; i < N_OF(cases); i++) {
        uint8_t learn[20] = {1, 1, [7] = (uint8_t)cases[i].byte};
        shard("w.mask", cases[i].magic, cases[i].version, cases[i].count, learn,
              (size_t)cases[i].bytes);
        refused(4, MANY, false, cases[i].words);
        assert_said("/w.");
    }
}

static void a_mask_that_leaves_nothing_is_named(void **state)
{
    uint8_t learn[40] = {0};
    use(positions("n.bin", 40), "", 0.5);
    shard("n.mask", IZ_MASK_MAGIC, 1, 40, learn, 40);
    refused(4, MANY, false, "nothing to be learnt for training");
    assert_said(used.path);
    learn[2] = 1; /* among the first windows, which are for training */
    shard("n.mask", IZ_MASK_MAGIC, 1, 40, learn, 40);
    refused(4, MANY, true, "nothing to be learnt for validation");
    assert_said(used.path);
    learn[39] = 1;
    shard("n.mask", IZ_MASK_MAGIC, 1, 40, learn, 40);
    struct iz_data *d = opened(4, 1, true);
    iz_data_close(&d);
}

static void a_mask_beside_some_shards_only_is_named(void **state)
{
    uint8_t learn[20] = {0};
    positions("x0.bin", 20);
    positions("x1.bin", 20);
    shard("x1.mask", IZ_MASK_MAGIC, 1, 20, learn, 20);
    use(in_folder("x?.bin"), "", 0);
    refused(4, MANY, false, "x1.bin has a loss mask beside it");
    assert_said("x0.bin has none");
}

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
