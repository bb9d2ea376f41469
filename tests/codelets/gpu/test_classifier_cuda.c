/* SPDX-License-Identifier: Apache-2.0 */
/* The classifier of the GPU against the reference: the real kernels run by the
 * emulation, the products answered by the stand-in for cuBLASLt. */
#include "tests/codelets/ops/fixture.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "codelets/kernels/cuda_lib.h"
#include "codelets/kernels/launch.h"
#include "codelets/ops/gpu_ops.h"
#include "tests/codelets/gpu/dies.h"
#include "tests/codelets/gpu/scratch.h"
#include "tests/codelets/ops/reference.h"
#include "tests/fake/cublaslt.h"

static const struct iz_cuda_ops table = {
    .classifier_fwd = iz_classifier_fwd_cuda,
    .classifier_bwd = iz_classifier_bwd_cuda};
const struct iz_cuda_ops *const iz_cuda_ops = &table;

static struct iz_cuda cuda;
static int runs;

struct classifier {
    struct tensor a, w, da, dw;
    int32_t *target;
    struct iz_classifier c;
    double loss, flops;
};

/* Every fifth target is ignored. */
static struct classifier classifier_new(enum iz_dtype t, enum iz_dtype dw,
                                        const int64_t s[3])
{
    struct classifier k = {
        .a = tensor_new(t, s[0], s[1], 2),
        .w = tensor_new(t, s[2], s[1], 2),
        .da = tensor_new(t, s[0], s[1], 1),
        .dw = tensor_new(dw, s[2], s[1], 1),
        .target = calloc((size_t)s[0], sizeof(int32_t)),
        .loss = -1,
    };

    for (int64_t i = 0; i < s[0]; i++)
        k.target[i] = i % 5 == 3 ? -1 : fixture_below(s[2]);
    k.c = (struct iz_classifier){.a = k.a.v,
                                 .w = k.w.v,
                                 .target = k.target,
                                 .da = k.da.v,
                                 .dw = k.dw.v,
                                 .loss_scale = 64};
    return k;
}

static void classifier_free(struct classifier *k)
{
    tensor_free(&k->a);
    tensor_free(&k->w);
    tensor_free(&k->da);
    tensor_free(&k->dw);
    free(k->target);
}

/* Dry for the size of the scratch, then for real.  Where dw is not wanted a dry
 * run counts it all the same.
 */
static void run(void (*op)(struct iz_exec *x, const struct iz_classifier *c),
                struct classifier *k)
{
    struct iz_exec dry = iz_exec_dry(IZ_CUDA, k->a.v.dtype);
    struct iz_exec x = {.backend = IZ_CUDA, .act = k->a.v.dtype, .cuda = &cuda};

    k->c.loss = &k->loss;
    op(&dry, &k->c);
    x.work = scratch_new(dry.work.peak, runs++);
    op(&x, &k->c);
    assert_int_equal(x.work.used, 0);
    assert_true(x.flops == dry.flops || !k->c.dw.p);
    assert_true(x.bytes == dry.bytes || !k->c.dw.p);
    k->flops = x.flops;
    scratch_free(&x.work);
}

/* The gradients, and how far the rounding of the gradients of the logits to 16
 * bits may move them: by half an ulp of each. */
struct want {
    double loss, *da, *dw, *da_off, *dw_off;
};

static struct want want_new(const struct classifier *k)
{
    size_t da = (size_t)iz_view_len(k->da.v), dw = (size_t)iz_view_len(k->dw.v);

    return (struct want){.da = calloc(da, sizeof(double)),
                         .dw = calloc(dw, sizeof(double)),
                         .da_off = calloc(da, sizeof(double)),
                         .dw_off = calloc(dw, sizeof(double))};
}

static void want_free(struct want *w)
{
    free(w->da);
    free(w->dw);
    free(w->da_off);
    free(w->dw_off);
}

/* What rounding to t may add to g: half an ulp, or half of the smallest number
 * of fp16. */
static double rounding(enum iz_dtype t, double g)
{
    double half = t == IZ_F32 ? 0x1p-24 : t == IZ_BF16 ? 0x1p-8 : 0x1p-11;

    return half * fabs(g) + (t == IZ_F16 ? 0x1p-25 : 0);
}

/* g: gradient of logit v of row i, off by `err` before it is rounded. */
static void want_add(struct want *want, const struct classifier *k, int64_t i,
                     int64_t v, double g, double err)
{
    double off = err + rounding(k->a.v.dtype, g);
    int64_t c = k->a.v.cols;

    for (int64_t j = 0; j < c; j++) {
        want->da[i * c + j] += g * k->w.d[v * c + j];
        want->dw[v * c + j] += g * k->a.d[i * c + j];
        want->da_off[i * c + j] += off * fabs(k->w.d[v * c + j]);
        want->dw_off[v * c + j] += off * fabs(k->a.d[i * c + j]);
    }
}

