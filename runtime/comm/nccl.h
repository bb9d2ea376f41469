/* SPDX-License-Identifier: Apache-2.0 */
/* Movement of bytes between the GPUs of all ranks through NCCL.  Each call
 * enqueues on the stream and waits, but only for as long as all ranks answer.
 * Errors, a rank that is gone, and the time-out of coll.h end the job. */
#pragma once

#include "runtime/comm/coll.h"
#include "runtime/comm/way.h"

struct iz_nccl;

/* Whether this program has NCCL. */
bool iz_nccl_built(void);

/* All ranks, each with a GPU of its own in use.  Negative errno with the reason
 * printed; once ranks connect, a failure ends the job, because the others wait.
 */
int iz_nccl_open(struct iz_nccl **out, struct iz_coll *c);
/* All ranks.  Accepts NULL and half-built. */
void iz_nccl_close(struct iz_nccl **n);

/* On device memory, in place: the shard of rank r begins at r * shard_bytes. */
void iz_nccl_all_gather(struct iz_nccl *n, void *stream, void *full,
                        int64_t shard_bytes, const char *what);
/* Each way of so many items, but what a rank gives to itself.  A group of ranks
 * has no communicator of its own, which would take memory. */
void iz_nccl_send_recv(struct iz_nccl *n, void *stream, const void *from,
                       void *to, iz_way_of way, const void *arg, int items,
                       const char *verb, const char *what);
