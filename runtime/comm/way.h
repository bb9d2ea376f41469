/* SPDX-License-Identifier: Apache-2.0 */
/* Which bytes of a buffer each rank gives to which place in another rank's:
 * what a movement is, whatever moves it (gather.c, nccl.c). */
#pragma once

#include <stdint.h>

/* Where bytes begin in the giver's buffer and in the taker's, and how many they
 * are; 0: the taker gets nothing. */
struct iz_way {
    int64_t from, to, bytes;
};

/* Of item i; both ranks know the same way. */
typedef struct iz_way (*iz_way_of)(const void *arg, int i, int giver,
                                   int taker);

/* What the ways below are about: shards of so many bytes of all ranks, and
 * groups of n consecutive ranks. */
struct iz_shards {
    int64_t bytes;
    int n, ranks;
};

/* One item, see iz_coll_all_gather_among and iz_coll_refresh (gather.c). */
struct iz_way iz_way_gather(const void *shards, int i, int giver, int taker);
struct iz_way iz_way_refresh(const void *shards, int i, int giver, int taker);

/* Parts for a sum of its group: item j goes to the rank that has the owner's
 * position, of the part whose owner is in group j (reduce.c). */
struct iz_way iz_way_within(const void *shards, int j, int giver, int taker);
