/* SPDX-License-Identifier: Apache-2.0 */
/* Sums, norms and updates: the bits of the kernels against those of the CPU. */
#include "tests/codelets/gpu/emulated.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/flat/flat.h"
#include "codelets/flat/update.h"
#include "codelets/ops/gpu_ops.h"
#include "tests/codelets/gpu/dies.h"

enum { MOST = 3000001 };

static struct iz_exec x = {.backend = IZ_CUDA};

/* n random elements and one more before them, so that the address is odd where
 * `shift` is 1. */
static void *fill(enum iz_dtype t, int64_t n, int shift)
{
    int64_t bytes = iz_dtype_bytes(t);
    char *p = (char *)fixture_take((n + 1) * bytes) + shift * bytes;

    for (int64_t i = 0; i < n; i++) {
        float f = (float)(4 * fixture_uniform());

        iz_cast(p + i * bytes, t, &f, IZ_F32, 1);
    }
    return p;
}

static void release(void *p, enum iz_dtype t, int shift)
{
    free((char *)p - shift * iz_dtype_bytes(t));
}

static void *copy(const void *from, enum iz_dtype t, int64_t n, int shift)
{
    char *p = (char *)fixture_take((n + 1) * iz_dtype_bytes(t)) +
              shift * iz_dtype_bytes(t);

    memcpy(p, from, (size_t)(n * iz_dtype_bytes(t)));
    return p;
}

struct sum {
    enum iz_dtype out, in;
    int n_in, shift;
    bool accumulate;
};

static void check_sum(const struct sum *s, int64_t n)
{
    void *in[4], *out = fill(s->out, n, s->shift);
    void *want = copy(out, s->out, n, s->shift);

    for (int i = 0; i < s->n_in; i++)
        in[i] = fill(s->in, n, s->shift);
    iz_flat_sum(want, s->out, s->accumulate, (const void *const *)in, s->n_in,
                s->in, n);
    iz_cuda_ops->sum(&x, out, s->out, s->accumulate, (const void *const *)in,
                     s->n_in, s->in, n);
    assert_memory_equal(out, want, (size_t)(n * iz_dtype_bytes(s->out)));
    for (int i = 0; i < s->n_in; i++)
        release(in[i], s->in, s->shift);
    release(out, s->out, s->shift);
    release(want, s->out, s->shift);
}

static void sum_has_the_bits_of_the_cpu(void **state)
{
    static const int64_t sizes[] = {0, 1, 7, 8, 2048, 4099};

    (void)state;
    fixture_seed();
    for (int k = 0; k < 3 * 3 * 4 * 2 * 2; k++) {
        struct sum s = {fixture_types[k % 3], fixture_types[k / 3 % 3],
                        1 + k / 9 % 4, k / 36 % 2, k / 72 != 0};

        for (int i = 0; i < 6; i++)
            check_sum(&s, sizes[i]);
    }
}

/* The output is one of the inputs; NaN and infinity come out. */
static void sum_may_overwrite_an_input(void **state)
{
    float a[1500], b[1500];
    const void *in[] = {a, b};

    (void)state;
    for (int i = 0; i < 1500; i++) {
        a[i] = (float)i;
        b[i] = 0.5f;
    }
    a[3] = NAN;
    a[4] = INFINITY;
    iz_cuda_ops->sum(&x, b, IZ_F32, false, in, 2, IZ_F32, 1500);
    for (int i = 5; i < 1500; i++)
        assert_true(b[i] == (float)i + 0.5f);
    assert_true(isnan(b[3]) && isinf(b[4]));
}

static void sum_too_many(void)
{
    float out = 0;
    const void *in[IZ_SUM_INPUTS_MAX + 1];

    for (int i = 0; i < IZ_SUM_INPUTS_MAX + 1; i++)
        in[i] = &out;
    iz_cuda_ops->sum(&x, &out, IZ_F32, false, in, IZ_SUM_INPUTS_MAX + 1, IZ_F32,
                     1);
}

static void sum_refuses_too_many_inputs(void **state)
{
    (void)state;
    dies(sum_too_many, "a sum of 1025 buffers");
}

static double norm2_of(const void *p, enum iz_dtype t, int64_t n)
{
    double got = -1;
    struct iz_view scratch = {.rows = 1,
                              .cols = iz_flat_norm2_scratch_bytes(n)};

    scratch.p = fixture_take(scratch.cols);
    iz_cuda_ops->norm2(&x, &got, p, t, n, scratch);
    free(scratch.p);
    return got;
}

static void norm_has_the_bits_of_the_cpu(void **state)
{
    static const int64_t sizes[] = {
        0,    1,    31,   32,    33,      992,           993,
        1023, 1024, 1025, 40001, 1 << 20, (1 << 20) + 7, MOST};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++) {
        void *p = fill(fixture_types[t], MOST, 1);

        for (int i = 0; i < 14; i++)
            assert_true(norm2_of(p, fixture_types[t], sizes[i]) ==
                        iz_flat_norm2(p, fixture_types[t], sizes[i]));
        release(p, fixture_types[t], 1);
    }
}

static void squares_have_the_bits_of_the_cpu(void **state)
{
    static const int64_t sizes[] = {0, 1, 33, 1024, 1025, 40001, MOST};
    double *got = fixture_take((iz_norm_blocks(MOST) + 1) * 8);
    double *want = fixture_take((iz_norm_blocks(MOST) + 1) * 8);

    (void)state;
    fixture_seed();
    for (int k = 0; k < 7 * 3; k++) {
        enum iz_dtype t = fixture_types[k % 3];
        int64_t n = sizes[k / 3], blocks = iz_norm_blocks(n);
        void *p = fill(t, MOST, 1);

        got[blocks] = want[blocks] = 77;
        iz_cuda_ops->squares(&x, got, p, t, n);
        iz_flat_squares(want, p, t, n);
        assert_memory_equal(got, want, (size_t)(blocks + 1) * 8);
        release(p, t, 1);
    }
    free(got);
    free(want);
}

