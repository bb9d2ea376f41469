/* SPDX-License-Identifier: Apache-2.0 */
/* Token shards that a test makes, and the data that a run would read of them.
 */
#pragma once

#include "runtime/data/data.h"
#include "tests/runtime/fixture.h"

#define MANY (1 << 30) /* a vocabulary that holds positions as tokens */

/* Of the shards that are written: tokens of a text of a pair, of a packed
 * sample. */
extern int32_t text_tokens, sample_tokens;
/* A shard or a mask with `count` in its header and `bytes` of data; returns its
 * path. */
const char *shard(const char *name, int32_t magic, int32_t version,
                  int32_t count, const void *data, size_t bytes);
/* Token i is first + i: a sample shows where it was taken from. */
const char *positions_from(const char *name, int first, int n);
const char *positions(const char *name, int n);

/* Of the calls below; `use` sets it: tokens, or bytes where val is NULL. */
extern struct iz_data_config used;
void use(const char *path, const char *val, double fraction);
struct iz_data *opened(int seq, uint64_t seed, bool need_val);
/* It is not opened, and `words` are said. */
void refused(int seq, int vocab, bool need_val, const char *words);
/* First token of a sample of `positions`, after a look at all of it. */
int start(const struct iz_data *d, enum iz_split s, int seq, int64_t i);
/* The two have the same samples, n of them. */
void assert_same(const struct iz_data *a, const struct iz_data *b,
                 enum iz_split s, int seq, int64_t n);
