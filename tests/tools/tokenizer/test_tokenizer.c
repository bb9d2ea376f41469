/* SPDX-License-Identifier: Apache-2.0 */
/* Tokenizers in memory: nothing is lost on the way to tokens and back, the
 * merges are those of the definition, and long pieces take no squared time. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/tokenizer_parts.h"
#include "tests/tools/tokenizer/small.h"

static uint64_t random_next(void)
{
    static uint64_t x = 88172645463325252u;

    x ^= x << 13;
    x ^= x >> 7;
    return x ^= x << 17;
}

/* Text of any bytes in which merges and characters of all lengths are common.
 */
static int64_t random_text(char *out, int64_t room)
{
    static const char *const parts[] = {
        " the",     "and",
        "a",        "aa",
        "  ",       "\n",
        "123",      "'s",
        "\xc3\xa9", "e\xcc\x81",
        "\xe4\xbd", "\xe4\xbd\xa0",
        "\xff",     "\xf0\x9f\x98\x80",
        "our",      "<|endoftext|>",
        "\r\n\t",   "\xcc\xa3",
        "here",
    };
    int64_t n = 0, want = (int64_t)(random_next() % (uint64_t)room);

    while (n < want) {
        const char *p = parts[random_next() % (sizeof parts / sizeof *parts)];
        int64_t bytes = (int64_t)strlen(p);

        if (random_next() % 4 == 0)
            out[n++] = (char)random_next();
        else if (bytes <= want - n)
            n += (memcpy(out + n, p, (size_t)bytes), bytes);
        else
            break;
    }
    return n;
}

static void encode(struct iz_encoder *e, const char *text, int64_t n,
                   struct iz_ids *ids)
{
    ids->count = 0;
    assert_int_equal(iz_encode(e, text, n, false, ids), 0);
}

static void decoding_gives_the_bytes_back(void **state)
{
    char text[400];
    struct iz_ids ids = {0};

    (void)state;
    for (int f = 0; f < SMALL_FAMILIES; f++) {
        struct iz_tokenizer *t = small_tokenizer((enum small_family)f);
        struct iz_encoder *e;

        assert_non_null(t);
        assert_int_equal(iz_encoder_open(&e, t), 0);
        for (int i = 0; i < 5000 && f != SMALL_QWEN2; i++) {
            int64_t n = random_text(text, sizeof text), bytes;
            char *back;

            encode(e, text, n, &ids);
            back = iz_decode(t, ids.id, ids.count, &bytes);
            assert_int_equal(bytes, n);
            assert_memory_equal(back, text, (size_t)n);
            free(back);
        }
        iz_encoder_close(&e);
        iz_tokenizer_close(&t);
    }
    free(ids.id);
}

/* The definition: of all pairs the one of the lowest rank, of equal ones the
 * first; until none is left. */
static int64_t slow_merges(const struct iz_bpe *b, const char *text, int64_t n,
                           int32_t *id)
{
    for (int64_t i = 0; i < n; i++)
        id[i] = b->byte_id[(unsigned char)text[i]];
    for (;;) {
        const struct iz_merge *best = NULL;
        int64_t at = 0;

        for (int64_t i = 0; i + 1 < n; i++)
            for (uint64_t k = 0; k <= b->merges.mask; k++) {
                const struct iz_merge *m = &b->merges.slot[k];

                if (m->pair == ((uint64_t)id[i] << 32 | (uint64_t)id[i + 1]) &&
                    (!best || m->rank < best->rank))
                    best = m, at = i;
            }
        if (!best)
            return n;
        id[at] = best->id;
        memmove(id + at + 1, id + at + 2, (size_t)(n - at - 2) * sizeof *id);
        n--;
    }
}

static void merges_are_those_of_the_definition(void **state)
{
    struct iz_tokenizer *t = small_tokenizer(SMALL_GPT2);
    struct iz_bpe_work *w;
    struct iz_ids ids = {0};
    char text[70];
    int32_t want[70];

    (void)state;
    assert_int_equal(iz_bpe_work_open(&w), 0);
    for (int i = 0; i < 1000; i++) {
        int64_t n = 1 + (int64_t)(random_next() % 69), count;
        const char *letters = i % 2 ? "the adnr" : "aaaaaa h";

        for (int64_t k = 0; k < n; k++)
            text[k] = letters[random_next() % 8];
        count = slow_merges(&t->bpe, text, n, want);
        for (int again = 0; again < 2; again++) { /* then from the cache */
            ids.count = 0;
            assert_int_equal(iz_bpe_encode(&t->bpe, w, text, n, &ids), 0);
            assert_int_equal(ids.count, count);
            assert_memory_equal(ids.id, want, (size_t)count * sizeof *want);
        }
    }
    free(ids.id);
    iz_bpe_work_close(&w);
    iz_tokenizer_close(&t);
}

