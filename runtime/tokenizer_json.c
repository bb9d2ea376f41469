/* SPDX-License-Identifier: Apache-2.0 */
/* Reads a Hugging Face tokenizer.json with a byte-level BPE model, as GPT-2,
 * Llama 3 and Qwen have.  Every key is known with the values that are
 * supported; all else is refused by name. */
#include "runtime/tokenizer_json.h"

#include <assert.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/json.h"

int iz_reader_refuse(const struct iz_reader *r, const char *fmt, ...)
{
    va_list ap;

    fprintf(stderr, "izar: tokenizer: %s: ", r->name);
    va_start(ap, fmt);
    vfprintf(stderr, fmt, ap);
    va_end(ap);
    fputc('\n', stderr);
    return -EINVAL;
}

int iz_reader_no_memory(const struct iz_reader *r)
{
    iz_reader_refuse(r, "no memory");
    return -ENOMEM;
}

/* ---- objects whose keys are known ---- */

static bool is_one_of(const char *text, const char *values)
{
    size_t n = strlen(text);

    for (const char *at = values; at; at = strchr(at, '|')) {
        at += *at == '|';
        if (strncmp(at, text, n) == 0 && (at[n] == '|' || at[n] == '\0'))
            return true;
    }
    return false;
}

bool iz_reader_is(const struct iz_json *v, const char *values)
{
    char *text = v ? iz_json_dump(v) : NULL;
    bool yes = text && is_one_of(text, values);

    free(text);
    return yes;
}

static int check_value(const struct iz_reader *r, const char *what,
                       const char *key, const struct iz_json *v,
                       const char *values)
{
    char *text;

    if (!values || iz_reader_is(v, values))
        return 0;
    text = iz_json_dump(v);
    iz_reader_refuse(r, "%s.%s = %.60s is not supported", what, key,
                     text ? text : "?");
    free(text);
    return -ENOTSUP;
}

int iz_reader_check(const struct iz_reader *r, const char *what,
                    const struct iz_json *object, const struct iz_rule *rules)
{
    if (!iz_json_is_object(object))
        return iz_reader_refuse(r, "%s is not an object", what);
    for (const char *key = NULL; (key = iz_json_key(object, key));) {
        const struct iz_rule *rule = rules;
        int err;

        while (rule->key && strcmp(rule->key, key) != 0)
            rule++;
        if (!rule->key)
            return iz_reader_refuse(r, "%s.%.60s is not supported", what, key);
        err = check_value(r, what, key, iz_json_member(object, key),
                          rule->values);
        if (err)
            return err;
    }
    return 0;
}

/* ---- the byte alphabet ---- */

/* Bytes are written as printable characters: themselves where they are, else
 * U+0100 and on, in order. */
