/* SPDX-License-Identifier: Apache-2.0 */
/* Muon of matrices: the passes over elements against their formula, at every
 * SIMD level and cut anywhere; Newton-Schulz against the same iteration in
 * double, and for what it makes of singular values. */
#include <math.h>
#include <string.h>

#include "codelets/base/int64.h"
#include "codelets/flat/simd.h"
#include "codelets/flat/update.h"
#include "codelets/ops/gemm16.h"
#include "codelets/ops/orthogonal.h"
#include "tests/codelets/flat/flat_test.h"

/* ---- the passes over elements ---- */

enum { MANY = 1500 };

struct passed {
    float p[MANY], m[MANY], g[MANY], d[MANY];
    uint16_t out[MANY];
};

static const struct iz_step matrix_step = {.hyper = {.type = IZ_OPTIMIZER_MUON,
                                                     .lr = 0.02,
                                                     .weight_decay = 0.1,
                                                     .momentum = 0.9,
                                                     .nesterov = true,
                                                     .adam_rate = 1},
                                           .t = 3,
                                           .grad_scale = 0.25f,
                                           .matrix = true};

static void fill_passed(struct passed *x)
{
    memset(x, 0, sizeof(*x));
    flat_fill(x->p, IZ_F32, MANY, 2);
    flat_fill(x->m, IZ_F32, MANY, 1);
    flat_fill(x->g, IZ_F32, MANY, 3);
}

/* Both passes over [from, from + n); what the second one reads is d. */
static void pass_over(struct passed *x, struct iz_step s, int64_t from,
                      int64_t n)
{
    float v[MANY] = {0};
    struct iz_update_range first = iz_update_range_of(&s);
    struct iz_update u = {.optimizer = from % 2 ? IZ_OPTIMIZER_DIRECTION
                                                : IZ_OPTIMIZER_MUON,
                          .g_type = IZ_F32,
                          .out_type = IZ_BF16,
                          .n = n,
                          .at = from,
                          .room = MANY,
                          .p = x->p + from,
                          .state = {x->m, from % 2 ? NULL : v},
                          .g = x->g + from,
                          .d = x->d + from,
                          .out = x->out + from,
                          .range = &first,
                          .ranges = 1};
    iz_update(&u);
    s.hyper.type = IZ_OPTIMIZER_ALONG;
    struct iz_update_range last = iz_update_range_of(&s);
    u = (struct iz_update){.optimizer = IZ_OPTIMIZER_ALONG,
                           .g_type = IZ_F32,
                           .out_type = IZ_BF16,
                           .n = n,
                           .p = x->p + from,
                           .g = x->d + from,
                           .out = x->out + from,
                           .range = &last,
                           .ranges = 1};
    iz_update(&u);
    for (int i = 0; i < MANY; i++)
        assert_true(v[i] == 0);
}

static void passes_follow_their_formula(void **state)
{
    for (int c = 0; c < 2; c++) {
        static struct passed x, y;
        struct iz_step s = matrix_step;
        const struct iz_hyper *h = &s.hyper;
        s.hyper.nesterov = c;
        fill_passed(&x);
        y = x;
        pass_over(&x, s, 0, MANY);
        for (int i = 0; i < MANY; i++) {
            double g = y.g[i] * (double)s.grad_scale, b = h->momentum;
            double m = b * y.m[i] + (1 - b) * g;
            double d = c ? b * m + (1 - b) * g : m;
            double p = y.p[i] * (1 - h->lr * h->weight_decay) - h->lr * d;
            uint16_t out;
            assert_true(fabs(x.m[i] - m) < 1e-6 && fabs(x.d[i] - d) < 1e-6);
            assert_true(fabs(x.p[i] - p) < 1e-6);
            iz_cast_params(&out, IZ_BF16, &x.p[i], 1);
            assert_true(out == x.out[i]);
        }
    }
}

