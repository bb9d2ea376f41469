/* SPDX-License-Identifier: Apache-2.0 */
/* Whose kernels do on a GPU what is fused (run.gpu_attention). */
#ifndef IZ_RUNTIME_FUSED_H
#define IZ_RUNTIME_FUSED_H

#include "runtime/train.h"

/* Puts its choice into the config, where a GPU computes.  The same one on every
 * rank.  Collective.  Negative errno with the reason printed by one rank. */
int iz_fused_choose(struct iz_config *c, bool resume, struct iz_coll *coll);

/* Before the first step: asks the library for all that the plan's tasks will
 * want of it, and has it make that ready.  Collective; errors as above. */
int iz_fused_prepare(const struct iz_engine *e);

#endif
