/* SPDX-License-Identifier: Apache-2.0 */
/* A tokenizer as a whole: opening, special tokens within text, and the way back
 * from tokens to text; see tokenizer.h. */
#include "runtime/tokenizer.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/data/shard.h"
#include "runtime/tokenizer_parts.h"
#include "runtime/tokenizer_sp.h"

int iz_ids_room(struct iz_ids *ids, int64_t n)
{
    int64_t room = ids->room ? ids->room : 1024;
    int32_t *grown;

    if (ids->room - ids->count >= n)
        return 0;
    while (room - ids->count < n)
        room += room / 2;
    grown = realloc(ids->id, (size_t)room * sizeof *grown);
    if (!grown)
        return -ENOMEM;
    ids->id = grown;
    ids->room = room;
    return 0;
}

/* ---- opening ---- */

static bool ends_in(const char *name, const char *ending)
{
    size_t n = strlen(name), m = strlen(ending);

    return n >= m && strcmp(name + n - m, ending) == 0;
}

static int open_file(struct iz_tokenizer *t, const char *name)
{
    struct iz_mapping m;
    int err;

    if (!ends_in(name, ".json") && !ends_in(name, ".model")) {
        fprintf(stderr,
                "izar: tokenizer: %s is neither bytes, NAME.json nor "
                "NAME.model\n",
                name);
        return -EINVAL;
    }
    err = iz_mapping_open(&m, name);
    if (err)
        return err;
    if (ends_in(name, ".json"))
        err = iz_tokenizer_read_json(t, name, (char *)m.at, m.bytes);
    else {
        t->kind = IZ_TOKENS_SP;
        err = iz_sp_open(&t->sp, name, m.at, m.bytes);
    }
    iz_mapping_close(&m);
    return err;
}

static int finish(struct iz_tokenizer **out, struct iz_tokenizer *t, int err)
{
    if (err)
        iz_tokenizer_close(&t);
    *out = t;
    return err;
}

int iz_tokenizer_open(struct iz_tokenizer **out, const char *name)
{
    struct iz_tokenizer *t = calloc(1, sizeof *t);

    *out = NULL;
    if (!t)
        return -ENOMEM;
    return finish(out, t, strcmp(name, "bytes") == 0 ? 0 : open_file(t, name));
}

int iz_tokenizer_open_json(struct iz_tokenizer **out, const char *name,
                           const char *text, int64_t bytes)
{
    struct iz_tokenizer *t = calloc(1, sizeof *t);

    *out = NULL;
    if (!t)
        return -ENOMEM;
    return finish(out, t, iz_tokenizer_read_json(t, name, text, bytes));
}

void iz_tokenizer_close(struct iz_tokenizer **t)
{
    if (!*t)
        return;
    iz_words_close(&(*t)->bpe.words);
    iz_merges_close(&(*t)->bpe.merges);
    iz_cuts_close(&(*t)->cuts);
    for (int i = 0; i < (*t)->n_added; i++)
        free((*t)->added[i].text);
    free((*t)->added);
    iz_sp_close(&(*t)->sp);
    free(*t);
    *t = NULL;
}

/* ---- questions ---- */

int32_t iz_tokenizer_vocab(const struct iz_tokenizer *t)
{
    if (t->kind == IZ_TOKENS_SP)
        return iz_sp_vocab(t->sp);
    return t->kind == IZ_TOKENS_BYTES ? 256 : t->bpe.words.ids;
}

int32_t iz_tokenizer_find(const struct iz_tokenizer *t, const char *token)
{
    if (t->kind == IZ_TOKENS_SP)
        return iz_sp_find(t->sp, token);
    for (int i = 0; i < t->n_added; i++)
        if (strcmp(t->added[i].text, token) == 0)
            return t->added[i].id;
    if (t->kind == IZ_TOKENS_BPE)
        return iz_words_find(&t->bpe.words, token, (int64_t)strlen(token));
    return strlen(token) == 1 ? (unsigned char)*token : -1;
}

int32_t iz_tokenizer_end(const struct iz_tokenizer *t)
{
    static const char *const names[] = {"<|endoftext|>", "<|end_of_text|>",
                                        "<|end\xe2\x96\x81of\xe2\x96\x81"
                                        "sentence|>",
                                        "</s>", "<eos>"};

    if (t->kind == IZ_TOKENS_SP)
        return iz_sp_end(t->sp);
    if (t->kind == IZ_TOKENS_BYTES)
        return 0; /* no text has it */
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        for (int k = 0; k < t->n_added; k++)
            if (strcmp(t->added[k].text, names[i]) == 0)
                return t->added[k].id;
    return -1;
}

/* ---- encoding ---- */

struct iz_encoder {
    const struct iz_tokenizer *t;
    struct iz_bpe_work *bpe;
    struct iz_cut_work *cut;
    struct iz_text text; /* normalised, with the space in front */
    struct iz_ids *out;
};

int iz_encoder_open(struct iz_encoder **out, const struct iz_tokenizer *t)
{
    struct iz_encoder *e = calloc(1, sizeof *e);

    *out = e;
    if (!e)
        return -ENOMEM;
    e->t = t;
    if (t->kind == IZ_TOKENS_BPE &&
        (iz_bpe_work_open(&e->bpe) || iz_cut_work_open(&e->cut))) {
        iz_encoder_close(out);
        return -ENOMEM;
    }
    return 0;
}