static void alphabet(struct iz_reader *r)
{
    int next = 256;

    for (int i = 0; i < 324; i++)
        r->byte_of[i] = -1;
    for (int b = 0; b < 256; b++) {
        bool printable =
            (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;

        r->byte_of[printable ? b : next++] = b;
    }
    assert(next == 324);
}

/* The bytes that a word is written for, in r->word; false: it has a character
 * of another alphabet. */
static bool word_bytes(struct iz_reader *r, const char *word)
{
    r->word.bytes = 0;
    while (*word) {
        int c = (unsigned char)*word++;
        char byte;

        if (c >= 0x80) { /* two bytes of valid UTF-8, or it is not ours */
            if (c >= 0xe0)
                return false;
            c = (c & 0x1f) << 6 | (*word++ & 0x3f);
        }
        if (c >= 324 || r->byte_of[c] < 0)
            return false;
        byte = (char)r->byte_of[c];
        if (iz_text_add(&r->word, &byte, 1))
            return false;
    }
    return true;
}

/* The id of a word of the vocabulary, or -1. */
static int32_t find(struct iz_reader *r, const char *word)
{
    if (!word || !*word || !word_bytes(r, word))
        return -1;
    return iz_words_find(&r->t->bpe.words, r->word.p, r->word.bytes);
}

/* ---- model ---- */

static int64_t id_of(const struct iz_json *v)
{
    return v ? iz_json_number(v, IZ_TOKEN_MAX - 1) : -1;
}

static int add_word(struct iz_reader *r, const char *word, int32_t id)
{
    bool ours = *word && word_bytes(r, word);
    const char *text = ours ? r->word.p : word;
    int64_t bytes = ours ? r->word.bytes : (int64_t)strlen(word);
    int err = iz_words_add(&r->t->bpe.words, id, text, bytes, ours);

    if (err == -EEXIST)
        return iz_reader_refuse(
            r, "model.vocab: \"%.60s\" or its id %d is there twice", word,
            (int)id);
    return err ? iz_reader_no_memory(r) : 0;
}

static int read_vocab(struct iz_reader *r, const struct iz_json *vocab,
                      const struct iz_json *added)
{
    int64_t most = -1;

    for (const char *key = NULL; (key = iz_json_key(vocab, key));) {
        int64_t id = id_of(iz_json_member(vocab, key));

        if (id < 0)
            return iz_reader_refuse(
                r, "model.vocab: the id of \"%.60s\" is not in 0..%d", key,
                IZ_TOKEN_MAX - 1);
        most = id > most ? id : most;
    }
    for (int64_t i = 0; i < iz_json_count(added); i++) {
        int64_t id = id_of(iz_json_member(iz_json_item(added, i), "id"));

        most = id > most ? id : most;
    }
    if (iz_words_open(&r->t->bpe.words, (int32_t)most + 1))
        return iz_reader_no_memory(r);
    for (const char *key = NULL; (key = iz_json_key(vocab, key));) {
        int err = add_word(r, key, (int32_t)id_of(iz_json_member(vocab, key)));

        if (err)
            return err;
    }
    return 0;
}

static int read_bytes(struct iz_reader *r)
{
    struct iz_bpe *b = &r->t->bpe;

    for (int i = 0; i < 256; i++) {
        char byte = (char)i;

        b->byte_id[i] = iz_words_find(&b->words, &byte, 1);
        if (b->byte_id[i] < 0)
            return iz_reader_refuse(
                r,
                "model.vocab has no token for the byte 0x%02x: "
                "it is not byte-level",
                i);
    }
    return 0;
}

/* Both sides of "a b" or ["a", "b"]; -1 for what is no word. */
static void merge_sides(struct iz_reader *r, const struct iz_json *v,
                        int32_t side[2])
{
    const char *text = iz_json_text(v);
    const char *space = text ? strchr(text, ' ') : NULL;
    char *left = NULL;

    side[0] = side[1] = -1;
    if (text && space && !strchr(space + 1, ' ')) {
        left = strdup(text);
        if (!left)
            return;
        left[space - text] = '\0';
        side[0] = find(r, left);
        side[1] = find(r, space + 1);
        free(left);
    } else if (!text && iz_json_count(v) == 2) {
        side[0] = find(r, iz_json_text(iz_json_item(v, 0)));
        side[1] = find(r, iz_json_text(iz_json_item(v, 1)));
    }
}

/* The id of two tokens as one. */
static int32_t joined(struct iz_reader *r, const int32_t side[2])
{
    const struct iz_words *w = &r->t->bpe.words;

    r->word.bytes = 0;
    for (int i = 0; i < 2; i++) {
        const struct iz_word *word = &w->word[side[i]];

        if (iz_text_add(&r->word, w->text + word->at, word->bytes))
            return -1;
    }
    return iz_words_find(w, r->word.p, r->word.bytes);
}

static int read_merge(struct iz_reader *r, const struct iz_json *v,
                      int32_t rank)
{
    int32_t side[2], id;
    int err;

    merge_sides(r, v, side);
    if (side[0] < 0 || side[1] < 0)
        return iz_reader_refuse(r, "model.merges: merge %d is not two tokens",
                                (int)rank);
    id = joined(r, side);
    if (id < 0)
        return iz_reader_refuse(
            r, "model.merges: the result of merge %d is no token", (int)rank);
    err = iz_merges_add(&r->t->bpe.merges, side[0], side[1], rank, id);
    if (err)
        return iz_reader_refuse(r, "model.merges: merge %d was there before",
                                (int)rank);
    return 0;
}

static int read_merges(struct iz_reader *r, const struct iz_json *merges)
{
    int64_t n = iz_json_count(merges);

    if (iz_json_is_object(merges) || iz_json_text(merges))
        return iz_reader_refuse(r, "model.merges is not an array");
    if (iz_merges_open(&r->t->bpe.merges, n))
        return iz_reader_no_memory(r);
    for (int64_t i = 0; i < n; i++) {
        int err = read_merge(r, iz_json_item(merges, i), (int32_t)i);

        if (err)
            return err;
    }
    return 0;
}

static int read_model(struct iz_reader *r, const struct iz_json *model,
                      const struct iz_json *added)
{
    static const struct iz_rule rules[] = {
        {"type", "\"BPE\""},
        {"dropout", "null|0|0.0"},
        {"unk_token", NULL}, /* every byte is known: it never comes */
        {"fuse_unk", NULL},
        {"continuing_subword_prefix", "null|\"\""},
        {"end_of_word_suffix", "null|\"\""},
        {"byte_fallback", "null|false"},
        {"ignore_merges", "null|false|true"},
        {"vocab", NULL},
        {"merges", NULL},
        {NULL, NULL},
    };
    int err = iz_reader_check(r, "model", model, rules);

    if (!err && !iz_json_is_object(iz_json_member(model, "vocab")))
        err = iz_reader_refuse(r, "model.vocab is not an object");
    if (!err)
        err = read_vocab(r, iz_json_member(model, "vocab"), added);
    if (!err)
        err = read_bytes(r);
    if (!err)
        err = read_merges(r, iz_json_member(model, "merges"));
    r->t->bpe.ignore_merges =
        iz_reader_is(iz_json_member(model, "ignore_merges"), "true");
    return err;
}

/* ---- normalizer ---- */

const char *iz_reader_type(const struct iz_json *v)
{
    const char *type = iz_json_text(iz_json_member(v, "type"));

    return type ? type : "";
}

static int read_normalizer(struct iz_reader *r, const struct iz_json *v,
                           bool nested)
{
    const struct iz_json *list = iz_json_member(v, "normalizers");

    if (!v || iz_reader_is(v, "null"))
        return 0;
    if (strcmp(iz_reader_type(v), "NFC") == 0) {
        r->t->nfc = true;
        return 0;
    }
    if (strcmp(iz_reader_type(v), "Sequence") != 0 || nested)
        return iz_reader_refuse(r, "normalizer \"%.60s\" is not supported",
                                iz_reader_type(v));
    for (int64_t i = 0; i < iz_json_count(list); i++) {
        int err = read_normalizer(r, iz_json_item(list, i), true);

        if (err)
            return err;
    }
    return 0;
}

/* ---- added tokens ---- */

static int add_token(struct iz_reader *r, const struct iz_json *v,
                     struct iz_added *a)
{
    const char *text = iz_json_text(iz_json_member(v, "content"));
    int64_t id = id_of(iz_json_member(v, "id"));
    struct iz_words *w = &r->t->bpe.words;
    int32_t known;

    if (!text || !*text || id < 0)
        return iz_reader_refuse(
            r, "added_tokens: content or id is missing or wrong");
    known = find(r, text);
    if (known >= 0 && known != id)
        return iz_reader_refuse(
            r,
            "added_tokens: \"%.60s\" has id %d, in model.vocab "
            "it has %d",
            text, (int)id, (int)known);
    *a = (struct iz_added){
        .text = strdup(text),
        .bytes = (int32_t)strlen(text),
        .id = (int32_t)id,
        .special = iz_reader_is(iz_json_member(v, "special"), "true")};
    if (!a->text)
        return iz_reader_no_memory(r);
    r->t->n_added++;
    if (w->word[id].bytes < 0)
        return iz_words_add(w, (int32_t)id, text, a->bytes, false)
                   ? iz_reader_no_memory(r)
                   : 0;
    if (w->word[id].bytes == a->bytes &&
        memcmp(w->text + w->word[id].at, text, (size_t)a->bytes) == 0)
        return 0;
    return iz_reader_refuse(
        r, "added_tokens: the id %d of \"%.60s\" is another token's", (int)id,
        text);
}

static int read_token(struct iz_reader *r, const struct iz_json *v,
                      struct iz_added *a)
{
    static const struct iz_rule rules[] = {
        {"id", NULL},
        {"content", NULL},
        {"single_word", "null|false"},
        {"lstrip", "null|false"},
        {"rstrip", "null|false"},
        {"normalized", "null|false|true"},
        {"special", "null|false|true"},
        {NULL, NULL},
    };
    int err = iz_reader_check(r, "added_tokens", v, rules);

    if (err)
        return err;
    if (r->t->nfc && iz_reader_is(iz_json_member(v, "normalized"), "true"))
        return iz_reader_refuse(
            r, "added_tokens.normalized = true is not supported "
               "beside a normalizer");
    return add_token(r, v, a);
}

static int by_length(const void *a, const void *b)
{
    const struct iz_added *x = a, *y = b;

    return x->bytes != y->bytes ? (x->bytes < y->bytes) - (x->bytes > y->bytes)
                                : strcmp(x->text, y->text);
}

static int read_added(struct iz_reader *r, const struct iz_json *list)
{
    int64_t n = iz_json_count(list);
    struct iz_tokenizer *t = r->t;

    if (n > IZ_TOKEN_MAX)
        return iz_reader_refuse(r, "added_tokens has %lld items", (long long)n);
    t->added = calloc((size_t)n + 1, sizeof *t->added);
    if (!t->added)
        return iz_reader_no_memory(r);
    for (int64_t i = 0; i < n; i++) {
        int err = read_token(r, iz_json_item(list, i), &t->added[i]);

        if (err)
            return err;
    }
    qsort(t->added, (size_t)n, sizeof *t->added, by_length);
    for (int i = 0; i < t->n_added; i++) {
        const struct iz_added *a = &t->added[i];

        if (i > 0 && strcmp(a->text, a[-1].text) == 0)
            return iz_reader_refuse(r, "added_tokens: \"%.60s\" is there twice",
                                    a->text);
        t->begins[true][(unsigned char)*a->text] = true;
        if (!a->special)
            t->begins[false][(unsigned char)*a->text] = true;
    }
    return 0;
}

/* ---- the file ---- */

static int read_root(struct iz_reader *r, const struct iz_json *root)
{
    static const struct iz_rule rules[] = {
        {"version", NULL},        {"truncation", NULL},
        {"padding", NULL},        {"added_tokens", NULL},
        {"normalizer", NULL},     {"pre_tokenizer", NULL},
        {"post_processor", NULL}, {"decoder", NULL},
        {"model", NULL},          {NULL, NULL},
    };
    const struct iz_json *added = iz_json_member(root, "added_tokens");
    int err = iz_reader_check(r, "tokenizer", root, rules);

    if (!err)
        err = read_normalizer(r, iz_json_member(root, "normalizer"), false);
    if (!err)
        err = read_model(r, iz_json_member(root, "model"), added);
    if (!err)
        err = iz_read_pre_tokenizer(r, iz_json_member(root, "pre_tokenizer"));
    return err ? err : read_added(r, added);
}

int iz_tokenizer_read_json(struct iz_tokenizer *t, const char *name,
                           const char *text, int64_t bytes)
{
    struct iz_reader r = {.t = t, .name = name};
    struct iz_json *root = iz_json_open(text, bytes);
    int err;

    t->kind = IZ_TOKENS_BPE;
    if (!root)
        return iz_reader_refuse(&r, "is not JSON");
    alphabet(&r);
    err = read_root(&r, root);
    iz_json_close(&root);
    free(r.word.p);
    return err;
}
