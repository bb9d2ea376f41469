/* SPDX-License-Identifier: Apache-2.0 */
/* Samples of files of tokens: what is read of one or several and of their loss
 * masks, in which order, and what is refused. */
#include "tests/runtime/fixture.h"

#include <sys/stat.h>

#include "runtime/data/data.h"
#include "runtime/data/shard.h"

#define MANY (1 << 30) /* a vocabulary that holds positions as tokens */

/* What a run would read; `use` sets it: tokens, or bytes where val is NULL. */
static struct iz_data_config used;
/* Of the shards that are written: tokens of a text of a pair, of a packed
 * sample. */
static int32_t text_tokens, sample_tokens;

/* A shard or a mask with `count` in its header and `bytes` of data; returns its
 * path. */
static const char *shard(const char *name, int32_t magic, int32_t version,
                         int32_t count, const void *data, size_t bytes)
{
    int32_t header[256] = {magic, version, count, text_tokens, sample_tokens};
    const char *path = in_folder("%s", name);
    char *all = malloc(sizeof(header) + bytes);
    memcpy(all, header, sizeof(header));
    memcpy(all + sizeof(header), data, bytes);
    replace(path, all, (int64_t)(sizeof(header) + bytes));
    free(all);
    return path;
}

/* Token i is first + i: a sample shows where it was taken from. */
static const char *positions_from(const char *name, int first, int n)
{
    uint32_t *t = malloc((size_t)n * sizeof(*t));
    for (int i = 0; i < n; i++)
        t[i] = (uint32_t)(first + i);
    const char *path = shard(name, 20240801, 7, n, t, (size_t)n * sizeof(*t));
    free(t);
    return path;
}

static const char *positions(const char *name, int n)
{
    return positions_from(name, 0, n);
}

static void use(const char *path, const char *val, double fraction)
{
    used = (struct iz_data_config){.val_fraction = fraction,
                                   .bytes = !val,
                                   .document_end = -1,
                                   .group = 1};
    snprintf(used.path, sizeof(used.path), "%s", path);
    snprintf(used.val_path, sizeof(used.val_path), "%s", val ? val : "");
}

static struct iz_data *opened(int seq, uint64_t seed, bool need_val)
{
    struct iz_data *d = NULL;
    assert_int_equal(iz_data_open(&d, &used, seq, MANY, seed, need_val, stderr),
                     0);
    return d;
}

/* It is not opened, and `words` are said. */
static void refused(int seq, int vocab, bool need_val, const char *words)
{
    struct iz_data *d = NULL;
    assert_true(
        HEARD(iz_data_open(&d, &used, seq, vocab, 1, need_val, stderr)) < 0);
    assert_null(d);
    assert_said(words);
}

/* First token of a sample of `positions`, after a look at all of it. */
static int start(const struct iz_data *d, enum iz_split s, int seq, int64_t i)
{
    static int32_t input[4096], target[4096];
    iz_data_sample(d, s, i, input, target);
    for (int j = 0; j < seq; j++) {
        assert_int_equal(input[j], input[0] + j);
        assert_int_equal(target[j], input[j] + 1);
    }
    return input[0];
}

/* The two have the same samples, n of them. */
static void assert_same(const struct iz_data *a, const struct iz_data *b,
                        enum iz_split s, int seq, int64_t n)
{
    assert_int_equal(iz_data_windows(a, s), iz_data_windows(b, s));
    for (int64_t i = n; i-- > 0;) /* backwards: no state */
        assert_int_equal(start(a, s, seq, i), start(b, s, seq, i));
}

