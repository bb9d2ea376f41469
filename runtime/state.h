/* SPDX-License-Identifier: Apache-2.0 */
/* Saving and resuming a run: the engine's states as the parts of a checkpoint.
 */
#ifndef IZ_RUNTIME_STATE_H
#define IZ_RUNTIME_STATE_H

#include "runtime/train.h"

/* All ranks.  Waits for the tasks under way.  model_text: what must be equal
 * for a checkpoint to fit.  Negative errno on every rank, reason printed. */
int iz_state_save(struct iz_engine *e, const char *model_text);
/* Loads the newest checkpoint of the run's output; -ENOENT if there is none. */
int iz_state_load(struct iz_engine *e, const char *model_text);
/* Step of the newest complete checkpoint under `dir`, or -ENOENT. */
int iz_state_latest(const char *dir, int64_t *step);

#endif
