/* SPDX-License-Identifier: Apache-2.0 */
/* From files to shards: documents are encoded by several threads and written in
 * their order, so that the output does not depend on the number of threads. */
#ifndef IZ_RUNTIME_TOKENIZER_RUN_H
#define IZ_RUNTIME_TOKENIZER_RUN_H

#include "runtime/tokenizer_record.h"

struct iz_tokenize_job {
    struct iz_recipe recipe; /* masked and chat are found out */
    const char *const *input;
    int inputs;
    const char *out;      /* PREFIX of PREFIX_train_000000.bin */
    const char *split_on; /* NULL: a text file is one document */
    int64_t shard_tokens;
    double val_fraction; /* 0..0.5 */
    int threads;
    bool skip_bad; /* faulty records are counted, not fatal */
};

struct iz_tokenize_counts {
    int64_t bytes, bytes_total; /* of the input, read and written out */
    int64_t documents, skipped;
    int64_t tokens[2], shards[2]; /* training, validation */
    int64_t learnt;               /* tokens that a mask lets count */
    bool masked;
};

typedef void iz_tokenize_progress(void *arg,
                                  const struct iz_tokenize_counts *counts);

/* Calls `progress` a few times a second from the calling thread.  Prints.
 * Negative errno. */
int iz_tokenize(const struct iz_tokenize_job *job,
                struct iz_tokenize_counts *counts,
                iz_tokenize_progress *progress, void *arg);

#endif
