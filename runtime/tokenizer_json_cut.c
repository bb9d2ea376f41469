/* SPDX-License-Identifier: Apache-2.0 */
/* The pre-tokenizer of a tokenizer.json: which stages there are, and the
 * patterns of each; see tokenizer_json.h. */
#include "runtime/tokenizer_json.h"

#include <string.h>

#include "runtime/base/json.h"

/* GPT-2's, which ByteLevel has built in. */
static const char gpt2_pattern[] =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+"
    "|\\s+(?!\\S)|\\s+";

static int add_cut(struct iz_reader *r, const char *pattern, bool drop_gaps)
{
    char why[IZ_WHY];
    int err = iz_cuts_add(&r->t->cuts, pattern, drop_gaps, why);

    return err ? iz_reader_refuse(r, "pre_tokenizer: %s (%.300s)", why, pattern)
               : 0;
}

/* A text as a pattern that matches it. */
static int add_literal(struct iz_reader *r, const char *text, bool drop_gaps)
{
    r->word.bytes = 0;
    for (; *text; text++) {
        bool plain = (*text & 0x80) || strchr(" \r\n\t", *text) ||
                     (*text >= '0' && *text <= '9') ||
                     ((*text | 32) >= 'a' && (*text | 32) <= 'z');

        if ((!plain && iz_text_add(&r->word, "\\", 1)) ||
            iz_text_add(&r->word, text, 1))
            return iz_reader_no_memory(r);
    }
    if (iz_text_add(&r->word, "", 1))
        return iz_reader_no_memory(r);
    return add_cut(r, r->word.p, drop_gaps);
}

static int read_split(struct iz_reader *r, const struct iz_json *v)
{
    static const struct iz_rule rules[] = {
        {"type", NULL},
        {"pattern", NULL},
        {"behavior", "\"Isolated\"|\"Removed\""},
        {"invert", "null|false|true"},
        {NULL, NULL},
    };
    const struct iz_json *pattern = iz_json_member(v, "pattern");
    const char *regex = iz_json_text(iz_json_member(pattern, "Regex"));
    const char *text = iz_json_text(iz_json_member(pattern, "String"));
    bool removed = iz_reader_is(iz_json_member(v, "behavior"), "\"Removed\"");
    int err = iz_reader_check(r, "pre_tokenizer.Split", v, rules);

    if (err)
        return err;
    if (removed && !iz_reader_is(iz_json_member(v, "invert"), "true"))
        return iz_reader_refuse(
            r, "pre_tokenizer.Split.behavior = \"Removed\" is not "
               "supported without invert: it removes text");
    if (regex)
        return add_cut(r, regex, removed);
    if (text && *text)
        return add_literal(r, text, removed);
    return iz_reader_refuse(
        r, "pre_tokenizer.Split.pattern is neither Regex nor String");
}

static int read_byte_level(struct iz_reader *r, const struct iz_json *v,
                           bool is_first)
{
    static const struct iz_rule rules[] = {
        {"type", NULL},         {"add_prefix_space", "null|false|true"},
        {"trim_offsets", NULL}, {"use_regex", "null|false|true"},
        {NULL, NULL},
    };
    int err = iz_reader_check(r, "pre_tokenizer.ByteLevel", v, rules);

    if (err)
        return err;
    r->byte_level = true;
    /* Absent means true, as the library has it. */
    r->t->prefix_space =
        !iz_reader_is(iz_json_member(v, "add_prefix_space"), "false");
    if (r->t->prefix_space && !is_first)
        return iz_reader_refuse(
            r, "pre_tokenizer.ByteLevel.add_prefix_space = true is "
               "not supported behind another pre-tokenizer");
    if (!iz_reader_is(iz_json_member(v, "use_regex"), "false"))
        return add_cut(r, gpt2_pattern, false);
    return 0;
}

static int read_digits(struct iz_reader *r, const struct iz_json *v)
{
    static const struct iz_rule rules[] = {
        {"type", NULL},
        {"individual_digits", "null|false|true"},
        {NULL, NULL},
    };
    int err = iz_reader_check(r, "pre_tokenizer.Digits", v, rules);
    bool each = iz_reader_is(iz_json_member(v, "individual_digits"), "true");

    return err ? err : add_cut(r, each ? "\\p{N}" : "\\p{N}+", false);
}

static int read_stage(struct iz_reader *r, const struct iz_json *v,
                      bool is_first)
{
    const char *type = iz_reader_type(v);

    if (r->byte_level)
        return iz_reader_refuse(
            r,
            "pre_tokenizer \"%.60s\" behind ByteLevel is not "
            "supported",
            type);
    if (strcmp(type, "Split") == 0)
        return read_split(r, v);
    if (strcmp(type, "ByteLevel") == 0)
        return read_byte_level(r, v, is_first);
    if (strcmp(type, "Digits") == 0)
        return read_digits(r, v);
    return iz_reader_refuse(r, "pre_tokenizer \"%.60s\" is not supported",
                            type);
}

int iz_read_pre_tokenizer(struct iz_reader *r, const struct iz_json *v)
{
    const struct iz_json *list = iz_json_member(v, "pretokenizers");
    bool sequence = strcmp(iz_reader_type(v), "Sequence") == 0;
    int err = 0;

    if (!v || iz_reader_is(v, "null"))
        return iz_reader_refuse(
            r, "pre_tokenizer is missing: it is not byte-level");
    if (!sequence)
        err = read_stage(r, v, true);
    for (int64_t i = 0; !err && sequence && i < iz_json_count(list); i++)
        err = read_stage(r, iz_json_item(list, i), i == 0);
    if (!err && !r->byte_level)
        err = iz_reader_refuse(r, "pre_tokenizer has no ByteLevel");
    return err;
}
