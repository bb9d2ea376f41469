/* SPDX-License-Identifier: Apache-2.0 */
/* The elements of tensors in the layout of Hugging Face, read and written. */
#pragma once

#include "codelets/base/take.h"
#include "runtime/comm/coll.h"
#include "runtime/formats/coded.h"
#include "runtime/formats/folder.h"
#include "runtime/formats/map.h"

/* ---- read.c: parameters out of a folder ---- */

/* Any range of them: only the pages that hold it are read. */

struct iz_hf_reader;

/* Maps the folder's files and compares them with the model: tensors that are
 * missing, unknown or of another shape or type are all told on `err` (NULL:
 * nothing is).  Negative errno.  key: of the config, for messages; it and
 * `path` are borrowed until close. */
int iz_hf_read_open(struct iz_hf_reader **out, const struct iz_hf *hf,
                    const struct iz_model *model, const char *key,
                    const char *path, FILE *err);
void iz_hf_read_close(struct iz_hf_reader **r);

/* Where other tensors than those of a model come from. */
struct iz_hf_source {
    const char *key;              /* of the config */
    const char *path;             /* borrowed until close */
    const char *file;             /* NULL: as iz_hf_folder_open finds them */
    int64_t rows;                 /* of a tensor whose first rows are read */
    int64_t tokens;               /* rows of those that grow; 0: the model's */
    const struct iz_model *model; /* whose parameters may be quantised; or NULL
                                   */
};

/* As above; takes the map, also after an error. */
int iz_hf_read_open_map(struct iz_hf_reader **out, struct iz_hf_map *map,
                        const struct iz_hf_source *from, FILE *err);

/* Elements [from, from + n) of a unit's flat array as fp32; padding is left as
 * it is.  -EINVAL, told, where a value is not finite, or a second name of a
 * parameter has other values. */
int iz_hf_read(struct iz_hf_reader *r, int unit, int64_t from, int64_t n,
               float *out);
/* The same of what was written from want[n], as `type`: -EBADMSG, told, where
 * another value is there.  What is no tensor's is taken from `want`. */
int iz_hf_read_equal(struct iz_hf_reader *r, int unit, int64_t from, int64_t n,
                     const float *want, enum iz_dtype type, float *out);
/* Group g of a matrix that is in 4 bits there; false: it is not. */
bool iz_hf_read_nf4(struct iz_hf_reader *r, int unit,
                    const struct iz_quant_matrix *m, int64_t g,
                    struct iz_nf4_group *out);

/* ---- write.c: a folder is written ---- */

/* By all ranks at once: the first one makes the files in their full length
 * under a temporary name, each writes the elements that it has where they
 * belong, and a rename ends it. */

struct iz_hf_writer;

/* What is written; borrowed until the end. */
struct iz_hf_order {
    const char *folder; /* must not exist, or be empty */
    const struct iz_hf_map *map;
    enum iz_dtype type;
    int64_t file_bytes; /* tensors of a file at most, if there are several */
    const char *file;   /* its name, if it is one */
    const char *config_file, *config; /* name and text; of the first rank */
    /* Whose files beside the config are copied (runtime/formats/imported.h); of
     * the first rank; NULL or "": nothing is. */
    const char *like;
    /* Of all ranks: looks at the folder while it still has a temporary name,
     * which it keeps after an error; NULL: nobody does. */
    int (*check)(void *arg, const char *folder);
    void *arg;
};

/* Whether the folder can be made, before there is something to write: makes its
 * parents.  Negative errno with the reason printed. */
int iz_hf_write_check(const char *folder);
bool iz_hf_is_empty(const char *folder); /* and a folder */

/* All ranks.  Negative errno on every rank with the reason printed. */
int iz_hf_write_open(struct iz_hf_writer **out, const struct iz_hf_order *o,
                     struct iz_coll *c);

/* Most elements of one call; room for them. */
#define IZ_HF_BUFFER ((int64_t)1 << 22)
static inline float *iz_hf_take_buffer(void)
{
    return iz_take(IZ_HF_BUFFER, sizeof(float), "a buffer of parameters");
}

/* Elements [from, from + n) of a unit's flat array; n <= IZ_HF_BUFFER.  What is
 * padding is left out.  Errors wait for the end. */
void iz_hf_write(struct iz_hf_writer *w, int unit, int64_t from,
                 const float *in, int64_t n);

/* All ranks must call it, also after an error, which is `err`: then no file
 * stays, unless it is the check's.  Negative errno on every rank with the
 * reason printed. */
int iz_hf_write_close(struct iz_hf_writer **w, int err);
