/* SPDX-License-Identifier: Apache-2.0 */
/* The head and its loss: whole, in chunks, and in parts of the rows. */
#include "tests/codelets/ops/timed.h"

#include <stdlib.h>

#include "codelets/ops/classifier.h"

enum { A, W, DA, DW, TARGET, LOSS, B, DB, CLASS_TENSORS };

struct classifier {
    struct scene s;
    int32_t *target;
    double *loss;
    float scale, cap;
    int odd;   /* rows of DW before the gradient */
    int spare; /* rows behind those of W */
    int count; /* of targets; with none all results are exactly 0 */
    bool frozen, biased;
    int64_t cut; /* rows of a first part, with dw of fp32; 0: all at once */
    /* What is expected, and how far the errors of the logits' gradients may
     * move it; owned. */
    double want_loss;
    struct near *da, *dw, *db;
};

static int64_t vocabulary(const struct classifier *k)
{
    return k->s.t[W].v.rows - k->spare;
}

static struct iz_classifier classifier_of(const struct classifier *k,
                                          const struct iz_view *v)
{
    int64_t n = vocabulary(k);
    struct iz_classifier c = {.a = v[A],
                              .w = iz_view_rows(v[W], 0, n),
                              .target = v[TARGET].p,
                              .da = v[DA],
                              .dw = iz_view_rows(v[DW], k->odd, n),
                              .loss_scale = k->scale,
                              .cap = k->cap,
                              .loss = v[LOSS].p};
    c.w.room = k->spare * v[W].cols;
    if (k->biased) {
        c.b = v[B];
        c.db = v[DB];
    }
    if (k->frozen) /* its type is all that is left of the gradient */
        c.dw = (struct iz_view){.dtype = v[DW].dtype, .cols = v[DW].cols};
    return c;
}

static void classify(struct iz_exec *x, const struct classifier *k,
                     struct iz_classifier c)
{
    struct iz_classifier part = c;
    if (!k->cut) {
        iz_classifier(x, &c);
        return;
    }
    part.targets = k->count;
    part.dw.room = iz_classifier_room(x, c.w);
    for (int64_t at = 0, n = k->cut; at < c.a.rows; at += n) {
        n = at ? c.a.rows - at : n;
        part.adds = at > 0;
        part.a = iz_view_rows(c.a, at, n);
        part.da = c.da.rows ? iz_view_rows(c.da, at, n) : IZ_NONE;
        part.target = c.target + at;
        iz_classifier(x, &part);
    }
}

static void classify_forward(struct iz_exec *x, const struct iz_view *v,
                             const void *arg)
{
    struct iz_classifier c = classifier_of(arg, v);
    c.da = IZ_NONE;
    classify(x, arg, c);
}

static void classify_backward(struct iz_exec *x, const struct iz_view *v,
                              const void *arg)
{
    classify(x, arg, classifier_of(arg, v));
}

static const struct pass loss_alone = {
    classify_forward, BIT(A) | BIT(W) | BIT(B) | BIT(TARGET), BIT(LOSS)};
/* Without a bias it leaves B and DB alone. */
static const struct pass both = {classify_backward,
                                 BIT(A) | BIT(W) | BIT(B) | BIT(TARGET),
                                 BIT(LOSS) | BIT(DA) | BIT(DW) | BIT(DB)};

/* s: rows, width, vocabulary, and whether there is no target; else every fifth
 * is ignored. */
static struct classifier classifier_new(enum iz_dtype param, enum iz_dtype dw,
                                        const int64_t *s, int spare)
{
    enum iz_dtype act = backend.act(param);
    int64_t rows = s[2] + spare;
    struct classifier k = {
        .s = {.n = CLASS_TENSORS,
              .pinned = BIT(TARGET) | BIT(LOSS),
              .t = {[A] = tensor_new(act, s[0], s[1], 2),
                    [W] = tensor_new(param, rows, s[1], 2),
                    [DA] = tensor_new(act, s[0], s[1], 1),
                    [DW] = tensor_new(dw, s[2] + 64, s[1], 1),
                    [TARGET] = bytes_new(s[0] * 4),
                    [LOSS] = bytes_new(8),
                    [B] = tensor_new(param, 1, s[2], 0.5),
                    [DB] = tensor_new(dw, 1, s[2], 1)}},
        .scale = 64,
        .spare = spare};
    k.target = k.s.t[TARGET].v.p;
    k.loss = k.s.t[LOSS].v.p;
    for (int64_t i = 0; i < s[0]; i++)
        k.target[i] = s[3] || i % 5 == 3 ? -1 : fixture_below(s[2]);
    return k;
}

