/* SPDX-License-Identifier: Apache-2.0 */
/* Attention against the reference, with sequences below, at and above the size
 * of a tile. */
#include "tests/codelets/ops/fixture.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/flat/simd.h"
#include "tests/codelets/ops/reference.h"

struct attention {
    struct tensor qkv, o, lse, dqkv, dy;
    struct iz_attention a;
    struct ref_attention ref;
};

struct shape {
    int64_t samples, seq, heads, d, kv_heads; /* 0: heads */
};

static struct attention attention_new(struct shape s, double scale)
{
    int64_t m = s.samples * s.seq, c = s.heads * s.d;
    int64_t keys = s.kv_heads ? s.kv_heads : s.heads, ld = c + 2 * keys * s.d;
    struct attention t = {
        .qkv = tensor_new(IZ_F32, m, ld, scale),
        .o = tensor_new(IZ_F32, m, c, 1),
        .lse = tensor_new(IZ_F32, s.samples * s.heads, s.seq, 1),
        .dqkv = tensor_new(IZ_F32, m, ld, 1),
        .dy = tensor_new(IZ_F32, m, c, 1),
    };

    t.a = (struct iz_attention){t.qkv.v,      t.o.v,           t.lse.v, s.seq,
                                (int)s.heads, (int)s.kv_heads, false};
    t.ref = (struct ref_attention){.qkv = t.qkv.d,
                                   .samples = s.samples,
                                   .seq = s.seq,
                                   .heads = s.heads,
                                   .c = c,
                                   .kv_heads = s.kv_heads};
    t.ref.o = calloc((size_t)(m * c), sizeof(double));
    t.ref.lse = calloc((size_t)(m * s.heads), sizeof(double));
    return t;
}

static void attention_free(struct attention *t)
{
    tensor_free(&t->qkv);
    tensor_free(&t->o);
    tensor_free(&t->lse);
    tensor_free(&t->dqkv);
    tensor_free(&t->dy);
    free(t->ref.o);
    free(t->ref.lse);
}

static void forward(struct iz_exec *x, void *arg)
{
    struct attention *t = arg;

    iz_attention_fwd(x, &t->a);
}

static void backward(struct iz_exec *x, void *arg)
{
    struct attention *t = arg;

    iz_attention_bwd(x, t->dqkv.v, t->dy.v, &t->a);
}

static double objective(void *arg)
{
    struct attention *t = arg;

    ref_attention(&t->ref);
    return fixture_dot(t->ref.o, t->dy.d, iz_view_len(t->o.v));
}

static void check_forward(struct attention *t)
{
    fixture_run(forward, t);
    ref_attention(&t->ref);
    fixture_close("o", &t->o, t->ref.o, 1e-5);
    fixture_close("lse", &t->lse, t->ref.lse, 2e-6);
}

static void check_keys(struct shape s, double scale, bool full)
{
    struct attention t = attention_new(s, scale);
    int64_t n = iz_view_len(t.qkv.v);
    double *want = calloc((size_t)n, sizeof *want);

    t.a.full = t.ref.full = full;
    check_forward(&t);
    fixture_run(backward, &t);
    ref_gradient(want, objective, &t, t.qkv.d, n);
    fixture_close("dqkv", &t.dqkv, want, 2e-5);
    free(want);
    attention_free(&t);
}

static void check_attention(struct shape s, double scale)
{
    check_keys(s, scale, false);
}

static void attention_agrees_with_reference(void **state)
{
    static const struct shape shape[] = {{1, 1, 1, 1, 0},   {2, 3, 2, 3, 0},
                                         {1, 17, 3, 7, 0},  {3, 7, 1, 17, 0},
                                         {1, 33, 1, 5, 0},  {1, 64, 1, 2, 0},
                                         {2, 65, 1, 3, 0},  {1, 130, 1, 2, 0},
                                         {1, 40, 1, 24, 0}, {1, 9, 1, 256, 0}};

    (void)state;
    fixture_seed();
    for (size_t i = 0; i < sizeof shape / sizeof shape[0]; i++)
        check_attention(shape[i], 2);
}

/* Groups of two, three and all heads; one key head of several tiles. */
static void grouped_queries_agree_with_reference(void **state)
{
    static const struct shape shape[] = {{2, 3, 2, 3, 1},
                                         {1, 17, 6, 5, 3},
                                         {2, 33, 6, 2, 2},
                                         {1, 70, 3, 4, 1},
                                         {3, 7, 4, 17, 4}};

    (void)state;
    fixture_seed();
    for (size_t i = 0; i < sizeof shape / sizeof shape[0]; i++)
        check_attention(shape[i], 2);
}

/* As in an encoder: one tile, several, and groups. */
static void attention_of_all_keys_agrees(void **state)
{
    static const struct shape shape[] = {{3, 1, 2, 3, 0},  {2, 5, 2, 4, 0},
                                         {1, 33, 3, 5, 0}, {2, 70, 1, 4, 0},
                                         {1, 65, 4, 2, 2}, {1, 300, 1, 3, 0}};

    (void)state;
    fixture_seed();
    for (size_t i = 0; i < sizeof shape / sizeof shape[0]; i++)
        check_keys(shape[i], 2, true);
}

