/* SPDX-License-Identifier: Apache-2.0 */
/* Documents of text and JSONL files, in order, and which of them are for
 * validation. */
#ifndef IZ_RUNTIME_TOKENIZER_CORPUS_H
#define IZ_RUNTIME_TOKENIZER_CORPUS_H

#include <stdbool.h>
#include <stdint.h>

struct iz_corpus;

/* Borrowed from the corpus. */
struct iz_document {
    const char *text; /* a line of JSON, or the text itself */
    int64_t bytes;
    const char *path;
    int64_t line; /* of JSONL, from 1 */
    bool json, val;
};

/* Maps all files.  NAME.jsonl has a document per line; any other file is one
 * document, or those between occurrences of `split_on`.  With val_fraction, a
 * file that is one document is cut at the end of a line; of others that part of
 * the documents is for validation, spread evenly.  Prints.  Negative errno. */
int iz_corpus_open(struct iz_corpus **out, const char *const *path, int paths,
                   const char *split_on, double val_fraction);
void iz_corpus_close(struct iz_corpus **c);

int64_t iz_corpus_bytes(const struct iz_corpus *c);
/* Bytes before the next document. */
int64_t iz_corpus_done(const struct iz_corpus *c);
/* False behind the last. */
bool iz_corpus_next(struct iz_corpus *c, struct iz_document *d);
/* To the first document again. */
void iz_corpus_rewind(struct iz_corpus *c);

#endif