void classifier_timed(const struct timed_shape *s, timed_fn *f, void *to)
{
    const int64_t size[] = {s->tokens, s->width, s->vocab, 0};
    struct classifier k = classifier_new(backend.x.act, backend.x.act, size, 0);
    timed_tokens(s, k.target);
    f(to, &k.s,
      &(const struct timed){"head: loss, da, dw", classify_backward, .arg = &k},
      1);
    scene_free(&k.s);
}

static void classifier_free(struct classifier *k)
{
    free(k->da);
    free(k->dw);
    free(k->db);
    scene_free(&k->s);
}

static void near_add(struct near *to, double g, double off, const double *x,
                     int64_t n)
{
    for (int64_t j = 0; j < n; j++) {
        to[j].is += g * x[j];
        to[j].within += off * fabs(x[j]);
    }
}

/* A logit is off by the roundings of its sum, by which its probability is off
 * in proportion, once itself and once in the sum of exponentials; the
 * exponentials add 1e-6.  The slope of a cap is off where it is a small
 * difference.  The gradient is rounded, and the sums that it is
 * added to are of fp32, up to a million numbers long. */
static void want_row(struct classifier *k, int64_t i, double scale)
{
    const struct tensor *t = k->s.t;
    int64_t n = vocabulary(k), c = t[A].v.cols;
    const double *a = t[A].d + i * c, *w = t[W].d, one = 1;
    double *s = calloc((size_t)n, sizeof(*s)), max = -INFINITY, sum = 0;
    double off = 0, sums = 0x1p-20 * fmax(1, sqrt((double)n) / 256);
    for (int64_t v = 0; v < n; v++) {
        struct want l = {0, 0};
        want_add(&l, k->biased ? t[B].d[v] : 0);
        for (int64_t j = 0; j < c; j++)
            want_add(&l, a[j] * w[v * c + j]);
        s[v] = k->cap != 0 ? k->cap * tanh(l.is / k->cap) : l.is;
        max = fmax(max, s[v]);
        off = fmax(off, 0x1p-21 * l.size);
    }
    for (int64_t v = 0; v < n; v++)
        sum += exp(s[v] - max);
    for (int64_t v = 0; v < n; v++) {
        double p = exp(s[v] - max) / sum;
        double of = k->cap != 0 ? s[v] / k->cap : 0;
        double raw = scale * (p - (v == k->target[i]));
        double g = raw * (1 - of * of);
        double err = scale * p * (2 * off + 1e-6) + fabs(raw * of) * 0x1p-20 +
                     fixture_rounding(t[A].v.dtype, g) + sums * fabs(g);
        near_add(k->da + i * c, g, err, w + v * c, c);
        near_add(k->dw + v * c, g, err, a, c);
        near_add(k->db + v, g, err, &one, 1);
    }
    k->want_loss += max + log(sum) - s[k->target[i]];
    free(s);
}

static void near_round(struct near *to, struct iz_view v)
{
    for (int64_t i = 0; i < iz_view_len(v); i++)
        to[i].within += fixture_rounding(v.dtype, to[i].is) + 1e-9;
}

static void classifier_want(struct classifier *k)
{
    const struct tensor *t = k->s.t;
    k->da = calloc((size_t)iz_view_len(t[DA].v), sizeof(*k->da));
    k->dw = calloc((size_t)iz_view_len(t[DW].v), sizeof(*k->dw));
    k->db = calloc((size_t)iz_view_len(t[DB].v), sizeof(*k->db));
    for (int64_t i = 0; i < t[A].v.rows; i++)
        k->count += k->target[i] >= 0;
    if (!k->count)
        return;
    for (int64_t i = 0; i < t[A].v.rows; i++)
        if (k->target[i] >= 0)
            want_row(k, i, (double)k->scale / k->count);
    k->want_loss /= k->count;
    near_round(k->da, t[DA].v);
    near_round(k->dw, t[DW].v);
    near_round(k->db, t[DB].v);
}

/* flops: how often those of one product. */
static void check_run(struct classifier *k, const struct pass *p, int flops)
{
    struct tensor *t = k->s.t, dw = t[DW];
    double once = 2. * (double)(iz_view_len(t[A].v) * vocabulary(k));
    scene_run(&k->s, p, k);
    assert_true(fabs(*k->loss - k->want_loss) <=
                (k->count ? 2e-6 * fmax(1, k->want_loss) : 0));
    assert_true(k->s.flops == flops * once);
    if (p == &loss_alone)
        return;
    fixture_near("da", &t[DA], k->da);
    dw.v = iz_view_rows(dw.v, k->odd, vocabulary(k));
    if (!k->frozen && !(k->s.unwanted & BIT(DW)))
        fixture_near("dw", &dw, k->dw);
    if (k->biased)
        fixture_near("db", &t[DB], k->db);
}

static const struct setting {
    float cap;
    bool biased;
    int64_t cut;
} settings[] = {
    {0}, {.cap = 1.5f}, {.biased = true}, {.biased = true, .cut = 4}};

static struct setting setting; /* of what follows */

