/* SPDX-License-Identifier: Apache-2.0 */
/* Text to tokens and back: byte-level BPE of a Hugging Face tokenizer.json,
 * SentencePiece's .model, or plain bytes.  What of a file is not supported is
 * refused by name; see docs/data.md. */
#ifndef IZ_RUNTIME_TOKENIZER_H
#define IZ_RUNTIME_TOKENIZER_H

#include "codelets/base/build.h"

#include <stdbool.h>
#include <stdint.h>

IZ_C_BEGIN

struct iz_tokenizer;
struct iz_encoder;

/* A growing array; starts as {0}, id is freed by the owner. */
struct iz_ids {
    int32_t *id;
    int64_t count, room;
};

/* Makes room for n more.  -ENOMEM. */
int iz_ids_room(struct iz_ids *ids, int64_t n);

/* `name`: "bytes", or a file that ends in .json or .model.  Reasons are printed
 * after "izar: tokenizer: NAME".  Negative errno. */
int iz_tokenizer_open(struct iz_tokenizer **out, const char *name);
/* The same of a tokenizer.json in memory. */
int iz_tokenizer_open_json(struct iz_tokenizer **out, const char *name,
                           const char *text, int64_t bytes);
void iz_tokenizer_close(struct iz_tokenizer **t);

/* Largest id + 1: the least model.vocab. */
int32_t iz_tokenizer_vocab(const struct iz_tokenizer *t);
/* The id of an added token or of a piece of the model that is written so; -1:
 * none. */
int32_t iz_tokenizer_find(const struct iz_tokenizer *t, const char *token);
/* End of text, by its usual names; -1: unknown. */
int32_t iz_tokenizer_end(const struct iz_tokenizer *t);

/* Scratch of one thread; t outlives it. */
int iz_encoder_open(struct iz_encoder **out, const struct iz_tokenizer *t);
void iz_encoder_close(struct iz_encoder **e);

/* Appends the tokens of a text of any bytes, at most 2^31 - 64 of them.
 * `special`: text that looks like a special token becomes it, else it is
 * ordinary text.  Negative errno, printed. */
int iz_encode(struct iz_encoder *e, const char *text, int64_t bytes,
              bool special, struct iz_ids *out);

/* The text of tokens, malloc'ed, with a NUL behind it; unknown ids are left
 * out.  NULL: no memory. */
char *iz_decode(const struct iz_tokenizer *t, const int32_t *id, int64_t n,
                int64_t *bytes);

IZ_C_END

#endif
