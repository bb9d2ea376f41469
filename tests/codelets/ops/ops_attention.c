/* SPDX-License-Identifier: Apache-2.0 */
/* Attention, with sequences and widths below, at and above those of a tile. */
#include "tests/codelets/ops/scene.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/flat/simd.h"
#include "codelets/ops/gpu_ops.h"
#include "tests/codelets/ops/attention_case.h"

/* What attention.c does not refuse on this GPU; fp32 is computed always. */
static bool possible(enum iz_dtype act, const struct shape *s)
{
    int c = backend.x.numerics.capability;
    bool small = c == 86 || c == 89 || c / 10 == 12;
    if (backend.x.backend == IZ_CPU)
        return true;
    return backend_computes(act) && (act == IZ_F32 || s->d % 8 == 0) &&
           (s->d <= 128 || (c != 75 && (act == IZ_F32 || !small)));
}

static bool acts(enum iz_dtype t)
{
    return backend_acts(t) && backend_computes(t);
}

/* What an op may be asked. */
struct asked {
    struct shape s;
    int window;
    float scale, cap;
    bool sinks, full, cudnn, cudnn_bwd;
    int document;  /* rows of each; 0: all are one */
    int64_t chunk; /* rows at a time, 0: all */
};

/* Flops of forward: two products, of pairs that are not hidden but by
 * documents. */
static double flops_of(const struct asked *a)
{
    double pairs = 0;
    for (int64_t i = 0; i < a->s.seq; i++) {
        int64_t seen = a->full ? a->s.seq : i + 1;
        pairs += (double)(a->window && a->window < seen ? a->window : seen);
    }
    return 4 * pairs * (double)(a->s.samples * a->s.heads * a->s.d);
}

static void check(enum iz_dtype act, const struct asked *a)
{
    if (!backend_acts(act) || !possible(act, &a->s))
        return;
    struct attention t = attention_new(act, a->s, 2);
    t.window = a->window;
    t.scale = a->scale;
    t.cap = a->cap;
    t.sinks = a->sinks;
    t.full = a->full;
    t.cudnn = a->cudnn;
    t.cudnn_bwd = a->cudnn_bwd;
    if (a->document)
        attention_cut(&t, a->document);
    if (a->chunk)
        attention_chunk(&t, a->chunk);
    attention_check(&t);
    assert_true(t.s.flops == 2 * flops_of(a)); /* of the backward */
    attention_free(&t);
}

static void check_shapes(const struct shape *s, int n, bool full)
{
    for (int k = 0; k < 2 * n; k += scene_step())
        check(scene_type(k), &(struct asked){.s = s[k / 2], .full = full});
}

/* Every width of a kernel, filled and not, and every length of a tile; widths
 * of one element and odd ones are possible in fp32.  Then the heads of a 1.5B,
 * a 7B and a 14B model. */
static const struct shape causal[] = {
    {1, 1, 1, 1, 1},     {1, 1, 1, 8, 1},     {2, 3, 2, 3, 2},
    {1, 17, 3, 7, 3},    {3, 7, 1, 17, 1},    {1, 64, 2, 1, 2},
    {2, 65, 1, 3, 1},    {1, 130, 1, 2, 1},   {1, 40, 1, 24, 1},
    {1, 9, 1, 256, 1},   {3, 5, 2, 16, 2},    {2, 64, 2, 40, 2},
    {2, 65, 3, 17, 3},   {1, 65, 3, 64, 3},   {2, 130, 1, 96, 1},
    {1, 257, 1, 32, 1},  {2, 33, 1, 128, 1},  {2, 33, 2, 81, 2},
    {1, 130, 1, 80, 1},  {1, 130, 1, 128, 1}, {1, 70, 1, 200, 1},
    {1, 40, 1, 255, 1},  {1, 100, 1, 256, 1}, {2, 512, 2, 64, 2},
    {1, 1024, 1, 64, 1}, {1, 1000, 1, 128, 1}};

