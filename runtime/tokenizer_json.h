/* SPDX-License-Identifier: Apache-2.0 */
/* What the readers of a tokenizer.json's parts share.  Nothing outside
 * runtime/tokenizer_json*.c includes this. */
#ifndef IZ_RUNTIME_TOKENIZER_JSON_H
#define IZ_RUNTIME_TOKENIZER_JSON_H

#include "runtime/tokenizer_parts.h"

struct iz_json;

struct iz_reader {
    struct iz_tokenizer *t;
    const char *name;    /* of the file */
    struct iz_text word; /* scratch */
    int byte_of[324];    /* of the characters of the byte alphabet, or -1 */
    bool byte_level;     /* that stage was there */
};

/* Prints "izar: tokenizer: NAME: ..."; -EINVAL. */
int iz_reader_refuse(const struct iz_reader *r, const char *fmt, ...)
    IZ_PRINTF(2, 3);
/* The same; -ENOMEM. */
int iz_reader_no_memory(const struct iz_reader *r);

/* A key that an object may have.  `values`: the JSON texts that pass, with |
 * between; NULL: any.  Ends with key = NULL. */
struct iz_rule {
    const char *key, *values;
};

/* Refuses, by name, what is no object, a key without a rule and a value that
 * does not pass.  `what` is the name of the object. */
int iz_reader_check(const struct iz_reader *r, const char *what,
                    const struct iz_json *object, const struct iz_rule *rules);

/* Whether v, which may be NULL, is one of the JSON texts "a|b|c". */
bool iz_reader_is(const struct iz_json *v, const char *values);
/* v's member "type", or "". */
const char *iz_reader_type(const struct iz_json *v);

/* Fills r->t's cuts. */
int iz_read_pre_tokenizer(struct iz_reader *r, const struct iz_json *v);

#endif
