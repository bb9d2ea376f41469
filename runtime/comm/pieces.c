/* SPDX-License-Identifier: Apache-2.0 */
/* How a reduce-scatter is cut into pieces: arithmetic that the planner needs
 * without any MPI.  Pieces are received into scratch and summed while they are
 * in the cache. */
#include "codelets/base/int64.h"
#include "codelets/flat/flat.h"
#include "runtime/comm/state.h"

#define REDUCE_PIECE ((int64_t)256 << 10)
#define REDUCE_ALONE ((int64_t)512 << 10) /* of a single peer */
#define REDUCE_TOTAL ((int64_t)8 << 20)   /* of all peers, one of two halves */
#define REDUCE_LEAST ((int64_t)64 << 10)
#define REDUCE_STEP ((int64_t)IZ_NORM_BLOCK * 4) /* blocks of all types */

/* Many peers get smaller pieces, so that the scratch stays bounded until the
 * messages become too small. */
int64_t iz_coll_piece_bytes(int ranks, int64_t shard_bytes)
{
    int64_t peers = ranks - 1;
    int64_t piece = peers == 1 ? REDUCE_ALONE : REDUCE_PIECE;
    if (piece * peers > REDUCE_TOTAL)
        piece = REDUCE_TOTAL / peers / REDUCE_STEP * REDUCE_STEP;
    if (piece < REDUCE_LEAST)
        piece = REDUCE_LEAST;
    return min64(piece, (shard_bytes + 63) / 64 * 64);
}

int64_t iz_coll_scratch_bytes(int ranks, int64_t shard_bytes)
{
    return 2 * (ranks - 1) * iz_coll_piece_bytes(ranks, shard_bytes);
}

/* A message over a network waits for its receiver's answer, which queues behind
 * what is under way: with too few in flight the link is idle meanwhile. */
struct iz_coll_cut iz_coll_cut(const struct iz_coll *c, int64_t shard_bytes)
{
    int64_t piece = iz_coll_piece_bytes(c->size, shard_bytes);
    int64_t half = piece / 2 / REDUCE_STEP * REDUCE_STEP;
    if (c->local_size == c->size || half < REDUCE_LEAST)
        return (struct iz_coll_cut){piece, 2};
    return (struct iz_coll_cut){half, IZ_FLIGHT_PIECES};
}