/* Groups of two, three, four and all heads: short ones, one key head of several
 * tiles, and tiles in which the turn from one head to the next comes early,
 * late and in the middle.  Then Llama 3.2, Llama 3 and Qwen 2.5. */
static const struct shape grouped[] = {
    {2, 3, 2, 3, 1},    {1, 17, 6, 5, 3},   {2, 33, 6, 2, 2},
    {1, 70, 3, 4, 1},   {3, 7, 4, 17, 4},   {2, 5, 2, 16, 1},
    {1, 130, 4, 64, 2}, {1, 33, 6, 128, 2}, {2, 97, 3, 32, 1},
    {1, 65, 8, 80, 2},  {1, 70, 2, 200, 1}, {3, 64, 4, 64, 4},
    {3, 33, 6, 32, 2},  {2, 130, 4, 64, 1}, {1, 513, 8, 128, 2},
    {1, 300, 7, 64, 1}};

/* As in an encoder; 197 are the patches of an image of 224 x 224, and one. */
static const struct shape whole[] = {
    {1, 33, 3, 5, 3},    {2, 70, 1, 4, 1},    {1, 65, 4, 2, 2},
    {3, 1, 2, 8, 2},     {2, 5, 2, 16, 2},    {1, 64, 2, 40, 2},
    {1, 65, 3, 64, 3},   {2, 130, 2, 64, 1},  {1, 130, 1, 96, 1},
    {2, 70, 1, 128, 1},  {1, 70, 2, 200, 1},  {1, 257, 2, 80, 2},
    {2, 130, 4, 128, 2}, {4, 197, 12, 64, 12}};

/* The last shapes of these lists, of models, only where there is time. */
static void attention_agrees_with_double(void **state)
{
    int rest = backend.large ? 0 : 3;
    check_shapes(causal, COUNT(causal) - rest, false);
    check_shapes(grouped, COUNT(grouped) - rest, false);
    check_shapes(whole, COUNT(whole) - rest, true);
}

/* cuDNN's forward, whose results our backward takes, and its backward, which
 * takes those of either. */
static void attention_by_cudnn_agrees(void **state)
{
    static const struct shape shape[] = {
        {1, 1, 1, 8, 1},     {3, 5, 2, 16, 2},   {2, 65, 3, 64, 3},
        {2, 33, 1, 128, 1},  {1, 130, 1, 80, 1}, {1, 70, 1, 200, 1},
        {1, 1024, 2, 64, 2}, {2, 130, 4, 64, 1}, {1, 513, 8, 128, 2}};
    if (backend.x.backend == IZ_CPU || backend.x.numerics.capability < 80 ||
        iz_cudnn_missing())
        skip();
    for (int i = 0; i < 4 * COUNT(shape); i += scene_step()) {
        bool back = i / 2 % 2;
        struct asked a = {.s = shape[i / 4],
                          .full = i / 4 % 3 == 1,
                          .cudnn = !back || i / 4 % 2,
                          .cudnn_bwd = back};
        if (!back || a.s.d <= 128)
            check(backend.act(i % 2 ? IZ_F16 : IZ_BF16), &a);
    }
}

/* Without tensor cores, and at 7.5 with less shared memory: every width and
 * length of a tile, up to the widest heads that are not refused.  At 8.6 the
 * widest heads where a block has 99 KiB of shared memory. */
static void older_gpus_agree_with_double(void **state)
{
    static const struct shape shape[] = {
        {1, 1, 1, 8, 1},    {3, 5, 2, 16, 2},   {1, 130, 4, 64, 2},
        {2, 33, 3, 40, 1},  {1, 65, 2, 128, 1}, {2, 49, 1, 96, 1},
        {1, 70, 2, 200, 1}, {1, 33, 1, 256, 1}, {1, 130, 2, 128, 1},
        {1, 40, 1, 256, 1}};
    if (!backend.become)
        skip();
    for (int k = 0; k < 2 * (COUNT(shape) - 2); k++) {
        backend.become(k % 2 ? 75 : 70);
        check_shapes(&shape[k / 2], 1, (k + k / 2) % 2);
    }
    backend.become(86);
    check_shapes(shape + COUNT(shape) - 2, 2, false);
    backend.become(80);
    check_shapes(shape + COUNT(shape) - 1, 1, false);
}

