/* SPDX-License-Identifier: Apache-2.0 */
/* Newton-Schulz's iteration; see orthogonal.h. */
#include "codelets/ops/orthogonal.h"

#include <math.h>
#include <string.h>

#include "codelets/base/int64.h"
#include "codelets/flat/flat.h"
#include "codelets/ops/gemm.h"
#include "codelets/ops/gpu_ops.h"

/* X becomes a X + (b A + c A A) X with A = X X^T. */
static const float quintic_a = 3.4445f, quintic_b = -4.7750f,
                   quintic_c = 2.0315f;

/* With X X^T: after so many iterations it is formed anew, or what rounding
 * makes of it would grow. */
#define RESTART 2

static bool by_gram(const struct iz_orthogonal *m)
{
    return m->gram && m->rows != m->cols;
}

int iz_orthogonal_squares(const struct iz_orthogonal *m)
{
    return by_gram(m) ? IZ_ORTHOGONAL_SQUARES : 2;
}

/* ---- the iteration ---- */

struct iteration {
    struct iz_exec *x;
    iz_strided_product_fn *product;
    void *arg;
    bool tall;
};

/* d = scale op(a) op(b) + keep c */
static void form(const struct iteration *t, struct iz_strided d, float scale,
                 struct iz_strided a, bool ta, struct iz_strided b, bool tb,
                 float keep, struct iz_strided c)
{
    struct iz_strided_product p = {d, a, b, c, ta, tb, scale, keep};
    t->product(t->x, &p, t->arg);
}

/* d = z y + keep c, all of them squares. */
static void multiply(const struct iteration *t, struct iz_strided d,
                     struct iz_strided z, struct iz_strided y, float keep,
                     struct iz_strided c)
{
    form(t, d, 1, z, false, y, false, keep, c);
}

/* The square X X^T of the shorter side. */
static void form_gram(const struct iteration *t, struct iz_strided g,
                      struct iz_strided x)
{
    form(t, g, 1, x, t->tall, x, !t->tall, 0, g);
}

/* y = h x + keep x, with a square on the shorter side. */
static void apply_square(const struct iteration *t, struct iz_strided y,
                         struct iz_strided h, struct iz_strided x, float keep)
{
    if (t->tall)
        form(t, y, 1, x, false, h, false, keep, x);
    else
        form(t, y, 1, h, false, x, false, keep, x);
}

static void swap(struct iz_strided *a, struct iz_strided *b)
{
    struct iz_strided c = *a;
    *a = *b;
    *b = c;
}

static struct iz_strided iterate(const struct iteration *t, int steps,
                                 struct iz_strided x, struct iz_strided y,
                                 const struct iz_strided *square)
{
    struct iz_strided g = square[0], h = square[1];
    for (int i = 0; i < steps; i++) {
        form_gram(t, g, x);
        form(t, h, quintic_c, g, false, g, false, quintic_b, g);
        apply_square(t, y, h, x, quintic_a);
        swap(&x, &y);
    }
    return x;
}

/* The same in real numbers.  With z = b r + c r r, x becomes (a I + z) x and
 * its r = x x^T becomes (a I + z) r (a I + z): q, the product of all (a I + z),
 * is applied to x where r is formed anew, and at the end. */
static struct iz_strided iterate_gram(const struct iteration *t, int steps,
                                      struct iz_strided x, struct iz_strided y,
                                      const struct iz_strided *square)
{
    struct iz_strided r = square[0], z = square[1], q = square[2],
                      w = square[3], none = {0};
    bool fresh = true;
    form_gram(t, r, x);
    for (int i = 0; i < steps; i++) {
        if (i == RESTART) {
            apply_square(t, y, q, x, 0);
            swap(&x, &y);
            form_gram(t, r, x);
            fresh = true;
        }
        form(t, z, quintic_c, r, false, r, false, quintic_b, r);
        if (fresh) {
            form(t, q, quintic_a, none, false, none, false, 1, z);
        } else {
            multiply(t, w, z, q, quintic_a, q);
            swap(&w, &q);
        }
        fresh = false;
        if (i + 1 == steps || i + 1 == RESTART)
            continue;
        multiply(t, w, z, r, quintic_a, r);
        multiply(t, r, z, w, quintic_a, w);
    }
    if (steps) {
        apply_square(t, y, q, x, 0);
        swap(&x, &y);
    }
    return x;
}

