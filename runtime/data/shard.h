/* SPDX-License-Identifier: Apache-2.0 */
/* One file of tokens, mapped and checked whole, with its loss mask if there is
 * one.  The layouts are llm.c's
 * and are written by tools/tokenize. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "codelets/unit/layer.h"

#define IZ_MASK_MAGIC 1802723693 /* "mask", little-endian */

struct iz_mapping {
    unsigned char *at;
    int64_t bytes;
};

struct iz_shard {
    char *path; /* owned */
    FILE *err;  /* where faults are told, or NULL; borrowed for the opening */
    struct iz_mapping tokens, mask;
    int64_t header_bytes, count;
    int text;        /* tokens of each text of pairs; 0: no pairs */
    int sample;      /* tokens of a packed sample; 0: not packed */
    int token_bytes; /* 1, 2, 4; of records any number */
};

/* `bytes`: any file, a token is a byte.  Else a token shard; X.mask beside
 * X.bin is its loss mask.  Every token is checked against `vocab`. */
int iz_shard_open(struct iz_shard *s, const char *path, bool bytes, int vocab,
                  FILE *err);
/* A file of the model's records, without header.  Its tokens are
 * records, each of them checked. */
int iz_shard_open_records(struct iz_shard *s, const char *path,
                          const struct iz_model *m, FILE *err);
void iz_shard_close(struct iz_shard *s);

/* Record `at`, in place. */
const void *iz_shard_record(const struct iz_shard *s, int64_t at);

/* Tokens [at, at + n) as int32. */
void iz_shard_tokens(const struct iz_shard *s, int64_t at, int32_t *out,
                     int64_t n);
/* Replaces by -1 the tokens [at, at + n) that the mask excludes. */
void iz_shard_ignore(const struct iz_shard *s, int64_t at, int32_t *target,
                     int64_t n);

/* Whether a document begins with a token of a packed shard. */
bool iz_shard_begins(const struct iz_shard *s, int64_t at);

/* `sample` of a token shard that is not open; 0 also of what is none. */
int iz_shard_sample(const char *path);
