/* SPDX-License-Identifier: Apache-2.0 */
/* The kernels of attention, run on the CPU, through the op itself: against
 * double precision for sequences and widths below, at and above those of a
 * tile. */
#include "tests/codelets/ops/fixture.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/kernels/launch.h"
#include "tests/codelets/gpu/attention_case.h"
#include "tests/codelets/gpu/attention_order.h"
#include "tests/codelets/gpu/dies.h"
#include "tests/codelets/gpu/mma_layout.h"
#include "tests/codelets/ops/reference.h"
#include "tests/fake/cuda_on_cpu/device.h"

static const struct iz_cuda_ops table = {
    .attention_fwd = iz_attention_fwd_cuda,
    .attention_bwd = iz_attention_bwd_cuda,
};

const struct iz_cuda_ops *const iz_cuda_ops = &table;

static void on_gpu(int c)
{
    attention_capability = c;
    emu_device(c);
}

static int newest(void **state)
{
    (void)state;
    on_gpu(90);
    return 0;
}

static void check_keys(enum iz_dtype type, struct shape s, double scale,
                       bool full)
{
    struct attention t = attention_new(type, s, scale);

    t.a.full = t.ref.full = full;
    attention_double_run(&t.ref);
    attention_run(&t, false);
    attention_double_near(&t.ref, "o", &t.o, t.ref.o);
    attention_double_near(&t.ref, "lse", &t.lse, t.ref.lse);
    attention_run(&t, true);
    attention_double_near(&t.ref, "dqkv", &t.dqkv, t.ref.dqkv);
    attention_free(&t);
}

static void check_shape(enum iz_dtype type, struct shape s, double scale)
{
    check_keys(type, s, scale, false);
}

/* Every width of a kernel, filled and not, and every length of a tile. */
static void sixteen_bits_agree_with_double(void **state)
{
    static const struct shape shape[] = {
        {1, 1, 1, 8, 1},    {3, 5, 2, 16, 2},    {2, 64, 2, 40, 2},
        {1, 65, 3, 64, 3},  {1, 130, 2, 64, 2},  {2, 130, 1, 96, 1},
        {1, 257, 1, 32, 1}, {2, 33, 1, 128, 1},  {1, 257, 1, 64, 1},
        {1, 130, 1, 80, 1}, {1, 130, 1, 128, 1}, {1, 70, 1, 200, 1},
        {1, 100, 1, 256, 1}};

    (void)state;
    fixture_seed();
    for (size_t i = 0; i < sizeof shape / sizeof shape[0]; i++) {
        check_shape(IZ_BF16, shape[i], 2);
        check_shape(IZ_F16, shape[i], 2);
    }
}

/* Odd widths too. */
static void fp32_agrees_with_double(void **state)
{
    static const struct shape shape[] = {{1, 1, 1, 1, 1},   {3, 5, 2, 7, 2},
                                         {2, 65, 3, 17, 3}, {1, 130, 2, 64, 2},
                                         {1, 64, 2, 1, 2},  {1, 70, 1, 128, 1},
                                         {2, 33, 2, 81, 2}, {1, 40, 1, 255, 1}};

    (void)state;
    fixture_seed();
    for (size_t i = 0; i < sizeof shape / sizeof shape[0]; i++)
        check_shape(IZ_F32, shape[i], 2);
}

/* Without tensor cores, and at 7.5 with less shared memory: every width and
 * length of a tile, up to the widest heads that are not refused. */
static void older_gpus_agree_with_double(void **state)
{
    static const struct shape shape[] = {
        {1, 1, 1, 8, 1},    {3, 5, 2, 16, 2},   {1, 130, 4, 64, 2},
        {2, 33, 3, 40, 1},  {1, 65, 2, 128, 1}, {2, 49, 1, 96, 1},
        {1, 70, 2, 200, 1}, {1, 33, 1, 256, 1}};
    static const int gpu[] = {70, 75};

    (void)state;
    fixture_seed();
    for (size_t k = 0; k < sizeof gpu / sizeof gpu[0]; k++) {
        on_gpu(gpu[k]);
        for (size_t i = 0; i < sizeof shape / sizeof shape[0]; i++) {
            if (gpu[k] == 75 && shape[i].d > 128)
                continue;
            for (int full = 0; full < 2; full++) {
                check_keys(IZ_F16, shape[i], 2, full);
                check_keys(IZ_F32, shape[i], 2, full);
            }
        }
    }
}

