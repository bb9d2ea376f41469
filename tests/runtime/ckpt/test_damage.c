/* SPDX-License-Identifier: Apache-2.0 */
/* Damaged checkpoints: whatever happened to a file is named, nothing of it is
 * put, and no header breaks the reader. */
#include "tests/runtime/ckpt/sample.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "runtime/ckpt/ckpt.h"
#include "runtime/ckpt/rank_file.h"

static const char *const files[] = {"rank-00000-of-00002.safetensors",
                                    "rank-00001-of-00002.safetensors",
                                    "index.json"};

static const char *file_of(int i)
{
    char name[128];

    snprintf(name, sizeof(name), "checkpoints/step-00000005/%s", files[i]);
    return in_folder(name);
}

static void save_two(void)
{
    struct job j = {small, 5, false};

    assert_int_equal(save_alone(4, 0), 0);
    all_return(2, save_one, &j, 0);
}

/* The load fails, names the file and the checkpoint before it, and puts
 * nothing. */
static void damage_is_named(int i)
{
    int err;

    listen_begin();
    err = load_alone(5, 5);
    listen_end();
    assert_true(err < 0);
    assert_said(files[i]);
    assert_said("step-00000004, looks complete");
}

static void every_flipped_bit_is_named(void **state)
{
    save_two();
    for (int i = 0; i < N_OF(files); i++) {
        int64_t bytes;
        char *p = contents(file_of(i), &bytes);

        for (int n = 0; n < 150; n++) {
            int64_t at = (int64_t)(random_next() % (uint64_t)bytes);
            char bit = (char)(1 << random_next() % 8);

            p[at] = (char)(p[at] ^ bit);
            replace(file_of(i), p, bytes);
            damage_is_named(i);
            p[at] = (char)(p[at] ^ bit);
        }
        replace(file_of(i), p, bytes);
        free(p);
    }
    assert_int_equal(load_alone(5, 5), 0);
}

static void every_other_length_is_named(void **state)
{
    save_two();
    for (int i = 0; i < N_OF(files); i++) {
        int64_t bytes;
        char *p = contents(file_of(i), &bytes);

        for (int n = 0; n < 50; n++) {
            int64_t left = (int64_t)(random_next() % (uint64_t)bytes);

            replace(file_of(i), p, n < 10 ? n : n == 10 ? bytes + 1 : left);
            damage_is_named(i);
        }
        replace(file_of(i), p, bytes);
        free(p);
    }
    assert_int_equal(load_alone(5, 5), 0);
}

static void a_missing_or_foreign_file_is_named(void **state)
{
    struct job j = {small, 3, false};
    int64_t bytes;
    char *p;

    save_two();
    all_return(2, save_one, &j, 0); /* an older step, as if copied together */
    p = contents(file_of(0), &bytes);
    unlink(file_of(0));
    damage_is_named(0);
    assert_said("No such file");
    mkdir(file_of(0), 0700);
    damage_is_named(0);
    assert_said("not a regular file");
    rmdir(file_of(0));
    replace(file_of(0), p, bytes);
    free(p);
    p = contents(in_folder("checkpoints/step-00000003/"
                           "rank-00001-of-00002.safetensors"),
                 &bytes);
    replace(file_of(1), p, bytes);
    damage_is_named(1);
    free(p);
}

static int load_damaged(struct iz_coll *c, void *arg)
{
    struct run r;
    int err;

    run_set(&r, arg, c->rank, c->size, 5);
    err = iz_ckpt_load(&r.k, 5, c);
    return number_put(&r) == 0 ? -err : 1;
}

static void damage_that_one_rank_sees_fails_on_all(void **state)
{
    struct job j = {large, 5, false};
    int64_t bytes;
    char *p;

    all_return(2, save_one, &j, 0);
    p = contents(file_of(1), &bytes);
    p[bytes - 1] ^= 1;
    replace(file_of(1), p, bytes);
    free(p);
    all_return(3, load_damaged, (void *)(uintptr_t)large, EINVAL);
    assert_said("rank-00001-of-00002.safetensors: damaged: tensor ln/v");
}

