/* SPDX-License-Identifier: Apache-2.0 */
/* How long a unit's buffers are, of which the list of places is made and which
 * who fills them asks for. */
#pragma once

#include "runtime/plan/plan.h"

/* Elements of a unit's parameters where it is gathered, quantised ones among
 * them; and of those that lie in a file, in whole chunks. */
int64_t iz_plan_gathered(const struct iz_plan_unit *g);
int64_t iz_plan_filed(const struct iz_plan *p, const struct iz_plan_unit *g);
/* Words of a chunk of quantised parameters in a file: whole pages. */
int64_t iz_plan_quant_filed(const struct iz_plan_unit *g, int chunk);
/* Bytes of a chunk's states in a file: whole pages. */
int64_t iz_plan_chunk_bytes(const struct iz_plan *p,
                            const struct iz_plan_unit *g, int chunk);

/* Elements of a whole gradient of its, as it is sent. */
int64_t iz_plan_sent(const struct iz_plan_unit *g);
/* Elements of an accumulator of its gradient; of its last ones, those that the
 * GPU has apart from the others (split.c). */
int64_t iz_plan_grads(const struct iz_plan *p, const struct iz_plan_unit *g);
int64_t iz_plan_grads_apart(const struct iz_plan *p,
                            const struct iz_plan_unit *g);
/* Elements of piece i of an accumulator; i = pieces: of what is apart. */
int64_t iz_plan_piece(const struct iz_plan *p, const struct iz_plan_unit *g,
                      int i);
/* Elements of a buffer for the sum of a rank's contributions, or 0; whether it
 * is one of the ring's and not the unit's own. */
int64_t iz_plan_sum(const struct iz_plan *p, const struct iz_plan_unit *g);
bool iz_plan_ring_sum(const struct iz_plan *p, const struct iz_plan_unit *g);
/* Elements whose squares are added block by block, piece by piece, before the
 * blocks are: all or none. */
int64_t iz_plan_squared(const struct iz_plan *p, const struct iz_plan_unit *g);
/* Whether a contribution comes from a GPU straight into the host's accumulator:
 * nothing is to be added and the type is right. */
bool iz_plan_straight(const struct iz_plan *p, bool first);

/* Bytes of a unit's output, for one track; and of the room that each boundary
 * has in a slot or a file: that of the largest. */
int64_t iz_plan_boundary_bytes(const struct iz_plan *p,
                               const struct iz_model *m, int unit);
int64_t iz_plan_boundary_room(const struct iz_plan *p);
/* Bytes that a unit which recomputes this keeps from forward to backward, for
 * one track. */
int64_t iz_plan_saved(const struct iz_plan *p, const struct iz_model *m,
                      int unit, enum iz_recompute level);
