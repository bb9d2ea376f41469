/* SPDX-License-Identifier: Apache-2.0 */
/* The tensors of a folder in the layout of Hugging Face: model.safetensors, or
 * several such files and model.safetensors.index.json.  The files are mapped,
 * and of what they say nothing is believed before it was checked. */
#ifndef IZ_RUNTIME_HF_FOLDER_H
#define IZ_RUNTIME_HF_FOLDER_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "codelets/flat/dtype.h"
#include "runtime/base/json.h"

#define IZ_HF_DIMS 8
#define IZ_HF_SINGLE "model.safetensors"
#define IZ_HF_INDEX "model.safetensors.index.json"

/* One tensor of a file; it lies in the mapping, at any address. */
struct iz_hf_entry {
    char *name;
    char dtype[16]; /* as the file has it: "BF16" */
    int64_t shape[IZ_HF_DIMS];
    int dims;
    const unsigned char *data;
    int64_t bytes;
};

struct iz_hf_file {
    char *path;
    const unsigned char *map;
    int64_t bytes;
    struct iz_hf_entry *entry;
    int n_entries;
};

struct iz_hf_folder {
    const char *path; /* borrowed */
    struct iz_hf_file *file;
    int n_files;
    FILE *err; /* for faults; NULL: they are not told */
};

/* Negative errno with the faults told. */
int iz_hf_folder_open(struct iz_hf_folder *f, const char *path, FILE *err);
void iz_hf_folder_close(struct iz_hf_folder *f);

/* Fills the entries of a file from its f->bytes bytes at f->map. */
int iz_hf_file_parse(struct iz_hf_file *f, FILE *err);
/* Frees what iz_hf_file_parse took. */
void iz_hf_file_clear(struct iz_hf_file *f);

/* "F32", "BF16", "F16"; false: another one. */
bool iz_hf_dtype_read(const char *text, enum iz_dtype *t);
const char *iz_hf_dtype_text(enum iz_dtype t);

#endif
