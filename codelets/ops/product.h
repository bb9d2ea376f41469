/* SPDX-License-Identifier: Apache-2.0 */
/* The matrix products of a linear layer, whichever library forms them. */
#pragma once

#include "codelets/ops/ops.h"

IZ_C_BEGIN

enum { IZ_EXPERT_ADAPTERS = 3 }; /* of one weight, at most */

/* d = scale op(a) op(b) + keep c + bias (scale or keep 0 for 1), or d += op(a)
 * op(b) with `add`.  op(a) is [m,k], op(b) [k,n], d and c [m,n], and ta, tb say
 * that the matrix is stored transposed.  d has m rows, and b gives n and k:
 * rows of the others may be longer.  bias [1,n] is added to every row.  a and b
 * have one type, and so have c, d and bias.  bias may be absent, c absent or d.
 */
struct iz_product {
    struct iz_view a, b, c, d, bias;
    bool ta, tb, add;
    float scale, keep;
};

static inline int64_t iz_product_n(const struct iz_product *p)
{
    return p->tb ? p->b.rows : p->b.cols;
}

static inline int64_t iz_product_k(const struct iz_product *p)
{
    return p->tb ? p->b.cols : p->b.rows;
}

/* A product as cuBLASLt gets it, whose operands may be copies in the scratch
 * and its result, too. */
struct iz_padded {
    struct iz_product p;
    int64_t bytes; /* of scratch, IZ_PRODUCT_SCRATCH for the library first */
};

/* With 16-bit operands, neighbours in memory come in eights: rows of all
 * matrices have a multiple of 8 elements and begin at a multiple of 16 bytes.
 * How many rows there are does not matter.  A matrix that is not so gets a
 * place in the scratch at `base` (NULL: in none), where what is added to it are
 * zeros.  b has the rows that follow it instead, if it has the room: they meet
 * zeros of a, or give columns of d that nobody reads. */
struct iz_padded iz_product_pad(const struct iz_product *p, char *base);

/* The products of iz_matmul_fwd and _dw of ops.h; that of _da is one of a
 * forward. */
struct iz_product iz_product_fwd(struct iz_view y, struct iz_view r,
                                 struct iz_view a, const struct iz_linear *l);
struct iz_product iz_product_dw(struct iz_view dy, struct iz_view a,
                                const struct iz_linear *l);
/* The weights of number i of e experts, which lie one below the other, and so
 * do the two matrices of an adapter; its own ones are made in `own`. */
struct iz_linear iz_product_expert(const struct iz_linear *l, int64_t i,
                                   int64_t e,
                                   struct iz_adapter own[IZ_EXPERT_ADAPTERS]);

IZ_C_END
