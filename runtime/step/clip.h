/* SPDX-License-Identifier: Apache-2.0 */
/* Loss, gradient norm, clipping, loss scale, learning rate. */
#pragma once

#include "runtime/engine/engine.h"

/* empty: nothing of the step was submitted. */
void iz_clip_step(struct iz_engine *e, int64_t step, bool empty);
/* samples: of the evaluation. */
void iz_clip_eval(struct iz_engine *e, int64_t step, int64_t samples);
