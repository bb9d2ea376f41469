/* SPDX-License-Identifier: Apache-2.0 */
/* How a reduce-scatter is cut into fragments: arithmetic that the planner needs
 * without any MPI.  Fragments are received into scratch and summed while they
 * are in the cache. */
#include "codelets/base/int64.h"
#include "codelets/flat/flat.h"
#include "runtime/comm/state.h"

#define REDUCE_FRAGMENT ((int64_t)256 << 10)
#define REDUCE_ALONE ((int64_t)512 << 10) /* of a single peer */
#define REDUCE_TOTAL ((int64_t)8 << 20)   /* of all peers, one of two halves */
#define REDUCE_LEAST ((int64_t)64 << 10)
#define REDUCE_ALIGN ((int64_t)IZ_NORM_BLOCK * 4) /* blocks of all types */

/* Many peers get smaller fragments, so that the scratch stays bounded until the
 * messages become too small. */
int64_t iz_coll_fragment_bytes(int ranks, int64_t shard_bytes)
{
    int64_t peers = ranks - 1;
    int64_t fragment = peers == 1 ? REDUCE_ALONE : REDUCE_FRAGMENT;
    if (fragment * peers > REDUCE_TOTAL)
        fragment = REDUCE_TOTAL / peers / REDUCE_ALIGN * REDUCE_ALIGN;
    if (fragment < REDUCE_LEAST)
        fragment = REDUCE_LEAST;
    return min64(fragment, (shard_bytes + 63) / 64 * 64);
}

int64_t iz_coll_scratch_bytes(int ranks, int64_t shard_bytes)
{
    return 2 * (ranks - 1) * iz_coll_fragment_bytes(ranks, shard_bytes);
}

/* A message over a network waits for its receiver's answer, which queues behind
 * what is under way: with too few in flight the link is idle meanwhile. */
struct iz_coll_pipeline iz_coll_pipeline(const struct iz_coll *c,
                                         int64_t shard_bytes)
{
    int64_t fragment = iz_coll_fragment_bytes(c->size, shard_bytes);
    int64_t half = fragment / 2 / REDUCE_ALIGN * REDUCE_ALIGN;
    if (c->local_size == c->size || half < REDUCE_LEAST)
        return (struct iz_coll_pipeline){fragment, 2};
    return (struct iz_coll_pipeline){half, IZ_FLIGHT_DEPTH};
}
