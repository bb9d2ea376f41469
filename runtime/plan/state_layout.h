/* SPDX-License-Identifier: Apache-2.0 */
/* Where the arrays of a chunk's states are: [master][state 0][state 1]...  The
 * plan says it; who allocates, updates, moves or saves states asks, and does
 * not count arrays itself. */
#pragma once

#include "codelets/flat/optimizer.h"
#include "runtime/config/config.h"

/* Elements of a block of a checkpoint, which has a hash of its own and passes
 * through a buffer as a whole. */
#define IZ_CKPT_BLOCK (1 << 20)

struct iz_plan;

/* From byte `at` of the chunk on, `bytes` for `per` elements. */
struct iz_state_bytes {
    int64_t at;
    int bytes, per;
};

/* A master, and of a state in fp8 both codes and powers. */
enum { IZ_STATE_BYTES = 1 + 2 * IZ_STATES_MAX };

struct iz_state_layout {
    int64_t room;  /* elements that the chunk has room for */
    int64_t lacks; /* of them, how many have no state of elements */
    int64_t bytes; /* of all arrays */
    bool master;   /* at byte 0; else the parameters are their own */
    bool lower;    /* of the master only the lower halves of iz_cast_split: the
                      upper ones are the parameters */
    int states;
    int64_t at[IZ_STATES_MAX]; /* byte at which a state begins */
    enum iz_moment_type type;  /* of every state */
    enum iz_optimizer_type optimizer;
};

/* Of a chunk with this home and room for so many elements; lacks: see
 * iz_plan_chunk_lacks.  Parameters in fp32 are their own master where the
 * optimizer sees them. */
struct iz_state_layout iz_plan_states(const struct iz_plan *p,
                                      enum iz_home home, int64_t room,
                                      int64_t lacks);

/* Elements that state i lacks. */
int64_t iz_state_lacks(const struct iz_state_layout *l, int i);

/* Of an element's master, where the layout has one. */
static inline int iz_state_master_bytes(const struct iz_state_layout *l)
{
    return l->lower ? 2 : 4;
}

/* State i of a chunk whose arrays begin at `chunk`. */
struct iz_moments iz_state_array(const struct iz_state_layout *l, void *chunk,
                                 int i);

/* All arrays, for who moves a part of the elements; returns how many. */
int iz_state_list(const struct iz_state_layout *l,
                  struct iz_state_bytes out[IZ_STATE_BYTES]);

/* Bytes that an update of n elements reads and writes; lacks: of them. */
double iz_state_traffic(const struct iz_plan *p, int64_t n, int64_t lacks);
