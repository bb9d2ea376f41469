/* SPDX-License-Identifier: Apache-2.0 */
/* Bytes as they are, from one buffer to another: to and from a GPU, within a
 * memory, or among ranks. */
#pragma once

#include "runtime/engine/engine.h"

/* So many bytes, and where they begin in either buffer.  Where ranks gather
 * they are a shard, and `to` is where the first rank's begins. */
struct iz_stretch {
    int64_t to, from, bytes;
};

struct iz_move {
    int to, from; /* buffers of the task; from -1: it is in its place */
    int n;
    const struct iz_stretch *list;
    /* Consecutive ranks with a shard each, which goes to its place in the
     * whole; then the comm worker gathers those of the others.  0: 1. */
    int group;
    bool refreshes; /* renews a group's copy instead: iz_coll_refresh */
    bool gpu;       /* the whole is there */
    bool from_host; /* and the shard is not */
    bool skips;     /* nothing is moved in a step that is skipped */
};

/* Submits a task without a body that has the move's buffers, if there are
 * bytes. */
void iz_move(struct iz_engine *e, struct iz_task *t, struct iz_move m);
