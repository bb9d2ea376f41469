/* SPDX-License-Identifier: Apache-2.0 */
/* Newton-Schulz's iteration on a GPU: products by cuBLASLt, of 16-bit operands
 * with sums in fp32; what is around them by kernels of ours. */
#include "codelets/base/int64.h"
#include "codelets/kernels/cuda_lib.h"
#include "codelets/ops/gpu_ops.h"

/* Of the products' type, without gaps, as all matrices here. */
static struct iz_view view_of(struct iz_strided m, enum iz_dtype t)
{
    return (struct iz_view){
        .p = m.p, .dtype = t, .rows = m.rows, .cols = m.cols};
}

struct by_cublas {
    enum iz_dtype type;
    struct iz_view workspace;
};

static void product_cuda(struct iz_exec *x, const struct iz_strided_product *p,
                         void *arg)
{
    const struct by_cublas *by = arg;
    struct iz_product q = iz_orthogonal_product(p, by->type);
    if (p->b.rows)
        iz_product_cuda(x, &q, by->workspace);
    else
        iz_orthogonal_shift_square_cuda(x, q.d, q.c, p->scale);
}

/* Takes a matrix from the scratch. */
static struct iz_strided take_matrix(char **at, int64_t rows, int64_t cols,
                                     enum iz_dtype t)
{
    struct iz_strided m = {*at, rows, cols, cols};
    *at += round_up(rows * cols, 64) * iz_dtype_bytes(t);
    return m;
}

void iz_orthogonal_cuda(struct iz_exec *x, const struct iz_orthogonal *m,
                        struct iz_view scratch)
{
    int64_t least = min64(m->rows, m->cols);
    struct by_cublas by = {.type = iz_orthogonal_type(m->gram)};
    struct iz_strided square[IZ_ORTHOGONAL_SQUARES] = {0};
    char *at = scratch.p;
    struct iz_strided one = take_matrix(&at, m->rows, m->cols, by.type);
    struct iz_strided other = take_matrix(&at, m->rows, m->cols, by.type);
    for (int i = 0; i < iz_orthogonal_squares(m); i++)
        square[i] = take_matrix(&at, least, least, by.type);
    /* the sums last, as copies of operands lie at multiples of 64 bytes */
    char *end = (char *)scratch.p + iz_view_bytes(scratch);
    double *sums = (double *)end - (IZ_ORTHOGONAL_SUMS + 1);
    by.workspace = (struct iz_view){
        .p = at, .dtype = IZ_U8, .rows = 1, .cols = (char *)sums - at};
    iz_orthogonal_normalise_cuda(x, view_of(one, by.type), m, sums);
    one = iz_orthogonal_iterate(x, m, one, other, square, product_cuda, &by);
    iz_orthogonal_spread_cuda(x, m, view_of(one, by.type));
}
