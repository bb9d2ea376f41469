/* SPDX-License-Identifier: Apache-2.0 */
/* The loops that are compiled once per SIMD level for speed alone: products and
 * sums are fused and vectors have the level's length, so another level has
 * other bits.  At one level the bits depend on the arguments alone: not on the
 * thread, nor on what else a task computes. */
#pragma once

#include "codelets/ops/attention.h"

struct iz_attention_loops {
    void (*attention_fwd)(const struct iz_head *h);
    void (*attention_bwd)(const struct iz_head *h);
};
