/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors in the layout of Hugging Face: which of a model's parameters they
 * hold, the folders and files that they are in, and their elements, read and
 * written. */
#pragma once

#include "codelets/flat/nf4.h"
#include "codelets/unit/layer.h"
#include "runtime/base/st_format.h"
#include "runtime/comm/coll.h"

/* ---- map.c: which tensor holds which elements of which parameter ---- */

#define IZ_HF_NAME 128

struct iz_hf_tensor {
    char name[IZ_HF_NAME];
    int unit, param;
    int64_t offset; /* of the parameter in the unit's flat array */
    int64_t width;  /* columns of the parameter */
    /* The tensor's rectangle of the parameter. */
    int64_t row, col, rows, cols;
    bool transposed; /* it lies there as [cols, rows] */
    bool vector;     /* it has one dimension */
    bool tied;       /* a second name; see struct iz_hf_name */
    bool first;      /* the first rows of a tensor that may have more */
    /* [rows / experts, cols experts], where columns of all experts take turns;
     * 0: it is not.  Such are only read. */
    int64_t experts;
};

struct iz_hf_named {
    const char *bare; /* in the tensor's name */
    const struct iz_hf_tensor *tensor;
};

struct iz_hf_map {
    const struct iz_hf *hf;
    struct iz_hf_tensor *tensor; /* in the order of units and parameters */
    int n;
    struct iz_hf_named *by_name; /* NULL: not sorted */
};

/* The tensors of a model.  -ENOMEM, or -EINVAL with the reason printed. */
int iz_hf_map_open(struct iz_hf_map *m, const struct iz_hf *hf,
                   const struct iz_model *model);
void iz_hf_map_close(struct iz_hf_map *m);

/* The tensor that is called so, with or without the prefix; NULL: none. */
const struct iz_hf_tensor *iz_hf_map_find(const struct iz_hf_map *m,
                                          const char *name);
/* A tensor's name without the prefix. */
const char *iz_hf_bare(const struct iz_hf_map *m, const char *name);
/* Whether a tensor of this name is known to mean nothing. */
bool iz_hf_map_ignores(const struct iz_hf_map *m, const char *name);

/* A tensor's dimensions. */
int iz_hf_shape(const struct iz_hf_tensor *t, int64_t shape[2]);

/* A rectangle of a tensor, in rows and columns of the parameter counted from
 * the tensor's own. */
struct iz_hf_rect {
    int64_t row, col, rows, cols;
};

/* Elements [from, to) of the unit's flat array as rectangles of the tensor;
 * their number. */
int iz_hf_rects(const struct iz_hf_tensor *t, int64_t from, int64_t to,
                struct iz_hf_rect out[3]);
/* Where the first element of a rectangle lies in the unit's flat array. */
int64_t iz_hf_flat(const struct iz_hf_tensor *t, const struct iz_hf_rect *r);
/* Where it lies in the tensor. */
int64_t iz_hf_place(const struct iz_hf_tensor *t, const struct iz_hf_rect *r);

/* ---- folder.c: files ---- */

/* The tensors of a folder: model.safetensors, or several such files and
 * model.safetensors.index.json.  The files are mapped. */

#define IZ_HF_SINGLE "model.safetensors"
#define IZ_HF_INDEX "model.safetensors.index.json"

struct iz_hf_folder {
    const char *path; /* borrowed */
    struct iz_st *file;
    int n_files;
    FILE *err; /* for faults; NULL: they are not told */
};

/* Only the file of that name, if one is given.  Negative errno with the faults
 * told. */
int iz_hf_folder_open(struct iz_hf_folder *f, const char *path,
                      const char *file, FILE *err);
void iz_hf_folder_close(struct iz_hf_folder *f);

/* ---- nf4.c: tensors in 4 bits, as transformers saves those of bitsandbytes
 * ---- */

/* What belongs to such a tensor beside its codes. */
enum iz_hf_nf4_part {
    IZ_HF_NF4_SCALE,
    IZ_HF_NF4_MOST,
    IZ_HF_NF4_VALUES,  /* of a code of a weight */
    IZ_HF_NF4_DYNAMIC, /* of a code of a scale */
    IZ_HF_NF4_STATE,
    IZ_HF_NF4_PARTS
};

struct iz_hf_nf4 {
    const struct iz_st_tensor *code, *part[IZ_HF_NF4_PARTS];
    int64_t n;  /* weights */
    float mean; /* of the scales */
};

/* Whether a tensor of this name is such a part, and then the name of the tensor
 * that it belongs to. */
bool iz_hf_nf4_name(const char *name, enum iz_hf_nf4_part *part,
                    char of[IZ_HF_NAME]);
/* Sets the mean, given all else.  What keeps it from being read; NULL: it can.
 */
const char *iz_hf_nf4_check(struct iz_hf_nf4 *t);
void iz_hf_nf4_group(const struct iz_hf_nf4 *t, int64_t g,
                     struct iz_nf4_group *out);

/* ---- read.c: parameters out of a folder ---- */

/* Any range of them: only the pages that hold it are read. */

struct iz_hf_reader;

/* Maps the folder's files and compares them with the model: tensors that are
 * missing, unknown or of another shape or type are all told on `err` (NULL:
 * nothing is).  Negative errno.  `path` is borrowed until close. */
int iz_hf_read_open(struct iz_hf_reader **out, const struct iz_hf *hf,
                    const struct iz_model *model, const char *path, FILE *err);
void iz_hf_read_close(struct iz_hf_reader **r);

/* Where other tensors than those of a model come from. */
struct iz_hf_source {
    const char *key;              /* of the config */
    const char *path;             /* borrowed until close */
    const char *file;             /* NULL: as iz_hf_folder_open finds them */
    int64_t rows;                 /* of a tensor whose first rows are read */
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
/* Group g of a matrix that is in 4 bits there; false: it is not. */
bool iz_hf_read_nf4(const struct iz_hf_reader *r, int unit,
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
    /* Whose files beside the config are copied (runtime/config/imported.h); of
     * the first rank; NULL or "": nothing is. */
    const char *like;
};

/* Whether the folder can be made, before there is something to write: makes its
 * parents.  Negative errno with the reason printed. */
int iz_hf_write_check(const char *folder);
bool iz_hf_is_empty(const char *folder); /* and a folder */

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
