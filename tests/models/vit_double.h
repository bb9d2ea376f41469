/* SPDX-License-Identifier: Apache-2.0 */
/* A vision transformer in double precision, written from its definition. */
#pragma once

#include "models/vit.h"

/* Mean cross-entropy of the records.  param: token, position, patch; of each
 * block norm1, qkv, proj, norm2, fc1, fc2, weight and bias each; norm's weight
 * and bias, the classifier. */
double vit_double_loss(const struct iz_vit_config *c, double *const *param,
                       const unsigned char *records, int samples);
