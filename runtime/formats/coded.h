/* SPDX-License-Identifier: Apache-2.0 */
/* Tensors as others publish them: of numbers, or in few bits, as codes, with
 * other tensors beside them that have ends of names of their own. */
#pragma once

#include "codelets/flat/nf4.h"
#include "runtime/formats/map.h"
#include "runtime/formats/st.h"

enum iz_coded_kind {
    IZ_CODED_NUMBERS,
    IZ_CODED_BITS4, /* of bitsandbytes */
    IZ_CODED_INT8,  /* of bitsandbytes */
    IZ_CODED_FP8,
    IZ_CODED_MXFP4
};

enum iz_coded_tensor {
    IZ_CODED_CODES, /* or numbers */
    IZ_CODED_SCALES,
    IZ_CODED_MOST,    /* of 4 bits with codes for scales: their magnitudes, */
    IZ_CODED_DYNAMIC, /* and what a code means */
    IZ_CODED_VALUES,  /* what a code of a weight means */
    IZ_CODED_STATE,
    IZ_CODED_FORMAT,
    IZ_CODED_UNUSED, /* of what a layer reads */
    IZ_CODED_TENSORS
};

struct iz_coded {
    enum iz_coded_kind kind;
    const struct iz_st_tensor *tensor[IZ_CODED_TENSORS];
    int64_t rows, cols; /* of weights; the check makes one row of some */
    int64_t block[2];   /* rows and columns with one scale; set by the check */
    int64_t nested;     /* scales of one magnitude; 0: scales are no codes */
    float mean;         /* of such scales */
    float value[16];    /* of a code of 4 bits */
};

struct iz_coded_name {
    enum iz_coded_kind kind;
    enum iz_coded_tensor tensor;
    char of[IZ_HF_NAME]; /* the tensor that it belongs to */
};
/* Whether a name is that of such a tensor. */
bool iz_coded_name(const char *name, struct iz_coded_name *out);
/* "in 4 bits" */
const char *iz_coded_what(enum iz_coded_kind k);
/* Completes one of codes whose tensors, rows and columns are there.  block:
 * of FP8, as the folder's config has it.  What keeps it from being read; NULL:
 * it can. */
const char *iz_coded_check(struct iz_coded *t, const int64_t block[2]);
/* n weights from weight `at`, end to end; they may lie at an odd address. */
void iz_coded_load(const struct iz_coded *t, int64_t at, float *out, int64_t n);

/* What keeps the bytes of one that is checked from being groups of ours; NULL:
 * they are. */
const char *iz_coded_nf4(const struct iz_coded *t);
void iz_coded_nf4_group(const struct iz_coded *t, int64_t g,
                        struct iz_nf4_group *out);
