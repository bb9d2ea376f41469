/* SPDX-License-Identifier: Apache-2.0 */
/* One rank's file of a checkpoint: every tensor is a range of a flat fp32
 * array. Where the range lies in the array and a hash of each block of it are
 * in the header's metadata. */
#pragma once

#include <stdint.h>

#include "runtime/formats/st.h"
#include "runtime/plan/state_layout.h"

/* What the index of a checkpoint says of a rank's file. */
struct iz_ckpt_file {
    int64_t bytes;
    uint64_t header_hash;
};

/* Elements [first, first + count) of the array `name` of `total` elements. */
struct iz_rank_range {
    char name[64];
    int64_t total, first, count;
    int64_t offset; /* bytes, from the start of the data */
    uint64_t *hash; /* per block; owned by whoever made the range */
};

struct iz_rank_file {
    struct iz_st st;
    int64_t step;
    int rank, ranks;
    struct iz_rank_range *range;
    int n_ranges;
};

int64_t iz_rank_range_blocks(const struct iz_rank_range *p);
/* IZ_CKPT_BLOCK, fewer in the last. */
int64_t iz_rank_range_block_elems(const struct iz_rank_range *p, int64_t b);

/* The bytes before the data; malloc'ed, *bytes of them.  Their number does not
 * depend on the hashes, so that the data can be written first. */
char *iz_rank_file_header(const struct iz_rank_range *range, int n,
                          int64_t step, int rank, int ranks, int64_t *bytes);

/* Opens a file and checks all of its header; the data are checked when read.
 * Negative errno with the file and the fault printed. */
int iz_rank_file_open(struct iz_rank_file **out, const char *path);
void iz_rank_file_close(struct iz_rank_file **s);

/* NULL if the file has no such range. */
const struct iz_rank_range *iz_rank_file_find(const struct iz_rank_file *s,
                                              const char *name);

/* Reads block b of a range (IZ_CKPT_BLOCK elements, fewer in the last) and
 * checks its hash. Negative errno with the reason printed. */
int iz_rank_file_read(const struct iz_rank_file *s,
                      const struct iz_rank_range *p, int64_t b, float *out);
