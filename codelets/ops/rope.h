/* SPDX-License-Identifier: Apache-2.0 */
/* The arithmetic of rotary positions that the CPU and the GPU share. */
#pragma once

#include "codelets/ops/ops.h"

IZ_C_BEGIN

/* Turns per token, in full circles, of column i and i + d/2. */
struct iz_rope_turns {
    double f[IZ_ROPE_MOST / 2];
};

/* The d/2 frequencies of r. */
void iz_rope_turns_of(struct iz_rope_turns *out, const struct iz_rope *r);

IZ_C_END
