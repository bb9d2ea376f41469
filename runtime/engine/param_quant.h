/* SPDX-License-Identifier: Apache-2.0 */
/* Makes quantised parameters, when no task runs; access.h reads them. */
#pragma once

#include "runtime/engine/engine.h"

/* Where values come from: [from, from + n) of a unit's.  All workers ask at
 * once. */
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
