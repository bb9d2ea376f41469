/* SPDX-License-Identifier: Apache-2.0 */
/* A folder in the layout of Hugging Face, written by all ranks at once: the
 * first one makes the files in their full length under a temporary name, each
 * writes the elements that it has where they belong, and a rename ends it. */
#pragma once

#include <stdint.h>

#include "codelets/flat/dtype.h"
#include "runtime/comm/coll.h"
#include "runtime/hf/map.h"

struct iz_hf_writer;

/* What is written; borrowed until the end. */
struct iz_hf_order {
    const char *folder; /* must not exist, or be empty */
    const struct iz_hf_map *map;
    enum iz_dtype type;
    int64_t file_bytes; /* tensors of a file at most, if there are several */
    const char *file;   /* its name, if it is one */
    const char *config_file, *config; /* name and text; of the first rank */
};

/* Whether the folder can be made, before there is something to write: makes its
 * parents.  Negative errno with the reason printed. */
int iz_hf_write_check(const char *folder);

/* All ranks.  Negative errno on every rank with the reason printed. */
int iz_hf_write_open(struct iz_hf_writer **out, const struct iz_hf_order *o,
                     struct iz_coll *c);

/* Most elements of one call. */
#define IZ_HF_PIECE ((int64_t)1 << 22)

/* Elements [from, from + n) of a unit's flat array; n <= IZ_HF_PIECE.  What is
 * padding is left out.  Errors wait for the end. */
void iz_hf_write(struct iz_hf_writer *w, int unit, int64_t from,
                 const float *in, int64_t n);

/* All ranks must call it, also after an error, which is `err`: then no file
 * stays.  Negative errno on every rank with the reason printed. */
int iz_hf_write_close(struct iz_hf_writer **w, int err);