/* Scratch is what the sums of the blocks need and no more. */
static void norm_scratch_is_exact(void **state)
{
    (void)state;
    assert_int_equal(iz_flat_norm2_scratch_bytes(0), 0);
    assert_int_equal(iz_flat_norm2_scratch_bytes(1024), 0);
    assert_int_equal(iz_flat_norm2_scratch_bytes(1025), 2 * 8);
    assert_int_equal(iz_flat_norm2_scratch_bytes(1 << 20), 1024 * 8);
    assert_int_equal(iz_flat_norm2_scratch_bytes((1 << 20) + 1), 1027 * 8);
}

static void norm_shows_every_non_finite(void **state)
{
    float p[1100] = {0};

    (void)state;
    for (int i = 0; i < 1100; i += 99) {
        p[i] = -INFINITY;
        assert_true(isinf(norm2_of(p, IZ_F32, 1100)));
        p[i] = NAN;
        assert_true(isnan(norm2_of(p, IZ_F32, 1100)));
        p[i] = 1;
    }
}

struct updated {
    enum iz_dtype g, out;
    int shift;
    bool copies;
    struct iz_step a;
};

/* Every fifth element has no gradient and a state that is about to become
 * subnormal. */
static void prepare(void *const *state, void *g, enum iz_dtype g_type,
                    int64_t n)
{
    float *m = state[1], *v = state[2];

    for (int64_t i = 0; i < n; i++)
        v[i] = fabsf(v[i]);
    for (int64_t i = 0; i < n; i += 5) {
        m[i] = -1.2e-38f;
        v[i] = 1.2e-38f;
        memset((char *)g + i * iz_dtype_bytes(g_type), 0,
               (size_t)iz_dtype_bytes(g_type));
    }
}

static void update(const struct updated *k, const struct iz_step *s, int64_t n,
                   void *const *on, const void *g, bool gpu)
{
    struct iz_alike all = iz_alike_of(s);
    struct iz_update u = {.optimizer = s->hyper.type,
                          .g_type = k->g,
                          .out_type = k->out,
                          .n = n,
                          .p = on[0],
                          .state = {on[1], on[2]},
                          .g = g,
                          .out = k->copies ? on[3] : NULL,
                          .span = &all,
                          .spans = 1};

    if (gpu)
        iz_cuda_ops->update(&x, &u);
    else
        iz_update(&u);
}

/* Three updates of the same state on both sides. */
static void check_update(const struct updated *k, int64_t n)
{
    const enum iz_dtype type[4] = {IZ_F32, IZ_F32, IZ_F32, k->out};
    void *cpu[4], *gpu[4], *g = fill(k->g, n, k->shift);

    for (int i = 0; i < 4; i++)
        cpu[i] = fill(type[i], n, k->shift);
    prepare(cpu, g, k->g, n);
    for (int i = 0; i < 4; i++)
        gpu[i] = copy(cpu[i], type[i], n, k->shift);
    for (int i = 0; i < 3; i++) {
        struct iz_step a = k->a;

        a.t += i;
        update(k, &a, n, cpu, g, false);
        update(k, &a, n, gpu, g, true);
    }
    for (int i = 0; i < 4; i++) {
        assert_memory_equal(cpu[i], gpu[i],
                            (size_t)(n * iz_dtype_bytes(type[i])));
        release(cpu[i], type[i], k->shift);
        release(gpu[i], type[i], k->shift);
    }
    release(g, k->g, k->shift);
}

/* By every optimizer; Adam's kernel is AdamW's. */
static void updates_have_the_bits_of_the_cpu(void **state)
{
    static const int64_t sizes[] = {0, 1, 7, 8, 2048, 3001};

    (void)state;
    fixture_seed();
    for (int k = 0; k < 3 * 3 * 2 * 2 * 2; k++) {
        struct updated u = {fixture_types[k % 3],
                            fixture_types[k / 3 % 3],
                            k / 9 % 2,
                            k / 18 % 2,
                            {.hyper = {.lr = 1e-3,
                                       .beta1 = 0.9,
                                       .beta2 = 0.95,
                                       .eps = 1e-8,
                                       .weight_decay = 0.1,
                                       .adamw = k / 36,
                                       .bias_correction = k % 2},
                             .t = 1 + k,
                             .grad_scale = 0.37f}};

        for (int t = IZ_OPTIMIZER_ADAMW; t < IZ_OPTIMIZERS; t++) {
            u.a.hyper.type = (enum iz_optimizer_type)t;
            for (int i = 0; i < 6; i++)
                check_update(&u, sizes[i]);
        }
    }
}

int gpu_flat(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sum_has_the_bits_of_the_cpu),
        cmocka_unit_test(sum_may_overwrite_an_input),
        cmocka_unit_test(sum_refuses_too_many_inputs),
        cmocka_unit_test(norm_has_the_bits_of_the_cpu),
        cmocka_unit_test(squares_have_the_bits_of_the_cpu),
        cmocka_unit_test(norm_scratch_is_exact),
        cmocka_unit_test(norm_shows_every_non_finite),
        cmocka_unit_test(updates_have_the_bits_of_the_cpu),
    };

    return cmocka_run_group_tests_name("flat", tests, NULL, NULL);
}
