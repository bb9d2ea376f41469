/* SPDX-License-Identifier: Apache-2.0 */
/* The matrix products of the GPU against the reference: the real calls of
 * cuBLASLt, answered by the stand-in, and the real kernel for sums of columns,
 * run by the emulation.  Shows that operands, types, layouts and workspace are
 * right; says nothing of the library itself. */
#include "tests/codelets/gpu/product.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <cublasLt.h>

#include "tests/fake/cublaslt.h"

static const int64_t sizes[][3] = {{1, 1, 1},   {3, 7, 1},   {1, 17, 3},
                                   {7, 3, 17},  {17, 1, 33}, {33, 17, 7},
                                   {4, 16, 16}, {8, 64, 24}};
enum { SIZES = sizeof sizes / sizeof sizes[0] };

/* Every type, size and layout; `dw` is fp32 where gradients are added up. */
static void for_each(void (*f)(struct product *p), bool wide_dw)
{
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (int i = 0; i < 2 * SIZES; i++) {
            enum iz_dtype type = fixture_types[t];
            struct product p =
                product_new(type, wide_dw ? IZ_F32 : type, sizes[i / 2], i % 2);
            f(&p);
            product_free(&p);
        }
}

static void forward_agrees(void **state)
{
    (void)state;
    for_each(product_check_forwards, false);
}

/* r may be y. */
static void forward_in_place(struct product *p)
{
    struct tensor y = p->y;

    p->ref.r = p->r.d;
    p->ref.b = p->b.d;
    ref_matmul(&p->ref);
    p->y = p->r;
    product_run(product_forward, p);
    fixture_close("y = y + a w + b", &p->r, p->want, PRODUCT_TOL);
    p->y = y;
}

static void forward_in_place_agrees(void **state)
{
    (void)state;
    for_each(forward_in_place, false);
}

static void forward_to_fp32(struct product *p)
{
    struct tensor y = p->y;

    p->y = tensor_new(IZ_F32, y.v.rows, y.v.cols, 1);
    product_check_forward(p, false, false);
    tensor_free(&p->y);
    p->y = y;
}

static void forward_from_16_bits_to_fp32_agrees(void **state)
{
    (void)state;
    for_each(forward_to_fp32, false);
}

static void gradient_of_a_agrees(void **state)
{
    (void)state;
    for_each(product_check_da, false);
}

static void dw_written(struct product *p)
{
    product_check_dw(p, false);
}

static void dw_fused(struct product *p)
{
    p->fused_db = true;
    product_check_dw(p, false);
}

static void dw_added(struct product *p)
{
    product_check_dw(p, true);
}

static void gradient_of_w_agrees(void **state)
{
    int sums = fake_cublaslt.sums;

    (void)state;
    for_each(dw_written, false);
    assert_int_equal(fake_cublaslt.sums, sums);
    for_each(dw_fused, false);
    assert_int_equal(fake_cublaslt.sums - sums, 3 * 2 * SIZES);
}

static void gradient_of_w_is_added_in_fp32(void **state)
{
    (void)state;
    for_each(dw_added, true);
    for_each(dw_written, true);
}

/* The library refuses or fails: db by our kernel, and it is asked once per
 * shape. */
static void gradient_of_b_without_the_library(void **state)
{
    static const int status[] = {0, CUBLAS_STATUS_NOT_SUPPORTED,
                                 CUBLAS_STATUS_INVALID_VALUE,
                                 CUBLAS_STATUS_INTERNAL_ERROR};

    for (size_t i = 0; i < sizeof status / sizeof status[0]; i++) {
        product_renew(state);
        fake_cublaslt.no_sums = status[i] == 0;
        fake_cublaslt.sums_fail = status[i];
        for_each(dw_fused, false);
        assert_int_equal(fake_cublaslt.sums, 0);
        assert_int_equal(fake_cublaslt.products, 3 * 2 * SIZES);
    }
}

/* By our kernel, then the product; with r, what they are together is rounded to
 * the type on the way. */
static void bias_and_product(struct product *p)
{
    double half = p->y.v.dtype == IZ_F32    ? 0x1p-24
                  : p->y.v.dtype == IZ_BF16 ? 0x1p-8
                                            : 0x1p-11;
    struct tensor y = p->y;

    product_check_forward(p, false, true);
    p->ref.r = p->r.d;
    product_run(product_forward, p);
    ref_matmul(&p->ref);
    fixture_close("y = r + b, + a w", &p->y, p->want, PRODUCT_TOL + 2 * half);
    p->y = p->r;
    product_run(product_forward, p);
    fixture_close("y = y + b, + a w", &p->r, p->want, PRODUCT_TOL + 2 * half);
    p->y = y;
}

