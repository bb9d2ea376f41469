/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes between the host and where they live, when no task runs. */
#pragma once

#include "runtime/engine/engine.h"

/* Whether this home is the memory of a GPU. */
bool iz_bounce_on_gpu(const struct iz_engine *e, enum iz_home h);
/* Between the host and a place whose home is h; through a pinned buffer to and
 * from a GPU. */
void iz_bounce_move(struct iz_engine *e, enum iz_home h, char *place,
                    char *host, int64_t bytes, bool put);
