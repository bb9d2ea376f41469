/* SPDX-License-Identifier: Apache-2.0 */
/* How products of the GPU ask cuBLASLt: for which type, how often, what they do
 * and say when it cannot; and our kernel for sums of columns.  The real calls,
 * answered by the stand-in.  Shows that operands, types, layouts and workspace
 * are right; says nothing of the library itself. */
#include <cublasLt.h>

#include "codelets/kernels/cuda_lib.h"
#include "codelets/ops/gpu_ops.h"
#include "tests/codelets/gpu/emulated.h"
#include "tests/codelets/ops/product.h"
#include "tests/fake/cublaslt.h"

enum { SIZES = COUNT(product_sizes) - 1 };

static int renew(void **state)
{
    fake_cublaslt = (struct fake_cublaslt){0};
    fixture_seed(state);
    return backend_renew(state);
}

/* By our kernel, then the product; with r, what they are together is rounded to
 * the type on the way. */
static void bias_and_product(struct product *p)
{
    product_check_forward(p, false, true);
    p->slack = 2 * fixture_rounding(p->s.t[Y].v.dtype, 1);
    product_check_forward(p, true, true);
    product_check_in_place(p);
}

static void some_rows_of_that(struct product *p)
{
    p->rows_vary = true;
    bias_and_product(p);
}

static void bias_without_the_library(void **state)
{
    static const struct fake_cublaslt library[] = {
        {.no_bias = true},
        {.bias_fails = CUBLAS_STATUS_NOT_SUPPORTED},
        {.bias_fails = CUBLAS_STATUS_INTERNAL_ERROR}};
    for (int i = 0; i < COUNT(library); i++) {
        renew(state);
        fake_cublaslt = library[i];
        product_each(bias_and_product, product_sizes, SIZES, false);
        product_each(some_rows_of_that, product_sizes, SIZES, false);
    }
}

/* Also where they begin at an address that no wide load can use. */
static void sums_of_columns_agree(void **state)
{
    static const int64_t size[][2] = {{2, 1},     {33, 3},     {300, 8},
                                      {300, 33},  {64, 384},   {1000, 1},
                                      {97, 1000}, {2000, 264}, {40, 4104}};
    for (int i = 0; i < 2 * 3 * COUNT(size); i++) {
        const int64_t *n = size[i / 6], s[3] = {n[0], 1, n[1]};
        enum iz_dtype t = fixture_types[i / 2 % 3];
        struct product p = product_new(t, t, s, false);
        tensor_free(&p.s.t[DB]);
        p.s.t[DB] = tensor_new(i / 6 % 2 ? IZ_F32 : t, 1, s[2], 1);
        p.absent = BIT(DW);
        p.s.late = BIT(DY);
        p.s.late_by = i % 2;
        product_check(&p, GRADIENT_W);
        product_free(&p);
    }
}

/* A second step finds every algorithm; another alignment is another search, and
 * an odd one none: then there is a copy. */
static void algorithms_are_kept(void **state)
{
    static const int64_t s[3] = {5, 8, 16};
    struct product p = product_new(IZ_BF16, IZ_BF16, s, true);
    product_check_all(&p);
    int first = fake_cublaslt.searches;
    assert_int_equal(first, 4);
    product_check_all(&p);
    assert_int_equal(fake_cublaslt.searches, first);
    p.s.late = BIT(A);
    for (p.s.late_by = 3; p.s.late_by <= 8; p.s.late_by += 5) {
        product_check_forward(&p, true, true);
        assert_int_equal(fake_cublaslt.searches, first + p.s.late_by / 8);
    }
    product_free(&p);
}

static void varying_gradient(struct iz_exec *x, const struct iz_view *v,
                             const void *arg)
{
    x->rows_vary = true;
    product_gradient_w(x, v, arg);
    x->rows_vary = false;
}

/* From 17 to 32 rows they have one search, unless the library says that its
 * algorithm is for 32 alone; then 15 have their own in each of two calls. */
