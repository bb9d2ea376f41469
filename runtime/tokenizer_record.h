/* SPDX-License-Identifier: Apache-2.0 */
/* A document as tokens: plain text, or a conversation of which only the answers
 * are to be learnt. */
#ifndef IZ_RUNTIME_TOKENIZER_RECORD_H
#define IZ_RUNTIME_TOKENIZER_RECORD_H

#include "runtime/tokenizer.h"
#include "runtime/tokenizer_corpus.h"

/* How messages are told apart; see docs/data.md. */
enum iz_chat { IZ_CHAT_AUTO, IZ_CHAT_PLAIN, IZ_CHAT_CHATML, IZ_CHAT_LLAMA3 };

struct iz_recipe {
    const struct iz_tokenizer *tokenizer;
    int32_t begin, end; /* tokens around a document; -1: none */
    bool special;       /* special tokens are recognised in documents */
    bool masked;        /* conversations; else text */
    bool quiet;         /* a faulty record is not printed */
    enum iz_chat chat;
};

/* Tokens and whether each is to be learnt. */
struct iz_lesson {
    struct iz_ids ids;
    uint8_t *learn;
    int64_t marked, room;
};

void iz_lesson_free(struct iz_lesson *l);

/* What IZ_CHAT_AUTO stands for; whether the tokenizer has the tokens of
 * another is printed and refused. */
int iz_recipe_chat(struct iz_recipe *r);

/* Whether a document is a conversation; -EBADMSG, printed. */
int iz_record_is_masked(const struct iz_document *d);

/* Appends a document.  -EBADMSG: it is no record of the kind that r->masked
 * says; nothing is appended.  Other negative errno: fatal. */
int iz_record_encode(const struct iz_recipe *r, struct iz_encoder *e,
                     const struct iz_document *d, struct iz_lesson *out);

#endif
