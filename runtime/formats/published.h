/* SPDX-License-Identifier: Apache-2.0 */
/* config.json of a published checkpoint, read as keys of the section "model"
 * and written from them. */
#pragma once

#include <stdbool.h>
#include <stdio.h>

#include "codelets/flat/dtype.h"
#include "runtime/base/json.h"
#include "runtime/base/key.h"

#define IZ_PUBLISHED_CONFIG "config.json"

/* folder/config.json; of a model of text and images (*multimodal is true) its
 * text part.  NULL with the fault told on `err`.  Both may be NULL. */
json_t *iz_published_open(const char *folder, bool *multimodal, FILE *err);

/* The shape that folder/config.json has, as a JSON object of the keys of
 * section "model"; malloc'ed.  What of the file is not read is told on `notes`.
 * NULL with all faults told on `err`: a key is missing, or the model is of
 * another kind.  Both may be NULL. */
char *iz_published_read(const struct iz_hf *hf, const char *folder, FILE *notes,
                        FILE *err);

/* The type as which a model is published; NULL: none. */
const struct iz_hf_type *iz_published_type(const struct iz_hf *hf,
                                           const void *self);

/* The text of config.json for weights of type t of the model that `self` is;
 * malloc'ed.  `like`: a folder, of whose config.json the keys that the table
 * lacks are kept; NULL or "": none.  NULL with the reason printed. */
char *iz_published_text(const struct iz_section *model, const void *self,
                        enum iz_dtype t, const char *like);

/* Whether folder/config.json, which an export wrote, says the shape of the
 * model that `self` is; folder NULL: whether one could.  Negative errno with
 * the difference told on `err`. */
int iz_published_same(const struct iz_section *model, const void *self,
                      const char *folder, FILE *err);

/* The member of config.json that gives a key of the section "model". */
const char *iz_published_name(const struct iz_hf *hf, const char *key);
/* The key of the section "model" that may be set to less than the folder says,
 * or to more; "": there is none. */
const char *iz_published_resized(const struct iz_hf *hf, bool more);
/* Whether a setting of the key may differ from what the folder says. */
bool iz_published_free(const struct iz_hf *hf, const char *key);
