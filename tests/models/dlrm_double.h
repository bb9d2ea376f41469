/* SPDX-License-Identifier: Apache-2.0 */
/* The recommendation model in double precision, written from its definition:
 * with one table per category and the binary cross-entropy of one logit. */
#pragma once

#include "models/dlrm.h"

/* Mean loss of the records.  param: the rows of each unit of tables; weight and
 * bias of each layer of the bottom MLP and of the top one; the answers. */
double dlrm_double_loss(const struct iz_dlrm_config *c, double *const *param,
                        const unsigned char *records, int samples);
