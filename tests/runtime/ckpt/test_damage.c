/* SPDX-License-Identifier: Apache-2.0 */
/* Damaged checkpoints: whatever happened to a file is named, nothing of it is
 * put, and no header breaks the reader. */
#include "tests/runtime/ckpt/sample.h"

#include <sys/stat.h>

static const char *const files[] = {"/rank-00000-of-00002.safetensors",
                                    "/rank-00001-of-00002.safetensors",
                                    "/index.json"};

/* Of step 5, which save_two saves on two ranks, after step 4. */
static const char *file_of(int i)
{
    return in_step(5, files[i]);
}

static void save_two(void)
{
    struct job j = {small, 5};
    assert_int_equal(save_alone(4, 0), 0);
    all_return(2, save_one, &j, 0);
}

/* The load fails, names the file and the checkpoint before it, and puts
 * nothing. */
static void damage_is_named(int i)
{
    assert_true(HEARD(load_alone(5, 5)) < 0);
    assert_said(files[i]);
    assert_said("step-00000004, looks complete");
}

static void every_flipped_bit_and_other_length_is_named(void **state)
{
    save_two();
    for (int i = 0; i < N_OF(files); i++) {
        int64_t bytes;
        char *p = contents(file_of(i), &bytes);
        for (int n = 0; n < 90; n++) {
            int64_t at = random_below(bytes);
            int64_t left = n < 10 ? n : n == 10 ? bytes + 1 : at;
            char bit = (char)(n < 30 ? 0 : 1 << random_below(8));
            p[at] = (char)(p[at] ^ bit);
            replace(file_of(i), p, bit ? bytes : left);
            damage_is_named(i);
            p[at] = (char)(p[at] ^ bit);
        }
        replace(file_of(i), p, bytes);
        free(p);
    }
    assert_int_equal(load_alone(5, 5), 0);
}

static void a_missing_foreign_or_changed_file_is_named(void **state)
{
    struct job j = {small, 3};
    uint64_t length;
    int64_t bytes;
    save_two();
    all_return(2, save_one, &j, 0); /* an older step, as if copied together */
    char *p = contents(file_of(0), &bytes);
    unlink(file_of(0));
    damage_is_named(0);
    assert_said("No such file");
    mkdir(file_of(0), 0700);
    damage_is_named(0);
    assert_said("not a regular file");
    rmdir(file_of(0));
    /* Still the same JSON: only the hash in the index tells. */
    memcpy(&length, p, 8);
    assert_int_equal(p[7 + length], ' ');
    p[7 + length] = '\n';
    replace(file_of(0), p, bytes);
    damage_is_named(0);
    assert_said("the header has not the hash");
    p[7 + length] = ' ';
    replace(file_of(0), p, bytes);
    free(p);
    p = contents(in_step(3, files[1]), &bytes);
    replace(file_of(1), p, bytes);
    damage_is_named(1);
    free(p);
}

static int load_damaged(struct iz_coll *c, void *arg)
{
    struct run r;
    run_set(&r, large, c, 5);
    int err = iz_ckpt_load(&r.k, 5, c);
    return number_put(&r) == 0 ? -err : 1;
}

static void damage_that_one_rank_sees_fails_on_all(void **state)
{
    struct job j = {large, 5};
    int64_t bytes;
    all_return(2, save_one, &j, 0);
    char *p = contents(file_of(1), &bytes);
    p[bytes - 1] ^= 1;
    replace(file_of(1), p, bytes);
    free(p);
    all_return(3, load_damaged, NULL, EINVAL);
    assert_said("rank-00001-of-00002.safetensors: damaged: tensor ln/v");
}

#define META "'step':'1','rank':'0','ranks':'1',"
#define HASH "0123456789abcdef"
#define NAME_64 HASH HASH HASH HASH
#define PLACE(first_and_count) META "'a':'" first_and_count " " HASH "'"
#define TENSOR(shape, at)                                                      \
    "{'dtype':'F32','shape':[" shape "],'data_offsets':[" at "]}"
#define TWO "'a':" TENSOR("2", "0,8")
#define ONE "'a':" TENSOR("1", "0,4")

/* Headers of a file with 8 bytes of data; what is wrong with each, and what it
 * should say. */
