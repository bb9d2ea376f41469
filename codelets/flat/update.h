/* SPDX-License-Identifier: Apache-2.0 */
/* The update of a part of a chunk by any optimizer, with the low-precision copy
 * of the parameters written in the same pass. */
#pragma once

#include "codelets/flat/consts.h"
#include "codelets/flat/dtype.h"
#include "codelets/flat/optimizer.h"

IZ_C_BEGIN

/* Elements that are updated alike, up to the one at `end`. */
struct iz_update_range {
    union iz_consts consts;
    int64_t end;
};

/* The constants of one step for all elements from some position on. */
struct iz_update_range iz_update_range_of(const struct iz_hyper_at *s);

/* One per element of a block: a call can then always treat a whole block. */
enum { IZ_UPDATE_RANGES_MAX = IZ_MOMENT_BLOCK };

/* One update of n elements.  p is their fp32 master and g their gradient.  p
 * and the states are updated in place; out receives the new p as out_type, a
 * parameter (iz_cast_params), and may be NULL.  With `lower` there is no p: the
 * master is the parameters in out, bf16, and these lower halves (iz_half_join),
 * and both are updated.  p, lower, g and out begin with the first element.  An
 * array of states has `room` elements, and the first element is at `at` in it;
 * one that lacks whole blocks has fewer, and the first element is nearer to its
 * begin.  No two buffers overlap.
 *
 * States in fewer bytes (see moment.h) are widened, updated in fp32 and rounded
 * again.  The random bits of a state depend on the key, on the position and on
 * whether it is an m or a v; the first element has the position `first`, which
 * differs from `at` by whole blocks.  If only a part of a block is updated, its
 * other elements keep their values in bf16; in fp8 they share its power, and a
 * block is updated at once.
 *
 * d: of Muon, where the directions of its matrices go; the first element's.
 * Blocks that have m alone are updated by IZ_OPTIMIZER_DIRECTION.  The last
 * pass is IZ_OPTIMIZER_ALONG, which has no states: g is what Newton-Schulz has
 * made of the directions.
 *
 * A GPU needs, with states in fewer bytes: at and n in whole blocks, p, lower,
 * g and out aligned to 16 bytes, and states in bf16 to 8. */
struct iz_update {
    enum iz_optimizer_type optimizer;
    enum iz_moment_type type; /* of the states */
    enum iz_dtype g_type, out_type;
    int64_t n, at, room;
    float *p;
    uint16_t *lower; /* of the master; NULL: it is p */
    void *state[IZ_STATES_MAX];
    struct {
        int64_t all, before; /* elements that it lacks, and before the first */
    } lacks[IZ_STATES_MAX];
    const void *g;
    float *d;
    void *out;
    uint64_t key;
    int64_t first;
    const struct iz_update_range *range; /* in order, by elements of this
                                   update; the last one ends at n or later */
    int ranges;                          /* at most IZ_UPDATE_RANGES_MAX */
};

/* The i-th state of u as an array of moment.h, and where u begins in it. */
struct iz_moments iz_update_state(const struct iz_update *u, int i);
int64_t iz_update_at(const struct iz_update *u, int i);

/* On the CPU, one pass over memory. */
void iz_update(const struct iz_update *u);

IZ_C_END