/* A logit is rounded to fp32, by which its probability is off in proportion,
 * and so is the sum; the exponentials and their sum add 1e-6. */
static void want_row(struct want *want, const struct classifier *k, int64_t i,
                     double scale)
{
    int64_t n = k->w.v.rows, c = k->a.v.cols;
    double *s = calloc((size_t)n, sizeof *s), max = -INFINITY, sum = 0;
    double largest = 0;

    for (int64_t v = 0; v < n; v++) {
        s[v] = fixture_dot(k->a.d + i * c, k->w.d + v * c, c);
        max = fmax(max, s[v]);
        largest = fmax(largest, fabs(s[v]));
    }
    for (int64_t v = 0; v < n; v++)
        sum += exp(s[v] - max);
    for (int64_t v = 0; v < n; v++) {
        double p = exp(s[v] - max) / sum;

        want_add(want, k, i, v, scale * (p - (v == k->target[i])),
                 scale * p * (0x1p-22 * largest + 1e-6));
    }
    want->loss += max + log(sum) - s[k->target[i]];
    free(s);
}

static struct want want_of(const struct classifier *k)
{
    struct want w = want_new(k);
    int count = 0;

    for (int64_t i = 0; i < k->a.v.rows; i++)
        count += k->target[i] >= 0;
    for (int64_t i = 0; i < k->a.v.rows; i++)
        if (k->target[i] >= 0)
            want_row(&w, k, i, (double)k->c.loss_scale / count);
    w.loss = count ? w.loss / count : 0;
    return w;
}

/* Within `off`, and the rounding of got. */
static void close_to(const char *what, struct tensor *got, const double *want,
                     const double *off)
{
    tensor_load(got);
    for (int64_t i = 0; i < iz_view_len(got->v); i++) {
        double most = off[i] + rounding(got->v.dtype, want[i]) + 1e-9;

        if (!(fabs(got->d[i] - want[i]) <= most))
            fail_msg("%s [%lld,%lld] %s: element %lld is %.9g, not %.9g", what,
                     (long long)got->v.rows, (long long)got->v.cols,
                     iz_dtype_name(got->v.dtype), (long long)i, got->d[i],
                     want[i]);
    }
}

static void clear(struct tensor *t)
{
    memset(t->v.p, 0xff, (size_t)iz_view_bytes(t->v));
}

static void check_backward(struct classifier *k, const struct want *w)
{
    clear(&k->da);
    clear(&k->dw);
    run(iz_classifier_bwd, k);
    assert_true(fabs(k->loss - w->loss) <= 2e-6 * fmax(1, w->loss));
    close_to("da", &k->da, w->da, w->da_off);
    close_to("dw", &k->dw, w->dw, w->dw_off);
}

/* The gradient of a may lie in the memory of a. */
static void check_in_place(struct classifier *k)
{
    k->c.da = k->a.v;
    run(iz_classifier_bwd, k);
    fixture_same_bits("da in a", k->a.v, k->da.v);
}

static void check_classifier(enum iz_dtype t, enum iz_dtype dw,
                             const int64_t s[3])
{
    struct classifier k = classifier_new(t, dw, s);
    struct want w = want_of(&k);
    double forward;

    run(iz_classifier_fwd, &k);
    assert_true(fabs(k.loss - w.loss) <= 2e-6 * fmax(1, w.loss));
    assert_true(k.flops == 2. * (double)(s[0] * s[1] * s[2]));
    forward = k.loss;
    check_backward(&k, &w);
    assert_true(k.loss == forward);
    assert_true(k.flops == 6. * (double)(s[0] * s[1] * s[2]));
    check_in_place(&k);
    want_free(&w);
    classifier_free(&k);
}

static void agrees_with_reference(void **state)
{
    /* 8200 and 16900 logits take a block more than one turn */
    static const int64_t size[][3] = {
        {1, 1, 1},   {3, 7, 2},    {7, 3, 17},   {17, 5, 33},  {1, 17, 3},
        {6, 2, 257}, {33, 8, 384}, {5, 3, 8200}, {4, 2, 16900}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0; i < sizeof size / sizeof size[0]; i++) {
            check_classifier(fixture_types[t], fixture_types[t], size[i]);
            check_classifier(fixture_types[t], IZ_F32, size[i]);
        }
}

/* So large a vocabulary that the rows fall into two chunks, and dw is summed
 * over them in scratch; `shift` bytes lie before dw. */
