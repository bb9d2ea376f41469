/* SPDX-License-Identifier: Apache-2.0 */
/* Products with bf16 operands on a CPU; see matmul_16.h. */
#include "codelets/ops/matmul_16.h"

#include <string.h>

#include "codelets/ops/gemm16.h"

bool iz_matmul16(const struct iz_exec *x, const struct iz_linear *l)
{
    return x->bf16_products && x->backend == IZ_CPU && l->w.dtype == IZ_BF16 &&
           l->scale == 0;
}

/* v rounded to bf16, in scratch. */
static struct iz_view rounded(struct iz_exec *x, struct iz_view v)
{
    struct iz_view to = iz_work(x, IZ_BF16, v.rows, v.cols);

    if (!x->dry)
        iz_cast(to.p, IZ_BF16, v.p, v.dtype, iz_view_len(v));
    return to;
}

static void matmul_16_product(struct iz_exec *x, struct iz_gemm16 *g)
{
    struct iz_view scratch = iz_work(x, IZ_U8, 1, iz_gemm16_scratch(g));

    g->scratch = scratch.p;
    if (!x->dry)
        iz_gemm16(g);
}

void iz_matmul16_fwd(struct iz_exec *x, struct iz_view y, struct iz_view r,
                     struct iz_view a, const struct iz_linear *l)
{
    struct iz_gemm16 g = {.m = y.rows,
                          .n = y.cols,
                          .k = a.cols,
                          .a = rounded(x, a).p,
                          .b = l->w.p,
                          .tb = l->out_in,
                          .bias = l->b.p,
                          .bias_type = l->b.dtype,
                          .biased = l->b.rows > 0,
                          .c = y.p,
                          .c_type = y.dtype,
                          .add = r.rows > 0};

    if (g.add && y.p != r.p && !x->dry)
        memcpy(y.p, r.p, (size_t)iz_view_bytes(y));
    matmul_16_product(x, &g);
}

void iz_matmul16_da(struct iz_exec *x, struct iz_view da, struct iz_view dy,
                    const struct iz_linear *l)
{
    struct iz_gemm16 g = {.m = da.rows,
                          .n = da.cols,
                          .k = dy.cols,
                          .a = rounded(x, dy).p,
                          .b = l->w.p,
                          .tb = !l->out_in,
                          .c = da.p,
                          .c_type = da.dtype};

    matmul_16_product(x, &g);
}

void iz_matmul16_dw(struct iz_exec *x, struct iz_view dy, struct iz_view a,
                    const struct iz_linear *l)
{
    /* Rows of dw belong to columns of `left`. */
    struct iz_view left = l->out_in ? dy : a, right = l->out_in ? a : dy;
    struct iz_gemm16 g = {.m = l->dw.rows,
                          .n = l->dw.cols,
                          .k = dy.rows,
                          .a = rounded(x, left).p,
                          .ta = true,
                          .b = rounded(x, right).p,
                          .c = l->dw.p,
                          .c_type = l->dw.dtype,
                          .add = l->add};

    matmul_16_product(x, &g);
}
