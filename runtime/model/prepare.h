/* SPDX-License-Identifier: Apache-2.0 */
/* All that a config does to a model that was just opened. */
#pragma once

#include <stdio.h>

#include "codelets/unit/layer.h"
#include "runtime/config/config.h"

/* Tells the model what its data are, gives it the adapters, and sets which of
 * its parameters are updated how.  Negative errno with the reason printed on
 * `err`, which may be NULL. */
int iz_model_prepare(struct iz_model *m, const struct iz_config *c,
                     const struct iz_hf *hf, FILE *err);
