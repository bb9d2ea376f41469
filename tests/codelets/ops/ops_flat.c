/* SPDX-License-Identifier: Apache-2.0 */
/* Copies, sums, norms and updates on a GPU: the bits of the CPU, which
 * tests/codelets/flat has for itself. */
#include "tests/codelets/ops/scene.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "codelets/base/mix.h"
#include "codelets/buffer/flat_buffer.h"
#include "codelets/flat/flat.h"
#include "codelets/flat/half.h"
#include "codelets/ops/gpu_ops.h"

enum { IN_MOST = 4, MOST = 3000001 };

/* Any number for choice i of case k: so many cases try all pairs of choices. */
static int chosen(uint64_t k, int i)
{
    return (int)(iz_mix(k * IZ_GOLDEN + (uint64_t)i) >> 33);
}

/* ---- copies ------------------------------------------------------------- */

static void copy_and_clear(struct iz_exec *x, const struct iz_view *v,
                           const void *arg)
{
    int64_t all = iz_view_bytes(v[0]);
    if (x->dry)
        return;
    iz_buffer_copy(x, v[1].p, v[0].p, all);
    iz_buffer_clear(x, v[1].p, all / 6);
}

static void copies_move_every_byte(void **state)
{
    static const int64_t n[] = {1, 7, 1024, 4099, 1048583, MOST};
    for (int i = 0; i < COUNT(n); i++) {
        struct scene s = {.n = 2,
                          .t = {tensor_new(IZ_BF16, 1, n[i], 4),
                                tensor_new(IZ_BF16, 1, n[i], 4)},
                          .exact = true};
        scene_run(&s, &(struct pass){copy_and_clear, 1, 2}, NULL);
        scene_free(&s);
    }
}

/* ---- sums --------------------------------------------------------------- */

struct sum {
    int64_t n;
    enum iz_dtype out, in;
    int n_in, shift;       /* 2: of the inputs, 1: of the output too */
    bool accumulate, over; /* over: the output is also the last input */
};

/* v[0]: out; then the inputs. */
static void sum(struct iz_exec *x, const struct iz_view *v, const void *arg)
{
    const struct sum *s = arg;
    const void *in[IN_MOST];
    for (int i = 0; i < s->n_in; i++)
        in[i] = v[1 + i].p;
    if (s->over)
        in[s->n_in - 1] = v[0].p;
    if (!x->dry)
        iz_buffer_sum(x, v[0].p, s->out, s->accumulate, in, s->n_in, s->in,
                      s->n);
    memset(in, 0xff, sizeof(in)); /* a call keeps nothing of its arguments */
}

static void check_sum(struct sum k)
{
    struct scene s = {.n = 1 + k.n_in,
                      .late = ~(k.shift == 2 ? BIT(0) : 0),
                      .late_by = k.shift,
                      .exact = true};
    for (int i = 0; i <= k.n_in; i++)
        s.t[i] = tensor_new(i ? k.in : k.out, 1, k.n, 4);
    scene_run(&s, &(struct pass){sum, ~0u, 1}, &k);
    scene_free(&s);
}

static void sum_has_the_bits_of_the_cpu(void **state)
{
    static const int64_t n[] = {0, 1, 7, 8, 2048, 4099};
    for (uint64_t k = 0; k < 300; k += (uint64_t)scene_step())
        check_sum((struct sum){n[k % 6], fixture_types[chosen(k, 0) % 3],
                               fixture_types[chosen(k, 1) % 3],
                               1 + chosen(k, 2) % 4, chosen(k, 3) % 3,
                               chosen(k, 4) % 2, false});
    check_sum((struct sum){MOST, IZ_F32, IZ_BF16, 2, 0, true, false});
    check_sum((struct sum){1500, IZ_F32, IZ_F32, 2, .over = true});
}

static void sum_too_many(const void *arg)
{
    const void *in[IZ_SUM_INPUTS_MAX + 1] = {0};
    float out = 0;
    iz_flat_sum_cuda(&backend.x, &out, IZ_F32, false, in, IZ_SUM_INPUTS_MAX + 1,
                     IZ_F32, 1);
}

static void sum_refuses_too_many_inputs(void **state)
{
    scene_dies(sum_too_many, NULL, "a sum of 1025 buffers");
}

/* ---- norm --------------------------------------------------------------- */

/* v[1]: the result, or the sums of squares. */
static void norm2(struct iz_exec *x, const struct iz_view *v, const void *arg)
{
    int64_t mark = iz_exec_mark(x), n = iz_view_len(v[0]);
    if (!x->dry)
        iz_buffer_norm2(x, v[1].p, v[0].p, v[0].dtype, n);
    else if (x->backend == IZ_CUDA)
        iz_exec_work(x, IZ_U8, 1, iz_flat_norm2_scratch_bytes(n));
    iz_exec_release(x, mark);
}

