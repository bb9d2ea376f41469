/* SPDX-License-Identifier: Apache-2.0 */
/* Quantised parameters where they live, when no task runs; see access.h, which
 * is what others include. */
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
 * [first, last); what all ranks have together is cut into [begin, end). */
struct iz_owned {
    enum iz_array array; /* IZ_MASTER, IZ_FROZEN, IZ_QUANT_VALUES */
    int64_t n, first, last, begin, end;
    int64_t at; /* where they begin in all of the unit's, end to end */
};
/* A rank's shard is in its file, and is read and written, in buffers of so many
 * bytes: blocks of a checkpoint. */
#define IZ_QUANT_BUFFER_BYTES ((int64_t)4 * IZ_CKPT_BLOCK)

/* Those of a unit as values, and as words of the groups. */
struct iz_owned iz_param_quant_values(const struct iz_engine *e, int unit);
struct iz_owned iz_param_quant_words(const struct iz_engine *e, int unit);

/* The first byte of this rank's shard where it keeps them; see quant and
 * quant_at of struct iz_unit_memory. */
int64_t iz_param_quant_own(const struct iz_engine *e, int unit);
/* Bytes [from, from + n) of this rank's shard of groups. */
void iz_param_quant_move(struct iz_engine *e, int unit, int64_t from,
                         char *host, int64_t n, bool put);
/* Values [from, from + n), which this rank owns, as a unit is computed with
 * them. */
void iz_param_quant_get(struct iz_engine *e, int unit, int64_t from, float *out,
                        int64_t n);

/* Where values come from: [from, from + n) of a unit's. */
struct iz_quant_source {
    int (*read)(void *arg, int unit, int64_t from, float *out, int64_t n);
    /* Group g of a matrix that is quantised there already; false: it is not.
     * NULL: none is. */
    bool (*group)(void *arg, int unit, const struct iz_quant_matrix *m,
                  int64_t g, void *out);
    void *arg;
};
/* Quantises all values of a unit, each rank those of its shard.  All
 * ranks; negative errno on every one, of the source's or -ENOMEM. */
int iz_param_quant_fill(struct iz_engine *e, int unit,
                        const struct iz_quant_source *from);
