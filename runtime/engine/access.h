/* SPDX-License-Identifier: Apache-2.0 */
/* Reads and writes parameters and states where they live, when no task runs. */
#pragma once

#include "runtime/engine/engine.h"

/* IZ_STATE and on: the optimizer's states.  Of quantised parameters the values,
 * and their groups as words of 4 bytes, which are no numbers. */
enum iz_array {
    IZ_QUANT_WORDS = -3,
    IZ_QUANT_VALUES,
    IZ_FROZEN,
    IZ_MASTER,
    IZ_STATE
};

/* A part of a unit's parameters, n without padding.  This rank owns
 * [first, last), its shard or the whole.  [begin, end) is its shard in any
 * case: from shard x rank on, cut at n. */
struct iz_owned {
    enum iz_array array;
    int64_t n, first, last, begin, end;
    int64_t at; /* where they begin in all of the unit's, end to end */
};

/* How a chunk's states lie, in memory or in a file. */
static inline struct iz_state_layout
iz_chunk_states(const struct iz_engine *e, int unit, const struct iz_chunk *k)
{
    return iz_plan_states(&e->plan, k->home,
                          k->state ? k->count : e->unit[unit].plan->chunk,
                          k->lacks);
}

struct iz_owned iz_owned_of(const struct iz_engine *e, int unit,
                            enum iz_unit_part part);
static inline enum iz_unit_part iz_array_part(enum iz_array a)
{
    return a == IZ_QUANT_WORDS || a == IZ_QUANT_VALUES ? IZ_PART_QUANT
           : a == IZ_FROZEN                            ? IZ_PART_FROZEN
                                                       : IZ_PART_TRAINED;
}

/* Those that an array is of: all but IZ_QUANT_WORDS have a part's elements. */
struct iz_owned iz_owned_of_array(const struct iz_engine *e, int unit,
                                  enum iz_array a);

/* Where element `at` of a unit is in an array of it: before that, states of
 * elements lack what iz_plan_lacks says. */
int64_t iz_engine_array(const struct iz_engine *e, int unit, enum iz_array a,
                        int64_t at);

/* The groups that this rank owns, of a unit that has quantised parameters:
 * [first, last). */
struct iz_quant_groups {
    int64_t first, last;
};
struct iz_quant_groups iz_owned_groups(const struct iz_engine *e, int unit);

/* Elements of an array that lie together, among the states of a chunk or its
 * parameters. */
struct iz_extent {
    struct iz_chunk *chunk;
    struct iz_state_layout states; /* of the chunk */
    bool state;                    /* else they are of its parameters */
    enum iz_home home;
    int64_t base;  /* byte of those at which the chunk's array begins */
    int64_t room;  /* elements that it has room for */
    int64_t at, n; /* those of it */
};

/* Those of an array from element `at` on, which this rank has: n at most.  All
 * arrays but IZ_QUANT_VALUES are in chunks. */
struct iz_extent iz_engine_extent(const struct iz_engine *e, int unit,
                                  enum iz_array a, int64_t at, int64_t n);

/* Elements [from, from + n) of an array of a unit's trained parameters
 * (IZ_FROZEN and below: of the others), which this rank owns, or of their
 * padding; no task runs.  put(MASTER) also sets the parameters of compute type;
 * IZ_QUANT_VALUES is only read. */
void iz_access_get(struct iz_engine *e, int unit, enum iz_array a, int64_t from,
                   float *out, int64_t n);
void iz_access_put(struct iz_engine *e, int unit, enum iz_array a, int64_t from,
                   const float *in, int64_t n);

/* Of what is on disk, one chunk stays in its buffer from one call to the next,
 * and is written when another one is asked for.  Whoever takes that buffer or
 * that file for something else calls this before: what was put is on disk. */
void iz_access_let_go(struct iz_engine *e);

/* All trained parameters of a unit as fp32, end to end and then padding, on
 * every rank; malloc'ed.  All ranks call it. */
float *iz_access_gather(struct iz_engine *e, int unit);
