/* SPDX-License-Identifier: Apache-2.0 */
/* Movement of bytes between the GPUs of all ranks through NCCL.  Each call
 * enqueues on the stream and waits, but only for as long as all ranks answer.
 * Errors, a rank that is gone, and the time-out of coll.h end the job. */
#pragma once

#include "runtime/comm/coll.h"

struct iz_nccl;

/* Whether this program has NCCL. */
bool iz_nccl_built(void);

/* All ranks, each with a GPU of its own in use.  Negative errno with the reason
 * printed; once ranks connect, a failure ends the job, because the others wait.
 */
int iz_nccl_open(struct iz_nccl **out, struct iz_coll *c);
/* All ranks.  Accepts NULL and half-built. */
void iz_nccl_close(struct iz_nccl **n);

/* On device memory, see iz_coll_all_gather_among and iz_coll_refresh, but that
 * what a rank has of its own is in its place already. */
void iz_nccl_all_gather(struct iz_nccl *n, void *stream, void *full,
                        int64_t shard_bytes, int ranks, const char *what);
void iz_nccl_refresh(struct iz_nccl *n, void *stream, void *out,
                     const void *own, int64_t shard_bytes, int ranks,
                     const char *what);
/* Ranks that exchange parts of their buffers: member k is rank first + k * step
 * and gets the parts part + k * step + j * apart, j from 0 to parts - 1. */
struct iz_nccl_team {
    int first, step, n, self; /* self: this rank is that member */
    int part, parts, apart;
};

/* in[j * n + k] becomes what member k's `full` has of this rank's part j, but
 * for the own ones, which are not moved. */
void iz_nccl_exchange(struct iz_nccl *n, void *stream, void *in,
                      const void *full, int64_t part_bytes,
                      const struct iz_nccl_team *t, const char *what);
