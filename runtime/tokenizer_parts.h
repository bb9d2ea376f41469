/* SPDX-License-Identifier: Apache-2.0 */
/* What the parts of a tokenizer share.  Nothing outside runtime/tokenizer*.c
 * includes this. */
#ifndef IZ_RUNTIME_TOKENIZER_PARTS_H
#define IZ_RUNTIME_TOKENIZER_PARTS_H

#include "runtime/tokenizer.h"

#define IZ_TOKEN_MAX (1 << 22)       /* ids are below */
#define IZ_TEXT_MAX (INT32_MAX - 64) /* bytes of a text */
#define IZ_CUTS_MAX 8

/* ---- words: the bytes of tokens, by id and by bytes ---- */

struct iz_word {
    int64_t at;    /* in the text of all */
    int32_t bytes; /* -1: no such id */
};

struct iz_words {
    struct iz_word *word; /* [ids] */
    int32_t ids;
    int32_t *slot; /* open addressing: ids, -1 is free */
    uint64_t mask;
    char *text;
    int64_t text_bytes, text_room;
};

uint64_t iz_bytes_hash(const void *p, int64_t n);

int iz_words_open(struct iz_words *w, int32_t ids);
void iz_words_close(struct iz_words *w);
/* `findable`: iz_words_find knows it.  -EEXIST if the id is taken or, of
 * findable ones, the text; -ENOMEM. */
int iz_words_add(struct iz_words *w, int32_t id, const void *text,
                 int64_t bytes, bool findable);
/* -1: none. */
int32_t iz_words_find(const struct iz_words *w, const void *text,
                      int64_t bytes);

/* ---- merges: the pairs of byte-pair encoding ---- */

struct iz_merge {
    uint64_t pair; /* left << 32 | right; ~0 is free */
    int32_t rank, id;
};

struct iz_merges {
    struct iz_merge *slot;
    uint64_t mask;
};

int iz_merges_open(struct iz_merges *m, int64_t count);
void iz_merges_close(struct iz_merges *m);
/* -EEXIST if the pair is known. */
int iz_merges_add(struct iz_merges *m, int32_t left, int32_t right,
                  int32_t rank, int32_t id);

struct iz_bpe {
    struct iz_words words;
    struct iz_merges merges;
    int32_t byte_id[256];
    bool ignore_merges; /* a piece that is a token is that token */
};

/* Scratch of one thread. */
struct iz_bpe_work;

int iz_bpe_work_open(struct iz_bpe_work **out);
void iz_bpe_work_close(struct iz_bpe_work **w);
/* Appends the tokens of one piece of text.  -ENOMEM. */
int iz_bpe_encode(const struct iz_bpe *b, struct iz_bpe_work *w,
                  const char *text, int64_t bytes, struct iz_ids *out);

/* ---- cuts: from text to pieces ---- */

/* One stage of a pre-tokenizer: cuts each piece where a pattern begins and
 * ends. */
struct iz_cut {
    void *code;     /* compiled pattern */
    bool drop_gaps; /* what the pattern does not match is left out */
};

struct iz_cuts {
    struct iz_cut cut[IZ_CUTS_MAX];
    int count;
};

#define IZ_WHY 256

/* `why` (IZ_WHY bytes) says what the pattern has that is not supported. */
int iz_cuts_add(struct iz_cuts *c, const char *pattern, bool drop_gaps,
                char *why);
void iz_cuts_close(struct iz_cuts *c);

struct iz_cut_work;
typedef int iz_piece_fn(void *arg, const char *text, int64_t bytes);

int iz_cut_work_open(struct iz_cut_work **out);
void iz_cut_work_close(struct iz_cut_work **w);
/* Calls f for each piece of valid UTF-8, in order, until it does not return 0.
 */
int iz_cut(const struct iz_cuts *c, struct iz_cut_work *w, const char *text,
           int64_t bytes, iz_piece_fn *f, void *arg);

/* ---- Unicode ---- */

/* The length of the valid UTF-8 that p begins with. */
int64_t iz_utf8_valid(const char *p, int64_t n);
/* Bytes from p until valid UTF-8 begins again. */
int64_t iz_utf8_invalid(const char *p, int64_t n);

/* Whether normalisation form C can differ from the text. */
bool iz_nfc_may_change(const char *p, int64_t n);

struct iz_text {
    char *p;
    int64_t bytes, room;
};

/* Appends.  -ENOMEM. */
int iz_text_add(struct iz_text *t, const char *p, int64_t n);
/* Appends form C of valid UTF-8. */
int iz_nfc_add(struct iz_text *t, const char *p, int64_t n);

/* ---- the whole ---- */

/* A token that is not made by merges. */
struct iz_added {
    char *text;
    int32_t bytes, id;
    bool special;
};

enum iz_tokenizer_kind { IZ_TOKENS_BYTES, IZ_TOKENS_BPE, IZ_TOKENS_SP };

struct iz_tokenizer {
    enum iz_tokenizer_kind kind;
    struct iz_bpe bpe;
    struct iz_cuts cuts;
    bool nfc, prefix_space;
    struct iz_added *added; /* longest first */
    int n_added;
    bool begins[2][256]; /* [special][b]: a token to look for begins with b */
    struct iz_sp *sp;
};

/* Fills an empty t; prints. */
int iz_tokenizer_read_json(struct iz_tokenizer *t, const char *name,
                           const char *text, int64_t bytes);

#endif