/* Scores of thousands: one key takes everything, nothing overflows. */
static void attention_survives_huge_scores(void **state)
{
    struct attention t;

    (void)state;
    fixture_seed();
    t = attention_new((struct shape){1, 67, 1, 4, 0}, 1);
    for (int64_t i = 0; i < 67; i++)
        for (int k = 0; k < 8; k++)
            t.qkv.d[i * 12 + k] = 64 * floor(2 * t.qkv.d[i * 12 + k]);
    tensor_store(&t.qkv);
    check_forward(&t);
    fixture_run(backward, &t);
    tensor_load(&t.dqkv);
    for (int64_t i = 0; i < iz_view_len(t.dqkv.v); i++)
        assert_true(isfinite(t.dqkv.d[i]));
    attention_free(&t);
}

/* The logarithm of a sum is rounded, here by more than the largest power that a
 * float has: still no key weighs more than 1. */
static void attention_weighs_no_key_more_than_once(void **state)
{
    enum { T = 67, C = 4 };
    struct attention t;

    (void)state;
    fixture_seed();
    t = attention_new((struct shape){1, T, 1, C, 0}, 1);
    for (int64_t i = 0; i < T; i++)
        for (int k = 0; k < 2 * C; k++)
            t.qkv.d[i * 3 * C + k] *= 6e4;
    tensor_store(&t.qkv);
    fixture_run(forward, &t);
    fixture_run(backward, &t);
    tensor_load(&t.dqkv);
    for (int k = 0; k < C; k++) {
        double most = 0;

        for (int64_t i = 0; i < T; i++)
            most += fabs(t.dy.d[i * C + k]);
        for (int64_t i = 0; i < T; i++)
            assert_true(fabs(t.dqkv.d[i * 3 * C + 2 * C + k]) <= 1.001 * most);
    }
    attention_free(&t);
}

/* Rows before a changed token keep their bits, in forward; with a NaN the rows
 * of its own tile may be NaN, those of earlier tiles not. */
static void attention_is_causal(void **state)
{
    enum { T = 150, AT = 100, C = 6 };
    struct attention t;
    struct tensor before;

    (void)state;
    fixture_seed();
    t = attention_new((struct shape){1, T, 2, 3, 0}, 1);
    before = tensor_new(IZ_F32, T, C, 1);
    fixture_run(forward, &t);
    memcpy(before.v.p, t.o.v.p, (size_t)iz_view_bytes(t.o.v));
    for (int i = AT * 3 * C; i < T * 3 * C; i++)
        t.qkv.d[i] = fixture_uniform();
    tensor_store(&t.qkv);
    fixture_run(forward, &t);
    fixture_same_bits("rows before", iz_view_rows(before.v, 0, AT),
                      iz_view_rows(t.o.v, 0, AT));
    t.qkv.d[AT * 3 * C] = NAN;
    tensor_store(&t.qkv);
    fixture_run(forward, &t);
    fixture_same_bits("tile before", iz_view_rows(before.v, 0, 64),
                      iz_view_rows(t.o.v, 0, 64));
    tensor_load(&t.o);
    assert_true(isnan(t.o.d[AT * C]));
    tensor_free(&before);
    attention_free(&t);
}

/* The second of two samples has the bits that it has alone. */
static void a_sample_does_not_see_its_neighbours(void **state)
{
    enum { T = 77 };
    struct attention two, one;

    (void)state;
    fixture_seed();
    two = attention_new((struct shape){2, T, 4, 20, 2}, 2);
    one = attention_new((struct shape){1, T, 4, 20, 2}, 2);
    memcpy(one.qkv.v.p, iz_view_rows(two.qkv.v, T, T).p,
           (size_t)iz_view_bytes(one.qkv.v));
    memcpy(one.dy.v.p, iz_view_rows(two.dy.v, T, T).p,
           (size_t)iz_view_bytes(one.dy.v));
    fixture_run(forward, &two);
    fixture_run(backward, &two);
    fixture_run(forward, &one);
    fixture_run(backward, &one);
    fixture_same_bits("o", iz_view_rows(two.o.v, T, T), one.o.v);
    fixture_same_bits("lse", iz_view_rows(two.lse.v, 4, 4), one.lse.v);
    fixture_same_bits("dqkv", iz_view_rows(two.dqkv.v, T, T), one.dqkv.v);
    attention_free(&two);
    attention_free(&one);
}

int ops_attention(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(attention_agrees_with_reference),
        cmocka_unit_test(grouped_queries_agree_with_reference),
        cmocka_unit_test(attention_of_all_keys_agrees),
        cmocka_unit_test(attention_survives_huge_scores),
        cmocka_unit_test(attention_weighs_no_key_more_than_once),
        cmocka_unit_test(attention_is_causal),
        cmocka_unit_test(a_sample_does_not_see_its_neighbours),
    };
    const struct iz_simd_level *best = NULL;
    int failed = 0;

    for (const struct iz_simd_level *l = iz_simd_levels; l->name; l++) {
        if (!iz_simd_use(l))
            continue;
        best = best ? best : l;
        printf("attention at level %s\n", l->name);
        failed += cmocka_run_group_tests_name(l->name, tests, NULL, NULL);
    }
    iz_simd_use(best);
    return failed;
}