/* The widest heads where a block has 99 KiB of shared memory. */
static void less_shared_memory_is_enough(void **state)
{
    static const struct shape narrow = {1, 130, 2, 128, 1},
                              wide = {1, 40, 1, 256, 1};

    (void)state;
    fixture_seed();
    on_gpu(86);
    for (int t = 0; t < 3; t++)
        check_shape(fixture_types[t], narrow, 2);
    check_shape(IZ_F32, wide, 2);
    on_gpu(80);
    for (int t = 0; t < 3; t++)
        check_shape(fixture_types[t], wide, 2);
}

/* Groups of two, three, four and all heads: short ones, and tiles in which the
 * turn from one head to the next comes early, late and in the middle. */
static void grouped_queries_agree_with_double(void **state)
{
    static const struct shape shape[] = {{2, 5, 2, 16, 1},   {1, 130, 4, 64, 2},
                                         {1, 33, 6, 128, 2}, {2, 97, 3, 32, 1},
                                         {1, 65, 8, 80, 2},  {1, 70, 2, 200, 1},
                                         {3, 64, 4, 64, 4}};

    (void)state;
    fixture_seed();
    for (size_t i = 0; i < sizeof shape / sizeof shape[0]; i++)
        for (int t = 0; t < 3; t++)
            check_shape(fixture_types[t], shape[i], 2);
}

/* As in an encoder: every width of a kernel, lengths around those of a tile. */
static void attention_of_all_keys_agrees(void **state)
{
    static const struct shape shape[] = {
        {3, 1, 2, 8, 2},    {2, 5, 2, 16, 2},   {1, 64, 2, 40, 2},
        {1, 65, 3, 64, 3},  {2, 130, 2, 64, 1}, {1, 197, 1, 64, 1},
        {1, 130, 1, 96, 1}, {2, 70, 1, 128, 1}, {1, 70, 2, 200, 1}};

    (void)state;
    fixture_seed();
    for (size_t i = 0; i < sizeof shape / sizeof shape[0]; i++)
        for (int t = 0; t < 3; t++)
            check_keys(fixture_types[t], shape[i], 2, true);
}

/* Scores of thousands: one key takes everything, nothing overflows. */
static void huge_scores_are_survived(void **state)
{
    (void)state;
    fixture_seed();
    for (int k = 0; k < 3; k++) {
        struct attention t =
            attention_new(fixture_types[k], (struct shape){1, 67, 1, 8, 1}, 1);

        for (int64_t i = 0; i < 67; i++)
            for (int j = 0; j < 16; j++)
                t.qkv.d[i * 24 + j] = 64 * floor(2 * t.qkv.d[i * 24 + j]);
        tensor_store(&t.qkv);
        attention_double_run(&t.ref);
        attention_run(&t, false);
        attention_double_near(&t.ref, "o", &t.o, t.ref.o);
        attention_double_near(&t.ref, "lse", &t.lse, t.ref.lse);
        attention_run(&t, true);
        attention_double_near(&t.ref, "dqkv", &t.dqkv, t.ref.dqkv);
        attention_free(&t);
    }
}

/* Rows before a changed token keep their bits; with a NaN those of its own tile
 * may be NaN, those of earlier tiles not, and no row after it hides it. */
static void check_causal(enum iz_dtype type)
{
    enum { T = 150, AT = 100, C = 16 };
    struct attention t = attention_new(type, (struct shape){1, T, 2, 8, 2}, 1);
    struct tensor before = tensor_new(type, T, C, 1);

    attention_run(&t, false);
    memcpy(before.v.p, t.o.v.p, (size_t)iz_view_bytes(t.o.v));
    for (int i = AT * 3 * C; i < T * 3 * C; i++)
        t.qkv.d[i] = fixture_uniform();
    tensor_store(&t.qkv);
    attention_run(&t, false);
    fixture_same_bits("rows before", iz_view_rows(before.v, 0, AT),
                      iz_view_rows(t.o.v, 0, AT));
    for (int i = C; i < 3 * C; i++)
        t.qkv.d[AT * 3 * C + i] = NAN;
    tensor_store(&t.qkv);
    attention_run(&t, false);
    fixture_same_bits("tile before", iz_view_rows(before.v, 0, 64),
                      iz_view_rows(t.o.v, 0, 64));
    tensor_load(&t.o);
    for (int i = AT * C; i < T * C; i++)
        assert_true(isnan(t.o.d[i]));
    tensor_free(&before);
    attention_free(&t);
}

