/* SPDX-License-Identifier: Apache-2.0 */
/* An adapter in the layout of Hugging Face's PEFT: which tensors of the file
 * are which elements of what a run trains, and its config. */
#pragma once

#include "runtime/config/config.h"
#include "runtime/hf/map.h"

#define IZ_LORA_CONFIG "adapter_config.json"
#define IZ_LORA_FILE "adapter_model.safetensors"

/* The tensors, and the text of the config, malloc'ed.  Negative errno, with
 * nothing to close: -EINVAL with the reason printed where lora.export "adapter"
 * cannot be met. */
int iz_lora_map_open(struct iz_hf_map *out, char **config,
                     const struct iz_hf *hf, const struct iz_model *m,
                     const struct iz_config *c);
