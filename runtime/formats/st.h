/* SPDX-License-Identifier: Apache-2.0 */
/* The file format safetensors: 8 bytes with the length of the header, the
 * header in JSON, then the tensors' bytes end to end.  Checkpoints and
 * published models use it; what their tensors mean is not known here.  Nothing
 * that a file says is believed before it was checked. */
#pragma once

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "codelets/base/build.h"
#include "codelets/flat/dtype.h"
#include "runtime/base/json.h"

#define IZ_ST_DIMS 8

/* Strings live as long as the file is open, or are the writer's. */
struct iz_st_tensor {
    const char *name, *dtype; /* "BF16" */
    int64_t shape[IZ_ST_DIMS];
    int dims;
    int64_t offset, bytes;     /* in the data */
    const unsigned char *data; /* of a mapped file, at any address */
};

struct iz_st {
    const char *who; /* borrowed */
    char *path;
    FILE *err;
    int fd;
    int64_t bytes;        /* of the file */
    int64_t data;         /* where the data begin */
    uint64_t header_hash; /* of the bytes before */
    json_t *header;
    const json_t *metadata;      /* NULL: none */
    struct iz_st_tensor *tensor; /* in the order of the header */
    const struct iz_st_tensor **by_name;
    int n;
    unsigned char *map;
};

/* Opens a file and checks its header against itself and its size.  Negative
 * errno with "izar: WHO PATH: REASON" told on `err` (NULL: it is not).  Half
 * open after a failure: to be closed as well. */
int iz_st_open(struct iz_st *s, const char *who, const char *path, FILE *err);
void iz_st_close(struct iz_st *s);

/* Tells a fault of the file like those above; -EINVAL. */
int iz_st_fault(const struct iz_st *s, const char *fmt, ...) IZ_PRINTF(2, 3);

/* NULL if the file has no such tensor. */
const struct iz_st_tensor *iz_st_find(const struct iz_st *s, const char *name);
/* Bytes of the data.  Negative errno with the reason told. */
int iz_st_read(const struct iz_st *s, void *out, int64_t bytes, int64_t at);
/* Maps the file in place of reading, and fills `data` of each tensor. */
int iz_st_map(struct iz_st *s);

/* The bytes before the data of a file, 64-aligned and malloc'ed.  metadata: a
 * JSON object.  Names go into it as they are. */
char *iz_st_header(const char *metadata, const struct iz_st_tensor *t, int n,
                   int64_t *bytes);

/* "F32", "BF16", "F16"; false: another one. */
bool iz_st_dtype_read(const char *text, enum iz_dtype *t);
const char *iz_st_dtype_text(enum iz_dtype t);
