/* SPDX-License-Identifier: Apache-2.0 */
/* Adapters alone, in the layout of Hugging Face's PEFT: adapter_config.json and
 * adapter_model.safetensors. */
#pragma once

#include "runtime/hf/tensors.h"
#include "runtime/step/train.h"

/* For an export: the tensors, and the text of the config, malloc'ed.  Negative
 * errno, with nothing to close: -EINVAL with the reason printed where
 * lora.export "adapter" cannot be met. */
int iz_adapter_open(struct iz_hf_map *out, char **config,
                    const struct iz_hf *hf, const struct iz_model *m,
                    const struct iz_config *c);

/* Whether an export can be made: of what is trained, and of the model's own
 * tensors.  -EINVAL with the reason printed. */
int iz_adapter_check_trained(const struct iz_model *m);

/* Whether the folder of lora.import has the tensors of these adapters and no
 * others; all faults are told on `err`.  Negative errno. */
int iz_adapter_check(const struct iz_config *c, const struct iz_hf *hf,
                     const struct iz_model *m, FILE *err);

/* A reader of the adapters of a folder (see tensors.h): of one that an export
 * wrote, or if that is NULL of lora.import. */
int iz_adapter_read_open(struct iz_hf_reader **out, const struct iz_config *c,
                         const struct iz_hf *hf, const struct iz_model *m,
                         const char *exported, FILE *err);

/* Fills the adapters from that folder, after all parameters have values.  All
 * ranks.  Negative errno on every rank with the reason printed. */
int iz_adapter_import(struct iz_engine *e, const struct iz_hf *hf);

/* Magnitudes become the norms of the weights as they are.  All ranks. */
int iz_adapter_init_magnitudes(struct iz_engine *e);

/* A unit's trained parameters, as iz_lora_merge wants its adapters; malloc'ed.
 * All ranks. */
float *iz_adapter_gather(struct iz_engine *e, int u);