static int newest(void **state)
{
    if (backend.become)
        backend.become(90);
    return 0;
}

/* Scores of thousands, where one key takes everything; a sink that takes all,
 * and one that takes nothing. */
static void attention_survives_huge_numbers(void **state)
{
    static const double sink[] = {0, 30000, -30000};
    for (int k = 0; k < 9; k++) {
        enum iz_dtype act = fixture_types[k / 3];
        if (!acts(act))
            continue;
        struct attention t =
            attention_new(act, (struct shape){1, 67, 1, 8, 1}, 1);
        double *qkv = t.s.t[QKV].d;
        t.sinks = k % 3;
        t.s.t[SINKS].d[0] = sink[k % 3];
        for (int64_t i = 0; !t.sinks && i < 67 * 24; i++)
            if (i % 24 < 16)
                qkv[i] = 64 * floor(2 * qkv[i]);
        tensor_store(&t.s.t[QKV]);
        tensor_store(&t.s.t[SINKS]);
        attention_check(&t);
        attention_free(&t);
    }
}

/* The logarithm of a sum is rounded, here by more than the largest power that a
 * float has: still no key weighs more than 1. */
static void attention_weighs_no_key_more_than_once(void **state)
{
    enum { T = 67, C = 4 };
    if (backend.x.backend != IZ_CPU)
        skip();
    struct attention t =
        attention_new(IZ_F32, (struct shape){1, T, 1, C, 1}, 1);
    double *d = t.s.t[QKV].d;
    for (int64_t i = 0; i < T; i++)
        for (int k = 0; k < 2 * C; k++)
            d[i * 3 * C + k] *= 6e4;
    tensor_store(&t.s.t[QKV]);
    attention_run(&t, false);
    attention_run(&t, true);
    tensor_load(&t.s.t[DQKV]);
    d = t.s.t[DQKV].d;
    double *dy = t.s.t[DY].d;
    for (int k = 0; k < C; k++) {
        double most = 0;
        for (int64_t i = 0; i < T; i++)
            most += fabs(dy[i * C + k]);
        for (int64_t i = 0; i < T; i++)
            assert_true(fabs(d[i * 3 * C + 2 * C + k]) <= 1.001 * most);
    }
    attention_free(&t);
}

/* ---- documents that do not see each other ---- */

/* Documents of one row and of several tiles, whose borders lie anywhere in a
 * tile, or on its edge; groups of heads. */
static void documents_agree_with_double(void **state)
{
    static const int rows[] = {3, 47, 1, 128, 64};
    static const struct shape shape[] = {
        {1, 1, 1, 8, 1},     {3, 5, 2, 16, 2},   {2, 65, 3, 17, 3},
        {1, 130, 4, 64, 2},  {1, 257, 1, 32, 1}, {1, 260, 2, 40, 1},
        {1, 140, 2, 128, 2}, {1, 97, 1, 200, 1}};
    for (int i = 0; i < COUNT(shape) * COUNT(rows); i += scene_step()) {
        const struct shape *s = &shape[i % COUNT(shape)];
        int cut = i / COUNT(shape);
        enum iz_dtype act =
            backend.act(fixture_types[(i % COUNT(shape) + cut) % 3]);
        check(possible(act, s) ? act : IZ_F32,
              &(struct asked){.s = *s, .document = rows[cut]});
    }
}

/* ---- windows, scales, caps and sinks ---- */

