/* SPDX-License-Identifier: Apache-2.0 */
/* index.json of a checkpoint: what its rank files mean together, and what a run
 * must have in common with it to resume. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "runtime/base/json.h"
#include "runtime/ckpt/ckpt.h"

/* The index's entry of a rank's file. */
struct iz_ckpt_file {
    int64_t bytes;
    uint64_t header_hash;
};

/* An index that was read. */
struct iz_ckpt_index {
    char *path;
    FILE *err; /* for faults; NULL: they are not printed */
    json_t *root;
    int64_t step;
    int ranks;
    struct iz_ckpt_file *file; /* [ranks] */
};

/* The name of a rank's file: "rank-00000-of-00002.safetensors". */
#define IZ_CKPT_FILE "rank-%05d-of-%05d.safetensors"

/* Writes and syncs `path`; file[ranks].  Negative errno with the reason
 * printed. */
int iz_ckpt_index_write(const char *path, const struct iz_ckpt *k, int64_t step,
                        int ranks, const struct iz_ckpt_file *file);

/* Reads an index and checks it against its own checksum.  `quiet` prints
 * nothing. */
int iz_ckpt_index_open(struct iz_ckpt_index **out, const char *path,
                       bool quiet);
void iz_ckpt_index_close(struct iz_ckpt_index **x);

/* Whether the run has the model, arrays, parameters and scalars of the
 * checkpoint. -EINVAL with the first difference printed. */
int iz_ckpt_index_check(const struct iz_ckpt_index *x, const struct iz_ckpt *k);

/* Fills k's scalars; after a check that succeeded. */
void iz_ckpt_index_scalars(const struct iz_ckpt_index *x, struct iz_ckpt *k);
