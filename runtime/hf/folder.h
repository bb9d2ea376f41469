/* SPDX-License-Identifier: Apache-2.0 */
/* The tensors of a folder in the layout of Hugging Face: model.safetensors, or
 * several such files and model.safetensors.index.json.  The files are mapped.
 */
#pragma once

#include <stdio.h>

#include "runtime/base/st_format.h"

#define IZ_HF_SINGLE "model.safetensors"
#define IZ_HF_INDEX "model.safetensors.index.json"

struct iz_hf_folder {
    const char *path; /* borrowed */
    struct iz_st *file;
    int n_files;
    FILE *err; /* for faults; NULL: they are not told */
};

/* Negative errno with the faults told. */
int iz_hf_folder_open(struct iz_hf_folder *f, const char *path, FILE *err);
void iz_hf_folder_close(struct iz_hf_folder *f);
