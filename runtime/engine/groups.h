/* SPDX-License-Identifier: Apache-2.0 */
/* What units own: parameters, gradients and states in memory or in files. */
#pragma once

#include "runtime/engine/engine.h"

/* -errno, with the reason printed unless it is -ENOMEM. */
int iz_groups_open(struct iz_engine *e);
void iz_groups_close(struct iz_engine *e);

/* First owned element within g->param: a full buffer holds every rank's shard.
 */
int64_t iz_groups_own(const struct iz_engine *e, const struct iz_group *g);