/* Windows of one row, of a tile and about, in tiles and over them, and longer
 * than a sample; caps that squeeze scores of some tens, and one that hardly
 * does.  Chunks of one row, of an odd number, of a panel, of tiles, of all rows
 * and more. */
static const struct asked asked[] = {
    {{1, 7, 1, 8, 1}, .window = 1},
    {{2, 130, 2, 32, 1}, .window = 5},
    {{1, 300, 2, 64, 2}, .window = 64},
    {{1, 260, 1, 128, 1}, .window = 65, .scale = 0.11f},
    {{1, 257, 3, 40, 1}, .window = 127, .document = 47},
    {{1, 390, 1, 16, 1}, .window = 200, .document = 47},
    {{2, 65, 2, 24, 2}, .window = 1000},
    {{3, 33, 2, 80, 1}, .scale = 1},
    {{2, 40, 3, 48, 3}, .scale = 0.3f, .full = true},
    {{2, 77, 2, 16, 1}, .scale = 1, .cap = 3},
    {{1, 130, 4, 64, 2}, .cap = 50, .document = 47},
    {{1, 97, 1, 256, 1}, .scale = 0.0625f, .cap = 5, .full = true},
    {{1, 1, 2, 8, 1}, .sinks = true},
    {{2, 150, 3, 64, 1}, .sinks = true},
    {{2, 70, 2, 200, 1}, .sinks = true, .full = true},
    {{2, 140, 4, 32, 2}, 30, 0.5f, 2, .sinks = true, .document = 47},
    {{1, 140, 2, 128, 1}, .window = 33, .cap = 9, .sinks = true},
    {{1, 7, 1, 8, 1}, .chunk = 1},
    {{1, 67, 2, 8, 1}, .sinks = true, .chunk = 3},
    {{1, 140, 2, 64, 2}, .chunk = 8},
    {{1, 300, 2, 32, 1}, .chunk = 128},
    {{1, 200, 2, 128, 1}, .scale = 0.2f, .chunk = 64},
    {{1, 33, 3, 16, 1}, .sinks = true, .full = true, .chunk = 33},
    {{1, 150, 2, 24, 1}, .cap = 5, .full = true, .chunk = 64},
    {{1, 261, 3, 16, 1}, 0, 0, 9, .sinks = true, .document = 47, .chunk = 77},
    {{1, 390, 1, 40, 1}, .window = 50, .document = 47, .chunk = 100},
    {{1, 391, 2, 16, 1}, .window = 1, .chunk = 130},
    {{1, 300, 2, 48, 1}, .window = 200, .cap = 3, .sinks = true, .chunk = 128},
    {{1, 110, 1, 200, 1}, 30, 0, 0, true, .document = 47, .chunk = 41},
    {{1, 97, 1, 256, 1}, .document = 47, .chunk = 200}};

static void what_is_asked_agrees_with_double(void **state)
{
    for (int k = 0; k < 2 * COUNT(asked); k += scene_step())
        check(scene_type(k), &asked[k / 2]);
}

/* Where tiles are the same; and keys after those of a chunk may be NaN, as they
 * are not there yet. */
static void chunks_have_the_bits_of_the_whole(void **state)
{
    enum { T = 333, C = 48 };
    for (int k = 0; k < 16; k++) {
        enum iz_dtype act = scene_type(k);
        int64_t rows = k / 8 ? 100 : 128, same = k / 8 ? 100 : T;
        if (!backend_acts(act))
            continue;
        struct attention t =
            attention_new(act, (struct shape){1, T, 2, C / 2, 1}, 2);
        struct iz_view o = t.s.t[O].v, late;
        t.sinks = true;
        t.window = k / 4 % 2 ? 150 : 0;
        if (k / 2 % 2)
            attention_cut(&t, 47);
        attention_run(&t, false);
        struct tensor whole = tensor_copy(&t.s.t[O]);
        attention_chunk(&t, rows);
        late = iz_view_rows(t.s.t[KV].v, same, T - same);
        memset(late.p, 0xff, (size_t)iz_view_bytes(late));
        attention_run(&t, false);
        attention_run(&t, true);
        fixture_same_bits("o", iz_view_rows(whole.v, 0, same),
                          iz_view_rows(o, 0, same));
        tensor_load(&t.s.t[DQKV]);
        for (int64_t i = 0; i < same * C; i++)
            assert_false(isnan(t.s.t[DQKV].d[i / C * 2 * C + i % C]));
        tensor_free(&whole);
        attention_free(&t);
    }
}

