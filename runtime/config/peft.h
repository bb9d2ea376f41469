/* SPDX-License-Identifier: Apache-2.0 */
/* adapter_config.json of Hugging Face's PEFT. */
#pragma once

#include "runtime/config/keys.h"

#define IZ_PEFT_CONFIG "adapter_config.json"

/* Takes rank and alpha from the folder of lora.import, if there is one; what
 * the config says of them must be the same.  Everything that makes another
 * adapter than this program has is a fault. */
void iz_peft_read(struct iz_config_file *file, struct iz_faults *f);
