/* SPDX-License-Identifier: Apache-2.0 */
/* How the matrix products of the GPU ask cuBLASLt: for which type of product,
 * how often, and what they say when it cannot.  The real calls, answered by the
 * stand-in. */
#include "tests/codelets/gpu/product.h"

#include <stdlib.h>
#include <unistd.h>

#include <cublasLt.h>

#include "tests/codelets/gpu/dies.h"
#include "tests/fake/cublaslt.h"

/* Two layers of one shape share an algorithm, not their biases. */
static void every_call_has_its_own_bias(void **state)
{
    static const int64_t s[3] = {5, 8, 16};
    struct product p[2];

    (void)state;
    fixture_seed();
    for (int i = 0; i < 2; i++) {
        p[i] = product_new(IZ_BF16, IZ_BF16, s, true);
        p[i].fused_db = true;
    }
    for (int i = 0; i < 4; i++) {
        product_check_forward(&p[i % 2], true, true);
        product_check_dw(&p[i % 2], false);
    }
    assert_int_equal(fake_cublaslt.searches, 2);
    product_free(&p[0]);
    product_free(&p[1]);
}

/* A second step finds every algorithm; another alignment is another search. */
static void algorithms_are_kept(void **state)
{
    static const int64_t s[3] = {5, 8, 16};
    struct product p = product_new(IZ_BF16, IZ_BF16, s, true);
    struct tensor a = p.a;
    char *mem;
    int first;

    (void)state;
    product_check_forwards(&p);
    product_check_da(&p);
    product_check_dw(&p, false);
    first = fake_cublaslt.searches;
    assert_int_equal(first, 4);
    product_check_forwards(&p);
    product_check_da(&p);
    product_check_dw(&p, false);
    assert_int_equal(fake_cublaslt.searches, first);
    mem = fixture_take(iz_view_bytes(a.v) + 6);
    p.a.v.p = mem + 6;
    tensor_store(&p.a);
    product_check_forward(&p, true, true);
    assert_int_equal(fake_cublaslt.searches, first + 1);
    free(mem);
    p.a = a;
    product_free(&p);
}

static void tf32_is_for_fp32_alone(void **state)
{
    static const int64_t s[3] = {5, 8, 16};

    (void)state;
    fixture_seed();
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

static void ask_for_the_impossible(void)
{
    static const int64_t s[3] = {3, 5, 2};
    struct product p = product_new(IZ_BF16, IZ_BF16, s, false);

    fake_cublaslt.none = true;
    product_run(product_forward, &p);
}

static void ask_what_fails(void)
{
    static const int64_t s[3] = {3, 5, 2};
    struct product p = product_new(IZ_BF16, IZ_BF16, s, false);

    fake_cublaslt.fails = CUBLAS_STATUS_INTERNAL_ERROR;
    product_run(product_backward_w, &p);
}

static void ask_for_513_kinds(void)
{
    for (int64_t i = 1; i <= 513; i++) {
        int64_t s[3] = {i, 1, 1};
        struct product p = product_new(IZ_F32, IZ_F32, s, false);

        product_run(product_forward, &p);
        if (fake_cublaslt.searches != i)
            _exit(1);
        product_free(&p);
    }
}

/* A library that writes its result while it still reads that operand. */
static void ask_over_an_operand(void)
{
    static const int64_t s[3] = {4, 4, 4};
    struct product p = product_new(IZ_BF16, IZ_BF16, s, false);

    p.y = p.a;
    product_run(product_forward, &p);
}

static void ends_the_job_with_call_and_shape(void **state)
{
    (void)state;
    dies(ask_over_an_operand, "cublasLtMatmul for [4,4] [4,4]");
    dies(ask_for_the_impossible,
         "cublasLtMatmulAlgoGetHeuristic for [3,5] [5,2], bf16 to bf16: "
         "not supported");
    dies(ask_what_fails, "cublasLtMatmulAlgoGetHeuristic for [5,3] [3,2], bf16 "
                         "to bf16: an error");
    dies(ask_for_513_kinds, "more than 512 kinds of matrix products");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(every_call_has_its_own_bias, product_renew),
        cmocka_unit_test_setup(algorithms_are_kept, product_renew),
        cmocka_unit_test_setup(tf32_is_for_fp32_alone, product_renew),
        cmocka_unit_test_setup(ends_the_job_with_call_and_shape, product_renew),
    };

    return product_main(tests);
}
