/* SPDX-License-Identifier: Apache-2.0 */
/* See passed.h.  M = rows, C = width, k = experts of a row. */
#include "models/passed.h"

#include "models/parts.h"

/* Numbers of 4 bytes have room for two elements, which may have 2 each. */
int64_t iz_passed_len(const struct iz_block *b)
{
    const struct iz_experts *c = &b->experts;
    int64_t of_row = 2 * (int64_t)b->width + 2 * 3 * c->per_token;
    return b->seq * of_row + 2 * (int64_t)c->n;
}

struct iz_passed iz_passed_of(const struct iz_block *b, struct iz_view v,
                              bool whole)
{
    int64_t at = 0, k = b->experts.per_token, m = v.rows * b->seq;
    struct iz_passed p = {.c = next_view(v, &at, v.dtype, m, b->width)};
    if (!whole)
        return p;
    p.h = next_view(v, &at, v.dtype, m, b->width);
    p.r.weight = next_view(v, &at, IZ_F32, m, k);
    p.r.place = next_view(v, &at, IZ_I32, m, k);
    p.r.chosen = next_view(v, &at, IZ_I32, m, k);
    p.r.end = next_view(v, &at, IZ_I32, 1, b->experts.n);
    return p;
}

void iz_routes_copy(struct iz_exec *x, const struct iz_routes *to,
                    const struct iz_routes *from)
{
    iz_op_copy(x, to->weight, from->weight);
    iz_op_copy(x, to->place, from->place);
    iz_op_copy(x, to->chosen, from->chosen);
    iz_op_copy(x, to->end, from->end);
}
