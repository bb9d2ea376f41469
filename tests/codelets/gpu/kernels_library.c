/* SPDX-License-Identifier: Apache-2.0 */
/* How products of the GPU ask cuBLASLt: for which type, how often, what they do
 * and say when it cannot; and our kernel for sums of columns.  The real calls,
 * answered by the stand-in.  Shows that operands, types, layouts and workspace
 * are right; says nothing of the library itself. */
#include <stdlib.h>
#include <unistd.h>

#include <cublasLt.h>

#include "codelets/kernels/cuda_lib.h"
#include "codelets/ops/gpu_ops.h"
#include "tests/codelets/gpu/emulated.h"
#include "tests/codelets/ops/product.h"
#include "tests/fake/cublaslt.h"

/* Products that are made twice, as every scene is run. */
enum { SIZES = COUNT(product_sizes) - 1, RUNS = 2 * 2 * 2 * SIZES };

static int renew(void **state)
{
    fake_cublaslt = (struct fake_cublaslt){0};
    fixture_seed(state);
    return backend_renew(state);
}

static void for_each(void (*f)(struct product *p))
{
    product_each(f, product_sizes, SIZES, false);
}

static void forward_to_fp32(struct product *p)
{
    tensor_free(&p->s.t[Y]);
    p->s.t[Y] = tensor_new(IZ_F32, p->m, p->out, 1);
    product_check_forward(p, false, false);
    product_check_forward(p, false, true);
}

static void forward_from_16_bits_to_fp32_agrees(void **state)
{
    for_each(forward_to_fp32);
}

/* Gradients of the weight: which of them there are, and how many products. */
static const struct gradients {
    unsigned absent, unwanted;
    int products;
} gradients[] = {{.products = RUNS},
                 {.absent = BIT(DW)},
                 {.unwanted = BIT(DW) | BIT(DB)},
                 {.unwanted = BIT(DB), .products = RUNS}};

static const struct gradients *wanted; /* under test */

static void check_gradients(struct product *p)
{
    p->absent = wanted->absent;
    p->s.unwanted = wanted->unwanted;
    product_check(p, GRADIENT_W);
}

static void only_wanted_gradients_are_products(void **state)
{
    for (int i = 0; i < COUNT(gradients); i++) {
        wanted = &gradients[i];
        renew(state);
        for_each(check_gradients);
        assert_int_equal(fake_cublaslt.products, wanted->products);
    }
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
        for_each(bias_and_product);
        for_each(some_rows_of_that);
        assert_int_equal(fake_cublaslt.products, 6 * RUNS);
    }
}

/* Also where they begin at an address that no wide load can use. */
static void check_sum(struct product *p)
{
    p->absent = BIT(DW);
    p->s.late = BIT(DY);
    for (p->s.late_by = 0; p->s.late_by < 2; p->s.late_by++)
        product_check(p, GRADIENT_W);
}

static void sums_of_columns_agree(void **state)
{
    static const int64_t size[][2] = {{2, 1},     {33, 3},     {300, 8},
                                      {300, 33},  {64, 384},   {1000, 1},
                                      {97, 1000}, {2000, 264}, {40, 4104}};
    for (int i = 0; i < 3 * COUNT(size); i++) {
        int64_t s[3] = {size[i / 3][0], 1, size[i / 3][1]};
        enum iz_dtype t = fixture_types[i % 3];
        struct product p = product_new(t, t, s, false);
        tensor_free(&p.s.t[DB]);
        p.s.t[DB] = tensor_new(i / 3 % 2 ? IZ_F32 : t, 1, s[2], 1);
        check_sum(&p);
        product_free(&p);
    }
}