/* The rows of `from` from row `at` on. */
static void take_rows(struct tensor *to, const struct tensor *from, int64_t at)
{
    memcpy(to->v.p, iz_view_rows(from->v, at, to->v.rows).p,
           (size_t)iz_view_bytes(to->v));
}

/* After a run of `all`, of 4 heads of 24 columns: n rows, of a sample or a
 * document, have the bits that they have alone. */
static void check_alone(const struct attention *all, int64_t at, int64_t n)
{
    const struct tensor *a = all->s.t;
    const int64_t seq = all->shape.seq;
    struct attention one =
        attention_new(a[O].v.dtype, (struct shape){1, n, 4, 24, 2}, 2);
    take_rows(&one.s.t[QKV], &a[QKV], at);
    take_rows(&one.s.t[DY], &a[DY], at);
    attention_run(&one, false);
    attention_run(&one, true);
    fixture_same_bits("o", iz_view_rows(a[O].v, at, n), one.s.t[O].v);
    fixture_same_bits("dqkv", iz_view_rows(a[DQKV].v, at, n), one.s.t[DQKV].v);
    for (int64_t h = 0; h < 4; h++)
        assert_memory_equal(
            (float *)a[LSE].v.p + (at / seq * 4 + h) * seq + at % seq,
            (float *)one.s.t[LSE].v.p + h * n, (size_t)n * sizeof(float));
    attention_free(&one);
}

/* A sample, and a document that begins with a tile: of one tile, of two, and
 * the last. */
static void neighbours_are_not_seen(void **state)
{
    static const int64_t document[][2] = {{0, 128}, {128, 256}, {384, 77}};
    for (int i = 0; i < 4; i += 3) {
        enum iz_dtype act = scene_type(i);
        if (!backend_acts(act))
            continue;
        struct attention two =
            attention_new(act, (struct shape){2, 77, 4, 24, 2}, 2);
        struct attention all =
            attention_new(act, (struct shape){1, 461, 4, 24, 2}, 2);
        attention_cut(&all, 128);
        for (int32_t k = 256; k < 384; k++)
            all.begins[k] = 128;
        for (int k = 0; k < 4; k++)
            attention_run(k % 2 ? &all : &two, k / 2);
        check_alone(&two, 77, 77);
        for (int k = 0; k < COUNT(document); k++)
            check_alone(&all, document[k][0], document[k][1]);
        attention_free(&two);
        attention_free(&all);
    }
}

/* How many of the tiles of 128 rows a tensor has, in its columns from c0 to c1,
 * are not numbers somewhere. */
static int tiles_spoilt(struct tensor *t, int64_t c0, int64_t c1)
{
    int n = 0;
    tensor_load(t);
    for (int64_t i0 = 0; i0 < t->v.rows; i0 += 128) {
        bool spoilt = false;
        for (int64_t i = i0; i < i0 + 128; i++)
            for (int64_t c = c0; c < c1; c++)
                spoilt |= isnan(t->d[i * t->v.cols + c]);
        n += spoilt;
    }
    return n;
}

/* What is computed of a NaN is NaN, though it weighs 0: so what is not spoilt
 * by a document, or by what lies before a window, was not computed with it. */
