/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors in the layout of Hugging Face: which elements of which parameters of
 * a model they hold. */
#pragma once

#include "codelets/unit/layer.h"

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
    int64_t times;   /* it is [times, rows / times, cols], each of these
                      * transposed or not; 0: it is not */
    bool tied;       /* a second name; see struct iz_hf_name */
    bool needed;     /* though it is one */
    bool first;      /* the first rows of a tensor that may have more */
    bool grows;      /* a tensor may have fewer rows: see read.c */
    /* [rows / experts, cols experts], where columns of all experts take turns;
     * 0: it is not.  Such are only read. */
    int64_t experts;
    /* Rows, or elements of a vector, of a head's queries, which its keys and
     * its values follow; 0: all queries come first. */
    int64_t head;
};

struct iz_hf_named {
    const char *bare; /* in the tensor's name */
    const struct iz_hf_tensor *tensor;
};

struct iz_hf_map {
    const struct iz_hf *hf;
    const struct iz_model *model;
    struct iz_hf_tensor *tensor; /* in the order of units and parameters */
    int n, room;
    struct iz_hf_named *by_name; /* NULL: not sorted */
};

/* The tensors of a model.  -EINVAL with the reason printed. */
int iz_hf_map_open(struct iz_hf_map *m, const struct iz_hf *hf,
                   const struct iz_model *model);
void iz_hf_map_close(struct iz_hf_map *m);
/* Of tensors that somebody else has put there: quick to find from now on. */
void iz_hf_map_sort(struct iz_hf_map *m);

/* The tensor that is called so, with or without the prefix; NULL: none. */
const struct iz_hf_tensor *iz_hf_map_find(const struct iz_hf_map *m,
                                          const char *name);
/* A tensor's name without the prefix, and without a prefix of the text model
 * inside another model. */
const char *iz_hf_bare(const struct iz_hf_map *m, const char *name);
/* Whether a tensor of this name is known to mean nothing. */
bool iz_hf_map_ignores(const struct iz_hf_map *m, const char *name);

/* A tensor's dimensions. */
enum { IZ_HF_DIMS = 3 };
int iz_hf_shape(const struct iz_hf_tensor *t, int64_t shape[IZ_HF_DIMS]);

/* A rectangle of a tensor, in rows and columns of the parameter counted from
 * the tensor's own. */
struct iz_hf_rect {
    int64_t row, col, rows, cols;
};

/* Elements [from, to) of the unit's flat array as rectangles of the tensor;
 * their number. */
int iz_hf_rects(const struct iz_hf_tensor *t, int64_t from, int64_t to,
                struct iz_hf_rect out[3]);
/* The first rows of a rectangle that are of one of `times`: the others remain
 * in *r.  False: there are none. */
bool iz_hf_next(const struct iz_hf_tensor *t, struct iz_hf_rect *r,
                struct iz_hf_rect *out);
/* Where the first element of a rectangle lies in the unit's flat array. */
int64_t iz_hf_flat(const struct iz_hf_tensor *t, const struct iz_hf_rect *r);
/* Where it lies in the tensor. */
int64_t iz_hf_place(const struct iz_hf_tensor *t, const struct iz_hf_rect *r);