static void squares(struct iz_exec *x, const struct iz_view *v, const void *arg)
{
    if (!x->dry)
        iz_buffer_squares(x, v[1].p, v[0].p, v[0].dtype, iz_view_len(v[0]));
}

static void check_norm(scene_op *op, enum iz_dtype t, int64_t n, int shift,
                       int64_t sums_of)
{
    struct scene s = {.n = 2,
                      .pinned = 2,
                      .late = 1,
                      .late_by = shift,
                      .t = {tensor_new(t, 1, n, 4), bytes_new(8 * sums_of)},
                      .exact = true};
    scene_run(&s, &(struct pass){op, 1, 2}, NULL);
    scene_free(&s);
}

static void norm_has_the_bits_of_the_cpu(void **state)
{
    static const int64_t n[] = {0,       1,    7,     31,      32,
                                33,      992,  993,   1023,    1024,
                                1025,    4099, 40001, 1 << 20, (1 << 20) + 7,
                                1048583, MOST};
    static const int64_t m[] = {0, 1, 33, 1024, 1025, 40001, 70001, MOST};
    for (int k = 0; k < 2 * COUNT(n); k += scene_step())
        check_norm(norm2, fixture_types[k % 3], n[k / 2], k % 2, 1);
    for (int k = 0; k < 2 * COUNT(m); k += scene_step())
        check_norm(squares, fixture_types[k % 3], m[k / 2], k % 2,
                   iz_norm2_blocks(m[k / 2]));
}

static void norm_shows_every_non_finite(void **state)
{
    enum { N = 1100 };
    struct scene s = {
        .n = 2, .pinned = 2, .t = {tensor_new(IZ_F32, 1, N, 4), bytes_new(8)}};
    for (int i = 0; i < N; i += 99) {
        double *d = &s.t[0].d[i], was = *d;
        for (int nan = 0; nan < 2; nan++) {
            *d = nan ? (double)NAN : (double)-INFINITY;
            tensor_store(&s.t[0]);
            scene_run(&s, &(struct pass){norm2, 1, 2}, NULL);
            assert_true(nan ? isnan(*(double *)s.t[1].v.p)
                            : isinf(*(double *)s.t[1].v.p));
        }
        *d = was;
    }
    scene_free(&s);
}

/* ---- updates ------------------------------------------------------------ */

enum { P, STATE, G, OUT, TENSORS, UPDATES = 3, BLOCK = IZ_MOMENT_BLOCK };

struct update {
    enum iz_optimizer_type optimizer;
    enum iz_moment_type type;
    enum iz_dtype g, out;
    bool copies, wild, uncorrected;
    bool halves;              /* the master is out and, in P, lower halves */
    int64_t n, before, after; /* elements of m and v before and behind */
    int64_t range;            /* length of one */
    double beta1, beta2;
    int t;   /* the update */
    int odd; /* elements before the first of the others */
};

/* Any finite number where `wild`, else one of about 1. */
static float number(bool wild)
{
    uint32_t bits = (uint32_t)(fixture_uniform() * 0x1p31 + 0x1p31);
    float any = iz_float_of_bits(bits);
    if (!wild)
        return (float)(4 * fixture_uniform());
    return fabsf(any) < 1e18f ? any : 0;
}

/* m and v one behind the other, as in a chunk. */
static struct iz_moments moment_of(const struct update *k, char *state, int w)
{
    int64_t n = k->before + k->n + k->after;
    return (struct iz_moments){state + w * iz_moment_bytes(k->type, n), k->type,
                               (enum iz_moment)w, n};
}

/* Spans that differ in rate and decay, of which the first one ends early. */
static int ranges_of(const struct update *k, struct iz_update_range *range)
{
    int s = 0;
    for (int64_t end = 1; s == 0 || range[s - 1].end < k->n;
         s++, end += k->range) {
        struct iz_hyper_at a = {.hyper = {.type = k->optimizer,
                                          .lr = 1e-3 * (s + 1),
                                          .beta1 = k->beta1,
                                          .beta2 = k->beta2,
                                          .eps = 1e-8,
                                          .weight_decay = s % 2 ? 0.1 : 0,
                                          .adamw = s % 3 != 0,
                                          .bias_correction = !k->uncorrected},
                                .t = k->t,
                                .grad_scale = k->wild ? 1.0f : 0.37f};
        assert_true(s < IZ_UPDATE_RANGES_MAX);
        range[s] = iz_update_range_of(&a);
        range[s].end = end;
    }
    range[s - 1].end = INT64_MAX;
    return s;
}