static void samples_are_the_tokens_of_each_format(void **state)
{
    uint16_t tokens16[] = {1, 2, 65535, 4, 5};
    uint32_t tokens32[] = {1, 2, 128255, 4, 5};
    int32_t input[4], target[4];
    use(shard("a", 20240520, 1, 5, tokens16, sizeof(tokens16)), "", 0);
    struct iz_data *d = opened(2, 0, false);
    assert_int_equal(iz_data_windows(d, IZ_TRAIN), 2);
    for (int i = 0; i < 2; i++) {
        iz_data_sample(d, IZ_TRAIN, i, input, target);
        assert_true(input[0] == 1 ? target[1] == 65535 : input[0] == 65535);
    }
    iz_data_close(&d);
    assert_null(d);
    use(shard("b", 20240801, 7, 5, tokens32, sizeof(tokens32)), "", 0);
    d = opened(4, 0, false);
    iz_data_sample(d, IZ_TRAIN, 0, input, target);
    assert_int_equal(input[2], 128255);
    assert_int_equal(target[3], 5);
    iz_data_close(&d);
    use(write_text(in_folder("t"), "ab\xff\x80"), NULL, 0);
    d = opened(3, 1, false);
    iz_data_sample(d, IZ_TRAIN, 0, input, target);
    assert_int_equal(input[0], 'a');
    assert_int_equal(input[2], 255);
    assert_int_equal(target[2], 128);
    iz_data_close(&d);
}

/* What documents are is in tests/e2e/data/test_documents.py. */
static void a_wrong_end_of_documents_is_named(void **state)
{
    uint16_t tokens[] = {3, 9, 9, 4, 5, 9, 6, 7, 8}, ends[] = {9, 9, 9};
    use(shard("d", 20240520, 1, 9, tokens, sizeof(tokens)), "", 0);
    used.document_end = 9;
    refused(8, 9, false, "outside the vocabulary");
    used.document_end = 10;
    refused(8, 11, false, "no token 10");
    use(shard("e", 20240520, 1, 3, ends, sizeof(ends)), "", 0);
    used.document_end = 9;
    refused(2, 10, false, "document_end leaves nothing to be learnt");
}

static void use_packed(int sample, const uint16_t *tokens, const uint8_t *mask,
                       int n, const char *val)
{
    sample_tokens = sample;
    use(shard("k.bin", 20240520, 1, n, tokens, (size_t)n * 2), val, 0.5);
    sample_tokens = 0;
    shard("k.mask", IZ_MASK_MAGIC, sample ? 2 : 1, n, mask, (size_t)n);
    assert_int_equal(iz_data_look(&used, stderr), 0);
}

static void wrong_packed_samples_are_named(void **state)
{
    const uint16_t tokens[] = {1, 2, 3, 4, 5, 6, 0, 0};
    uint8_t mask[] = {2, 1, 1, 2, 2, 1, 2, 2};
    use_packed(4, tokens, mask, 8, positions("v", 9));
    assert_true(used.packed && used.apart);
    refused(4, 9, true, "is not packed, and the first file of data.path is");
    use_packed(4, tokens, mask, 7, "");
    refused(4, 9, false, "its last packed sample is not whole");
    mask[3] = 3;
    use_packed(4, tokens, mask, 8, "");
    refused(4, 9, false, "neither 0 nor 1 nor 2");
    mask[3] = 2;
    use_packed(0, tokens, mask, 8, "");
    assert_false(used.packed || used.apart);
    refused(4, 9, false, "neither 0 nor 1");
    remove(in_folder("k.mask"));
}

/* All windows of an epoch lie on one grid, which is shifted by what is left. */
static void every_window_comes_once_an_epoch(void **state)
{
    static const int many[] = {4096, 4097, 65535, 65537};
    for (int k = 1; k <= 200 + N_OF(many); k++) {
        int windows = k <= 200 ? k : many[k - 201], in_place = 0;
        int rest = windows % 3;
        use(positions("p", windows * 3 + 1 + rest), "", 0);
        struct iz_data *d = opened(3, random_next(), false);
        char *seen = calloc((size_t)windows, 1);
        assert_int_equal(iz_data_windows(d, IZ_TRAIN), windows);
        for (int i = 0; i < 2 * windows; i++) {
            int at = start(d, IZ_TRAIN, 3, i);
            int shift = start(d, IZ_TRAIN, 3, i / windows * windows) % 3;
            assert_true(at % 3 == shift && shift <= rest);
            assert_int_equal(seen[at / 3]++, i / windows);
            in_place += at / 3 == i;
        }
        assert_true(windows < 1000 || in_place < 20); /* expected: 1 */
        free(seen);
        iz_data_close(&d);
    }
}