static void check_chunks(enum iz_dtype t, int shift)
{
    static const int64_t size[3] = {33, 1, (2 << 20) + 3};
    struct classifier k = classifier_new(t, t, size);
    struct want w = want_of(&k);
    char *own = k.dw.v.p, *mem = fixture_take(iz_view_bytes(k.dw.v) + shift);

    k.dw.v.p = k.c.dw.p = mem + shift;
    check_backward(&k, &w);
    free(mem);
    k.dw.v.p = own;
    want_free(&w);
    classifier_free(&k);
}

static void chunks_agree(void **state)
{
    (void)state;
    fixture_seed();
    check_chunks(IZ_BF16, 0);
    assert_int_equal(fake_cublaslt.products, 6);
    check_chunks(IZ_F16, 2);
}

static void unwanted_dw_is_not_computed(void **state)
{
    static const int64_t size[3] = {7, 5, 33};
    struct classifier k;
    struct want w;

    (void)state;
    fixture_seed();
    k = classifier_new(IZ_F16, IZ_F16, size);
    w = want_of(&k);
    k.c.dw.p = NULL;
    run(iz_classifier_bwd, &k);
    close_to("da", &k.da, w.da, w.da_off);
    assert_int_equal(fake_cublaslt.products, 2);
    assert_true(k.flops == 4. * 7 * 5 * 33);
    want_free(&w);
    classifier_free(&k);
}

static void without_targets_all_is_zero(void **state)
{
    static const int64_t size[3] = {3, 2, 9};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++) {
        struct classifier k =
            classifier_new(fixture_types[t], fixture_types[t], size);

        for (int i = 0; i < 3; i++)
            k.target[i] = -1;
        run(iz_classifier_bwd, &k);
        assert_true(k.loss == 0);
        tensor_load(&k.da);
        tensor_load(&k.dw);
        for (int i = 0; i < 6; i++)
            assert_true(k.da.d[i] == 0);
        for (int i = 0; i < 18; i++)
            assert_true(k.dw.d[i] == 0);
        classifier_free(&k);
    }
}

/* What comes of a[0,0] = value and w[0,0] = w in the loss of row 0. */
static double loss_with(double value, double w, int64_t vocab)
{
    const int64_t size[3] = {6, 3, vocab};
    struct classifier k = classifier_new(IZ_F32, IZ_F32, size);
    double loss;

    k.a.d[0] = value;
    k.w.d[0] = w;
    for (int i = 0; i < 6; i++)
        k.target[i] = i ? -1 : 1;
    tensor_store(&k.a);
    tensor_store(&k.w);
    run(iz_classifier_bwd, &k);
    loss = k.loss;
    run(iz_classifier_fwd, &k);
    assert_memory_equal(&loss, &k.loss, sizeof loss);
    classifier_free(&k);
    return loss;
}

static void shows_nan_and_overflow(void **state)
{
    (void)state;
    fixture_seed();
    for (int v = 5; v <= 33; v += 28) { /* one by one, and 8 at once */
        assert_true(isnan(loss_with(NAN, 1, v)));
        assert_false(isfinite(loss_with(INFINITY, 1, v)));
        assert_false(isfinite(loss_with(-INFINITY, 1, v)));
        assert_true(isfinite(loss_with(1e4, 1, v)));
        assert_true(isfinite(loss_with(1e30, 1, v)));
        assert_true(isfinite(loss_with(1e-42, 1, v)));
        /* one logit is -infinity: probability 0 and nothing else */
        assert_true(isfinite(loss_with(1e4, -3.4e38, v)));
        assert_false(isfinite(loss_with(1e4, 3.4e38, v)));
    }
}

static void ask_for_a_foreign_target(void)
{
    static const int64_t size[3] = {6, 3, 33};
    struct classifier k = classifier_new(IZ_F32, IZ_F32, size);

    k.target[4] = 33;
    run(iz_classifier_fwd, &k);
}

static void ends_the_job_on_a_foreign_target(void **state)
{
    (void)state;
    dies(ask_for_a_foreign_target,
         "target 33 at position 4 is outside the vocabulary 0..32");
}

static int renew(void **state)
{
    (void)state;
    iz_cublas_close(&cuda.blas);
    fake_cublaslt = (struct fake_cublaslt){0};
    return iz_cublas_open(&cuda.blas);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(agrees_with_reference, renew),
        cmocka_unit_test_setup(chunks_agree, renew),
        cmocka_unit_test_setup(unwanted_dw_is_not_computed, renew),
        cmocka_unit_test_setup(without_targets_all_is_zero, renew),
        cmocka_unit_test_setup(shows_nan_and_overflow, renew),
        cmocka_unit_test_setup(ends_the_job_on_a_foreign_target, renew),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);

    iz_cublas_close(&cuda.blas);
    return failed;
}