struct iz_strided
iz_orthogonal_iterate(struct iz_exec *x, const struct iz_orthogonal *m,
                      struct iz_strided at, struct iz_strided other,
                      const struct iz_strided square[IZ_ORTHOGONAL_SQUARES],
                      iz_strided_product_fn *product, void *arg)
{
    struct iteration t = {x, product, arg, at.rows > at.cols};
    return (by_gram(m) ? iterate_gram : iterate)(&t, m->steps, at, other,
                                                 square);
}

/* ---- on the CPU ---- */

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
    (void)x;
    (void)arg;
    if (p->keep != 0)
        copy_rows(p->d, p->c);
    if (p->b.rows)
        iz_gemm_cpu(&g);
    else
        for (int64_t i = 0; i < p->d.rows; i++)
            ((float *)p->d.p)[i * (p->d.stride + 1)] += p->scale;
}

static void count_product(struct iz_exec *x, const struct iz_strided_product *p,
                          void *arg)
{
    double k = (double)(p->ta ? p->a.rows : p->a.cols);
    (void)arg;
    iz_count(x, 2 * (double)p->d.rows * (double)p->d.cols * k, 0);
}

static struct iz_strided work(struct iz_exec *x, int64_t rows, int64_t cols)
{
    struct iz_view v = iz_work(x, IZ_F32, rows, cols);
    return (struct iz_strided){v.p, rows, cols, cols};
}

static void orthogonal_cpu(struct iz_exec *x, const struct iz_orthogonal *m)
{
    int64_t least = min64(m->rows, m->cols);
    struct iz_strided at = {m->p, m->rows, m->cols, m->stride};
    struct iz_strided other = work(x, m->rows, m->cols);
    struct iz_strided square[IZ_ORTHOGONAL_SQUARES] = {0};
    for (int i = 0; i < iz_orthogonal_squares(m); i++)
        square[i] = work(x, least, least);
    if (x->dry)
        return;
    scale_rows(at, at, (float)(1 / fmax(frobenius(at), IZ_ORTHOGONAL_LEAST)));
    scale_rows(
        at, iz_orthogonal_iterate(x, m, at, other, square, product_cpu, NULL),
        (float)m->scale);
}

static struct iz_view scratch_of(struct iz_exec *x,
                                 const struct iz_orthogonal *m)
{
    int64_t least = min64(m->rows, m->cols);
    int64_t elems = 2 * round_up(m->rows * m->cols, 64) +
                    iz_orthogonal_squares(m) * round_up(least * least, 64);
    return iz_work(x, IZ_U8, 1,
                   elems * iz_dtype_bytes(iz_orthogonal_type(m->gram)) +
                       (IZ_ORTHOGONAL_SUMS + 1) * (int64_t)sizeof(double) +
                       IZ_PRODUCT_SCRATCH);
}

void iz_orthogonal(struct iz_exec *x, const struct iz_orthogonal *m)
{
    int64_t mark = iz_work_mark(x), least = min64(m->rows, m->cols);
    struct iz_strided shape = {NULL, m->rows, m->cols, m->stride};
    struct iz_strided square = {NULL, least, least, least};
    const struct iz_strided squares[IZ_ORTHOGONAL_SQUARES] = {square, square,
                                                              square, square};
    iz_orthogonal_iterate(x, m, shape, shape, squares, count_product, NULL);
    iz_count(x, 0, 8 * (double)m->rows * (double)m->cols);
    if (x->backend == IZ_CUDA) {
        struct iz_view scratch = scratch_of(x, m);
        if (!x->dry)
            iz_orthogonal_cuda(x, m, scratch);
    } else {
        orthogonal_cpu(x, m);
    }
    iz_work_release(x, mark);
}
