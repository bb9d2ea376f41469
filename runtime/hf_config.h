/* SPDX-License-Identifier: Apache-2.0 */
/* config.json of a published checkpoint, read as keys of the section "model"
 * and written from them. */
#ifndef IZ_RUNTIME_HF_CONFIG_H
#define IZ_RUNTIME_HF_CONFIG_H

#include <stdio.h>

#include "codelets/dtype.h"
#include "runtime/config.h"

/* The shape that folder/config.json has, as a JSON object of the keys of
 * section "model"; malloc'ed.  NULL with all faults told on `err` (may be
 * NULL): a key is missing, or the model is of another kind. */
char *iz_hf_config_read(const struct iz_hf *hf, const char *folder, FILE *err);

/* The type as which a model is published; NULL: none. */
const struct iz_hf_type *iz_hf_type(const struct iz_hf *hf, const void *self);

/* The text of config.json for weights of type t of the model that `self` is;
 * malloc'ed.  `like`: keys that folder/config.json has beyond those of the
 * table are kept; NULL or "": none.  NULL: no memory. */
char *iz_hf_config_text(const struct iz_section *model, const void *self,
                        enum iz_dtype t, const char *like);

#endif