static void training_and_validation_share_no_target(void **state)
{
    for (int n = 8; n < 90; n += 3)
        for (int seq = 1; seq <= 3; seq++) {
            double fraction = (double)(random_next() % 60 + 1) / 100;
            int last_trained = 0;
            use(positions("p", n), "", fraction);
            struct iz_data *d = opened(seq, random_next(), true);
            for (int i = 0; i < 5 * iz_data_windows(d, IZ_TRAIN); i++) {
                int at = start(d, IZ_TRAIN, seq, i) + seq;
                last_trained = at > last_trained ? at : last_trained;
            }
            for (int i = 0; i < iz_data_windows(d, IZ_VAL); i++) {
                int at = start(d, IZ_VAL, seq, i);
                assert_true(at >= last_trained); /* its first target: at + 1 */
                assert_true(at + seq < n);
            }
            assert_int_equal(iz_data_windows(d, IZ_TRAIN) +
                                 iz_data_windows(d, IZ_VAL),
                             (n - 1) / seq);
            iz_data_close(&d);
        }
}

/* And wanting one does not change the training. */
static void validation_is_in_file_order_and_comes_again(void **state)
{
    use(positions("p", 101), positions("v", 31), 0.5);
    struct iz_data *d = opened(10, 1, true);
    assert_int_equal(iz_data_windows(d, IZ_TRAIN), 10);
    assert_int_equal(iz_data_windows(d, IZ_VAL), 3);
    for (int i = 0; i < 7; i++)
        assert_int_equal(start(d, IZ_VAL, 10, i), i % 3 * 10);
    iz_data_close(&d);
    use(positions("p", 1001), "", 0.1);
    struct iz_data *a = opened(5, 1, true), *b = opened(5, 1, false);
    assert_same(a, b, IZ_TRAIN, 5, 400);
    iz_data_close(&a);
    iz_data_close(&b);
}

static void what_is_no_token_file_is_named(void **state)
{
    const struct {
        const char *path, *val, *words;
    } cases[] = {
        {in_folder("nothing"), "", "No such file"},
        {folder, "", "not a regular file"},
        {in_folder("f"), "", "not a regular file"},
        {write_text(in_folder("e"), ""), NULL, "is empty"},
        {write_text(in_folder("s"), "short"), "", "5 bytes"},
    };
    assert_int_equal(mkfifo(in_folder("f"), 0600), 0);
    for (int i = 0; i < N_OF(cases); i++) {
        use(cases[i].path, cases[i].val, 0);
        refused(4, MANY, false, cases[i].words);
    }
}

/* Of a file with 20 tokens of 16 bits, or with 20 bytes of a mask beside one.
 */