/* Still the same JSON: only the hash in the index tells. */
static void a_header_that_only_looks_the_same_is_named(void **state)
{
    uint64_t length;
    int64_t bytes;
    char *p;

    save_two();
    p = contents(file_of(0), &bytes);
    memcpy(&length, p, 8);
    assert_int_equal(p[7 + length], ' ');
    p[7 + length] = '\n';
    replace(file_of(0), p, bytes);
    damage_is_named(0);
    assert_said("the header has not the hash");
    free(p);
}

/* A file of one tensor of two elements; what is wrong with it, and what it
 * should say. */
struct lie {
    const char *meta, *tensor, *words;
};

#define META "\"step\":\"1\",\"rank\":\"0\",\"ranks\":\"1\","
#define TENSOR "{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}"
#define HASH "0123456789abcdef"
#define NAME_64                                                                \
    "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

static void write_lie(const struct lie *l)
{
    char text[2048];
    uint64_t length = (uint64_t)snprintf(
        text + 8, sizeof(text) - 8, "{\"__metadata__\":{\"izar\":\"1\",%s},%s}",
        l->meta, l->tensor);

    memcpy(text, &length, 8);
    memset(text + 8 + length, 0, 8);
    replace(in_folder("x"), text, (int64_t)length + 16);
}

static void each_lie_of_a_header_is_named(void **state)
{
    static const struct lie lies[] = {
        {META "\"a\":\"0 2 " HASH "\"", "\"a\":" TENSOR, NULL},
        {"\"rank\":\"0\"", "\"a\":" TENSOR, "__metadata__.step is missing"},
        {"\"step\":\"99999999999999999999\"", "\"a\":" TENSOR, "step"},
        {"\"step\":\"1\",\"rank\":\"4294967296\"", "\"a\":" TENSOR, "rank"},
        {META "\"a\":\"0 2 " HASH HASH "\"", "\"a\":" TENSOR, "checksum"},
        {META "\"a\":\"0 2 0123456789abcdeF\"", "\"a\":" TENSOR, "checksum"},
        {META "\"a\":\"1 2 " HASH "\"", "\"a\":" TENSOR,
         "outside its array of 2"},
        {META "\"a\":\"9000000000000000000 2 " HASH "\"", "\"a\":" TENSOR,
         "outside its array"},
        {META "\"a\":\"0\"", "\"a\":" TENSOR, "no place"},
        {META "\"a\":7", "\"a\":" TENSOR, "no place"},
        {META "\"b\":\"\"", "\"a\":" TENSOR, "no place"},
        {META "\"a\":\"0 2 " HASH "\"", "\"a\":" TENSOR ",\"a\":" TENSOR,
         "not a JSON object"},
        {META "\"a\":\"0 2 " HASH "\"", "\"" NAME_64 "\":" TENSOR, "too long"},
        {META "\"a\":\"0 2 " HASH "\"",
         "\"a\":{\"dtype\":\"F16\",\"shape\":[4],\"data_offsets\":[0,8]}",
         "type F16, not F32"},
        {META "\"a\":\"0 2 " HASH "\"",
         "\"a\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[0,8]}",
         "shape is not [count]"},
        {META "\"a\":\"0 2 " HASH "\"",
         "\"a\":{\"dtype\":\"F32\",\"shape\":[-2],\"data_offsets\":[0,8]}",
         "shape is not a list of up to 8 sizes"},
        {META "\"a\":\"0 1 " HASH "\"",
         "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,8]}",
         "8 bytes are not those of its shape"},
        {META "\"a\":\"0 3 " HASH "\"",
         "\"a\":{\"dtype\":\"F32\",\"shape\":[3],\"data_offsets\":[0,12]}",
         "do not lie in the 8 bytes"},
        {META "\"a\":\"0 1 " HASH "\"",
         "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}",
         "a begins at byte 4 of the data, the one before ends at 0"},
        {META "\"a\":\"0 1 " HASH "\"",
         "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}",
         "tensors have 4 bytes, the file's data 8"},
        {META "\"a\":\"0 1 " HASH "\",\"b\":\"0 1 " HASH "\"",
         "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
         "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}",
         "begins at byte 0 of the data, the one before ends at 4"},
        {META "\"a\":\"0 2 " HASH "\",\"b\":\"0 2 " HASH "\"",
         "\"a\":" TENSOR ",\"b\":" TENSOR,
         "begins at byte 0 of the data, the one before ends at 8"},
        {META "\"a\":\"0 2 " HASH "\"", "\"a\":[]", "has no dtype"},
    };

    for (int i = 0; i < N_OF(lies); i++) {
        struct iz_safetensors *s;

        write_lie(&lies[i]);
        listen_begin();
        iz_safetensors_open(&s, in_folder("x"));
        listen_end();
        assert_int_equal(!s, lies[i].words != NULL);
        if (lies[i].words)
            assert_said(lies[i].words);
        iz_safetensors_close(&s);
    }
}

