/* SPDX-License-Identifier: Apache-2.0 */
/* In a build without SentencePiece: a model is refused, so nothing else is ever
 * called. */
#include "runtime/tokenizer_sp.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

int iz_sp_open(struct iz_sp **out, const char *name, const void *model,
               int64_t bytes)
{
    (void)model, (void)bytes;
    *out = NULL;
    fprintf(stderr,
            "izar: tokenizer: %s: this build has no SentencePiece "
            "(libsentencepiece-dev)\n",
            name);
    return -ENOTSUP;
}

void iz_sp_close(struct iz_sp **s)
{
    assert(!*s);
    (void)s;
}

int32_t iz_sp_vocab(const struct iz_sp *s)
{
    (void)s;
    abort();
}

int32_t iz_sp_find(const struct iz_sp *s, const char *piece)
{
    (void)s, (void)piece;
    abort();
}

int32_t iz_sp_end(const struct iz_sp *s)
{
    (void)s;
    abort();
}

int iz_sp_encode(const struct iz_sp *s, const char *text, int64_t bytes,
                 struct iz_ids *out)
{
    (void)s, (void)text, (void)bytes, (void)out;
    abort();
}

char *iz_sp_decode(const struct iz_sp *s, const int32_t *id, int64_t n,
                   int64_t *bytes)
{
    (void)s, (void)id, (void)n, (void)bytes;
    abort();
}