static void passes_do_not_depend_on_pieces_and_levels(void **state)
{
    static struct passed whole, cut;
    fill_passed(&whole);
    cut = whole;
    pass_over(&whole, matrix_step, 0, MANY);
    for (const struct iz_simd_level *l = iz_simd_levels; l->name; l++) {
        struct passed x = cut;
        if (!iz_simd_use(l))
            continue;
        for (int64_t at = 0, n; at < MANY; at += n) {
            n = min64(1 + random_piece(200, MANY), MANY - at);
            pass_over(&x, matrix_step, at, n);
        }
        assert_memory_equal(&x, &whole, sizeof(x));
    }
}

/* ---- the iteration ---- */

static double *wide_of(const struct iz_orthogonal *m)
{
    double *x = take((size_t)(m->rows * m->cols) * sizeof(*x));
    for (int64_t i = 0; i < m->rows * m->cols; i++)
        x[i] = m->p[i / m->cols * m->stride + i % m->cols];
    return x;
}

/* y [m,n] = a [m,k] op(b), which is [k,n] and may be stored transposed. */
static void times(double *y, const double *a, const double *b, int64_t m,
                  int64_t k, int64_t n, bool tb)
{
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = 0;
            for (int64_t l = 0; l < k; l++)
                sum += a[i * k + l] * b[tb ? j * k + l : l * n + j];
            y[i * n + j] = sum;
        }
}

/* Always with X X^T. */
static double *expected(const struct iz_orthogonal *m)
{
    int64_t r = m->rows, c = m->cols;
    double *x = wide_of(m), *y = take((size_t)(r * c) * sizeof(*y)), norm = 0;
    double *g = take((size_t)(r * r) * sizeof(*g));
    double *h = take((size_t)(r * r) * sizeof(*h));
    for (int64_t i = 0; i < r * c; i++)
        norm += x[i] * x[i];
    for (int64_t i = 0; i < r * c; i++)
        x[i] /= fmax(sqrt(norm), 1e-7);
    for (int s = 0; s < m->steps; s++) {
        times(g, x, x, r, c, r, true);
        times(h, g, g, r, r, r, false);
        for (int64_t i = 0; i < r * r; i++)
            h[i] = 2.0315 * h[i] - 4.7750 * g[i];
        times(y, h, x, r, r, c, false);
        for (int64_t i = 0; i < r * c; i++)
            x[i] = 3.4445 * x[i] + y[i];
    }
    for (int64_t i = 0; i < r * c; i++)
        x[i] *= m->scale;
    free(y);
    free(g);
    free(h);
    return x;
}

static void orthogonal_with(const struct iz_orthogonal *m, bool bf16)
{
    struct iz_exec x = iz_exec_dry(IZ_CPU, IZ_F32);
    x.numerics.bf16_products = bf16;
    iz_orthogonal(&x, m);
    assert_true(x.cost.flops > 0 && x.work.used == 0);
    int64_t size = x.work.peak;
    char *scratch = aligned_alloc(64, (size_t)size);
    assert_non_null(scratch);
    memset(scratch, 0xff, (size_t)size); /* NaN */
    x = (struct iz_exec){.work = {.base = scratch, .size = size},
                         .numerics.bf16_products = bf16};
    iz_orthogonal(&x, m);
    free(scratch);
}

static void orthogonal(const struct iz_orthogonal *m)
{
    orthogonal_with(m, false);
}

static const int64_t shapes[][2] = {{1, 1},   {1, 7},   {9, 1},  {8, 8},
                                    {24, 24}, {16, 40}, {33, 12}};
enum { SHAPES = sizeof(shapes) / sizeof(shapes[0]), GAP = 5 };

static struct iz_orthogonal matrix_new(int shape, int64_t gap)
{
    struct iz_orthogonal m = {.rows = shapes[shape][0],
                              .cols = shapes[shape][1],
                              .steps = 5,
                              .scale = 0.5};
    m.stride = m.cols + gap;
    m.p = take((size_t)(m.rows * m.stride) * sizeof(float));
    flat_fill(m.p, IZ_F32, m.rows * m.stride, 4);
    return m;
}