static void a_wrong_header_or_mask_is_named(void **state)
{
    static const struct {
        int32_t magic, version, count;
        int less, byte; /* bytes that are missing; one of the mask */
        const char *words;
    } cases[] = {
        {20240521, 1, 20, 0, 0, "magic 20240521 version 1"},
        {20240520, 2, 20, 0, 0, "magic 20240520 version 2"},
        {20240801, 1, 20, 0, 0, "magic 20240801 version 1"},
        {20240520, 1, -3, 0, 0, "-3 tokens"},
        {20240520, 1, 21, 0, 0,
         "1066 bytes, but the file has 1064 bytes (truncated)"},
        {20240520, 1, 20, 1, 0,
         "1064 bytes, but the file has 1063 bytes (truncated)"},
        {20240520, 1, 19, 0, 0,
         "1062 bytes, but the file has 1064 bytes (oversized)"},
        {20240520, 1, INT32_MAX, 0, 0, "(truncated)"},
        {1, 1, 20, 0, 1, "w.mask begins with magic 1"},
        {IZ_MASK_MAGIC, 2, 20, 0, 1, "version 2"},
        {IZ_MASK_MAGIC, 1, 19, 1, 1, "and 19 tokens"},
        {IZ_MASK_MAGIC, 1, 20, 1, 1, "w.mask: the header says 20 tokens"},
        {IZ_MASK_MAGIC, 1, 20, 0, 2, "w.mask: a byte is neither 0 nor 1"},
    };
    for (int i = 0; i < N_OF(cases); i++) {
        uint8_t data[40] = {1, 1, [7] = (uint8_t)cases[i].byte};
        bool mask = cases[i].byte != 0;
        use(mask ? positions("w.bin", 20) : in_folder("a"), "", 0);
        shard(mask ? "w.mask" : "a", cases[i].magic, cases[i].version,
              cases[i].count, data, (size_t)((mask ? 20 : 40) - cases[i].less));
        refused(4, MANY, false, cases[i].words);
        assert_said(mask ? "/w." : used.path);
    }
}

static void a_token_outside_the_vocabulary_is_named(void **state)
{
    enum { N = 200000 };
    uint16_t *t = calloc(N, sizeof(*t));
    char words[64];
    for (int i = 0; i < 20; i++) {
        int at = i == 0 ? 0 : i == 1 ? N - 1 : (int)random_below(N);
        t[at] = 50257;
        use(shard("a", 20240520, 1, N, t, N * sizeof(*t)), "", 0);
        snprintf(words, sizeof(words), "token %d is 50257", at);
        refused(4, 50257, false, words);
        assert_said(used.path);
        t[at] = 50256;
    }
    free(t);
    use(shard("w", 20240801, 7, 2, &(uint32_t[]){7, 1u << 31}, 8), "", 0);
    refused(1, 50257, false, "token 1 is 2147483648");
    use(write_text(in_folder("t"), "abcdefg\xc8"), NULL, 0);
    refused(4, 200, false, "token 7 is 200, outside the vocabulary of 200");
}

static void too_few_tokens_are_named(void **state)
{
    use(positions("p", 8), "", 0);
    refused(8, MANY, false, "8 tokens for training, but one window needs 9");
    use(positions("p", 9), "", 0);
    refused(8, MANY, true, "0 tokens for validation");
    assert_said(used.path);
    use(positions("p", 9), "", 0.5); /* the only window is for training */
    refused(8, MANY, true, "for validation");
    struct iz_data *d = opened(8, 1, false);
    iz_data_close(&d);
    use(positions("p", 9), positions("v", 8), 0);
    refused(8, MANY, true, "8 tokens for validation, but one window needs 9");
    assert_said(used.val_path);
    text_tokens = 4;
    use(shard("q.bin", 20240520, 1, 8, &(uint16_t[8]){0}, 16), "", 0);
    text_tokens = 0;
    shard("q.mask", IZ_MASK_MAGIC, 1, 8, "\1\1\1\1\1\1\1\1", 8);
    used.group = 2;
    refused(4, MANY, true, "0 tokens for validation, but one window needs 8");
}

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
        CASE(samples_are_the_tokens_of_each_format),
        CASE(a_wrong_end_of_documents_is_named),
        CASE(wrong_packed_samples_are_named),
        CASE(every_window_comes_once_an_epoch),
        CASE(training_and_validation_share_no_target),
        CASE(validation_is_in_file_order_and_comes_again),
        CASE(what_is_no_token_file_is_named),
        CASE(a_wrong_header_or_mask_is_named),
        CASE(a_token_outside_the_vocabulary_is_named),
        CASE(too_few_tokens_are_named),
        CASE(several_shards_are_one_stream),
        CASE(a_list_names_files_and_patterns_in_order),
        CASE(masked_tokens_are_no_targets),
        CASE(a_mask_that_leaves_nothing_is_named),
        CASE(a_mask_beside_some_shards_only_is_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
