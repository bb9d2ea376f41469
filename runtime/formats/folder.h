/* SPDX-License-Identifier: Apache-2.0 */
/* The tensors of a folder: model.safetensors, or several such files and
 * model.safetensors.index.json.  The files are mapped. */
#pragma once

#include <stdio.h>

#include "runtime/formats/st.h"

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
