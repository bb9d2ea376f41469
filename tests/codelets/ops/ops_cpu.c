/* SPDX-License-Identifier: Apache-2.0 */
/* What the CPU alone has: exponentials, products of bf16, threads. */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>

#include "codelets/flat/simd.h"
#include "codelets/ops/blas.h"
#include "codelets/ops/gemm16.h"
#include "codelets/ops/row_math.h"
#include "tests/codelets/ops/product.h"
#include "tests/codelets/ops/scene.h"

/* ---- exponentials ------------------------------------------------------- */

static double worst_of(float (*f)(float), double (*ref)(double), double from,
                       double to, double step)
{
    double worst = 0;
    for (double x = from; x < to; x += step) {
        double want = ref((double)(float)x);
        double ulp = ldexp(1, ilogb(want) - 23);
        worst = fmax(worst, fabs((double)f((float)x) - want) / ulp);
    }
    print_message("worst error %.2f ulp\n", worst);
    return worst;
}

static void exp_is_within_two_ulp(void **state)
{
    assert_true(worst_of(iz_math_expf, exp, -86.5, 88.72, 1.7e-4) < 2);
    assert_true(worst_of(iz_math_exp2f, exp2, -125, 127, 2.3e-4) < 2);
}

static void exp_keeps_special_values(void **state)
{
    assert_true(iz_math_expf(0) == 1);
    assert_true(iz_math_expf(1e-40f) == 1);
    assert_true(iz_math_expf(-87) == 0 && iz_math_expf(-3e38f) == 0);
    assert_true(iz_math_expf(-INFINITY) == 0);
    assert_true(isinf(iz_math_expf(88.8f)) && isinf(iz_math_expf(3e38f)));
    assert_true(isinf(iz_math_expf(INFINITY)));
    assert_true(isnan(iz_math_expf(NAN)));
    assert_true(iz_math_exp2f(0) == 1 && iz_math_exp2f(1e-40f) == 1);
    assert_true(iz_math_exp2f(-126) == 0 && iz_math_exp2f(-3e38f) == 0);
    assert_true(iz_math_exp2f(-INFINITY) == 0);
    assert_true(isnan(iz_math_exp2f(NAN)));
}

/* ---- products of bf16 --------------------------------------------------- */

/* Rounds values of fp32 to what bf16 holds. */
static void round_16(struct tensor *t)
{
    int64_t n = iz_view_len(t->v);
    uint16_t *half = calloc((size_t)n, sizeof(*half));
    iz_cast(half, IZ_BF16, t->v.p, IZ_F32, n);
    iz_cast(t->v.p, IZ_F32, half, IZ_BF16, n);
    tensor_load(t);
    free(half);
}

/* Operands that bf16 holds: only the sums differ from the reference. */
static void bf16_products_agree(void **state)
{
    static const int64_t size[][3] = {{1, 1, 1},    {3, 7, 1},    {1, 17, 3},
                                      {17, 1, 33},  {33, 17, 7},  {4, 16, 16},
                                      {65, 48, 80}, {7, 130, 31}, {130, 3, 18}};
    if (iz_gemm16_missing())
        skip();
    for (int i = 0; i < COUNT(size); i++)
        for (int how = 0; how < 4; how++) {
            struct product p = product_new(IZ_BF16, how & 1 ? IZ_F32 : IZ_BF16,
                                           size[i], how & 2);
            p.bf16 = true;
            round_16(&p.s.t[A]);
            round_16(&p.s.t[DY]);
            product_check_all(&p);
            p.add = how & 1;
            product_check(&p, GRADIENT_W);
            product_free(&p);
        }
}

/* Two products of the same numbers. */
static void pair_new(struct product p[2], enum iz_dtype t, const int64_t s[3],
                     bool out_in)
{
    for (int i = 0; i < 2; i++) {
        fixture_seed(NULL);
        p[i] = product_new(t, t, s, out_in);
    }
}

static void check_same(struct product p[2])
{
    for (int i = 0; i < 2; i++)
        for (int call = FORWARD; call <= GRADIENT_W; call++)
            product_run(&p[i], (enum call)call);
    fixture_same_bits("y", p[0].s.t[Y].v, p[1].s.t[Y].v);
    fixture_same_bits("da", p[0].s.t[DA].v, p[1].s.t[DA].v);
    fixture_same_bits("dw", p[0].s.t[DW].v, p[1].s.t[DW].v);
    product_free(&p[0]);
    product_free(&p[1]);
}

