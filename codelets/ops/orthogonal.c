/* SPDX-License-Identifier: Apache-2.0 */
/* Updates of matrices, with products of the CPU; see orthogonal.h. */
#include "codelets/ops/orthogonal.h"

#include <math.h>
#include <string.h>

#include "codelets/base/int64.h"
#include "codelets/flat/flat.h"
#include "codelets/ops/gemm.h"
#include "codelets/ops/gemm16.h"
#include "codelets/ops/gpu_ops.h"
#include "codelets/ops/product.h"

/* y = scale x; they may be the same. */
static void scale_rows(struct iz_strided y, struct iz_strided x, float scale)
{
    float *to = y.p;
    const float *from = x.p;
    for (int64_t r = 0; r < x.rows; r++)
        for (int64_t i = 0; i < x.cols; i++)
            to[r * y.stride + i] = from[r * x.stride + i] * scale;
}

static void copy_rows(struct iz_strided y, struct iz_strided x)
{
    float *to = y.p;
    const float *from = x.p;
    for (int64_t r = 0; r < x.rows; r++)
        memcpy(to + r * y.stride, from + r * x.stride,
               (size_t)x.cols * sizeof(float));
}

static double frobenius(struct iz_strided x)
{
    const float *p = x.p;
    double sum = 0;
    for (int64_t r = 0; r < x.rows; r++)
        sum += iz_flat_norm2(p + r * x.stride, IZ_F32, x.cols);
    return sqrt(sum);
}

static void product_cpu(struct iz_exec *x, const struct iz_strided_product *p,
                        void *arg)
{
    struct iz_gemm g = {.m = p->d.rows,
                        .n = p->d.cols,
                        .k = p->ta ? p->a.rows : p->a.cols,
                        .a = p->a.p,
                        .lda = p->a.stride,
                        .ta = p->ta,
                        .b = p->b.p,
                        .ldb = p->b.stride,
                        .tb = p->tb,
                        .c = p->d.p,
                        .ldc = p->d.stride,
                        .alpha = p->scale,
                        .beta = p->keep};
    if (p->keep != 0)
        copy_rows(p->d, p->c);
    if (p->b.rows)
        iz_gemm_cpu(&g);
    else
        for (int64_t i = 0; i < p->d.rows; i++)
            ((float *)p->d.p)[i * (p->d.stride + 1)] += p->scale;
}

/* In bf16 without gaps. */
static void *rounded(struct iz_exec *x, struct iz_strided m)
{
    struct iz_view v = iz_exec_work(x, IZ_BF16, m.rows, m.cols);
    const float *p = m.p;
    if (!x->dry)
        for (int64_t r = 0; r < m.rows; r++)
            iz_cast((uint16_t *)v.p + r * m.cols, IZ_BF16, p + r * m.stride,
                    IZ_F32, m.cols);
    return v.p;
}

/* With operands in bf16; d is without gaps. */
static void product_cpu16(struct iz_exec *x, const struct iz_strided_product *p,
                          void *arg)
{
    int64_t mark = iz_exec_mark(x);
    struct iz_gemm16 g = {.m = p->d.rows,
                          .n = p->d.cols,
                          .k = p->ta ? p->a.rows : p->a.cols,
                          .a = rounded(x, p->a),
                          .b = rounded(x, p->b),
                          .ta = p->ta,
                          .tb = p->tb,
                          .c = p->d.p,
                          .c_type = IZ_F32,
                          .add = p->keep != 0};
    g.scratch = iz_exec_work(x, IZ_U8, 1, iz_gemm16_scratch(&g)).p;
    if (!x->dry) {
        if (g.add)
            scale_rows(p->d, p->c, p->keep / p->scale);
        iz_gemm16(&g);
        if (p->scale != 1)
            scale_rows(p->d, p->d, p->scale);
    }
    iz_exec_release(x, mark);
}

static void count_product(struct iz_exec *x, const struct iz_strided_product *p,
                          void *arg)
{
    double k = (double)(p->ta ? p->a.rows : p->a.cols);
    iz_exec_count(x, 2 * (double)p->d.rows * (double)p->d.cols * k, 0);
}

