/* SPDX-License-Identifier: Apache-2.0 */
/* The tokens that a folder's tokenizer knows, as far as its files say so in
 * JSON. */
#pragma once

#include <stdio.h>

/* -EINVAL with the first token of each file told on `err` (NULL: nothing is)
 * whose id is not below `vocab`.  Files that are not there have none. */
int iz_tokens_check(const char *folder, int vocab, FILE *err);
