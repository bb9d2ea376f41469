/* SPDX-License-Identifier: Apache-2.0 */
/* The embedding and the classifier on a GPU against double precision. */
#include "tests/codelets/gpu/ops_gpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- embedding ---------------------------------------------------------- */

enum { Y, WTE, WPE, DY, DWTE, DWPE, EMBED_TENSORS };

struct embedding {
    struct tensor t[EMBED_TENSORS];
    int32_t *token;
    bool positions;
};

static void embed(struct iz_exec *x, const struct iz_view *v, const void *arg)
{
    const struct embedding *e = arg;

    iz_embedding_fwd(x, v[Y], e->token, v[WTE],
                     e->positions ? v[WPE] : IZ_NONE);
}

static void embed_back(struct iz_exec *x, const struct iz_view *v,
                       const void *arg)
{
    const struct embedding *e = arg;

    iz_embedding_bwd(x, v[DWTE], e->positions ? v[DWPE] : IZ_NONE, v[DY],
                     e->token);
}

static void run_embed(struct embedding *e,
                      void (*op)(struct iz_exec *, const struct iz_view *,
                                 const void *),
                      unsigned reads, unsigned writes)
{
    gpu_run(&(struct gpu_op){.run = op,
                             .arg = e,
                             .t = e->t,
                             .n = EMBED_TENSORS,
                             .reads = reads,
                             .writes = writes,
                             .act = e->t[Y].v.dtype});
}

static void add(struct want *w, double x)
{
    w->is += x;
    w->size += fabs(x);
}

static struct want want_y(const void *arg, int64_t i, int64_t j)
{
    const struct embedding *e = arg;
    int64_t c = e->t[Y].v.cols;
    struct want w = {0, 0};

    add(&w, e->t[WTE].d[e->token[i] * c + j]);
    if (e->positions)
        add(&w, e->t[WPE].d[i % e->t[WPE].v.rows * c + j]);
    return w;
}

static struct want want_dwte(const void *arg, int64_t i, int64_t j)
{
    const struct embedding *e = arg;
    struct want w = {0, 0};

    for (int64_t t = 0; t < e->t[DY].v.rows; t++)
        if (e->token[t] == i)
            add(&w, e->t[DY].d[t * e->t[DY].v.cols + j]);
    return w;
}

static struct want want_dwpe(const void *arg, int64_t i, int64_t j)
{
    const struct embedding *e = arg;
    struct want w = {0, 0};

    for (int64_t t = i; t < e->t[DY].v.rows; t += e->t[DWPE].v.rows)
        add(&w, e->t[DY].d[t * e->t[DY].v.cols + j]);
    return w;
}

static void check_embedding(struct embedding *e)
{
    for (int with = 0; with < 2; with++) {
        e->positions = with;
        run_embed(e, embed, 1u << WTE | 1u << WPE, 1u << Y);
        gpu_check("embedding", &e->t[Y], want_y, e);
        run_embed(e, embed_back, 1u << DY, 1u << DWTE | 1u << DWPE);
        gpu_check("dwte", &e->t[DWTE], want_dwte, e);
        if (with)
            gpu_check("dwpe", &e->t[DWPE], want_dwpe, e);
    }
}

/* s: positions, seq, width, vocabulary.  `kind` 0: one token everywhere, 1:
 * all different as far as possible, 2: any. */
static struct embedding embedding_new(enum iz_dtype param, const int64_t s[4],
                                      int kind)
{
    enum iz_dtype act = iz_cuda_ops->act(param);
    struct embedding e = {.t = {[Y] = tensor_new(act, s[0], s[2], 1),
                                [WTE] = tensor_new(param, s[3], s[2], 1),
                                [WPE] = tensor_new(param, s[1], s[2], 1),
                                [DY] = tensor_new(act, s[0], s[2], 1),
                                [DWTE] = tensor_new(param, s[3], s[2], 1),
                                [DWPE] = tensor_new(param, s[1], s[2], 1)},
                          .token = gpu_pinned(s[0] * 4)};

    for (int64_t i = 0; i < s[0]; i++)
        e.token[i] = kind == 0   ? (int32_t)(s[3] / 2)
                     : kind == 1 ? (int32_t)(i * 7 % s[3])
                                 : fixture_below(s[3]);
    return e;
}

static void check_sizes(enum iz_dtype param, const int64_t s[4], int kind)
{
    struct embedding e = embedding_new(param, s, kind);

    check_embedding(&e);
    for (int i = 0; i < EMBED_TENSORS; i++)
        tensor_free(&e.t[i]);
    gpu_unpin(e.token);
}