static struct iz_strided work(struct iz_exec *x, int64_t rows, int64_t cols)
{
    struct iz_view v = iz_exec_work(x, IZ_F32, rows, cols);
    return (struct iz_strided){v.p, rows, cols, cols};
}

/* X X^T's powers need more bits than bf16 has. */
static bool with_bf16(const struct iz_exec *x, const struct iz_orthogonal *m)
{
    return x->numerics.bf16_products && !m->gram;
}

static void orthogonal_cpu(struct iz_exec *x, const struct iz_orthogonal *m)
{
    int64_t least = min64(m->rows, m->cols);
    struct iz_strided to = {m->p, m->rows, m->cols, m->stride};
    struct iz_strided at = to, other = work(x, m->rows, m->cols);
    struct iz_strided square[IZ_ORTHOGONAL_SQUARES] = {0};
    bool bf16 = with_bf16(x, m);
    for (int i = 0; i < iz_orthogonal_squares(m); i++)
        square[i] = work(x, least, least);
    if (bf16)
        at = work(x, m->rows, m->cols);
    if (!x->dry)
        scale_rows(at, to,
                   (float)(1 / fmax(frobenius(to), IZ_ORTHOGONAL_LEAST)));
    if (bf16 || !x->dry)
        at = iz_orthogonal_iterate(x, m, at, other, square,
                                   bf16 ? product_cpu16 : product_cpu, NULL);
    if (!x->dry)
        scale_rows(to, at, (float)m->scale);
}

static struct iz_view packed(struct iz_strided m, enum iz_dtype t)
{
    return (struct iz_view){
        .p = m.p, .dtype = t, .rows = m.rows, .cols = m.cols};
}

struct iz_product iz_orthogonal_product(const struct iz_strided_product *p,
                                        enum iz_dtype t)
{
    return (struct iz_product){.a = packed(p->a, t),
                               .b = packed(p->b, t),
                               .d = packed(p->d, t),
                               .c = p->keep != 0 ? packed(p->c, t) : IZ_NONE,
                               .ta = p->ta,
                               .tb = p->tb,
                               .scale = p->scale,
                               .keep = p->keep};
}

/* Raises *arg to the scratch that a product takes on a GPU, of either type. */
static void measure_product(struct iz_exec *x,
                            const struct iz_strided_product *p, void *arg)
{
    struct iz_product q = iz_orthogonal_product(p, IZ_F16);
    int64_t *most = arg;
    if (p->b.rows)
        *most = max64(*most, iz_product_pad(&q, NULL).bytes);
}

/* most: of a product. */
static struct iz_view scratch_of(struct iz_exec *x,
                                 const struct iz_orthogonal *m, int64_t most)
{
    int64_t least = min64(m->rows, m->cols);
    int64_t elems = 2 * round_up(m->rows * m->cols, 64) +
                    iz_orthogonal_squares(m) * round_up(least * least, 64);
    return iz_exec_work(x, IZ_U8, 1,
                        elems * iz_dtype_bytes(iz_orthogonal_type(m->gram)) +
                            (IZ_ORTHOGONAL_SUMS + 1) * (int64_t)sizeof(double) +
                            most);
}

void iz_orthogonal(struct iz_exec *x, const struct iz_orthogonal *m)
{
    int64_t mark = iz_exec_mark(x), least = min64(m->rows, m->cols);
    struct iz_strided shape = {NULL, m->rows, m->cols, m->stride};
    struct iz_strided square = {NULL, least, least, least};
    const struct iz_strided squares[IZ_ORTHOGONAL_SQUARES] = {square, square,
                                                              square, square};
    iz_orthogonal_iterate(x, m, shape, shape, squares, count_product, NULL);
    iz_exec_count(x, 0, 8 * (double)m->rows * (double)m->cols);
    if (x->backend == IZ_CUDA) {
        int64_t most = 0;
        iz_orthogonal_iterate(x, m, shape, shape, squares, measure_product,
                              &most);
        struct iz_view scratch = scratch_of(x, m, most);
        if (!x->dry)
            iz_orthogonal_cuda(x, m, scratch);
    } else {
        orthogonal_cpu(x, m);
    }
    iz_exec_release(x, mark);
}
