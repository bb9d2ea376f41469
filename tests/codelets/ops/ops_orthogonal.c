/* SPDX-License-Identifier: Apache-2.0 */
/* Newton-Schulz's iteration against the same one in double, and for what it
 * makes of singular values. */
#include "tests/codelets/ops/scene.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/int64.h"
#include "codelets/ops/gemm16.h"
#include "codelets/ops/orthogonal.h"
#include "tests/codelets/ops/reference.h"

/* arg: the matrix, whose place is v[0]. */
static void orthogonal(struct iz_exec *x, const struct iz_view *v,
                       const void *arg)
{
    struct iz_orthogonal m = *(const struct iz_orthogonal *)arg;
    m.p = v[0].p;
    iz_orthogonal(x, &m);
}

/* A row has columns that are not the matrix's. */
static struct scene matrix_new(const struct iz_orthogonal *m)
{
    return (struct scene){.n = 1,
                          .t = {tensor_new(IZ_F32, m->rows, m->stride, 2)}};
}

static void matrix_run(struct scene *s, const struct iz_orthogonal *m)
{
    tensor_store(&s->t[0]);
    scene_run(s, &(struct pass){orthogonal, 1, 1}, m);
    tensor_load(&s->t[0]);
}

/* x [r,c] in place, always with X X^T. */
static void iterate(double *x, int64_t r, int64_t c, int steps)
{
    double *y = calloc((size_t)(r * c), sizeof(*y));
    double *g = calloc((size_t)(r * r), sizeof(*g));
    double *h = calloc((size_t)(r * r), sizeof(*h));
    double norm = sqrt(fixture_dot(x, x, r * c));
    for (int64_t i = 0; i < r * c; i++)
        x[i] /= fmax(norm, 1e-7);
    for (int s = 0; s < steps; s++) {
        ref_matmul(&(struct ref_matmul){
            .y = g, .a = x, .w = x, .m = r, .in = c, .out = r, .out_in = true});
        ref_matmul(&(struct ref_matmul){
            .y = h, .a = g, .w = g, .m = r, .in = r, .out = r});
        for (int64_t i = 0; i < r * r; i++)
            h[i] = 2.0315 * h[i] - 4.7750 * g[i];
        ref_matmul(&(struct ref_matmul){
            .y = y, .a = h, .w = x, .m = r, .in = r, .out = c});
        for (int64_t i = 0; i < r * c; i++)
            x[i] = 3.4445 * x[i] + y[i];
    }
    free(y);
    free(g);
    free(h);
}

/* In real numbers both iterations are one.  What is beside the matrix stays. */
static void check_matrix(const struct iz_orthogonal *m, double within)
{
    struct scene s = matrix_new(m);
    struct tensor *t = &s.t[0];
    int64_t n = m->rows * m->cols;
    double *want = tensor_want(t), *x = calloc((size_t)n, sizeof(*x));
    memcpy(want, t->d, (size_t)iz_view_bytes(t->v) * 2);
    for (int64_t i = 0; i < n; i++)
        x[i] = t->d[i / m->cols * m->stride + i % m->cols];
    iterate(x, m->rows, m->cols, m->steps);
    for (int64_t i = 0; i < n; i++)
        want[i / m->cols * m->stride + i % m->cols] = x[i] * m->scale;
    matrix_run(&s, m);
    for (int64_t i = 0; i < iz_view_len(t->v); i++)
        fixture_element(
            "update", t->v, i,
            (struct near){want[i], i % m->stride < m->cols ? within : 1e-30});
    /* Five iterations on X X^T form it twice and apply it twice. */
    double side = (double)min64(m->rows, m->cols), cube = side * side * side;
    if (!m->gram || m->rows == m->cols)
        assert_true(s.flops == m->steps * (4 * side * (double)n + 2 * cube));
    else if (m->steps == 5)
        assert_true(s.flops == 8 * side * (double)n + 28 * cube);
    free(x);
    scene_free(&s);
}

/* Where this processor multiplies operands of 8 bits of precision, also with
 * those, as a GPU does, unless the iteration is on X X^T: a GPU has 11 then. */
static void an_update_is_that_in_double(void **state)
{
    static const int64_t shape[][2] = {{1, 1},   {1, 7},   {9, 1},  {8, 8},
                                       {24, 24}, {16, 40}, {33, 12}};
    bool gpu = backend.x.backend == IZ_CUDA && !backend.exact;
    bool both = backend.x.backend == IZ_CPU && !iz_gemm16_missing();
    for (int i = 0; i < COUNT(shape) * (both ? 16 : 8); i++) {
        int c = i / COUNT(shape);
        struct iz_orthogonal m = {.rows = shape[i % COUNT(shape)][0],
                                  .cols = shape[i % COUNT(shape)][1],
                                  .steps = c / 4 % 2 ? 5 : 2,
                                  .gram = c / 2 % 2,
                                  .scale = 0.5};
        m.stride = m.cols + c % 2 * 5;
        backend.x.numerics.bf16_products = c / 8;
        check_matrix(&m, (gpu || c / 8) && !m.gram ? 0.02 : gpu ? 0.003 : 1e-4);
    }
    backend.x.numerics.bf16_products = false;
}

/* The diagonal of X X^T is between the squares of what the quintic leaves of
 * singular values, whatever their size.  In a matrix of rank 2 nothing grows,
 * however many iterations. */
static void singular_values_come_near_one(void **state)
{
    static const int steps[] = {7, 12, 99};
    for (int i = 0; i < 7 + 2 * COUNT(steps); i++) {
        bool low = i >= 7;
        struct iz_orthogonal m = {.rows = 16,
                                  .cols = 40,
                                  .stride = 40,
                                  .steps = low ? steps[(i - 7) / 2] : 5,
                                  .gram = i % 2,
                                  .scale = 1};
        struct scene s = matrix_new(&m);
        double *d = s.t[0].d;
        for (int64_t k = 0; k < m.rows * m.cols; k++) {
            int64_t r = k / m.cols, c = k % m.cols;
            if (!low)
                d[k] *= pow(10, 3 * i - 6);
            else if (r >= 2)
                d[k] = d[c] + (double)r * d[m.cols + c];
        }
        matrix_run(&s, &m);
        for (int64_t r = 0; r < m.rows; r++, d += m.cols) {
            double norm = fixture_dot(d, d, m.cols);
            assert_true((low || norm > 0.4) && norm < 1.5);
        }
        scene_free(&s);
    }
}

static void a_matrix_of_zeros_stays_and_nan_is_seen(void **state)
{
    struct iz_orthogonal m = {
        .rows = 24, .cols = 24, .stride = 24, .steps = 5, .scale = 1};
    struct scene s = matrix_new(&m);
    double *d = memset(s.t[0].d, 0, 24 * 24 * sizeof(*d));
    matrix_run(&s, &m);
    for (int i = 0; i < 24 * 24; i++)
        assert_true(d[i] == 0);
    d[3] = NAN;
    matrix_run(&s, &m);
    for (int i = 0; i < 24 * 24; i++)
        assert_true(isnan(d[i]));
    scene_free(&s);
}

int ops_orthogonal(void)
{
    const struct CMUnitTest tests[] = {
        SEEDED(an_update_is_that_in_double),
        SEEDED(singular_values_come_near_one),
        SEEDED(a_matrix_of_zeros_stays_and_nan_is_seen),
    };
    if (!backend.exact && !backend_multiplies())
        return 0;
    return cmocka_run_group_tests_name("orthogonal", tests, backend_renew,
                                       NULL);
}