static void update(struct iz_exec *x, const struct iz_view *v, const void *arg)
{
    const struct update *k = arg;
    struct iz_update_range range[IZ_UPDATE_RANGES_MAX];
    if (!x->dry)
        iz_buffer_update(
            x, &(struct iz_update){.optimizer = k->optimizer,
                                   .type = k->type,
                                   .n = k->n,
                                   .at = k->before,
                                   .room = k->before + k->n + k->after,
                                   .p = k->halves ? NULL : v[P].p,
                                   .lower = k->halves ? v[P].p : NULL,
                                   .state = {moment_of(k, v[STATE].p, 0).p,
                                             moment_of(k, v[STATE].p, 1).p},
                                   .g = v[G].p,
                                   .out = k->copies ? v[OUT].p : NULL,
                                   .g_type = k->g,
                                   .out_type = k->out,
                                   .key = 77 + (uint64_t)k->t,
                                   .first = 64000 + k->before,
                                   .range = range,
                                   .ranges = ranges_of(k, range)});
    memset(range, 0xff, sizeof(range));
}

/* Values that the type holds; every third block is zero.  In fp32 every fifth
 * element is about to become subnormal. */
static void fill_state(const struct update *k, char *state)
{
    for (int w = 0; w < 2; w++) {
        struct iz_moments a = moment_of(k, state, w);
        for (int64_t b = 0; b < a.n; b += BLOCK) {
            float block[BLOCK] = {0};
            for (int i = 0; b / BLOCK % 3 && i < BLOCK; i++)
                block[i] = w ? fabsf(number(k->wild)) : number(k->wild);
            for (int i = 0; k->type == IZ_MOMENT_F32 && i < BLOCK; i += 5)
                block[i] = w ? 1.2e-38f : -1.2e-38f;
            iz_moment_store(&a, b, block, BLOCK, 3, b);
        }
    }
}

/* Some blocks have no gradient, some elements none or a tiny one. */
static void fill_gradient(const struct update *k, struct tensor *g)
{
    for (int64_t i = 0; i < k->n; i++) {
        bool fifth = (i + k->before) % BLOCK % 5 == 0;
        bool none = i / BLOCK % 4 == 1 || (k->type == IZ_MOMENT_F32 && fifth);
        float f = none ? 0 : number(k->wild);
        g->d[i] = (double)(i % 7 == 3 ? f * 0x1p-12f : f);
    }
    tensor_store(g);
}

static struct scene update_new(const struct update *k)
{
    int64_t all = k->before + k->n + k->after;
    struct scene s = {
        .n = TENSORS,
        .late = BIT(P) | BIT(G) | BIT(OUT),
        .late_by = k->odd,
        .t = {[P] = tensor_new(k->halves ? IZ_BF16 : IZ_F32, 1, k->n, 4),
              [STATE] = bytes_new(2 * iz_moment_bytes(k->type, all)),
              [G] = tensor_new(k->g, 1, k->n, 4),
              [OUT] = tensor_new(k->out, 1, k->n, 4)},
        .exact = true};
    fill_state(k, s.t[STATE].v.p);
    fill_gradient(k, &s.t[G]);
    return s;
}

static const struct pass updates = {update, ~0u,
                                    BIT(P) | BIT(STATE) | BIT(OUT)};

/* Some updates of the same state by every optimizer that has a kernel; Adam's
 * is AdamW's. */
static void check_update(struct update k)
{
    int first = k.t ? k.t : 1;
    for (int o = IZ_OPTIMIZER_ADAMW; o < IZ_OPTIMIZER_MUON; o++) {
        k.optimizer = (enum iz_optimizer_type)o;
        struct scene s = update_new(&k);
        for (k.t = first; k.t < first + UPDATES; k.t++)
            scene_run(&s, &updates, &k);
        scene_free(&s);
    }
}

/* A master in halves has its copy in bf16.  States in fewer bytes are cut by
 * blocks: one, half a warp more than a warp has, a block of threads. */