static void what_is_hidden_is_skipped(void **state)
{
    enum { TILES = 3, T = TILES * 128, C = 16, LD = 3 * C };
    for (int k = 0; k < 2 * TILES; k++) {
        enum iz_dtype act = scene_type(k);
        if (!backend_acts(act))
            continue;
        for (int apart = 0; apart < 3; apart++) {
            struct attention t =
                attention_new(act, (struct shape){1, T, 1, C, 1}, 1);
            int64_t from = k / 2 * 128, sees = TILES - k / 2;
            if (apart) {
                sees = apart < sees ? apart : sees;
                t.window = apart == 2 ? 128 : 0;
            }
            if (apart == 1)
                attention_cut(&t, 128);
            for (int64_t i = from; i < from + 128; i++)
                for (int c = C; c < LD; c++)
                    t.s.t[QKV].d[i * LD + c] = NAN;
            tensor_store(&t.s.t[QKV]);
            attention_run(&t, false);
            assert_int_equal(tiles_spoilt(&t.s.t[O], 0, C), sees);
            attention_run(&t, true);
            assert_int_equal(tiles_spoilt(&t.s.t[DQKV], 0, C), sees);
            if (apart == 1)
                assert_int_equal(tiles_spoilt(&t.s.t[DQKV], C, LD), 1);
            attention_free(&t);
        }
    }
}

/* Heads of d columns on a GPU. */
struct heads {
    enum iz_dtype type;
    int64_t d;
    int capability;
};

/* In a dry run. */
static void heads_of(const void *arg)
{
    const struct heads *h = arg;
    struct iz_exec x = iz_exec_dry(IZ_CUDA, h->type);
    struct iz_attention a = {
        .qkv = {.dtype = h->type, .rows = 4, .cols = 3 * h->d},
        .o = {.dtype = h->type, .rows = 4, .cols = h->d},
        .lse = {.dtype = IZ_F32, .rows = 1, .cols = 4},
        .seq = 4,
        .heads = 1,
    };
    x.numerics.capability = h->capability;
    iz_attention_fwd(&x, &a);
}

/* Already in the dry run, which is before the first step. */
static void impossible_heads_are_refused(void **state)
{
    static const struct {
        struct heads h;
        const char *message;
    } bad[] = {{{IZ_BF16, 12, 90},
                "12 columns; possible are multiples of 8 up to 256"},
               {{IZ_F32, 257, 90}, "257 columns; possible are all up to 256"},
               {{IZ_F32, 129, 75},
                "capability 7.5: heads of 129 columns; possible are all up to "
                "128"},
               {{IZ_F16, 136, 89},
                "capability 8.9: heads of 136 columns; possible are multiples "
                "of 8 up to 128"}};
    heads_of(&(struct heads){IZ_F16, 256, 90});
    heads_of(&(struct heads){IZ_F32, 255, 90});
    for (int i = 0; i < COUNT(bad); i++)
        scene_dies(heads_of, &bad[i].h, bad[i].message);
}

int ops_attention(void)
{
    const struct CMUnitTest tests[] = {
        SEEDED(attention_agrees_with_double),
        SEEDED(attention_by_cudnn_agrees),
        cmocka_unit_test_setup_teardown(older_gpus_agree_with_double,
                                        fixture_seed, newest),
        SEEDED(attention_survives_huge_numbers),
        SEEDED(attention_weighs_no_key_more_than_once),
        SEEDED(documents_agree_with_double),
        SEEDED(neighbours_are_not_seen),
        SEEDED(what_is_asked_agrees_with_double),
        SEEDED(chunks_have_the_bits_of_the_whole),
        SEEDED(what_is_hidden_is_skipped),
    };
    const struct CMUnitTest once[] = {SEEDED(impossible_heads_are_refused)};
    const struct iz_simd_level *best = NULL;
    int failed = cmocka_run_group_tests_name("heads", once, NULL, NULL);
    if (backend.x.backend != IZ_CPU)
        return failed +
               cmocka_run_group_tests_name("attention", tests, NULL, NULL);
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
