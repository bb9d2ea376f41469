/* SPDX-License-Identifier: Apache-2.0 */
/* The matrix products of the GPU against the reference: the real calls of
 * cuBLASLt, answered by the stand-in, and the real kernel for sums of columns,
 * run by the emulation.  Shows that operands, types, layouts, workspace and the
 * table of algorithms are right; says nothing of the library itself. */
#include "tests/ops/fixture.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cublasLt.h>

#include "codelets/cuda.h"
#include "codelets/cuda_launch.h"
#include "codelets/cuda_lib.h"
#include "tests/gpu/dies.h"
#include "tests/gpu/fake_cublaslt.h"
#include "tests/gpu/scratch.h"
#include "tests/ops/reference.h"

static const struct iz_cuda_ops table = {.matmul_fwd = iz_matmul_fwd_cuda,
                                         .matmul_da = iz_matmul_da_cuda,
                                         .matmul_dw = iz_matmul_dw_cuda};
const struct iz_cuda_ops *const iz_cuda_ops = &table;

static struct iz_cuda cuda;
static int runs;

/* All tensors of one product; those that a case does not use stay unread. */
struct product {
    struct tensor y, r, a, w, b, dy, da, dw, db;
    struct iz_linear l;
    struct ref_matmul ref;
    double *want;
    bool tf32, fused_db;
};

static struct product product_new(enum iz_dtype t, enum iz_dtype dw,
                                  const int64_t s[3], bool out_in)
{
    int64_t m = s[0], in = s[1], out = s[2];
    int64_t rows = out_in ? out : in, cols = out_in ? in : out;
    struct product p = {.y = tensor_new(t, m, out, 1),
                        .r = tensor_new(t, m, out, 1),
                        .a = tensor_new(t, m, in, 1),
                        .w = tensor_new(t, rows, cols, 1),
                        .b = tensor_new(t, 1, out, 1),
                        .dy = tensor_new(t, m, out, 1),
                        .da = tensor_new(t, m, in, 1),
                        .dw = tensor_new(dw, rows, cols, 1),
                        .db = tensor_new(t, 1, out, 1)};

    p.l = (struct iz_linear){
        .w = p.w.v, .b = p.b.v, .dw = p.dw.v, .db = p.db.v, .out_in = out_in};
    p.want =
        calloc((size_t)((m + in) * (m + out) * 2 + in * out), sizeof *p.want);
    p.ref = (struct ref_matmul){.y = p.want,
                                .a = p.a.d,
                                .w = p.w.d,
                                .m = m,
                                .in = in,
                                .out = out,
                                .out_in = out_in};
    return p;
}

static void product_free(struct product *p)
{
    struct tensor *all[] = {&p->y,  &p->r,  &p->a,  &p->w, &p->b,
                            &p->dy, &p->da, &p->dw, &p->db};

    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        tensor_free(all[i]);
    free(p->want);
}

/* Dry for the size of the scratch, which has no room to spare. */
static void run(void (*op)(struct iz_exec *x, struct product *p),
                struct product *p)
{
    struct iz_exec dry = iz_exec_dry(IZ_CUDA, p->a.v.dtype);
    struct iz_exec x = {.backend = IZ_CUDA,
                        .act = p->a.v.dtype,
                        .tf32 = p->tf32,
                        .fused_db = p->fused_db,
                        .cuda = &cuda};

    op(&dry, p);
    x.work = scratch_new(dry.work.peak, runs++);
    op(&x, p);
    assert_int_equal(x.work.used, 0);
    assert_int_equal(x.work.peak, dry.work.peak);
    assert_true(x.flops == dry.flops && x.bytes == dry.bytes);
    scratch_free(&x.work);
}

static void forward(struct iz_exec *x, struct product *p)
{
    iz_matmul_fwd(x, p->y.v, p->ref.r ? p->r.v : IZ_NONE, p->a.v, &p->l);
}

static void backward_a(struct iz_exec *x, struct product *p)
{
    iz_matmul_da(x, p->da.v, p->dy.v, &p->l);
}

static void backward_w(struct iz_exec *x, struct product *p)
{
    iz_matmul_dw(x, p->dy.v, p->a.v, &p->l);
}

/* The result is formed in double and rounded once to fp32, and once more to a
 * 16-bit type, which fixture_close allows for. */
static const double TOL = 1e-7;

