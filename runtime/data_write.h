/* SPDX-License-Identifier: Apache-2.0 */
/* Writes token shards, and loss masks beside them, in the layouts that
 * runtime/data/shard.h reads. */
#ifndef IZ_RUNTIME_DATA_WRITE_H
#define IZ_RUNTIME_DATA_WRITE_H

#include <stdbool.h>
#include <stdint.h>

struct iz_shards;

/* PREFIX_000000.bin, PREFIX_000001.bin, ... of at most shard_tokens each; with
 * `mask` PREFIX_000000.mask too.  Tokens have 16 bits if `vocab` allows it.
 * Refuses where files of these names are.  Prints.  Negative errno. */
int iz_shards_open(struct iz_shards **out, const char *prefix, int64_t vocab,
                   int64_t shard_tokens, bool mask);
/* Appends.  learn[i] is 1 where token i is to be learnt, else 0; NULL without
 * masks. */
int iz_shards_put(struct iz_shards *s, const int32_t *id, const uint8_t *learn,
                  int64_t n);
/* Completes the last shard; without it the shard is removed by the close. */
int iz_shards_finish(struct iz_shards *s);
void iz_shards_close(struct iz_shards **s);

int64_t iz_shards_count(const struct iz_shards *s);

#endif