static void no_row_sees_a_later_one(void **state)
{
    (void)state;
    fixture_seed();
    for (int i = 0; i < 3; i++)
        check_causal(fixture_types[i]);
}

/* The emulation shuffles blocks and threads differently each time. */
static void bits_are_the_same_every_time(void **state)
{
    (void)state;
    fixture_seed();
    for (int i = 0; i < 3; i++) {
        struct attention t = attention_new(fixture_types[i],
                                           (struct shape){2, 140, 2, 24, 2}, 2);
        struct tensor o = t.o, dqkv = t.dqkv;

        attention_run(&t, false);
        attention_run(&t, true);
        t.o = tensor_new(o.v.dtype, o.v.rows, o.v.cols, 1);
        t.dqkv = tensor_new(o.v.dtype, dqkv.v.rows, dqkv.v.cols, 1);
        t.a.o = t.o.v;
        attention_run(&t, false);
        attention_run(&t, true);
        fixture_same_bits("o", o.v, t.o.v);
        fixture_same_bits("dqkv", dqkv.v, t.dqkv.v);
        tensor_free(&o);
        tensor_free(&dqkv);
        attention_free(&t);
    }
}

/* c against a b, which is exact but for sums in fp32. */
static void check_product(const struct tensor *c, const struct tensor *a,
                          const struct tensor *b)
{
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 8; j++) {
            double want = 0, got = (double)((float *)c->v.p)[i * 8 + j];

            for (int k = 0; k < 16; k++)
                want += a->d[i * 16 + k] * b->d[k * 8 + j];
            assert_true(fabs(got - want) < 16 * 16 * 0x1p-24);
        }
}

static void check_mma(enum iz_dtype t)
{
    struct tensor a = tensor_new(t, 16, 16, 1), b = tensor_new(t, 16, 8, 1);
    struct tensor bt = tensor_new(t, 8, 16, 1),
                  c = tensor_new(IZ_F32, 16, 8, 1);

    for (int i = 0; i < 128; i++)
        bt.d[i % 8 * 16 + i / 8] = b.d[i];
    tensor_store(&bt);
    mma_by_formulas(c.v.p, a.v.p, b.v.p, t, NULL);
    check_product(&c, &a, &b);
    memset(c.v.p, 0xff, 16 * 8 * sizeof(float));
    mma_by_loads(c.v.p, a.v.p, b.v.p, 0, t, NULL);
    check_product(&c, &a, &b);
    memset(c.v.p, 0xff, 16 * 8 * sizeof(float));
    mma_by_loads(c.v.p, a.v.p, bt.v.p, 1, t, NULL);
    check_product(&c, &a, &b);
    tensor_free(&a);
    tensor_free(&b);
    tensor_free(&bt);
    tensor_free(&c);
}

static void fragments_are_as_documented(void **state)
{
    (void)state;
    fixture_seed();
    check_mma(IZ_BF16);
    check_mma(IZ_F16);
}

static void heads_of(enum iz_dtype type, int64_t d)
{
    struct iz_exec x = iz_exec_dry(IZ_CUDA, type);
    struct iz_attention a = {
        .qkv = {.dtype = type, .rows = 4, .cols = 3 * d},
        .o = {.dtype = type, .rows = 4, .cols = d},
        .lse = {.dtype = IZ_F32, .rows = 1, .cols = 4},
        .seq = 4,
        .heads = 1,
    };

    x.capability = attention_capability;
    iz_attention_fwd(&x, &a);
}

static void odd_heads(void)
{
    heads_of(IZ_BF16, 12);
}

static void wide_heads(void)
{
    heads_of(IZ_F32, 257);
}

static void wide_heads_of_turing(void)
{
    on_gpu(75);
    heads_of(IZ_F32, 129);
}

static void wide_heads_of_ada(void)
{
    on_gpu(89);
    heads_of(IZ_F16, 136);
}

/* Already in the dry run, which is before the first step. */
static void impossible_heads_are_refused(void **state)
{
    (void)state;
    dies(odd_heads, "12 columns; possible are multiples of 8 up to 256");
    dies(wide_heads, "257 columns; possible are all up to 256");
    heads_of(IZ_F16, 256);
    heads_of(IZ_F32, 255);
    dies(wide_heads_of_turing,
         "capability 7.5: heads of 129 columns; possible are all up to 128");
    dies(wide_heads_of_ada, "capability 8.9: heads of 136 columns; possible "
                            "are multiples of 8 up to 128");
}