static void no_length_of_a_header_is_believed(void **state)
{
    static const uint64_t lengths[] = {
        0, 1, 9, 1 << 20, 200 << 20, INT64_MAX, UINT64_MAX, UINT64_MAX - 7};

    for (int i = 0; i < N_OF(lengths); i++) {
        struct iz_safetensors *s;
        char text[16] = "xxxxxxxx{}      ";

        memcpy(text, &lengths[i], 8);
        replace(in_folder("x"), text, sizeof(text));
        listen_begin();
        iz_safetensors_open(&s, in_folder("x"));
        listen_end();
        assert_null(s);
        assert_said("in a file of 16: not safetensors, or truncated");
    }
}

/* The reader by itself, on headers that no index vouches for. */
static void no_header_breaks_the_reader(void **state)
{
    static const char *const words[] = {
        "99999999999999999",    "-1", "[",    "}",      "\"", "0",
        "18446744073709551615", ",",  "null", "\\u0000"};
    static float block[IZ_BLOCK];
    int64_t bytes;
    int opened = 0;
    char *p, *q;

    assert_int_equal(save_alone(5, 0), 0);
    rename(
        in_folder("checkpoints/step-00000005/rank-00000-of-00001.safetensors"),
        in_folder("x"));
    p = contents(in_folder("x"), &bytes);
    q = malloc((size_t)bytes);
    for (int n = 0; n < 3000; n++) {
        struct iz_safetensors *s;
        int64_t header = bytes - 4 * 1006;

        memcpy(q, p, (size_t)bytes);
        for (uint64_t k = random_next() % 3 + 1; k-- > 0;) {
            const char *w = words[random_next() % N_OF(words)];
            int64_t at = (int64_t)(random_next() % (uint64_t)(header - 20));

            if (random_next() % 3)
                memcpy(q + at, w, strlen(w));
            else
                q[at] = (char)random_next();
        }
        replace(in_folder("x"), q, random_next() % 4 ? bytes : header);
        listen_begin();
        if (iz_safetensors_open(&s, in_folder("x")) == 0) {
            opened++;
            for (int i = 0; i < s->n_pieces; i++)
                for (int64_t b = 0; b < iz_piece_blocks(&s->piece[i]); b++)
                    iz_safetensors_read(s, &s->piece[i], b, block);
        }
        listen_end();
        if (!s)
            assert_said("/x: ");
        iz_safetensors_close(&s);
    }
    assert_true(opened > 0 && opened < 3000);
    free(p);
    free(q);
}

#define CASE(f) cmocka_unit_test_setup_teardown(f, make_folder, remove_folder)

int main(void)
{
    const struct CMUnitTest tests[] = {
        CASE(every_flipped_bit_is_named),
        CASE(every_other_length_is_named),
        CASE(a_missing_or_foreign_file_is_named),
        CASE(damage_that_one_rank_sees_fails_on_all),
        CASE(a_header_that_only_looks_the_same_is_named),
        CASE(each_lie_of_a_header_is_named),
        CASE(no_length_of_a_header_is_believed),
        CASE(no_header_breaks_the_reader),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
