/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes between the host and where they live, when no task runs. */
#pragma once

#include "runtime/engine/engine.h"

/* Whether this home is the memory of a GPU. */
bool iz_bounce_on_gpu(const struct iz_engine *e, enum iz_home h);
/* Where to write the numbers of a place whose home is h, or to read them:
 * there, or in the first or second half of a pinned buffer of IZ_BOUNCE_BYTES,
 * if that is a GPU. */
char *iz_bounce_way(const struct iz_engine *e, enum iz_home h, int half,
                    char *place);
/* Copies between the place and that way to it, if it is not the place itself:
 * to the place with `put`. */
void iz_bounce_pass(struct iz_engine *e, char *place, char *way, int64_t bytes,
                    bool put);
/* Between the host and a place whose home is h; through a pinned buffer to and
 * from a GPU. */
void iz_bounce_move(struct iz_engine *e, enum iz_home h, char *place,
                    char *host, int64_t bytes, bool put);