/* Every tile of every head or group once; a chunk after the other, and in it
 * tile after tile. */
static void check_order(int tiles, int all, int chunk, int group)
{
    int n = all / group, blocks = tiles * n;
    int *at = fixture_take(3 * blocks * (int64_t)sizeof *at);
    int *head = at, *tile = head + blocks, *after = tile + blocks;
    char *seen = calloc((size_t)blocks, 1);

    attention_order(head, tile, after, blocks, all, chunk, group);
    for (int i = 0; i < blocks; i++) {
        int part = head[i] / (chunk / group);

        assert_in_range(head[i], 0, n - 1);
        assert_in_range(tile[i], 0, tiles - 1);
        assert_int_equal(tile[i] + after[i], tiles - 1);
        assert_int_equal(seen[head[i] * tiles + tile[i]]++, 0);
        if (i == 0)
            continue;
        assert_true(part >= head[i - 1] / (chunk / group));
        if (part == head[i - 1] / (chunk / group))
            assert_true(tile[i] > tile[i - 1] ||
                        (tile[i] == tile[i - 1] && head[i] == head[i - 1] + 1));
    }
    free(seen);
    free(at);
}

static void blocks_take_chunks_of_heads(void **state)
{
    (void)state;
    check_order(1, 1, 1, 1);
    check_order(7, 13, 13, 1);
    check_order(7, 13, 4, 1);
    check_order(3, 5, 1, 1);
    check_order(1, 33, 16, 1);
    check_order(16, 64, 16, 1);
    check_order(5, 21, 6, 3);
    check_order(5, 20, 8, 4);
    check_order(9, 12, 4, 4);
}

static double objective(void *arg)
{
    struct attention *t = arg;
    struct ref_attention r = {
        .o = t->o.d,
        .lse = t->lse.d,
        .qkv = t->qkv.d,
        .samples = t->ref.samples,
        .seq = t->ref.seq,
        .heads = t->ref.heads,
        .kv_heads = t->ref.kv_heads,
        .c = t->ref.heads * t->ref.d,
    };

    ref_attention(&r);
    return fixture_dot(t->o.d, t->dy.d, iz_view_len(t->o.v));
}

/* The gradient in double against differences of the reference of the ops. */
static void double_agrees_with_differences(void **state)
{
    struct attention t;
    int64_t n;
    double *want;

    (void)state;
    fixture_seed();
    t = attention_new(IZ_F32, (struct shape){2, 7, 4, 5, 2}, 2);
    n = iz_view_len(t.qkv.v);
    want = fixture_take(n * (int64_t)sizeof *want);
    attention_double_run(&t.ref);
    ref_gradient(want, objective, &t, t.qkv.d, n);
    objective(&t);
    for (int64_t i = 0; i < n; i++)
        assert_true(fabs(want[i] - t.ref.dqkv[i].is) < 1e-8);
    for (int64_t i = 0; i < iz_view_len(t.o.v); i++)
        assert_true(fabs(t.o.d[i] - t.ref.o[i].is) < 1e-13);
    for (int64_t i = 0; i < iz_view_len(t.lse.v); i++)
        assert_true(fabs(t.lse.d[i] - t.ref.lse[i].is) < 1e-13);
    free(want);
    attention_free(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(double_agrees_with_differences),
        cmocka_unit_test(fragments_are_as_documented),
        cmocka_unit_test(blocks_take_chunks_of_heads),
        cmocka_unit_test(sixteen_bits_agree_with_double),
        cmocka_unit_test(fp32_agrees_with_double),
        cmocka_unit_test_teardown(older_gpus_agree_with_double, newest),
        cmocka_unit_test_teardown(less_shared_memory_is_enough, newest),
        cmocka_unit_test(grouped_queries_agree_with_double),
        cmocka_unit_test(attention_of_all_keys_agrees),
        cmocka_unit_test(huge_scores_are_survived),
        cmocka_unit_test(no_row_sees_a_later_one),
        cmocka_unit_test(bits_are_the_same_every_time),
        cmocka_unit_test(impossible_heads_are_refused),
    };

    return cmocka_run_group_tests_name("attention_cuda", tests, NULL, NULL);
}