static void check_classifier(enum iz_dtype param, enum iz_dtype dw,
                             const int64_t *s, int odd, int spare)
{
    struct classifier k = classifier_new(param, dw, s, spare);
    k.cap = setting.cap;
    k.biased = setting.biased;
    k.cut = setting.cut;
    k.odd = odd;
    classifier_want(&k);
    check_run(&k, &loss_alone, 1);
    double forward = *k.loss;
    check_run(&k, &both, 3);
    assert_true(fabs(*k.loss - forward) <= 0x1p-27);
    /* Of two parts, each quotient and their sum are rounded. */
    assert_true(!k.count ||
                fabs(forward - iz_classifier_even(forward * k.count) /
                                   k.count) <= (k.cut ? forward * 0x1p-51 : 0));
    scene_in_place(&k.s, &both, &k, 1, (const int[][2]){{DA, A}});
    k.frozen = spare;
    k.s.unwanted = spare ? 0 : BIT(DW);
    check_run(&k, &both, 2);
    classifier_free(&k);
}

static void check_gradient_types(enum iz_dtype param, const int64_t *s)
{
    if (!setting.cut)
        check_classifier(param, param, s, 0, 0);
    check_classifier(param, IZ_F32, s, 0, setting.cut ? 0 : 64);
}

/* 8200 and 16900 logits take a block of threads more than one turn.  Of the
 * first sizes with a cap, with a bias, and in two parts of the rows. */
static void classifier_agrees_with_reference(void **state)
{
    static const int64_t size[][4] = {
        {7, 3, 17},  {9, 8, 384},   {5, 3, 8200},  {1, 1, 1},
        {3, 7, 2},   {17, 5, 33},   {1, 17, 3},    {3, 2, 9, 1},
        {6, 2, 257}, {4, 2, 16900}, {65, 96, 5003}};
    for (int i = 0; i < COUNT(settings); i++) {
        setting = settings[i];
        scene_each(backend_computes, size, i ? 3 : COUNT(size), 1,
                   check_gradient_types);
    }
    setting = settings[0];
}

/* So many logits that the rows fall into chunks, over which the gradient is
 * summed where it lies or, in 16 bits, in scratch: on a GPU GPT-2's vocabulary,
 * emulated (where a chunk has 64 KiB) several of them, and a gradient that lies
 * at an odd address. */
static void classifier_agrees_in_chunks(void **state)
{
    static const int64_t cpu[4] = {20, 1, 1 << 20}, gpu[4] = {1400, 3, 50257};
    static const int64_t emulated[4] = {17, 3, 2003};
    const int64_t *size = backend.large ? gpu : backend.become ? emulated : cpu;
    setting.biased = true;
    for (int t = backend.large ? 2 : 0; t < 3; t += backend.become ? 1 : 2)
        check_classifier(fixture_types[t], fixture_types[t], size, t == 2,
                         64 * (t == 1));
    setting.biased = false;
}

/* What comes of a[0,0] = value and w[0,0] = w in the loss of row 0. */
static double loss_with(double value, double w, int64_t vocab)
{
    const int64_t size[4] = {6, 3, vocab};
    struct classifier k = classifier_new(IZ_F32, IZ_F32, size, 0);
    k.s.t[A].d[0] = value;
    k.s.t[W].d[0] = w;
    for (int i = 0; i < 6; i++)
        k.target[i] = i ? -1 : 1;
    tensor_store(&k.s.t[A]);
    tensor_store(&k.s.t[W]);
    scene_run(&k.s, &both, &k);
    double loss = *k.loss;
    scene_run(&k.s, &loss_alone, &k);
    assert_true(*k.loss == loss || (isnan(loss) && isnan(*k.loss)) ||
                fabs(*k.loss - loss) <= 0x1p-27);
    classifier_free(&k);
    return loss;
}

static void classifier_shows_nan_and_overflow(void **state)
{
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

static void classify_a_foreign_target(const void *arg)
{
    static const int64_t size[4] = {6, 3, 33};
    struct classifier k = classifier_new(IZ_F32, IZ_F32, size, 0);
    k.target[4] = 33;
    scene_run(&k.s, &loss_alone, &k);
}

static void classifier_refuses_a_foreign_target(void **state)
{
    scene_dies(classify_a_foreign_target, NULL,
               "target 33 at position 4 is outside the vocabulary 0..32");
}

int ops_classifier(void)
{
    const struct CMUnitTest tests[] = {
        SEEDED(classifier_agrees_with_reference),
        SEEDED(classifier_agrees_in_chunks),
        SEEDED(classifier_shows_nan_and_overflow),
        SEEDED(classifier_refuses_a_foreign_target),
    };
    if (!backend_multiplies())
        return 0;
    return cmocka_run_group_tests_name("classifier", tests, backend_renew,
                                       NULL);
}