/* The last is the embedding of a 1.5B model. */
static void embedding_agrees(void **state)
{
    static const int64_t size[][4] = {{1, 1, 1, 1},        {6, 3, 8, 11},
                                      {300, 100, 3, 57},   {1024, 8, 1, 5},
                                      {2500, 100, 8, 25},  {40, 20, 264, 9},
                                      {600, 300, 768, 555}};
    static const int64_t large[4] = {2048, 1024, 1600, 50257};

    (void)state;
    fixture_seed();
    for (int k = 0; k < 3 * 3 * 7; k++)
        check_sizes(fixture_types[k % 3], size[k / 9], k / 3 % 3);
    check_sizes(IZ_BF16, large, 2);
}

/* ---- classifier --------------------------------------------------------- */

enum { A, W, DA, DW, CLASS_TENSORS };

struct classifier {
    struct tensor t[CLASS_TENSORS];
    int32_t *target;
    double *loss; /* pinned */
    float scale;
    bool in_place;
};

static struct iz_classifier classifier_of(const struct classifier *k,
                                          const struct iz_view *v)
{
    return (struct iz_classifier){.a = v[A],
                                  .w = v[W],
                                  .target = k->target,
                                  .da = k->in_place ? v[A] : v[DA],
                                  .dw = v[DW],
                                  .loss_scale = k->scale,
                                  .loss = k->loss};
}

static void classify(struct iz_exec *x, const struct iz_view *v,
                     const void *arg)
{
    struct iz_classifier c = classifier_of(arg, v);

    iz_classifier_fwd(x, &c);
}

static void classify_back(struct iz_exec *x, const struct iz_view *v,
                          const void *arg)
{
    struct iz_classifier c = classifier_of(arg, v);

    iz_classifier_bwd(x, &c);
}

static void run_class(struct classifier *k,
                      void (*op)(struct iz_exec *, const struct iz_view *,
                                 const void *),
                      unsigned reads, unsigned writes)
{
    *k->loss = -1;
    gpu_run(&(struct gpu_op){.run = op,
                             .arg = k,
                             .t = k->t,
                             .n = CLASS_TENSORS,
                             .reads = reads,
                             .writes = writes,
                             .act = k->t[A].v.dtype});
}

/* Every fifth target is ignored. */
static struct classifier classifier_new(enum iz_dtype param, enum iz_dtype dw,
                                        const int64_t s[3])
{
    enum iz_dtype act = iz_cuda_ops->act(param);
    struct classifier k = {.t = {[A] = tensor_new(act, s[0], s[1], 2),
                                 [W] = tensor_new(param, s[2], s[1], 2),
                                 [DA] = tensor_new(act, s[0], s[1], 1),
                                 [DW] = tensor_new(dw, s[2], s[1], 1)},
                           .target = gpu_pinned(s[0] * 4),
                           .loss = gpu_pinned(8),
                           .scale = 64};

    for (int64_t i = 0; i < s[0]; i++)
        k.target[i] = i % 5 == 3 ? -1 : fixture_below(s[2]);
    return k;
}

static void classifier_free(struct classifier *k)
{
    for (int i = 0; i < CLASS_TENSORS; i++)
        tensor_free(&k->t[i]);
    gpu_unpin(k->target);
    gpu_unpin(k->loss);
}

/* The loss, the gradients, and how far the errors of the logits' gradients may
 * move them. */
struct wants {
    double loss, *da, *dw, *da_off, *dw_off;
};

static struct wants wants_new(const struct classifier *k)
{
    size_t da = (size_t)iz_view_len(k->t[DA].v);
    size_t dw = (size_t)iz_view_len(k->t[DW].v);

    return (struct wants){0, calloc(da, 8), calloc(dw, 8), calloc(da, 8),
                          calloc(dw, 8)};
}

static void wants_free(struct wants *w)
{
    free(w->da);
    free(w->dw);
    free(w->da_off);
    free(w->dw_off);
}

/* g: gradient of logit v of row i, off by `err` before it is rounded.  The sums
 * that it is added to are of fp32. */
static void wants_add(struct wants *to, const struct classifier *k, int64_t i,
                      int64_t v, double g, double err)
{
    int64_t c = k->t[A].v.cols;
    const double *a = k->t[A].d + i * c, *w = k->t[W].d + v * c;
    double off = err + gpu_rounding(k->t[A].v.dtype, g) + 0x1p-21 * fabs(g);

    for (int64_t j = 0; j < c; j++) {
        to->da[i * c + j] += g * w[j];
        to->dw[v * c + j] += g * a[j];
        to->da_off[i * c + j] += off * fabs(w[j]);
        to->dw_off[v * c + j] += off * fabs(a[j]);
    }
}

/* The logit of row i and column v. */
static struct want logit(const struct classifier *k, int64_t i, int64_t v)
{
    int64_t c = k->t[A].v.cols;
    struct want s = {0, 0};

