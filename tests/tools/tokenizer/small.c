/* SPDX-License-Identifier: Apache-2.0 */
/* See small.h. */
#include "tests/tools/tokenizer/small.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROOM 65536

/* Words of two sides; G stands for the space's character. */
static const char *const merges[][2] = {
    {"t", "h"},  {"th", "e"},   {"G", "the"}, {"i", "n"},   {"e", "r"},
    {"a", "n"},  {"an", "d"},   {"G", "and"}, {"G", "G"},   {"GG", "GG"},
    {"h", "e"},  {"G", "a"},    {"a", "a"},   {"aa", "aa"}, {"aaaa", "aa"},
    {"1", "2"},  {"12", "3"},   {"'", "s"},   {"r", "e"},   {"'", "re"},
    {"aa", "a"}, {"GG", "the"}, {"o", "u"},   {"ou", "r"},
};

#define MERGES (sizeof merges / sizeof *merges)

struct text {
    char *p;
    size_t bytes;
};

static void add(struct text *t, const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    t->bytes += (size_t)vsnprintf(t->p + t->bytes, ROOM - t->bytes, fmt, ap);
    va_end(ap);
}

static void add_word(struct text *t, const char *word)
{
    for (; *word; word++)
        add(t, *word == 'G' ? "\\u0120" : "%c", *word);
}

static void add_bytes(struct text *t)
{
    int next = 256;

    for (int b = 0; b < 256; b++) {
        int c = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174
                    ? b
                    : next++;

        add(t, "\"\\u%04x\":%d,", c, b);
    }
}

static void add_merges(struct text *t, bool pairs)
{
    for (size_t i = 0; i < MERGES; i++) {
        add(t, pairs ? "%s[\"" : "%s\"", i ? "," : "");
        add_word(t, merges[i][0]);
        add(t, pairs ? "\",\"" : " ");
        add_word(t, merges[i][1]);
        add(t, pairs ? "\"]" : "\"");
    }
}

static void add_words(struct text *t)
{
    for (size_t i = 0; i < MERGES; i++) {
        add(t, "%s\"", i ? "," : "");
        add_word(t, merges[i][0]);
        add_word(t, merges[i][1]);
        add(t, "\":%zu", 256 + i);
    }
}

static const char *pre_tokenizer(enum small_family f)
{
    static const char *const all[] = {
        "{\"type\":\"ByteLevel\",\"add_prefix_space\":false}",
        "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\","
        "\"pattern\":{\"Regex\":\"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
        "[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}{1,3}|"
        " ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|"
        "\\\\s+(?!\\\\S)|\\\\s+\"},\"behavior\":\"Isolated\",\"invert\":false},"
        "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
        "\"use_regex\":false}]}",
        "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\","
        "\"pattern\":{\"Regex\":\"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
        "[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}|"
        " ?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|"
        "\\\\s+(?!\\\\S)|\\\\s+\"},\"behavior\":\"Isolated\",\"invert\":false},"
        "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,"
        "\"use_regex\":false}]}",
    };

    return all[f];
}

char *small_json(enum small_family f)
{
    struct text t = {malloc(ROOM), 0};

    if (!t.p)
        return NULL;
    add(&t,
        "{\"added_tokens\":[{\"id\":%zu,\"content\":\"<|endoftext|>\","
        "\"special\":true}],\"normalizer\":%s,\"pre_tokenizer\":%s,",
        256 + MERGES, f == SMALL_QWEN2 ? "{\"type\":\"NFC\"}" : "null",
        pre_tokenizer(f));
    add(&t, "\"model\":{\"type\":\"BPE\",\"ignore_merges\":%s,\"vocab\":{",
        f == SMALL_LLAMA3 ? "true" : "false");
    add_bytes(&t);
    add_words(&t);
    add(&t, "},\"merges\":[");
    add_merges(&t, f == SMALL_LLAMA3);
    add(&t, "]}}");
    return t.p;
}

struct iz_tokenizer *small_tokenizer(enum small_family f)
{
    char *json = small_json(f);
    struct iz_tokenizer *t = NULL;

    if (json)
        iz_tokenizer_open_json(&t, "small", json, (int64_t)strlen(json));
    free(json);
    return t;
}
