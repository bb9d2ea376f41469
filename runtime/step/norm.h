/* SPDX-License-Identifier: Apache-2.0 */
/* Sums of squares of gradients. */
#pragma once

#include "runtime/engine/engine.h"

/* After the last contribution: the sum of squares where the sums have not left
 * it; in stage 0 also the other ranks' parts of the gradient. */
void iz_grad_norm(struct iz_engine *e, int group);

/* Submits the squares of what the GPU keeps of a gradient, once it is whole. */
void iz_norm_squares(struct iz_engine *e, int group);