/* In real numbers both iterations are one.  Where this processor multiplies
 * operands of 8 bits of precision, also with those, unless the iteration is on
 * X X^T.  The bits do not depend on the place, and gaps stay. */
static void an_update_is_that_in_double(void **state)
{
    for (int i = 0; i < SHAPES * (iz_gemm16_missing() ? 8 : 16); i++) {
        struct iz_orthogonal a = matrix_new(i % SHAPES, i / SHAPES % 2 * GAP);
        size_t bytes = (size_t)(a.rows * a.stride) * sizeof(float);
        bool bf16 = i / SHAPES / 8;
        a.gram = i / SHAPES / 2 % 2;
        a.steps = i / SHAPES / 4 % 2 ? 5 : 2;
        struct iz_orthogonal b = a;
        b.p = memcpy(take(bytes), a.p, bytes);
        double *want = expected(&a);
        float beside = a.p[a.stride - 1];
        orthogonal_with(&a, bf16);
        orthogonal_with(&b, bf16 && !a.gram);
        for (int64_t k = 0; k < a.rows * a.cols; k++)
            assert_true(fabs(a.p[k / a.cols * a.stride + k % a.cols] -
                             want[k]) < (bf16 && !a.gram ? 0.02 : 1e-4));
        assert_memory_equal(a.p, b.p, bytes);
        if (a.stride > a.cols)
            assert_true(a.p[a.stride - 1] == beside);
        free(want);
        free(a.p);
        free(b.p);
    }
}

/* Five iterations on the matrix, or on its square, which is formed twice and
 * applied twice. */
static void flops_are_those_of_the_products(void **state)
{
    for (int i = 0; i < SHAPES * 2; i++) {
        struct iz_orthogonal m = matrix_new(i / 2, 0);
        struct iz_exec x = iz_exec_dry(IZ_CPU, IZ_F32);
        double n = (double)min64(m.rows, m.cols);
        double elems = (double)(m.rows * m.cols);
        m.gram = i % 2;
        iz_orthogonal(&x, &m);
        assert_true(x.cost.flops == (m.gram && m.rows != m.cols
                                         ? 8 * n * elems + 28 * n * n * n
                                         : 20 * n * elems + 10 * n * n * n));
        free(m.p);
    }
}

/* Rows are orthogonal: X X^T is near 1, its diagonal between the squares of
 * what the quintic leaves of singular values, whatever their size. */
static void singular_values_come_near_one(void **state)
{
    for (int e = -6; e <= 12; e += 3) {
        struct iz_orthogonal m = matrix_new(5, 0);
        m.scale = 1;
        m.gram = e % 2;
        for (int64_t i = 0; i < m.rows * m.cols; i++)
            m.p[i] *= (float)pow(10, e);
        orthogonal(&m);
        for (int64_t r = 0; r < m.rows; r++) {
            double norm = 0;
            for (int64_t c = 0; c < m.cols; c++)
                norm += m.p[r * m.cols + c] * (double)m.p[r * m.cols + c];
            assert_true(norm > 0.4 && norm < 1.5);
        }
        free(m.p);
    }
}

static void a_matrix_of_zeros_stays_and_nan_is_seen(void **state)
{
    struct iz_orthogonal m = matrix_new(4, 0);
    memset(m.p, 0, (size_t)(m.rows * m.cols) * sizeof(float));
    orthogonal(&m);
    for (int64_t i = 0; i < m.rows * m.cols; i++)
        assert_true(m.p[i] == 0);
    m.p[3] = NAN;
    orthogonal(&m);
    for (int64_t i = 0; i < m.rows * m.cols; i++)
        assert_true(isnan(m.p[i]));
    free(m.p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(passes_follow_their_formula),
        cmocka_unit_test(passes_do_not_depend_on_pieces_and_levels),
        cmocka_unit_test(an_update_is_that_in_double),
        cmocka_unit_test(flops_are_those_of_the_products),
        cmocka_unit_test(singular_values_come_near_one),
        cmocka_unit_test(a_matrix_of_zeros_stays_and_nan_is_seen),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