static void bias_without_the_library(void **state)
{
    (void)state;
    fake_cublaslt.no_bias = true;
    for_each(bias_and_product, false);
    assert_int_equal(fake_cublaslt.products, 3 * 3 * 2 * SIZES);
}

static void only_db(struct product *p)
{
    double *db = p->want;

    product_want_db(p, db);
    p->l.dw = IZ_NONE;
    product_run(product_backward_w, p);
    fixture_close("db alone", &p->db, db, 1e-6);
}

static void only_dw(struct product *p)
{
    product_want_dw(p, p->want, NULL);
    p->l.db = IZ_NONE;
    product_run(product_backward_w, p);
    fixture_close("dw alone", &p->dw, p->want, PRODUCT_TOL);
}

/* Without memory for a gradient; the work arena is not touched either. */
static void no_gradient(struct product *p)
{
    struct iz_exec x = {.backend = IZ_CUDA, .cuda = &product_cuda};
    int products = fake_cublaslt.products;

    p->l.dw.p = p->l.db.p = NULL;
    iz_matmul_dw(&x, p->dy.v, p->a.v, &p->l);
    assert_true(x.flops == 0 && x.work.peak == 0);
    assert_int_equal(fake_cublaslt.products, products);
}

static void unwanted_gradients_are_not_computed(void **state)
{
    (void)state;
    for_each(only_db, false);
    assert_int_equal(fake_cublaslt.products, 0);
    for_each(only_dw, false);
    assert_int_equal(fake_cublaslt.sums, 0);
    for_each(no_gradient, false);
}

/* dy at an address that no wide load can use. */
static void sum_of_odd_address(struct product *p)
{
    struct tensor dy = p->dy;
    char *mem = fixture_take(iz_view_bytes(dy.v) + 4);

    p->dy.v.p = mem + 4;
    memcpy(p->dy.v.p, dy.v.p, (size_t)iz_view_bytes(dy.v));
    only_db(p);
    free(mem);
    p->dy = dy;
}

/* Sums of columns over one and over two stages, of each width of a thread. */
static void sums_of_columns_agree(void **state)
{
    static const int64_t size[][2] = {{1, 1},     {33, 3},     {300, 8},
                                      {300, 33},  {64, 384},   {1000, 1},
                                      {97, 1000}, {2000, 264}, {40, 4104}};

    (void)state;
    fixture_seed();
    for (int i = 0; i < 6 * (int)(sizeof size / sizeof size[0]); i++) {
        int64_t s[3] = {size[i / 6][0], 1, size[i / 6][1]};
        struct product p =
            product_new(fixture_types[i % 3], fixture_types[i % 3], s, false);
        tensor_free(&p.db);
        p.db =
            tensor_new(i / 3 % 2 ? IZ_F32 : fixture_types[i % 3], 1, s[2], 1);
        p.l.db = p.db.v;
        only_db(&p);
        sum_of_odd_address(&p);
        product_free(&p);
    }
}

static void shows_nan_and_overflow(void **state)
{
    static const int64_t s[3] = {3, 5, 2};
    struct product p;

    (void)state;
    fixture_seed();
    p = product_new(IZ_F16, IZ_F16, s, false);
    p.a.d[5] = NAN; /* row 1 */
    p.a.d[10] = 60000;
    p.w.d[0] = 60000;
    tensor_store(&p.a);
    tensor_store(&p.w);
    product_run(product_forward, &p);
    tensor_load(&p.y);
    assert_true(isnan(p.y.d[2]) && isnan(p.y.d[3]));
    assert_true(isinf(p.y.d[4]));
    product_free(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(forward_agrees, product_renew),
        cmocka_unit_test_setup(forward_in_place_agrees, product_renew),
        cmocka_unit_test_setup(forward_from_16_bits_to_fp32_agrees,
                               product_renew),
        cmocka_unit_test_setup(gradient_of_a_agrees, product_renew),
        cmocka_unit_test_setup(gradient_of_w_agrees, product_renew),
        cmocka_unit_test_setup(gradient_of_w_is_added_in_fp32, product_renew),
        cmocka_unit_test_setup(gradient_of_b_without_the_library,
                               product_renew),
        cmocka_unit_test_setup(bias_without_the_library, product_renew),
        cmocka_unit_test_setup(unwanted_gradients_are_not_computed,
                               product_renew),
        cmocka_unit_test_setup(sums_of_columns_agree, product_renew),
        cmocka_unit_test_setup(shows_nan_and_overflow, product_renew),
    };

    return product_main(tests);
}