    for (int64_t j = 0; j < c; j++)
        add(&s, k->t[A].d[i * c + j] * k->t[W].d[v * c + j]);
    return s;
}

/* A logit is off by the roundings of its sum, by which its probability is off
 * in proportion, once itself and once in the sum of exponentials; the
 * exponentials add 1e-6. */
static void wants_row(struct wants *to, const struct classifier *k, int64_t i,
                      double scale)
{
    int64_t n = k->t[W].v.rows;
    double *s = calloc((size_t)n, sizeof *s), max = -INFINITY, sum = 0;
    double off = 0;

    for (int64_t v = 0; v < n; v++) {
        struct want l = logit(k, i, v);

        s[v] = l.is;
        max = fmax(max, l.is);
        off = fmax(off, 0x1p-21 * l.size);
    }
    for (int64_t v = 0; v < n; v++)
        sum += exp(s[v] - max);
    for (int64_t v = 0; v < n; v++) {
        double p = exp(s[v] - max) / sum;

        wants_add(to, k, i, v, scale * (p - (v == k->target[i])),
                  scale * p * (2 * off + 1e-6));
    }
    to->loss += max + log(sum) - s[k->target[i]];
    free(s);
}

static struct wants wants_of(const struct classifier *k)
{
    struct wants w = wants_new(k);
    int count = 0;

    for (int64_t i = 0; i < k->t[A].v.rows; i++)
        count += k->target[i] >= 0;
    for (int64_t i = 0; i < k->t[A].v.rows; i++)
        if (k->target[i] >= 0)
            wants_row(&w, k, i, (double)k->scale / count);
    w.loss = count ? w.loss / count : 0;
    return w;
}

static void close_to(const char *what, struct tensor *got, const double *want,
                     const double *off)
{
    tensor_load(got);
    for (int64_t i = 0; i < iz_view_len(got->v); i++) {
        double most = off[i] + gpu_rounding(got->v.dtype, want[i]) + 1e-9;

        if (!(fabs(got->d[i] - want[i]) <= most))
            fail_msg("%s [%lld,%lld] %s: element %lld is %.9g, not %.9g within "
                     "%.3g",
                     what, (long long)got->v.rows, (long long)got->v.cols,
                     iz_dtype_name(got->v.dtype), (long long)i, got->d[i],
                     want[i], most);
    }
}

static void check_classifier(enum iz_dtype param, enum iz_dtype dw,
                             const int64_t s[3])
{
    struct classifier k = classifier_new(param, dw, s);
    struct wants w = wants_of(&k);
    double forward;

    run_class(&k, classify, 1u << A | 1u << W, 0);
    forward = *k.loss;
    assert_true(fabs(forward - w.loss) <= 2e-6 * fmax(1, w.loss));
    run_class(&k, classify_back, 1u << A | 1u << W, 1u << DA | 1u << DW);
    assert_true(*k.loss == forward);
    close_to("da", &k.t[DA], w.da, w.da_off);
    close_to("dw", &k.t[DW], w.dw, w.dw_off);
    k.in_place = true;
    run_class(&k, classify_back, 1u << A | 1u << W, 1u << A | 1u << DW);
    fixture_same_bits("da in a", k.t[A].v, k.t[DA].v);
    wants_free(&w);
    classifier_free(&k);
}

static void classifier_agrees(void **state)
{
    static const int64_t size[][3] = {{1, 1, 1},    {3, 7, 2},     {7, 3, 17},
                                      {17, 5, 33},  {6, 2, 257},   {33, 8, 384},
                                      {5, 3, 8200}, {65, 96, 5003}};

    (void)state;
    fixture_seed();
    for (int t = 0; t < 3; t++)
        for (size_t i = 0;
             gpu_computes(fixture_types[t]) && i < sizeof size / sizeof size[0];
             i++) {
            check_classifier(fixture_types[t], fixture_types[t], size[i]);
            check_classifier(fixture_types[t], IZ_F32, size[i]);
        }
}

/* GPT-2's vocabulary and so many rows that they fall into two chunks. */
static void classifier_agrees_in_chunks(void **state)
{
    static const int64_t size[3] = {1400, 3, 50257};
    enum iz_dtype t = gpu_computes(IZ_BF16) ? IZ_BF16 : IZ_F16;

    (void)state;
    fixture_seed();
    check_classifier(t, t, size);
}

int ops_gpu_tokens(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(embedding_agrees),
        cmocka_unit_test(classifier_agrees),
        cmocka_unit_test(classifier_agrees_in_chunks),
    };

    return cmocka_run_group_tests_name("gpu tokens", tests, NULL, NULL);
}