static void numbers_of_rows_share_a_search(void **state)
{
    static const struct pass pass[] = {
        {product_forward, BIT(A) | BIT(W), BIT(Y)},
        {varying_gradient, BIT(A) | BIT(DY), BIT(DW)}};
    for (int i = 0; i < 4; i++) {
        bool fixed = i / 2;
        fake_cublaslt = (struct fake_cublaslt){.fixed = fixed};
        backend_renew(state);
        for (int64_t n = 17; n <= 32; n++) {
            struct product p = product_new(IZ_BF16, IZ_BF16,
                                           (const int64_t[]){n, 8, 16}, true);
            p.rows_vary = true;
            p.absent = BIT(DB);
            scene_run(&p.s, &pass[i % 2], &p);
            product_compare(&p, pass[i % 2].writes);
            product_free(&p);
        }
        assert_int_equal(fake_cublaslt.searches, fixed ? 1 + 2 * 15 : 1);
    }
}

static void tf32_is_for_fp32_alone(void **state)
{
    static const int64_t s[3] = {5, 8, 16};
    for (int t = 0; t < 3; t++)
        for (int tf32 = 0; tf32 < 2; tf32++) {
            struct product p =
                product_new(fixture_types[t], fixture_types[t], s, false);
            p.tf32 = tf32;
            product_check_forward(&p, false, false);
            assert_int_equal(fake_cublaslt.compute,
                             tf32 && t == 0 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                            : CUBLAS_COMPUTE_32F);
            product_free(&p);
        }
}

/* ---- what ends the job -------------------------------------------------- */

/* What the library answers to a forward, and to a gradient. */
static void ask(const void *arg)
{
    struct product p = product_new(IZ_BF16, IZ_BF16, (int64_t[]){3, 8, 16}, 0);
    fake_cublaslt = *(const struct fake_cublaslt *)arg;
    if (fake_cublaslt.fails == CUBLAS_STATUS_NOT_SUPPORTED)
        product_check_forward(&p, false, false);
    else
        product_check(&p, GRADIENT_W);
}

static void ask_for_513_kinds(const void *arg)
{
    struct tensor y = tensor_new(IZ_F32, 1, 513, 1), w = tensor_copy(&y);
    struct tensor a = tensor_new(IZ_F32, 1, 1, 1);
    struct iz_view scratch = bytes_new(IZ_PRODUCT_SCRATCH).v;
    for (; y.v.cols > 0; y.v.cols--, w.v.cols--) {
        struct iz_product p =
            iz_product_fwd(y.v, IZ_NONE, a.v, &(struct iz_linear){.w = w.v});
        iz_product_cuda(&backend.x, &p, scratch);
    }
}

static void ends_the_job_with_call_and_shape(void **state)
{
    scene_dies(ask,
               &(struct fake_cublaslt){.fails = CUBLAS_STATUS_NOT_SUPPORTED},
               "cublasLtMatmulAlgoGetHeuristic for [3,8] [8,16], bf16 to bf16: "
               "not supported");
    scene_dies(ask,
               &(struct fake_cublaslt){.fails = CUBLAS_STATUS_INTERNAL_ERROR},
               "cublasLtMatmulAlgoGetHeuristic for [8,3] [3,16], bf16 to bf16: "
               "an error");
    scene_dies(ask_for_513_kinds, NULL,
               "more than 512 kinds of matrix products");
}

int kernels_library(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(bias_without_the_library, renew),
        cmocka_unit_test_setup(sums_of_columns_agree, renew),
        cmocka_unit_test_setup(algorithms_are_kept, renew),
        cmocka_unit_test_setup(numbers_of_rows_share_a_search, renew),
        cmocka_unit_test_setup(tf32_is_for_fp32_alone, renew),
        cmocka_unit_test_setup(ends_the_job_with_call_and_shape, renew),
    };
    return cmocka_run_group_tests_name("library", tests, NULL, NULL);
}