static const struct lie {
    const char *meta, *tensors, *words;
} lies[] = {
    {PLACE("0 2"), TWO, NULL},
    {"'rank':'0'", TWO, "__metadata__.step is missing"},
    {"'step':'99999999999999999999'", TWO, "step"},
    {"'step':'1','rank':'4294967296'", TWO, "rank"},
    {META "'a':'0 2 " HASH HASH "'", TWO, "checksum"},
    {META "'a':'0 2 0123456789abcdeF'", TWO, "checksum"},
    {PLACE("1 2"), TWO, "outside its array of 2"},
    {PLACE("9000000000000000000 2"), TWO, "outside its array"},
    {META "'a':'0'", TWO, "no place"},
    {META "'a':7", TWO, "no place"},
    {META "'b':''", TWO, "no place"},
    {PLACE("0 2"), TWO "," TWO, "not a JSON object"},
    {PLACE("0 2"), "'" NAME_64 "':" TENSOR("2", "0,8"), "too long"},
    {PLACE("0 2"), "'a':{'dtype':'F16','shape':[4],'data_offsets':[0,8]}",
     "type F16, not F32"},
    {PLACE("0 2"), "'a':" TENSOR("1,2", "0,8"), "shape is not [count]"},
    {PLACE("0 2"), "'a':" TENSOR("-2", "0,8"),
     "shape is not a list of up to 8 sizes"},
    {PLACE("0 1"), "'a':" TENSOR("1", "0,8"),
     "8 bytes are not those of its shape"},
    {PLACE("0 3"), "'a':" TENSOR("3", "0,12"), "do not lie in the 8 bytes"},
    {PLACE("0 1"), "'a':" TENSOR("1", "4,8"),
     "a begins at byte 4 of the data, the one before ends at 0"},
    {PLACE("0 1"), ONE, "tensors have 4 bytes, the file's data 8"},
    {PLACE("0 1") ",'b':'0 1 " HASH "'", ONE ",'b':" TENSOR("1", "0,4"),
     "begins at byte 0 of the data, the one before ends at 4"},
    {PLACE("0 2") ",'b':'0 2 " HASH "'", TWO ",'b':" TENSOR("2", "0,8"),
     "begins at byte 0 of the data, the one before ends at 8"},
    {PLACE("0 2"), "'a':[]", "has no dtype"},
    {PLACE("0 2"), "'a\\u001b[2J':[]", "tensor a?[2J has no dtype"},
    {PLACE("0 2"), "'a\\u009b2J':[]", "tensor a??2J has no dtype"},
};

static void each_lie_of_a_header_is_named(void **state)
{
    for (int i = 0; i < N_OF(lies); i++) {
        struct iz_rank_file *s;
        char text[2048] = "";
        uint64_t n =
            (uint64_t)snprintf(text + 8, sizeof(text) - 16,
                               "{\"__metadata__\":{\"izar\":\"1\",%s},%s}",
                               json(lies[i].meta), json(lies[i].tensors));
        memcpy(text, &n, 8);
        replace(in_folder("x"), text, (int64_t)n + 16);
        assert_int_equal(HEARD(iz_rank_file_open(&s, in_folder("x"))) != 0,
                         lies[i].words != NULL);
        assert_int_equal(!s, lies[i].words != NULL);
        assert_said(lies[i].words ? lies[i].words : "");
        iz_rank_file_close(&s);
    }
}

static void no_length_of_a_header_is_believed(void **state)
{
    static const uint64_t lengths[] = {
        0, 1, 9, 1 << 20, 200 << 20, INT64_MAX, UINT64_MAX, UINT64_MAX - 7};
    for (int i = 0; i < N_OF(lengths); i++) {
        struct iz_rank_file *s;
        char text[16] = "xxxxxxxx{}      ";
        memcpy(text, &lengths[i], 8);
        replace(in_folder("x"), text, sizeof(text));
        assert_true(HEARD(iz_rank_file_open(&s, in_folder("x"))) != 0);
        assert_null(s);
        assert_said("in a file of 16: not safetensors, or truncated");
    }
}

/* The reader by itself, on headers that no index vouches for. */
static void no_header_breaks_the_reader(void **state)
{
    static float block[IZ_CKPT_BLOCK];
    int64_t bytes;
    int opened = 0;
    assert_int_equal(save_alone(5, 0), 0);
    char *p = contents(in_step(5, "/rank-00000-of-00001.safetensors"), &bytes);
    char *q = malloc((size_t)bytes);
    for (int n = 0; n < 800; n++) {
        struct iz_rank_file *s;
        int64_t header = bytes - 4 * 1006;
        memcpy(q, p, (size_t)bytes);
        for (int64_t k = random_below(3); k >= 0; k--)
            damage(q, header);
        replace(in_folder("x"), q, random_next() % 4 ? bytes : header);
        if (HEARD(iz_rank_file_open(&s, in_folder("x"))) == 0) {
            opened++;
            listen_begin();
            for (int i = 0; i < s->n_ranges; i++)
                for (int64_t b = 0; b < iz_rank_range_blocks(&s->range[i]); b++)
                    iz_rank_file_read(s, &s->range[i], b, block);
            listen_end();
        }
        if (!s)
            assert_said("/x: ");
        iz_rank_file_close(&s);
    }
    assert_true(opened > 0 && opened < 800);
    free(p);
    free(q);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(every_flipped_bit_and_other_length_is_named),
        CASE(a_missing_foreign_or_changed_file_is_named),
        CASE(damage_that_one_rank_sees_fails_on_all),
        CASE(each_lie_of_a_header_is_named),
        CASE(no_length_of_a_header_is_believed),
        CASE(no_header_breaks_the_reader),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