/* Two layers of one shape share an algorithm, not their biases. */
static void every_call_has_its_own_bias(void **state)
{
    static const int64_t s[3] = {5, 8, 16};
    struct product p[2];
    for (int i = 0; i < 2; i++)
        p[i] = product_new(IZ_BF16, IZ_BF16, s, true);
    for (int i = 0; i < 4; i++)
        product_check_forward(&p[i % 2], true, true);
    assert_int_equal(fake_cublaslt.searches, 1);
    product_free(&p[0]);
    product_free(&p[1]);
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

struct varying {
    int64_t n; /* rows of this call */
    bool gradient;
};

static void varying(struct iz_exec *x, const struct iz_view *v, const void *arg)
{
    const struct varying *k = arg;
    int64_t mark = iz_exec_mark(x);
    struct iz_linear l = {.w = v[W], .dw = v[DW], .out_in = true};
    struct iz_view a = iz_view_rows(v[A], 0, k->n);
    struct iz_product p =
        k->gradient
            ? iz_product_dw(iz_view_rows(v[DY], 0, k->n), a, &l)
            : iz_product_fwd(iz_view_rows(v[Y], 0, k->n), IZ_NONE, a, &l);
    struct iz_view scratch =
        iz_exec_work(x, IZ_U8, 1, iz_product_pad(&p, NULL).bytes);
    x->rows_vary = true;
    if (!x->dry)
        iz_product_cuda(x, &p, scratch);
    x->rows_vary = false;
    iz_exec_release(x, mark);
}

/* From 17 to 32 rows they have one search, unless the library says that its
 * algorithm is for 32 alone; then 15 have their own in each of two calls. */
static void numbers_of_rows_share_a_search(void **state)
{
    for (int i = 0; i < 4; i++) {
        bool gradient = i % 2, fixed = i / 2;
        fake_cublaslt = (struct fake_cublaslt){.fixed = fixed};
        backend_renew(state);
        for (int64_t n = 17; n <= 32; n++) {
            struct product p = product_new(IZ_BF16, IZ_BF16,
                                           (const int64_t[]){n, 8, 16}, true);
            struct varying k = {n, gradient};
            scene_run(&p.s,
                      &(struct pass){varying, BIT(A) | BIT(gradient ? DY : W),
                                     BIT(gradient ? DW : Y)},
                      &k);
            product_compare(&p, BIT(gradient ? DW : Y));
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
    if (fake_cublaslt.none)
        product_check_forward(&p, false, false);
    else
        product_check(&p, GRADIENT_W);
}

static void ask_for_513_kinds(const void *arg)
{
    for (int64_t i = 0; i < 513; i++) {
        struct product p = product_new(
            IZ_F32, IZ_F32, (int64_t[]){1 + i % 23, 1 + i / 23, 1}, 0);
        product_check_forward(&p, false, false);
        if (fake_cublaslt.searches != i + 1)
            _exit(1);
        product_free(&p);
    }
}

/* A library that writes its result while it still reads that operand. */
static void ask_over_an_operand(const void *arg)
{
    struct product p = product_new(IZ_BF16, IZ_BF16, (int64_t[]){8, 8, 8}, 0);
    scene_in_place(&p.s,
                   &(struct pass){product_forward, BIT(A) | BIT(W), BIT(Y)}, &p,
                   1, (const int[][2]){{Y, A}});
}

static void ends_the_job_with_call_and_shape(void **state)
{
    scene_dies(ask_over_an_operand, NULL, "cublasLtMatmul for [8,8] [8,8]");
    scene_dies(ask, &(struct fake_cublaslt){.none = true},
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
        cmocka_unit_test_setup(forward_from_16_bits_to_fp32_agrees, renew),
        cmocka_unit_test_setup(only_wanted_gradients_are_products, renew),
        cmocka_unit_test_setup(bias_without_the_library, renew),
        cmocka_unit_test_setup(sums_of_columns_agree, renew),
        cmocka_unit_test_setup(every_call_has_its_own_bias, renew),
        cmocka_unit_test_setup(algorithms_are_kept, renew),
        cmocka_unit_test_setup(numbers_of_rows_share_a_search, renew),
        cmocka_unit_test_setup(tf32_is_for_fp32_alone, renew),
        cmocka_unit_test_setup(ends_the_job_with_call_and_shape, renew),
    };
    return cmocka_run_group_tests_name("library", tests, NULL, NULL);
}
