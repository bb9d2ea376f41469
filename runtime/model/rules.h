/* SPDX-License-Identifier: Apache-2.0 */
/* Which tensor is updated how: the section "parameters" of a config, applied to
 * the parameters of a model. */
#pragma once

#include <stdio.h>

#include "codelets/unit/layer.h"
#include "runtime/config/config.h"

/* Sets weight decay and rate of every parameter, which are frozen (without a
 * rule, all but the adapters if there are any), and which of these are kept in
 * 4 bits.  -EINVAL with the reason told on `err` (NULL: nothing is), with all
 * patterns that match nothing. */
int iz_rules_apply(struct iz_model *m, const struct iz_config *c, FILE *err);

/* Gives the model frozen copies of what is trained, for the reference of pairs;
 * adapters need none.  iz_rules_apply does it where loss.type has one. */
int iz_rules_add_reference(struct iz_model *m, FILE *err);

/* Whether there is something for an optimizer of matrices: 0, or -ENOTSUP with
 * the reason printed on `err`, which may be NULL. */
int iz_rules_check_matrices(const struct iz_model *m, const struct iz_config *c,
                            FILE *err);

/* Whether sparse tensors can be updated by this config, and with a GPU:
 * -ENOTSUP if not.  c NULL: whether the tensors can be sparse at all, -EINVAL
 * if not.  The reason is printed on `err`, which may be NULL. */
int iz_rules_check_sparse(const struct iz_model *m, const struct iz_config *c,
                          bool gpu, FILE *err);

/* Tells that a pattern matches nothing of `what`, with the nearest name;
 * returns -EINVAL. */
int iz_rules_none(const struct iz_model *m, const char *key, const char *match,
                  const char *what, FILE *err);

/* One line per parameter: name, shape, how it is updated. */
void iz_rules_print(const struct iz_model *m, FILE *out);

/* Neighbours in a unit's flat trained parameters that are updated alike. */
struct iz_segment {
    int64_t end; /* the last one holds the padding too: INT64_MAX */
    double lr_scale, weight_decay;
    bool by_matrix;
};

/* Segments of a unit, in order; malloc'ed. */
struct iz_segment *iz_rules_segments(const struct iz_unit *u);
