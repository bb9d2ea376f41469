/* SPDX-License-Identifier: Apache-2.0 */
/* The weights of a run from and to folders in the layout of Hugging Face. */
#pragma once

#include <stdbool.h>

#include "runtime/hf/tensors.h"
#include "runtime/step/train.h"

/* Fills the parameters from the folder of model.import, states with zero; each
 * rank reads what it owns.  All ranks.  Negative errno on every rank with the
 * reason printed. */
int iz_hf_import(struct iz_engine *e, const struct iz_section *section);

/* Whether run.export can be met: to be asked before step 0, on one rank.
 * Negative errno with the reason printed. */
int iz_hf_export_check(const struct iz_config *c,
                       const struct iz_section *section,
                       const struct iz_model *m);

/* Whether something is in the folder. */
bool iz_hf_export_there(const char *folder);

/* What run.export of a config means: *o borrows *text, of its config,
 * malloc'ed, and `like`, the folder whose other files go with it; both are
 * filled in on a rank that tells.  *map and *text are the caller's to close and
 * free, also after an error. */
int iz_hf_order_open(struct iz_hf_order *o, struct iz_hf_map *map, char **text,
                     char like[IZ_PATH_MAX + 32], const struct iz_config *c,
                     const struct iz_section *section, const struct iz_model *m,
                     bool tells);

/* Writes the master weights to the folder of run.export and proves it (see
 * proof.h), after which the engine's weights are those of the folder; waits for
 * the tasks under way.  All ranks.  Negative errno on every rank with the
 * reason printed. */
int iz_hf_export(struct iz_engine *e, const struct iz_section *section);