/* Squared time would be 10^12 steps: the test would not end. */
static void a_word_of_two_million_letters_is_merged(void **state)
{
    const int64_t n = 2000000;
    struct iz_tokenizer *t = small_tokenizer(SMALL_LLAMA3);
    struct iz_encoder *e;
    struct iz_ids ids = {0};
    char *text = malloc((size_t)n), *back;
    int64_t bytes;

    (void)state;
    assert_int_equal(iz_encoder_open(&e, t), 0);
    for (int blank = 0; blank < 2; blank++) {
        memset(text, blank ? ' ' : 'a', (size_t)n);
        encode(e, text, n, &ids);
        assert_true(ids.count < n / 2);
        back = iz_decode(t, ids.id, ids.count, &bytes);
        assert_int_equal(bytes, n);
        assert_memory_equal(back, text, (size_t)n);
        free(back);
    }
    free(text);
    free(ids.id);
    iz_encoder_close(&e);
    iz_tokenizer_close(&t);
}

/* Every string of up to three bytes: valid ones are those that
 * the definition of UTF-8 can write. */
static void valid_utf8_is_what_characters_are_written_as(void **state)
{
    static unsigned char written[1 << 21];

    (void)state;
    for (uint32_t c = 0x80; c < 0x10000; c++) {
        bool two = c < 0x800;
        uint32_t s = two ? (0xc0 | c >> 6) << 8 | (0x80 | (c & 0x3f))
                         : (0xe0 | c >> 12) << 16 |
                               (0x80 | (c >> 6 & 0x3f)) << 8 |
                               (0x80 | (c & 0x3f));

        if (c < 0xd800 || c > 0xdfff)
            written[s >> 3] |= (unsigned char)(1 << (s & 7));
    }
    for (uint32_t s = 0x8000; s < 0xf00000; s++) {
        char p[3];
        int n = s < 0x10000 ? 2 : 3;
        bool known = written[s >> 3] >> (s & 7) & 1;

        for (int i = 0; i < n; i++)
            p[i] = (char)(s >> 8 * (n - 1 - i));
        if ((unsigned char)p[0] >= (n == 2 ? 0xc0 : 0xe0) && n >= 2 &&
            (n == 3 || (unsigned char)p[0] < 0xe0))
            assert_int_equal(iz_utf8_valid(p, n) == n, known);
    }
    assert_int_equal(iz_utf8_valid("\xf4\x8f\xbf\xbf", 4), 4);
    assert_int_equal(iz_utf8_valid("\xf4\x90\x80\x80", 4), 0);
    assert_int_equal(iz_utf8_valid("\xf0\x8f\xbf\xbf", 4), 0);
    assert_int_equal(iz_utf8_valid("abcdefgh\xc3", 9), 8);
    assert_int_equal(iz_utf8_invalid("\xff\xc3\xa9", 3), 1);
}

/* A file that ends anywhere, or has a byte changed, opens or does not; nothing
 * else. */
static void damaged_files_do_no_harm(void **state)
{
    char *json = small_json(SMALL_QWEN2);
    int64_t n = (int64_t)strlen(json);
    struct iz_tokenizer *t;
    int opened = 0, said;

    (void)state;
    fflush(stderr);
    said = dup(STDERR_FILENO);
    assert_non_null(freopen("/dev/null", "w", stderr));
    for (int i = 0; i < 1500; i++) {
        int64_t at = (int64_t)(random_next() % (uint64_t)n);
        char was = json[at];

        json[at] = (char)(32 + random_next() % 95);
        opened += iz_tokenizer_open_json(&t, "x", json, i % 2 ? n : at) == 0;
        json[at] = was;
        iz_tokenizer_close(&t);
    }
    fflush(stderr);
    dup2(said, STDERR_FILENO);
    close(said);
    assert_true(opened > 0 && opened < 750);
    free(json);
}

static void names_give_ids(void **state)
{
    struct iz_tokenizer *t = small_tokenizer(SMALL_GPT2);

    (void)state;
    assert_int_equal(iz_tokenizer_vocab(t), 281);
    assert_int_equal(iz_tokenizer_end(t), 280);
    assert_int_equal(iz_tokenizer_find(t, "<|endoftext|>"), 280);
    assert_int_equal(iz_tokenizer_find(t, " the"), 258);
    assert_int_equal(iz_tokenizer_find(t, "nothing"), -1);
    iz_tokenizer_close(&t);
    assert_null(t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(decoding_gives_the_bytes_back),
        cmocka_unit_test(merges_are_those_of_the_definition),
        cmocka_unit_test(a_word_of_two_million_letters_is_merged),
        cmocka_unit_test(valid_utf8_is_what_characters_are_written_as),
        cmocka_unit_test(names_give_ids),
        cmocka_unit_test(damaged_files_do_no_harm),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