void iz_encoder_close(struct iz_encoder **e)
{
    if (!*e)
        return;
    iz_bpe_work_close(&(*e)->bpe);
    iz_cut_work_close(&(*e)->cut);
    free((*e)->text.p);
    free(*e);
    *e = NULL;
}

static int encode_piece(void *arg, const char *text, int64_t n)
{
    struct iz_encoder *e = arg;

    return iz_bpe_encode(&e->t->bpe, e->bpe, text, n, e->out);
}

/* Valid UTF-8. */
static int encode_valid(struct iz_encoder *e, const char *text, int64_t n,
                        bool is_first)
{
    bool space = e->t->prefix_space && is_first && n > 0 && *text != ' ';
    bool nfc = e->t->nfc && iz_nfc_may_change(text, n);
    int err = 0;

    if (!space && !nfc)
        return iz_cut(&e->t->cuts, e->cut, text, n, encode_piece, e);
    e->text.bytes = 0;
    if (space)
        err = iz_text_add(&e->text, " ", 1);
    if (!err)
        err = nfc ? iz_nfc_add(&e->text, text, n)
                  : iz_text_add(&e->text, text, n);
    return err ? err
               : iz_cut(&e->t->cuts, e->cut, e->text.p, e->text.bytes,
                        encode_piece, e);
}

/* Text without added tokens.  Bytes that are not UTF-8 are a piece of their
 * own: no pattern can read them, and no byte may be lost. */
static int encode_text(struct iz_encoder *e, const char *text, int64_t n)
{
    int err = 0;

    for (int64_t at = 0; !err && at < n;) {
        int64_t valid = iz_utf8_valid(text + at, n - at);
        int64_t rest = iz_utf8_invalid(text + at + valid, n - at - valid);

        err = encode_valid(e, text + at, valid, at == 0);
        if (!err)
            err = encode_piece(e, text + at + valid, rest);
        at += valid + rest;
    }
    return err;
}

/* The longest added token that p begins with, or NULL. */
static const struct iz_added *added_at(const struct iz_tokenizer *t,
                                       const char *p, int64_t n, bool special)
{
    if (!t->begins[special][(unsigned char)*p])
        return NULL;
    for (int i = 0; i < t->n_added; i++) {
        const struct iz_added *a = &t->added[i];

        if (a->bytes <= n && (special || !a->special) &&
            memcmp(p, a->text, (size_t)a->bytes) == 0)
            return a;
    }
    return NULL;
}

static int encode_added(struct iz_encoder *e, const struct iz_added *a)
{
    if (iz_ids_room(e->out, 1))
        return -ENOMEM;
    e->out->id[e->out->count++] = a->id;
    return 0;
}

static int encode_bpe(struct iz_encoder *e, const char *text, int64_t n,
                      bool special)
{
    int64_t from = 0;
    int err = 0;

    for (int64_t at = 0; !err && at < n;) {
        const struct iz_added *a = added_at(e->t, text + at, n - at, special);

        if (!a) {
            at++;
            continue;
        }
        err = encode_text(e, text + from, at - from);
        if (!err)
            err = encode_added(e, a);
        from = at += a->bytes;
    }
    return err ? err : encode_text(e, text + from, n - from);
}

static int encode_bytes(const char *text, int64_t n, struct iz_ids *out)
{
    if (iz_ids_room(out, n))
        return -ENOMEM;
    for (int64_t i = 0; i < n; i++)
        out->id[out->count++] = (unsigned char)text[i];
    return 0;
}

int iz_encode(struct iz_encoder *e, const char *text, int64_t n, bool special,
              struct iz_ids *out)
{
    int err;

    assert(n >= 0);
    e->out = out;
    if (n > IZ_TEXT_MAX) {
        fprintf(stderr,
                "izar: tokenizer: a text of %lld bytes, at most %d are one "
                "text\n",
                (long long)n, IZ_TEXT_MAX);
        return -EFBIG;
    }
    if (e->t->kind == IZ_TOKENS_BYTES)
        err = encode_bytes(text, n, out);
    else if (e->t->kind == IZ_TOKENS_SP)
        err = iz_sp_encode(e->t->sp, text, n, out);
    else
        err = encode_bpe(e, text, n, special);
    if (err == -ENOMEM)
        fprintf(stderr, "izar: tokenizer: no memory\n");
    return err;
}

/* ---- decoding ---- */

static int decode_one(const struct iz_tokenizer *t, int32_t id,
                      struct iz_text *out)
{
    const struct iz_words *w = &t->bpe.words;
    char byte = (char)id;

    if (t->kind == IZ_TOKENS_BYTES)
        return id >= 0 && id < 256 ? iz_text_add(out, &byte, 1) : 0;
    if (id < 0 || id >= w->ids || w->word[id].bytes < 0)
        return 0;
    return iz_text_add(out, w->text + w->word[id].at, w->word[id].bytes);
}

char *iz_decode(const struct iz_tokenizer *t, const int32_t *id, int64_t n,
                int64_t *bytes)
{
    struct iz_text out = {0};

    if (t->kind == IZ_TOKENS_SP)
        return iz_sp_decode(t->sp, id, n, bytes);
    for (int64_t i = 0; i < n; i++)
        if (decode_one(t, id[i], &out)) {
            free(out.p);
            return NULL;
        }
    *bytes = out.bytes;
    if (iz_text_add(&out, "", 1)) {
        free(out.p);
        return NULL;
    }
    return out.p;
}
