/* SPDX-License-Identifier: Apache-2.0 */
/* Token shards or files of records, mapped read-only, and which sample comes
 * when: a function of
 * seed and position alone, so that a run resumes at any step and every number
 * of ranks sees the same samples in the same global order. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "codelets/unit/layer.h"
#include "runtime/config/config.h"

struct iz_data;

enum iz_split { IZ_TRAIN, IZ_VAL };

/* Maps the files and checks them whole: header, length against size, every
 * token below `vocab`, at least one window of seq + 1 tokens in each split that
 * is used. data.path and val_path may name several files (shard.h): they
 * are one stream in the order of the list. Refuses with file, position and
 * reason told on `err`, or silently if that is NULL.  Negative errno. */
int iz_data_open(struct iz_data **out, const struct iz_data_config *c, int seq,
                 int vocab, uint64_t seed, bool need_val, FILE *err);
/* Like iz_data_open, for files of the model's records; a window is a record.
 * The model is borrowed until close. */
int iz_data_open_records(struct iz_data **out, const struct iz_data_config *c,
                         const struct iz_model *m, uint64_t seed, bool need_val,
                         FILE *err);
void iz_data_close(struct iz_data **d);
/* Whether the samples of c->path are packed, as its first file says: sets
 * c->packed and c->apart.  A file that is not there is none.  Refuses
 * data.document_end beside it.  Negative errno. */
int iz_data_look(struct iz_data_config *c, FILE *err);

/* File i of a split, in the order of the stream; NULL: it has no more.  What is
 * kept of the training files for validation is no file of its own. */
struct iz_shard;
const struct iz_shard *iz_data_shard(const struct iz_data *d, enum iz_split s,
                                     int i);

/* Windows of seq tokens (+ 1 for the target) in a split. */
int64_t iz_data_windows(const struct iz_data *d, enum iz_split s);

/* Of n samples: targets, excluded or not; of pairs, of the chosen ones. */
int64_t iz_data_targets(const struct iz_data *d, int64_t n);

/* Whether targets of a split are excluded, by a loss mask or behind the end of
 * a document, and how many of those of samples [first, first + n) are not; of
 * pairs, of the chosen ones.  Thread-safe. */
bool iz_data_masked(const struct iz_data *d, enum iz_split s);
int64_t iz_data_loss_tokens(const struct iz_data *d, enum iz_split s,
                            int64_t first, int64_t n);

/* Sample number `index` (0, 1, ... over all epochs; each epoch a new
 * permutation of the training windows by a counter-based generator; validation
 * in file order) as int32: input[seq] and target[seq] = the following tokens,
 * or -1 where the loss mask beside a shard excludes one, and behind
 * data.document_end.  With pairs, samples 2i and 2i + 1 are the chosen and
 * the rejected text of a pair.  The last token of such a text, and of a packed
 * sample, has no target.
 * Thread-safe, allocates nothing. */
void iz_data_sample(const struct iz_data *d, enum iz_split s, int64_t index,
                    int32_t *input, int32_t *target);

/* Where the documents of samples first to first + n - 1 begin: of each token,
 * at its place in input [n, seq], the first one of its document in the sample.
 * Needs data.document_end or packed samples. */
void iz_data_documents(const struct iz_data *d, enum iz_split s, int64_t first,
                       int n, const int32_t *input, int32_t *begins);

/* Samples first to first + n - 1, as a model that reads tokens or records takes
 * them. */
void iz_data_batch(const struct iz_data *d, enum iz_split s, int64_t first,
                   int n, void *input, void *target);
