/* SPDX-License-Identifier: Apache-2.0 */
/* The products of ops.h on a CPU that multiplies bf16 (struct iz_exec:
 * bf16_products): weights are taken as they are, the other operand is rounded
 * to bf16, sums are fp32. */
#pragma once

#include "codelets/ops/ops.h"

/* Whether the products with l->w are made here. */
bool iz_matmul16(const struct iz_exec *x, const struct iz_linear *l);

/* As iz_matmul_fwd, _da and _dw (without db) of ops.h; they count nothing. */
void iz_matmul16_fwd(struct iz_exec *x, struct iz_view y, struct iz_view r,
                     struct iz_view a, const struct iz_linear *l);
void iz_matmul16_da(struct iz_exec *x, struct iz_view da, struct iz_view dy,
                    const struct iz_linear *l);
void iz_matmul16_dw(struct iz_exec *x, struct iz_view dy, struct iz_view a,
                    const struct iz_linear *l);