static struct update chosen_update(uint64_t k)
{
    static const int64_t some[] = {0, 1, 7, 8, 1024, 2048, 3001};
    static const int64_t blocks[] = {0, 1, 2, 3, 16, 17, 37};
    struct update u = {.type = (enum iz_moment_type)(chosen(k, 0) % 3),
                       .halves = chosen(k, 1) % 4 == 0,
                       .g = fixture_types[chosen(k, 2) % 3],
                       .out = fixture_types[chosen(k, 3) % 3],
                       .copies = chosen(k, 4) % 2,
                       .uncorrected = chosen(k, 5) % 2,
                       .n = blocks[k % 7] * BLOCK,
                       .before = chosen(k, 6) % 3 * BLOCK,
                       .after = chosen(k, 7) % 2 * BLOCK,
                       .range = chosen(k, 8) % 2 ? 1000 : 77,
                       .beta1 = 0.9,
                       .beta2 = 0.95,
                       .t = 1 + (int)k};
    if (u.type == IZ_MOMENT_F32) {
        u.n = some[k % 7];
        u.odd = chosen(k, 6) % 3;
        u.before = u.odd;
        u.after = BLOCK - (u.odd + u.n) % BLOCK;
    }
    if (u.halves) {
        u.out = IZ_BF16;
        u.copies = true;
    }
    return u;
}

static void updates_have_the_bits_of_the_cpu(void **state)
{
    for (uint64_t k = 0; k < 300; k += (uint64_t)scene_step())
        check_update(chosen_update(k));
    for (int c = 0; c < 3; c++)
        check_update((struct update){.type = (enum iz_moment_type)c,
                                     .g = IZ_BF16,
                                     .out = IZ_BF16,
                                     .copies = true,
                                     .n = c ? 1027 * BLOCK : MOST,
                                     .after = c ? BLOCK : BLOCK - MOST % BLOCK,
                                     .range = c ? 30000 : MOST / 4,
                                     .beta1 = 0.9,
                                     .beta2 = 0.95});
}

static enum iz_moment_type type_of(int i)
{
    return i % 2 ? IZ_MOMENT_FP8 : IZ_MOMENT_BF16;
}

/* Without memory of the last step m and v are any numbers, from the smallest to
 * those whose square is near the end of fp32.  Then as many ranges as a call
 * may have, each of one element. */
static void coded_updates_have_them_at_every_exponent(void **state)
{
    for (int c = 0; c < 4; c++)
        check_update((struct update){.type = type_of(c),
                                     .copies = true,
                                     .wild = true,
                                     .n = 300 * BLOCK,
                                     .range = 1000,
                                     .beta1 = c / 2 * 0.5,
                                     .beta2 = c / 2 * 0.5});
    for (int c = 0; c < 2; c++)
        check_update((struct update){.type = type_of(c),
                                     .g = IZ_BF16,
                                     .out = IZ_BF16,
                                     .copies = true,
                                     .n = BLOCK,
                                     .range = 1,
                                     .beta1 = 0.9,
                                     .beta2 = 0.999});
}

/* Infinity and NaN spoil their block of fp8 and no other. */
static void what_is_not_finite_shows(void **state)
{
    struct update k = {
        .n = 4 * BLOCK, .range = 1000, .beta1 = 0.9, .beta2 = 0.999, .t = 1};
    float m[4 * BLOCK];
    for (int c = 0; c < 4; c++) {
        k.type = type_of(c);
        struct scene s = update_new(&k);
        s.exact = false; /* one NaN is as good as another */
        s.t[G].d[BLOCK + 5] = c / 2 ? (double)NAN : (double)INFINITY;
        tensor_store(&s.t[G]);
        scene_run(&s, &updates, &k);
        for (int w = 0; w < 2; w++) {
            struct iz_moments a = moment_of(&k, s.t[STATE].v.p, w);
            iz_moment_load(m, &a, 0, k.n);
            assert_false(isfinite(m[BLOCK + 5]));
            for (int i = 0; i < 4 * BLOCK; i++)
                assert_true(isfinite(m[i]) || i / BLOCK == 1);
        }
        scene_free(&s);
    }
}

static void odd_address(const void *arg)
{
    struct update k = {
        .type = IZ_MOMENT_BF16, .n = BLOCK, .range = BLOCK, .t = 1, .odd = 1};
    struct scene s = update_new(&k);
    scene_run(&s, &updates, &k);
}

static void an_odd_address_is_refused(void **state)
{
    scene_dies(odd_address, NULL, "no multiple of 16");
}

int ops_flat(void)
{
    const struct CMUnitTest tests[] = {
        SEEDED(copies_move_every_byte),
        SEEDED(sum_has_the_bits_of_the_cpu),
        SEEDED(sum_refuses_too_many_inputs),
        SEEDED(norm_has_the_bits_of_the_cpu),
        SEEDED(norm_shows_every_non_finite),
        SEEDED(updates_have_the_bits_of_the_cpu),
        SEEDED(coded_updates_have_them_at_every_exponent),
        SEEDED(what_is_not_finite_shows),
        SEEDED(an_odd_address_is_refused),
    };
    if (backend.x.backend == IZ_CPU)
        return 0;
    return cmocka_run_group_tests_name("flat", tests, NULL, NULL);
}
