/* SPDX-License-Identifier: Apache-2.0 */
/* Newton-Schulz's iteration; see orthogonal.h. */
#include "codelets/ops/orthogonal.h"

#include <math.h>
#include <string.h>

#include "codelets/base/int64.h"
#include "codelets/flat/flat.h"
#include "codelets/ops/gemm.h"

/* X becomes a X + (b A + c A A) X with A = X X^T. */
static const float quintic_a = 3.4445f, quintic_b = -4.7750f,
                   quintic_c = 2.0315f;
#define LEAST_NORM 1e-7

/* A matrix whose rows are `stride` apart. */
struct strided {
    float *p;
    int64_t rows, cols, stride;
};

/* y = scale x; they may be the same. */
static void scale_rows(struct strided y, struct strided x, float scale)
{
    for (int64_t r = 0; r < x.rows; r++)
        for (int64_t i = 0; i < x.cols; i++)
            y.p[r * y.stride + i] = x.p[r * x.stride + i] * scale;
}

static void copy_rows(struct strided y, struct strided x)
{
    for (int64_t r = 0; r < x.rows; r++)
        memcpy(y.p + r * y.stride, x.p + r * x.stride,
               (size_t)x.cols * sizeof(float));
}

static double frobenius(struct strided x)
{
    double sum = 0;
    for (int64_t r = 0; r < x.rows; r++)
        sum += iz_flat_norm2(x.p + r * x.stride, IZ_F32, x.cols);
    return sqrt(sum);
}

/* c = alpha op(a) op(b) + beta c */
static void product(struct strided c, struct strided a, bool ta,
                    struct strided b, bool tb, float alpha, float beta)
{
    struct iz_gemm g = {.m = c.rows,
                        .n = c.cols,
                        .k = ta ? a.rows : a.cols,
                        .a = a.p,
                        .lda = a.stride,
                        .ta = ta,
                        .b = b.p,
                        .ldb = b.stride,
                        .tb = tb,
                        .c = c.p,
                        .ldc = c.stride,
                        .alpha = alpha,
                        .beta = beta};
    iz_gemm_cpu(&g);
}

/* y = the next x; g and h are squares of the shorter side. */
static void iterate(struct strided y, struct strided x, struct strided g,
                    struct strided h)
{
    bool tall = x.rows > x.cols;
    product(g, x, tall, x, !tall, 1, 0);
    copy_rows(h, g);
    product(h, g, false, g, false, quintic_c, quintic_b);
    copy_rows(y, x);
    if (tall)
        product(y, x, false, h, false, 1, quintic_a);
    else
        product(y, h, false, x, false, 1, quintic_a);
}

static struct strided work(struct iz_exec *x, int64_t rows, int64_t cols)
{
    struct iz_view v = iz_work(x, IZ_F32, rows, cols);
    return (struct strided){v.p, rows, cols, cols};
}

void iz_orthogonal(struct iz_exec *x, const struct iz_orthogonal *m)
{
    int64_t mark = iz_work_mark(x), least = min64(m->rows, m->cols);
    double elems = (double)m->rows * (double)m->cols, side = (double)least;
    struct strided at = {m->p, m->rows, m->cols, m->stride};
    struct strided other = work(x, m->rows, m->cols);
    struct strided g = work(x, least, least), h = work(x, least, least);
    iz_count(x, m->steps * 2 * side * (2 * elems + side * side), 8 * elems);
    if (!x->dry) {
        scale_rows(at, at, (float)(1 / fmax(frobenius(at), LEAST_NORM)));
        struct strided from = at, to = other, swap;
        for (int i = 0; i < m->steps; i++) {
            iterate(to, from, g, h);
            swap = from;
            from = to;
            to = swap;
        }
        scale_rows(at, from, (float)m->scale);
    }
    iz_work_release(x, mark);
}