static void check_forward(struct product *p, bool with_r, bool with_b)
{
    p->ref.r = with_r ? p->r.d : NULL;
    p->ref.b = with_b ? p->b.d : NULL;
    p->l.b = with_b ? p->b.v : IZ_NONE;
    memset(p->y.v.p, 0xff, (size_t)iz_view_bytes(p->y.v));
    run(forward, p);
    ref_matmul(&p->ref);
    fixture_close("y", &p->y, p->want, TOL);
}

/* scale a w: what adapters take. */
static void check_scale(struct product *p)
{
    p->ref.r = p->ref.b = NULL;
    p->l.b = IZ_NONE;
    p->l.scale = 0.375F;
    run(forward, p);
    p->l.scale = 0;
    ref_matmul(&p->ref);
    for (int64_t i = 0; i < iz_view_len(p->y.v); i++)
        p->want[i] *= 0.375;
    fixture_close("scale a w", &p->y, p->want, TOL);
}

/* da = dy w^T is a forward with the weights the other way round. */
static void check_da(struct product *p)
{
    struct ref_matmul da = {.y = p->want,
                            .a = p->dy.d,
                            .w = p->w.d,
                            .m = p->ref.m,
                            .in = p->ref.out,
                            .out = p->ref.in,
                            .out_in = !p->l.out_in};

    memset(p->da.v.p, 0xff, (size_t)iz_view_bytes(p->da.v));
    run(backward_a, p);
    ref_matmul(&da);
    fixture_close("da", &p->da, p->want, TOL);
}

/* to [rows of w, cols of w] = a^T dy or dy^T a, plus `add`. */
static void want_dw(const struct product *p, double *to, const double *add)
{
    int64_t in = p->ref.in, out = p->ref.out;

    for (int64_t i = 0; i < in; i++)
        for (int64_t j = 0; j < out; j++) {
            int64_t at = p->l.out_in ? j * in + i : i * out + j;

            to[at] = add ? add[at] : 0;
            for (int64_t k = 0; k < p->ref.m; k++)
                to[at] += p->a.d[k * in + i] * p->dy.d[k * out + j];
        }
}

static void want_db(const struct product *p, double *to)
{
    for (int64_t j = 0; j < p->ref.out; j++) {
        to[j] = 0;
        for (int64_t k = 0; k < p->ref.m; k++)
            to[j] += p->dy.d[k * p->ref.out + j];
    }
}

static void check_dw(struct product *p, bool add)
{
    double *dw = p->want, *db = p->want + p->ref.in * p->ref.out;

    want_dw(p, dw, add ? p->dw.d : NULL);
    want_db(p, db);
    p->l.add = add;
    if (!add)
        memset(p->dw.v.p, 0xff, (size_t)iz_view_bytes(p->dw.v));
    memset(p->db.v.p, 0xff, (size_t)iz_view_bytes(p->db.v));
    run(backward_w, p);
    fixture_close("dw", &p->dw, dw, TOL);
    fixture_close("db", &p->db, db, 1e-6);
}

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

static void four_forwards(struct product *p)
{
    check_forward(p, false, false);
    check_forward(p, false, true);
    check_forward(p, true, false);
    check_forward(p, true, true);
    check_scale(p);
}

static void forward_agrees(void **state)
{
    (void)state;
    for_each(four_forwards, false);
}

/* r may be y. */
static void forward_in_place(struct product *p)
{
    struct tensor y = p->y;

    p->ref.r = p->r.d;
    p->ref.b = p->b.d;
    ref_matmul(&p->ref);
    p->y = p->r;
    run(forward, p);
    fixture_close("y = y + a w + b", &p->r, p->want, TOL);
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
    check_forward(p, false, false);
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
    for_each(check_da, false);
}

static void dw_written(struct product *p)
{
    check_dw(p, false);
}

static void dw_fused(struct product *p)
{
    p->fused_db = true;
    check_dw(p, false);
}

