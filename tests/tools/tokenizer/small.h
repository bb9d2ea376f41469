/* SPDX-License-Identifier: Apache-2.0 */
/* Small tokenizers in memory: all bytes and a few merges, with the
 * pre-tokenizers of three families. */
#ifndef IZ_TESTS_TOOLS_TOKENIZER_SMALL_H
#define IZ_TESTS_TOOLS_TOKENIZER_SMALL_H

#include "runtime/tokenizer.h"

enum small_family { SMALL_GPT2, SMALL_LLAMA3, SMALL_QWEN2, SMALL_FAMILIES };

/* The text of a tokenizer.json, malloc'ed. */
char *small_json(enum small_family f);
struct iz_tokenizer *small_tokenizer(enum small_family f);

#endif
