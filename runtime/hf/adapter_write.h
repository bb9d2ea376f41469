/* SPDX-License-Identifier: Apache-2.0 */
/* Adapters on their way out of a run: gathered to be merged into the weights,
 * or as a folder in the layout of Hugging Face's PEFT. */
#ifndef IZ_RUNTIME_HF_ADAPTER_WRITE_H
#define IZ_RUNTIME_HF_ADAPTER_WRITE_H

#include "runtime/step/train.h"

/* All trained parameters of a unit as fp32, end to end and then padding, on
 * every rank; malloc'ed.  All ranks, with no task running. */
float *iz_lora_gather(struct iz_engine *e, int unit);

/* Whether lora.export "adapter" can be met.  -EINVAL with the reason printed.
 */
int iz_lora_export_check(const struct iz_hf *hf, const struct iz_model *m);

/* Writes adapter_config.json and adapter_model.safetensors to run.export.  All
 * ranks.  Negative errno on every rank with the reason printed. */
int iz_lora_export(struct iz_engine *e, const struct iz_section *section);

#endif
