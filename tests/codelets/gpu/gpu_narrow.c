/* SPDX-License-Identifier: Apache-2.0 */
/* Updates with states in fewer bytes: the bits of the kernels against those of
 * the CPU. */
#include "tests/codelets/gpu/emulated.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/flat/half.h"
#include "codelets/flat/update.h"
#include "codelets/ops/gpu_ops.h"
#include "tests/codelets/gpu/dies.h"

enum { BLOCK = IZ_MOMENT_BLOCK, UPDATES = 3 };

static struct iz_exec x = {.backend = IZ_CUDA};

struct narrow {
    enum iz_optimizer_type optimizer;
    enum iz_moment_type type;
    enum iz_dtype g, out;
    bool copies, wild;
    int64_t n, at, after; /* elements of m and v before and behind */
    int64_t span;         /* length of one */
    double beta1, beta2;
};

/* What an update changes, on one side: m and v one behind the other, as in a
 * chunk. */
struct side {
    float *p;
    char *state, *out;
};

/* Any finite number where `wild`, else one of about 1. */
static float number(bool wild)
{
    uint32_t bits = (uint32_t)(fixture_uniform() * 0x1p31 + 0x1p31);
    float any = iz_bits_float(bits);

    if (!wild)
        return (float)(4 * fixture_uniform());
    return fabsf(any) < 1e18f ? any : 0;
}

static int64_t state_bytes(const struct narrow *k)
{
    return iz_moment_bytes(k->type, k->at + k->n + k->after);
}

static struct iz_moments moment_of(const struct narrow *k, char *state,
                                   enum iz_moment which)
{
    return (struct iz_moments){state + which * state_bytes(k), k->type, which,
                               k->at + k->n + k->after};
}

/* Values that the type holds; every third block is zero. */
static void fill_state(const struct narrow *k, char *state)
{
    int64_t n = k->at + k->n + k->after;

    for (int w = 0; w < 2; w++) {
        struct iz_moments a = moment_of(k, state, (enum iz_moment)w);

        for (int64_t b = 0; b < n; b += BLOCK) {
            float block[BLOCK] = {0};

            for (int i = 0; b / BLOCK % 3 && i < BLOCK; i++)
                block[i] = number(k->wild);
            for (int i = 0; w == IZ_MOMENT_V && i < BLOCK; i++)
                block[i] = fabsf(block[i]);
            iz_moment_store(&a, b, block, BLOCK, 3, b);
        }
    }
}

/* Some blocks have no gradient, some elements a tiny one. */
static void *fill_gradient(const struct narrow *k)
{
    int64_t size = iz_dtype_bytes(k->g);
    char *g = fixture_take((k->n + 1) * size);

    for (int64_t i = 0; i < k->n; i++) {
        float f = i / BLOCK % 4 == 1 ? 0 : number(k->wild);

        f = i % 7 == 3 ? f * 0x1p-12f : f;
        iz_cast(g + i * size, k->g, &f, IZ_F32, 1);
    }
    return g;
}

static struct side side_new(const struct narrow *k)
{
    struct side s = {fixture_take(4 * (k->n + 1)),
                     fixture_take(2 * state_bytes(k) + 1),
                     fixture_take((k->n + 1) * iz_dtype_bytes(k->out))};

    for (int64_t i = 0; i < k->n; i++)
        s.p[i] = number(false);
    memset(s.out, 0x5a, (size_t)((k->n + 1) * iz_dtype_bytes(k->out)));
    fill_state(k, s.state);
    return s;
}

static struct side side_copy(const struct narrow *k, const struct side *from)
{
    struct side s = side_new(k);

    memcpy(s.p, from->p, (size_t)(4 * k->n));
    memcpy(s.state, from->state, (size_t)(2 * state_bytes(k)));
    return s;
}

static void side_free(struct side *s)
{
    free(s->p);
    free(s->state);
    free(s->out);
}

/* Spans that differ in rate and decay, of which the first one ends early. */
static int spans_of(const struct narrow *k, int t, struct iz_alike *span)
{
    int s = 0;

    for (int64_t end = 1; s == 0 || span[s - 1].end < k->n;
         s++, end += k->span) {
        struct iz_step a = {.hyper = {.type = k->optimizer,
                                      .lr = 1e-3 * (s + 1),
                                      .beta1 = k->beta1,
                                      .beta2 = k->beta2,
                                      .eps = 1e-8,
                                      .weight_decay = s % 2 ? 0.1 : 0,
                                      .adamw = s % 3 != 0,
                                      .bias_correction = true},
                            .t = t,
                            .grad_scale = k->wild ? 1.0f : 0.37f};

        assert_true(s < IZ_ALIKE_MAX);
        span[s] = iz_alike_of(&a);
        span[s].end = end;
    }
    span[s - 1].end = INT64_MAX;
    return s;
}

static void update(const struct narrow *k, const struct side *s, const void *g,
                   int t, bool gpu)
{
    struct iz_alike span[IZ_ALIKE_MAX];
    struct iz_update a = {.optimizer = k->optimizer,
                          .type = k->type,
                          .n = k->n,
                          .at = k->at,
                          .room = k->at + k->n + k->after,
                          .p = s->p,
                          .state = {s->state, s->state + state_bytes(k)},
                          .g = g,
                          .out = k->copies ? s->out : NULL,
                          .g_type = k->g,
                          .out_type = k->out,
                          .key = 77 + (uint64_t)t,
                          .first = 64000 + k->at,
                          .span = span,
                          .spans = spans_of(k, t, span)};

    if (gpu)
        iz_cuda_ops->update(&x, &a);
    else
        iz_update(&a);
}