static void dw_added(struct product *p)
{
    check_dw(p, true);
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

static int renew(void **state)
{
    (void)state;
    iz_cublas_close(&cuda.blas);
    fake_cublaslt = (struct fake_cublaslt){0};
    return iz_cublas_open(&cuda.blas);
}

/* The library refuses or fails: db by our kernel, and it is asked once per
 * shape. */
static void gradient_of_b_without_the_library(void **state)
{
    static const int status[] = {0, CUBLAS_STATUS_NOT_SUPPORTED,
                                 CUBLAS_STATUS_INVALID_VALUE,
                                 CUBLAS_STATUS_INTERNAL_ERROR};

    for (size_t i = 0; i < sizeof status / sizeof status[0]; i++) {
        renew(state);
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

    check_forward(p, false, true);
    p->ref.r = p->r.d;
    run(forward, p);
    ref_matmul(&p->ref);
    fixture_close("y = r + b, + a w", &p->y, p->want, TOL + 2 * half);
    p->y = p->r;
    run(forward, p);
    fixture_close("y = y + b, + a w", &p->r, p->want, TOL + 2 * half);
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

    want_db(p, db);
    p->l.dw = IZ_NONE;
    run(backward_w, p);
    fixture_close("db alone", &p->db, db, 1e-6);
}

static void only_dw(struct product *p)
{
    want_dw(p, p->want, NULL);
    p->l.db = IZ_NONE;
    run(backward_w, p);
    fixture_close("dw alone", &p->dw, p->want, TOL);
}

/* Without memory for a gradient; the work arena is not touched either. */
static void no_gradient(struct product *p)
{
    struct iz_exec x = {.backend = IZ_CUDA, .cuda = &cuda};
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
        check_forward(&p[i % 2], true, true);
        check_dw(&p[i % 2], false);
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
    four_forwards(&p);
    check_da(&p);
    check_dw(&p, false);
    first = fake_cublaslt.searches;
    assert_int_equal(first, 4);
    four_forwards(&p);
    check_da(&p);
    check_dw(&p, false);
    assert_int_equal(fake_cublaslt.searches, first);
    mem = fixture_take(iz_view_bytes(a.v) + 6);
    p.a.v.p = mem + 6;
    tensor_store(&p.a);
    check_forward(&p, true, true);
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
            check_forward(&p, false, false);
            assert_int_equal(fake_cublaslt.compute,
                             tf32 && t == 0 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                            : CUBLAS_COMPUTE_32F);
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
    run(forward, &p);
    tensor_load(&p.y);
    assert_true(isnan(p.y.d[2]) && isnan(p.y.d[3]));
    assert_true(isinf(p.y.d[4]));
    product_free(&p);
}

static void ask_for_the_impossible(void)
{
    static const int64_t s[3] = {3, 5, 2};
    struct product p = product_new(IZ_BF16, IZ_BF16, s, false);

    fake_cublaslt.none = true;
    run(forward, &p);
}

static void ask_what_fails(void)
{
    static const int64_t s[3] = {3, 5, 2};
    struct product p = product_new(IZ_BF16, IZ_BF16, s, false);

    fake_cublaslt.fails = CUBLAS_STATUS_INTERNAL_ERROR;
    run(backward_w, &p);
}

static void ask_for_513_kinds(void)
{
    for (int64_t i = 1; i <= 513; i++) {
        int64_t s[3] = {i, 1, 1};
        struct product p = product_new(IZ_F32, IZ_F32, s, false);

        run(forward, &p);
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
    run(forward, &p);
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
        cmocka_unit_test_setup(forward_agrees, renew),
        cmocka_unit_test_setup(forward_in_place_agrees, renew),
        cmocka_unit_test_setup(forward_from_16_bits_to_fp32_agrees, renew),
        cmocka_unit_test_setup(gradient_of_a_agrees, renew),
        cmocka_unit_test_setup(gradient_of_w_agrees, renew),
        cmocka_unit_test_setup(gradient_of_w_is_added_in_fp32, renew),
        cmocka_unit_test_setup(gradient_of_b_without_the_library, renew),
        cmocka_unit_test_setup(bias_without_the_library, renew),
        cmocka_unit_test_setup(unwanted_gradients_are_not_computed, renew),
        cmocka_unit_test_setup(sums_of_columns_agree, renew),
        cmocka_unit_test_setup(every_call_has_its_own_bias, renew),
        cmocka_unit_test_setup(algorithms_are_kept, renew),
        cmocka_unit_test_setup(tf32_is_for_fp32_alone, renew),
        cmocka_unit_test_setup(shows_nan_and_overflow, renew),
        cmocka_unit_test_setup(ends_the_job_with_call_and_shape, renew),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);

    iz_cublas_close(&cuda.blas);
    return failed;
}
