/* SPDX-License-Identifier: Apache-2.0 */
/* SentencePiece behind a C interface.  A build without the library refuses to
 * open a model. */
#ifndef IZ_RUNTIME_TOKENIZER_SP_H
#define IZ_RUNTIME_TOKENIZER_SP_H

#include "runtime/tokenizer.h"

IZ_C_BEGIN

struct iz_sp;

/* `model`: the content of a .model file.  Prints. */
int iz_sp_open(struct iz_sp **out, const char *name, const void *model,
               int64_t bytes);
void iz_sp_close(struct iz_sp **s);

int32_t iz_sp_vocab(const struct iz_sp *s);
int32_t iz_sp_find(const struct iz_sp *s, const char *piece);
int32_t iz_sp_end(const struct iz_sp *s);
/* From several threads at once.  What is not UTF-8 becomes U+FFFD. */
int iz_sp_encode(const struct iz_sp *s, const char *text, int64_t bytes,
                 struct iz_ids *out);
char *iz_sp_decode(const struct iz_sp *s, const int32_t *id, int64_t n,
                   int64_t *bytes);

IZ_C_END

#endif