/* Also what lies before and behind the elements. */
static void compare(const struct narrow *k, const struct side *a,
                    const struct side *b)
{
    assert_memory_equal(a->p, b->p, (size_t)(4 * k->n));
    assert_memory_equal(a->state, b->state, (size_t)(2 * state_bytes(k)));
    assert_memory_equal(a->out, b->out,
                        (size_t)((k->n + 1) * iz_dtype_bytes(k->out)));
}

static void check_one(const struct narrow *k)
{
    struct side cpu = side_new(k), gpu = side_copy(k, &cpu);
    void *g = fill_gradient(k);

    for (int t = 1; t <= UPDATES; t++) {
        update(k, &cpu, g, t, false);
        update(k, &gpu, g, t, true);
        compare(k, &cpu, &gpu);
    }
    side_free(&cpu);
    side_free(&gpu);
    free(g);
}

/* By every optimizer; Adam's kernel is AdamW's. */
static void check(const struct narrow *k)
{
    struct narrow one = *k;

    for (int t = IZ_OPTIMIZER_ADAMW; t < IZ_OPTIMIZERS; t++) {
        one.optimizer = (enum iz_optimizer_type)t;
        check_one(&one);
    }
}

/* Of one block, of half a warp more than a warp has, of a block of threads and
 * of more. */
static void narrow_has_the_bits_of_the_cpu(void **state)
{
    static const int64_t blocks[] = {0, 1, 2, 3, 16, 17, 37};

    (void)state;
    fixture_seed();
    for (int c = 0; c < 2 * 3 * 3 * 2; c++)
        for (int i = 0; i < 7; i++)
            check(
                &(struct narrow){.type = c % 2 ? IZ_MOMENT_FP8 : IZ_MOMENT_BF16,
                                 .g = fixture_types[c / 2 % 3],
                                 .out = fixture_types[c / 6 % 3],
                                 .copies = c / 18,
                                 .n = blocks[i] * BLOCK,
                                 .at = i % 3 * BLOCK,
                                 .after = i % 2 * BLOCK,
                                 .span = i % 2 ? 1000 : 77,
                                 .beta1 = 0.9,
                                 .beta2 = 0.95});
}

/* Without memory of the last step m and v are any numbers, from the smallest to
 * those whose square is near the end of fp32. */
static void narrow_has_those_bits_at_every_exponent(void **state)
{
    (void)state;
    fixture_seed();
    for (int c = 0; c < 4; c++)
        check(&(struct narrow){.type = c % 2 ? IZ_MOMENT_FP8 : IZ_MOMENT_BF16,
                               .g = IZ_F32,
                               .out = IZ_F32,
                               .copies = true,
                               .wild = true,
                               .n = 300 * BLOCK,
                               .span = 1000,
                               .beta1 = c / 2 * 0.5,
                               .beta2 = c / 2 * 0.5});
}

/* As many spans as a call may have, each of one element. */
static void a_span_may_be_one_element(void **state)
{
    (void)state;
    fixture_seed();
    for (int c = 0; c < 2; c++)
        check(&(struct narrow){.type = c % 2 ? IZ_MOMENT_FP8 : IZ_MOMENT_BF16,
                               .g = IZ_BF16,
                               .out = IZ_BF16,
                               .copies = true,
                               .n = BLOCK,
                               .span = 1,
                               .beta1 = 0.9,
                               .beta2 = 0.999});
}

/* Infinity and NaN spoil their block of fp8 and no other. */
static void what_is_not_finite_shows(void **state)
{
    struct narrow k = {.type = IZ_MOMENT_FP8,
                       .g = IZ_F32,
                       .out = IZ_F32,
                       .n = 4 * BLOCK,
                       .span = 1000,
                       .beta1 = 0.9,
                       .beta2 = 0.999};

    (void)state;
    fixture_seed();
    for (int c = 0; c < 4; c++) {
        struct side s;
        float *g, m[4 * BLOCK];

        k.type = c % 2 ? IZ_MOMENT_FP8 : IZ_MOMENT_BF16;
        s = side_new(&k);
        g = fill_gradient(&k);
        g[BLOCK + 5] = c / 2 ? NAN : INFINITY;
        update(&k, &s, g, 1, true);
        for (int w = 0; w < 2; w++) {
            struct iz_moments a = moment_of(&k, s.state, (enum iz_moment)w);

            iz_moment_load(m, &a, 0, k.n);
            assert_false(isfinite(m[BLOCK + 5]));
            for (int i = 0; i < 4 * BLOCK; i++)
                assert_true(isfinite(m[i]) || i / BLOCK == 1);
        }
        side_free(&s);
        free(g);
    }
}

static void odd_address(void)
{
    struct narrow k = {.type = IZ_MOMENT_BF16, .n = BLOCK, .span = BLOCK};
    struct side s = side_new(&k);
    void *g = fill_gradient(&k);

    s.p++;
    update(&k, &s, g, 1, true);
}

static void an_odd_address_is_refused(void **state)
{
    (void)state;
    fixture_seed();
    dies(odd_address, "no multiple of 16");
}

int gpu_narrow(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(narrow_has_the_bits_of_the_cpu),
        cmocka_unit_test(narrow_has_those_bits_at_every_exponent),
        cmocka_unit_test(a_span_may_be_one_element),
        cmocka_unit_test(what_is_not_finite_shows),
        cmocka_unit_test(an_odd_address_is_refused),
    };

    return cmocka_run_group_tests_name("narrow", tests, NULL, NULL);
}
