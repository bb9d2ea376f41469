/* SPDX-License-Identifier: Apache-2.0 */
/* Parameters out of a published checkpoint, any range of them: only the pages
 * that hold it are read. */
#pragma once

#include <stdint.h>
#include <stdio.h>

#include "codelets/unit/layer.h"

struct iz_hf_reader;

/* Maps the folder's files and compares them with the model: tensors that are
 * missing, unknown or of another shape or type are all told on `err` (NULL:
 * nothing is).  Negative errno.  `path` is borrowed until close. */
int iz_hf_read_open(struct iz_hf_reader **out, const struct iz_hf *hf,
                    const struct iz_model *model, const char *path, FILE *err);
void iz_hf_read_close(struct iz_hf_reader **r);

/* Elements [from, from + n) of a unit's flat array as fp32; padding is left as
 * it is.  -EINVAL, told, where a second name of a parameter has other values.
 */
int iz_hf_read(struct iz_hf_reader *r, int unit, int64_t from, int64_t n,
               float *out);