/* The other operand is rounded as a cast does it, and nothing else is. */
static void bf16_products_round_one_operand(void **state)
{
    static const int64_t size[3] = {130, 70, 90};
    struct product p[2];
    if (iz_gemm16_missing())
        skip();
    pair_new(p, IZ_BF16, size, true);
    p[0].bf16 = p[1].bf16 = true;
    round_16(&p[1].s.t[A]);
    round_16(&p[1].s.t[DY]);
    assert_memory_not_equal(p[0].s.t[A].v.p, p[1].s.t[A].v.p, 64);
    check_same(p);
}

static void bf16_products_are_for_bf16_weights_alone(void **state)
{
    static const int64_t size[3] = {33, 17, 7};
    for (int t = 0; t < 3; t += 2) {
        struct product p[2];
        pair_new(p, fixture_types[t], size, false);
        p[1].bf16 = true;
        check_same(p);
    }
}

/* ---- threads ------------------------------------------------------------ */

static void *backward_thread(void *arg)
{
    struct product *p = arg;
    struct iz_linear l = {.w = p->s.t[W].v};
    struct iz_exec x = {
        .backend = IZ_CPU,
        .numerics.bf16_products = l.w.dtype == IZ_BF16,
        .work = {.base = fixture_take(1 << 20), .size = 1 << 20}};
    iz_matmul_da(&x, p->s.t[DA].v, p->s.t[DY].v, &l);
    free(x.work.base);
    return NULL;
}

static void check_threads(enum iz_dtype t)
{
    static const int64_t size[3] = {130, 70, 90};
    struct product p[2];
    pthread_t id[2];
    pair_new(p, t, size, false);
    for (int i = 0; i < 2; i++)
        pthread_create(&id[i], NULL, backward_thread, &p[i]);
    for (int i = 0; i < 2; i++)
        pthread_join(id[i], NULL);
    fixture_same_bits("da", p[0].s.t[DA].v, p[1].s.t[DA].v);
    product_free(&p[0]);
    product_free(&p[1]);
}

static void matmul_gives_equal_bits_on_every_thread(void **state)
{
    check_threads(IZ_F32);
    if (!iz_gemm16_missing())
        check_threads(IZ_BF16);
}

/* ---- the library's kernels ---- */

/* Near ones are not told apart, the library's own come first, and what is not
 * there or wrong is never taken. */
static void the_first_of_the_best_is_taken(void **state)
{
    static const struct {
        double rate[IZ_BLAS_KERNELS];
        int best;
    } row[] = {{{100, 104, 0, 99}, 0}, {{94, 96, 100, 90}, 1},
               {{24, 0, 150, 140}, 2}, {{0, 0, 0, 10}, 3},
               {{24, 90, 0, 100}, 3},  {{0, 0, 0, 0}, 0}};
    for (size_t i = 0; i < sizeof(row) / sizeof(row[0]); i++)
        assert_int_equal(iz_blas_best(row[i].rate), row[i].best);
}

static void kernels_are_taken_by_name(void **state)
{
    iz_blas_open();
    for (int i = 0; i < IZ_BLAS_KERNELS; i++)
        assert_true(!iz_blas_kernels(i) || iz_blas_take(iz_blas_kernels(i)));
    assert_false(iz_blas_take("NoSuchProcessor"));
    assert_true(iz_blas_take("BLAS"));
}

/* Products by each of the kernels that the library did not take by itself. */
static int other_kernels(void)
{
    int failed = 0;
    for (int i = 1; i < IZ_BLAS_KERNELS; i++) {
        const char *name = iz_blas_kernels(i);
        if (!name || !iz_blas_take(name))
            continue;
        print_message("kernels: %s\n", name);
        failed += ops_matmul_called(name);
    }
    iz_blas_take("BLAS");
    return failed;
}

int ops_cpu(void)
{
    const struct CMUnitTest tests[] = {
        SEEDED(exp_is_within_two_ulp),
        SEEDED(exp_keeps_special_values),
        SEEDED(bf16_products_agree),
        SEEDED(bf16_products_round_one_operand),
        SEEDED(bf16_products_are_for_bf16_weights_alone),
        SEEDED(matmul_gives_equal_bits_on_every_thread),
        SEEDED(the_first_of_the_best_is_taken),
        SEEDED(kernels_are_taken_by_name),
    };
    return cmocka_run_group_tests_name("cpu", tests, NULL, NULL) +
           other_kernels();
}
